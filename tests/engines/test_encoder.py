# SPDX-License-Identifier: Apache-2.0
"""Embeddings between real engines: an encoder, a consumer that decodes, and a plain engine."""

import base64
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from ecshare.router.api.client_request import Media
from ecshare.router.media.identity import identity
from ecshare.router.stages.plan import renamed
from lab.servers.engines import EngineProcess, ModelRunner, ec_argument
from tests.conftest import StartEngine
from tests.engines.chat import (
    QUESTION,
    announced,
    ask,
    counting,
    counts,
    passed_on,
    picture,
    wait_until,
    warmed,
)
from tests.engines.runners import on_each_runner
from tests.releases import needs_encoder_metrics

pytestmark = [pytest.mark.engine, on_each_runner]

TAKES_EITHER = ("--enable-mm-embeds", "--mm-processor-cache-gb=0")
# Small as they are, more than the engine's own encoder cache holds.
_MANY_PICTURES = 150


class Fleet(NamedTuple):
    plain: EngineProcess
    encoder: EngineProcess
    consumer: EngineProcess
    caching: EngineProcess
    """A consumer that caches inputs, as vLLM does by default."""
    stranger: EngineProcess
    """An encoder of other weights, under the same shapes."""
    root: Path

    @property
    def model(self) -> str:
        return self.plain.model

    @property
    def store(self) -> Path:
        return self.root / "store"


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine,
    vlm: Path,
    other_vlm: Path,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
) -> Fleet:
    root = tmp_path_factory.mktemp("fleet")
    url, host = str(root / "store"), str(root / "host")
    # One name for both sets of weights, as after a retraining: only the files differ.
    model = root / "model"
    model.symlink_to(vlm)
    producer = ec_argument("producer", url, host_cache_dir=host)
    consumer = ec_argument("consumer", url, host_cache_dir=host)
    first = (
        engine("plain", model=model),
        engine("encoder", producer, model=model),
        engine("consumer", consumer, *TAKES_EITHER, model=model, runner=runner),
        engine("caching", consumer, model=model, runner=runner),
    )
    for started in first:
        started.wait_ready()
    model.unlink()
    model.symlink_to(other_vlm)
    return Fleet(*first, engine("stranger", producer, model=model).wait_ready(), root)


def objects(fleet: Fleet) -> set[Path]:
    return {path for path in (fleet.store / "ec").rglob("*") if len(path.name) == 64}


def test_consumer_without_pixels_gives_the_plain_tokens(fleet: Fleet) -> None:
    encoded = ask(fleet.encoder, fleet.model, [picture(1, "one"), picture(2, "two")])
    content = [announced(encoded, "one"), announced(encoded, "two"), QUESTION]
    plain = ask(fleet.plain, fleet.model, [picture(1), picture(2), QUESTION])
    assert ask(fleet.consumer, fleet.model, content, **passed_on(encoded)).tokens == plain.tokens
    other = ask(fleet.plain, fleet.model, [picture(2), picture(1), QUESTION])
    assert other.tokens != plain.tokens, "the tokens do not depend on the pictures: no test"


@needs_encoder_metrics
def test_consumer_counts_its_loads(fleet: Fleet) -> None:
    encoded = ask(fleet.encoder, fleet.model, [picture(3, "three"), picture(9, "nine")])
    content = [announced(encoded, "three"), announced(encoded, "nine"), QUESTION]
    before = counts(fleet.consumer).get("ecshare_items/loaded", 0)
    ask(fleet.consumer, fleet.model, content, **passed_on(encoded))
    assert counts(fleet.consumer)["ecshare_items/loaded"] == before + 2


def test_lost_embedding_fails_only_its_request(fleet: Fleet) -> None:
    lost = announced(ask(fleet.encoder, fleet.model, [picture(4, "four")]), "four") | {
        "uuid": "lost"
    }
    failed = ask(fleet.consumer, fleet.model, [lost, QUESTION])
    assert failed.status == 500
    assert "error" in failed.body
    plain = ask(fleet.plain, fleet.model, [picture(5), QUESTION])
    assert ask(fleet.consumer, fleet.model, [picture(5), QUESTION]).tokens == plain.tokens


