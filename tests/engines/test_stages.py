# SPDX-License-Identifier: Apache-2.0
"""One engine encodes, one prefills, one decodes: the tokens are those of one that does it all.

What P and D load of each other and of E may be lost on the way.
"""

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.servers.engines import EngineProcess, ModelRunner, ec_argument, kv_argument
from tests.conftest import StartEngine
from tests.engines.chat import Answer, announced, ask, counting, passed_on, picture, stored_kv, text
from tests.engines.runners import V2_IN_THE_GATE, on
from tests.releases import HAS_ENCODER_METRICS

# Of V1 other tests of the gate tell the same.
pytestmark = [pytest.mark.engine, on(pytest.param("v1", marks=pytest.mark.models), V2_IN_THE_GATE)]

BLOCK = 32
LOADED, FAILED = "ecshare_items/loaded", "kvshare_blocks/failed"
STORY = text("Tell me a story about the sea, the wind and the stars. " * 8)
QUESTION = text("what is to be seen here, and where?")


class Fleet(NamedTuple):
    plain: EngineProcess
    e: EngineProcess
    p: EngineProcess
    d: EngineProcess
    root: Path

    def plain_tokens(self, *content: dict[str, Any]) -> list[int]:
        return ask(self.plain, self.plain.model, list(content)).tokens

    def encode(self, *content: dict[str, Any]) -> Answer:
        return ask(self.e, self.e.model, list(content))

    def prefill(self, content: list[dict[str, Any]], **fields: Any) -> Answer:
        """Have P compute a prompt; returns when its KV is stored."""
        answer = ask(self.p, self.p.model, content, max_tokens=1, **fields)
        stored_kv(self.root, "t0of1")
        return answer


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine, tmp_path_factory: pytest.TempPathFactory, runner: ModelRunner
) -> Fleet:
    root = tmp_path_factory.mktemp("fleet")
    store = f"file://{root}/store"

    def stage(name: str) -> EngineProcess:
        # A host cache of its own: what it has comes from the store.
        options = {"host_cache_dir": f"{root}/{name}-host", "wait_s": 10}
        ec = ec_argument("consumer", store, **options)
        kv = kv_argument("both", store, chunk_tokens=2 * BLOCK, **options)
        arguments = (f"--block-size={BLOCK}", "--enable-mm-embeds", "--mm-processor-cache-gb=0")
        tells = {"VLLM_SERVER_DEV_MODE": "1"}
        return engine(name, *arguments, ec, kv, environment=tells, runner=runner)

    e = engine("e", ec_argument("producer", store, host_cache_dir=f"{root}/e-host"))
    fleet = Fleet(engine("plain"), e, stage("p"), stage("d"), root)
    for each in fleet[:4]:
        each.wait_ready()
    return fleet


def test_v2_engines_schedule_ahead_as_on_a_gpu(fleet: Fleet, runner: ModelRunner) -> None:
    for each in (fleet.p, fleet.d):
        asked = f"{each.base_url}/server_info?config_format=json"
        with urllib.request.urlopen(asked, timeout=30) as reply:
            config = json.load(reply)["vllm_config"]["scheduler_config"]
        assert config["async_scheduling"] == (runner == "v2")


def test_d_computes_one_token_and_needs_no_pixels(fleet: Fleet) -> None:
    shown = [STORY, picture(1, "one"), picture(2, "two"), QUESTION]
    encoded = fleet.encode(*shown[1:3])
    content = [STORY, announced(encoded, "one"), announced(encoded, "two"), QUESTION]
    with counting(fleet.p) as gained:
        cold = fleet.prefill(content, **passed_on(encoded))
    if HAS_ENCODER_METRICS:
        assert gained[LOADED] == 2
    assert cold.num_cached_tokens == 0
    warm = ask(fleet.d, fleet.d.model, content, **passed_on(encoded))
    assert warm.tokens == fleet.plain_tokens(*shown)
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
    other = fleet.plain_tokens(STORY, shown[2], shown[1], QUESTION)
    assert other != warm.tokens, "the tokens do not depend on the pictures: no test"


def test_a_lost_embedding_fails_that_request_and_the_engines_serve_on(fleet: Fleet) -> None:
    lost = announced(fleet.encode(picture(3, "three")), "three") | {"uuid": "lost"}
    for each in (fleet.p, fleet.d):
        failed = ask(each, each.model, [lost, QUESTION])
        assert failed.status == 500
        assert "error" in failed.body
        in_full = [picture(4), QUESTION]
        assert ask(each, each.model, in_full).tokens == fleet.plain_tokens(*in_full)


@pytest.mark.parametrize("loses", ["some", "all"])
def test_lost_kv_is_computed_again_from_the_embedding(fleet: Fleet, loses: str) -> None:
    seed, uuid = (5, 6)[loses == "all"], f"loses {loses}"
    shown = [text(f"{loses} is lost"), picture(seed, uuid), STORY, QUESTION]
    encoded = fleet.encode(shown[1])
    content = [shown[0], announced(encoded, uuid), *shown[2:]]
    known = stored_kv(fleet.root, "t0of1")
    fleet.prefill(content, **passed_on(encoded))
    new = sorted(stored_kv(fleet.root, "t0of1") - known)
    assert len(new) > 3
    for path in new[1::2] if loses == "some" else new:
        path.unlink()
    with counting(fleet.d) as gained:
        answer = ask(fleet.d, fleet.d.model, content, **passed_on(encoded))
    assert answer.tokens == fleet.plain_tokens(*shown)
    assert answer.num_cached_tokens < answer.num_prompt_tokens - 1
    if HAS_ENCODER_METRICS and loses == "all":
        assert gained[LOADED] == 1


def test_spoiled_kv_is_computed_again_from_the_embedding(fleet: Fleet) -> None:
    """D is promised it, and finds out when the request has its blocks."""
    shown = [text("what is spoiled"), picture(7, "seven"), STORY, QUESTION]
    encoded = fleet.encode(shown[1])
    content = [shown[0], announced(encoded, "seven"), *shown[2:]]
    known = stored_kv(fleet.root, "t0of1")
    fleet.prefill(content, **passed_on(encoded))
    new = sorted(stored_kv(fleet.root, "t0of1") - known)
    for path in new:
        shutil.copyfile(sorted(known)[0], path)
    with counting(fleet.d) as gained:
        answer = ask(fleet.d, fleet.d.model, content, **passed_on(encoded))
    assert answer.tokens == fleet.plain_tokens(*shown)
    assert gained[FAILED] > 0
    if HAS_ENCODER_METRICS:
        assert gained[LOADED] == 1
