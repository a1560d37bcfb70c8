# SPDX-License-Identifier: Apache-2.0
"""Several pictures, one picture twice, videos; and engines with too small caches.

An encoder and its consumers over S3, each with a host cache of its own, as on hosts of their own.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from lab.faults.tcp_proxy import ProxyProcess
from lab.servers.engines import EngineProcess, ModelRunner, ec_argument
from lab.servers.openai_client import counters
from lab.servers.processes import LOOPBACK
from lab.servers.s3 import SeaweedFS
from tests.conftest import StartEngine
from tests.engines.chat import (
    QUESTION,
    Answer,
    announced,
    ask,
    begin,
    counting,
    passed_on,
    picture,
    text,
    video,
    wait_for_requests,
)
from tests.engines.runners import on_each_runner
from tests.releases import needs_encoder_metrics

pytestmark = [pytest.mark.engine, pytest.mark.s3, needs_encoder_metrics, on_each_runner]

ENCODED, LOADED = "ecshare_items/encoded", "ecshare_items/loaded"
SHOWS_VIDEOS = '--limit-mm-per-prompt={"image": 4, "video": 1}'
LARGE = 644
"""Side length in pixels; such a picture has 529 tokens."""
CUT_PREFILLS = ("--enable-chunked-prefill", "--max-num-batched-tokens=48")
"""No step takes a whole picture."""
SMALL = (
    *CUT_PREFILLS,
    # vLLM's encoder cache holds the largest item that can come: a picture of 1024 tokens. Were
    # longer prompts allowed, it would be a video, though only as an embedding.
    '--limit-mm-per-prompt={"image": 4, "video": 0}',
    "--max-model-len=1728",
    # vLLM reserves one block: 1728 tokens of KV remain for all requests together.
    "--block-size=32",
    "--num-gpu-blocks-override=55",
    "--no-enable-prefix-caching",
)


class Fleet(NamedTuple):
    plain: EngineProcess
    encoder: EngineProcess
    roomy: EngineProcess
    """A consumer that reaches the store through `proxy`."""
    small: EngineProcess
    """A consumer whose caches are too small for its requests; see SMALL."""
    proxy: ProxyProcess

    def encode(self, *content: dict[str, Any], **fields: Any) -> Answer:
        return ask(self.encoder, self.encoder.model, list(content), **fields)

    def ask_roomy(self, encoded: Answer, *content: dict[str, Any]) -> Answer:
        """Ask `roomy` about items that the encoder has just encoded."""
        return ask(self.roomy, self.roomy.model, [*content, QUESTION], **passed_on(encoded))

    def expected(self, *content: dict[str, Any], **fields: Any) -> list[int]:
        return ask(self.plain, self.plain.model, [*content, QUESTION], **fields).tokens


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine,
    seaweed: SeaweedFS,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")

    def option(name: str, role: str, endpoint_url: str) -> str:
        return ec_argument(
            role,
            f"{seaweed.url}/modalities-{runner}",
            storage_options={**seaweed.storage_options, "endpoint_url": endpoint_url},
            host_cache_dir=str(root / name),
            wait_s=20,
            io_timeout_s=30,
        )

    direct = seaweed.base_url
    with ProxyProcess(LOOPBACK, seaweed.port.number) as proxy:
        fleet = Fleet(
            engine("plain", SHOWS_VIDEOS),
            engine("encoder", SHOWS_VIDEOS, option("encoder", "producer", direct)),
            engine(
                *("roomy", SHOWS_VIDEOS, *CUT_PREFILLS, "--enable-mm-embeds", "--block-size=32"),
                option("roomy", "consumer", proxy.url),
                runner=runner,
            ),
            engine("small", *SMALL, option("small", "consumer", direct), runner=runner),
            proxy,
        )
        for started in fleet[:4]:
            started.wait_ready()
        yield fleet


def test_picture_shown_twice_is_encoded_once(fleet: Fleet) -> None:
    shown = [picture(1, "one"), picture(2, "two"), picture(1, "one")]
    with counting(fleet.encoder) as first:
        encoded = fleet.encode(*shown)
    with counting(fleet.encoder) as second:
        fleet.encode(*shown)
    assert (first[ENCODED], second[ENCODED]) == (2, 0)
    content = [announced(encoded, uuid) for uuid in ("one", "two", "one")]
    with counting(fleet.roomy) as gained:
        answer = fleet.ask_roomy(encoded, *content)
    assert answer.tokens == fleet.expected(*shown)
    assert (gained[LOADED], gained[ENCODED]) == (2, 0)
    assert answer.tokens != fleet.expected(*shown[:2])


@pytest.mark.parametrize("frames_per_s", [1, 2])
def test_consumer_loads_a_video(fleet: Fleet, frames_per_s: int) -> None:
    film, still = f"film {frames_per_s}", f"still {frames_per_s}"
    shown = [video(1, film, frames_per_s), picture(3, still)]
    with counting(fleet.encoder) as first:
        encoded = fleet.encode(*shown)
    with counting(fleet.encoder) as second:
        again = fleet.encode(*shown)
    assert (first[ENCODED], second[ENCODED]) == (2, 0)
    if frames_per_s == 2:
        sent = announced(encoded, film, "video")
    else:
        # Without its frames, a consumer assumes two frames a second.
        for told in (encoded, again):
            assert told.body["ec_transfer_params"][film]["metadata"] == {}
        sent = shown[0]
    with counting(fleet.roomy) as gained:
        answer = fleet.ask_roomy(encoded, sent, announced(encoded, still))
    assert answer.tokens == fleet.expected(*shown)
    assert (gained[LOADED], gained[ENCODED]) == (2, 0)
    assert answer.tokens != fleet.expected(video(5, None, frames_per_s), shown[1])
    assert answer.tokens != fleet.expected(video(1, None, 3 - frames_per_s), shown[1])


def test_items_in_the_cached_prefix_are_not_loaded(fleet: Fleet) -> None:
    between = text("Why is the sky blue? " * 10)
    shown = [picture(11, "eleven", 448), between, picture(12, "twelve")]
    other = [*shown[:2], picture(13, "thirteen")]
    encoded, another = fleet.encode(*shown), fleet.encode(other[-1])
    content = [announced(encoded, "eleven"), between, announced(encoded, "twelve")]
    cold = fleet.ask_roomy(encoded, *content)
    content[-1] = announced(another, "thirteen")
    with counting(fleet.roomy) as gained:
        half = fleet.ask_roomy(another, *content)
    assert cold.tokens == fleet.expected(*shown)
    assert half.tokens == fleet.expected(*other)
    assert cold.num_cached_tokens == 0
    assert half.num_cached_tokens > 256 + 32, "the first picture and the words before it"
    assert (gained[LOADED], gained[ENCODED]) == (1, 0)


def test_chunked_prefill_with_a_small_encoder_cache_loads_pictures(fleet: Fleet) -> None:
    shown = [picture(20 + number, f"large {number}", LARGE) for number in range(3)]
    encoded = fleet.encode(*shown)
    small = fleet.small
    with counting(small) as gained:
        answer = ask(small, small.model, [*shown, QUESTION], **passed_on(encoded))
    assert answer.tokens == fleet.expected(*shown)
    assert (gained[LOADED], gained[ENCODED]) == (3, 0)
    with counting(small) as gained:
        again = ask(small, small.model, [*shown, QUESTION], **passed_on(encoded))
    assert again.tokens == answer.tokens
    assert again.num_cached_tokens == 0
    assert gained[LOADED] >= 2, "the last one may still be in the encoder cache"
    assert gained[ENCODED] == 0


def test_preempted_requests_resume_with_the_same_tokens(fleet: Fleet) -> None:
    # Three prompts fit, or one with its answer. Only the last picture is still cached.
    shown = [picture(30 + number, f"preempted {number}", LARGE) for number in range(4)]
    encoded = [fleet.encode(each) for each in shown]
    expected = [fleet.expected(each, max_tokens=330) for each in shown]
    assert len({tuple(tokens) for tokens in expected}) == len(shown)

    def answer(number: int) -> list[int]:
        content, params = [shown[number], QUESTION], passed_on(encoded[number])
        return ask(fleet.small, fleet.small.model, content, max_tokens=330, **params).tokens

    before = sample(fleet.small, "num_preemptions_total")
    with counting(fleet.small) as gained, ThreadPoolExecutor(len(shown)) as clients:
        answers = list(clients.map(answer, range(len(shown))))
    assert answers == expected
    assert sample(fleet.small, "num_preemptions_total") > before
    assert gained[LOADED] > len(shown), "what was preempted is loaded again"
    assert gained[ENCODED] == 0


def test_client_disconnect_during_a_load_leaves_the_engine_working(fleet: Fleet) -> None:
    encoded = fleet.encode(picture(40, "forty"))
    content = announced(encoded, "forty")
    roomy = fleet.roomy
    fleet.proxy.stall()
    try:
        asked = [{"role": "user", "content": [content, QUESTION]}]
        body = {"model": roomy.model, "messages": asked, "temperature": 0}
        leaving = begin(roomy, "chat/completions", body | passed_on(encoded))
        wait_for_requests(roomy, 1)
        beside = ask(roomy, roomy.model, [text("Why is the sky blue?")])
        leaving.close()
        wait_for_requests(roomy, 0)
    finally:
        fleet.proxy.resume()
    sky = ask(fleet.plain, fleet.plain.model, [text("Why is the sky blue?")])
    assert beside.tokens == sky.tokens
    with counting(roomy) as gained:
        answer = fleet.ask_roomy(encoded, content)
    assert answer.tokens == fleet.expected(picture(40))
    assert gained[LOADED] == 1


def sample(engine: EngineProcess, name: str) -> float:
    return counters(engine.base_url)[f"vllm:{name}", ""]