@pytest.mark.parametrize("has_cache_of_inputs", [False, True])
def test_retry_with_pixels_succeeds_after_the_embedding_is_lost(
    fleet: Fleet, has_cache_of_inputs: bool
) -> None:
    consumer, uuid, again = fleet.consumer, "seven", "seven"
    if has_cache_of_inputs:
        consumer, uuid, again = fleet.caching, "eight", renamed(Media("eight", "")).uuid
    known = objects(fleet)
    encoded = ask(fleet.encoder, fleet.model, [picture(7, uuid)])
    path = stored_since(fleet, known)
    first = ask(consumer, fleet.model, [picture(7, uuid), QUESTION])
    content = [announced(encoded, uuid), QUESTION]
    assert ask(consumer, fleet.model, content, **passed_on(encoded)).tokens == first.tokens
    path.unlink()
    for entry in (fleet.root / "host").rglob("[!.]*"):
        if entry.is_file():
            entry.unlink()
    for number in range(100, 100 + _MANY_PICTURES):
        ask(consumer, fleet.model, [picture(number, f"many-{number}")], max_tokens=1)
    assert ask(consumer, fleet.model, [picture(7, again), QUESTION]).tokens == first.tokens


def stored_since(fleet: Fleet, known: set[Path]) -> Path:
    """The next new object; an encoder answers before the announced embedding is stored."""
    wait_until(lambda: bool(objects(fleet) - known), "nothing was stored", 30.0)
    (path,) = objects(fleet) - known
    return path


@needs_encoder_metrics
def test_warmed_corpus_is_not_encoded_again(fleet: Fleet, tmp_path: Path) -> None:
    known = objects(fleet)
    urls = [picture(40 + number)["image_url"]["url"] for number in range(5)]
    for number, url in enumerate(urls):
        (tmp_path / f"{number}.png").write_bytes(base64.b64decode(url.partition(",")[2]))
    with counting(fleet.encoder) as gained:
        assert warmed(tmp_path, f"--encoder={fleet.encoder.base_url}") == {"new": 5}
    assert gained["ecshare_items/encoded"] == 5
    wait_until(lambda: len(objects(fleet) - known) == 5, "not all are stored", 30.0)
    with counting(fleet.encoder) as gained:
        assert warmed(tmp_path, f"--encoder={fleet.encoder.base_url}") == {"there already": 5}
    assert gained["ecshare_items/encoded"] == 0
    with counting(fleet.consumer) as gained:
        for number in range(5):
            shown = picture(40 + number, identity("image", urls[number]))
            plain = ask(fleet.plain, fleet.model, [picture(40 + number), QUESTION])
            assert ask(fleet.consumer, fleet.model, [shown, QUESTION]).tokens == plain.tokens
    assert (gained["ecshare_items/encoded"], gained["ecshare_items/loaded"]) == (0, 5)


def test_object_lost_from_the_store_is_stored_again(fleet: Fleet) -> None:
    known = objects(fleet)
    ask(fleet.encoder, fleet.model, [picture(6, "six")])
    path = stored_since(fleet, known)
    path.unlink()
    # The encoder's own cache still holds it, so vLLM will not encode it again.
    ask(fleet.encoder, fleet.model, [picture(6, "six")])
    assert stored_since(fleet, known) == path


@pytest.mark.parametrize("uuid", ["../../evil/x", "/evil", "e\u0301vil " * 50])
def test_hostile_uuid_stays_inside_the_store(fleet: Fleet, uuid: str) -> None:
    encoded = ask(fleet.encoder, fleet.model, [picture(7, uuid)])
    plain = ask(fleet.plain, fleet.model, [picture(7), QUESTION])
    content = [announced(encoded, uuid), QUESTION]
    assert ask(fleet.consumer, fleet.model, content, **passed_on(encoded)).tokens == plain.tokens
    outside = [path for path in fleet.root.rglob("*evil*") if path.is_dir()]
    assert not outside


def test_engines_with_other_weights_share_nothing_and_log_it(fleet: Fleet) -> None:
    # The log of this run only: the file may be older.
    log = fleet.stranger.log_path.read_text().partition(str(fleet.root))[2]
    assert re.search(r'WARNING .*differs in .*:\n.*weights: "\w+" != "\w+"\n', log)
    encoded = ask(fleet.stranger, fleet.model, [picture(8, "eight")])
    assert ask(fleet.consumer, fleet.model, [announced(encoded, "eight"), QUESTION]).status == 500
    plain = ask(fleet.plain, fleet.model, [picture(8), QUESTION])
    answer = ask(fleet.consumer, fleet.model, [picture(8, "eight"), QUESTION])
    assert answer.tokens == plain.tokens
