# SPDX-License-Identifier: Apache-2.0
"""Real engines: D has its request while P computes, and loads chunks as they appear."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.servers.engines import EngineProcess, ModelRunner, ec_argument, kv_argument
from tests.conftest import StartEngine
from tests.engines.chat import (
    FOR_DECODE,
    announced,
    ask,
    begin,
    complete,
    counting,
    counts,
    picture,
    stored_kv,
    text,
    wait_for_requests,
    wait_until,
)
from tests.engines.runners import on_each_runner
from tests.releases import HAS_ENCODER_METRICS

pytestmark = [pytest.mark.engine, on_each_runner]

BLOCK = 32
CHUNK = 2 * BLOCK
STREAMED = {"kvshare": {"streamed": True}}
WAIT_S = 40.0
GIVE_UP_S = 120.0
RUNS_S, STANDS_S = 0.05, 0.15
LOADED = "kvshare_blocks/loaded"
OTHERS = (4, 0, 1, 2, 5, 6)
"""Seeds of pictures; after so long a story not each of them changes the tokens."""
STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. " * 140


class Fleet(NamedTuple):
    plain: EngineProcess
    p: EngineProcess
    """Computes one chunk a step."""
    d: EngineProcess
    root: Path

    @contextmanager
    def p_stops_in_the_middle(self) -> Iterator[None]:
        """In the block P and D are sent a prompt. At the end of it P has computed some of it and
        is stopped, so that it cannot answer, and D has loaded some of that."""
        num_objects = len(stored_kv(self.root, "t0of1"))
        num_loaded = loaded(self.d)
        yield
        wait_until(
            lambda: self._num_objects_a_moment_later() > num_objects,
            "P stored nothing",
            GIVE_UP_S,
        )
        wait_until(lambda: loaded(self.d) > num_loaded, "D loaded nothing", GIVE_UP_S)

    def _num_objects_a_moment_later(self) -> int:
        """Let P run for a moment, and stop it; return how much is stored then.

        A disk that is slow just now gains on P: P would be done before its first chunks show.
        """
        self.p.resume()
        time.sleep(RUNS_S)
        self.p.pause()
        time.sleep(STANDS_S)
        # Not `stored_kv`: that waits until P is done.
        return len(list((self.root / "store" / "kv").rglob("*.t0of1")))


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine,
    plain: EngineProcess,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
) -> Fleet:
    root = tmp_path_factory.mktemp("fleet")
    store = f"file://{root}/store"

    def sharing(name: str, ec_role: str, *more: str) -> EngineProcess:
        # Hosts of their own: KV passes between them through the store only.
        options = {"host_cache_dir": f"{root}/{name}-host", "wait_s": WAIT_S}
        ec = ec_argument(ec_role, store, **options)
        kv = kv_argument("both", store, chunk_tokens=CHUNK, **options)
        return engine(name, f"--block-size={BLOCK}", ec, kv, *more, runner=runner)

    fleet = Fleet(
        plain,
        sharing("p", "both", f"--max-num-batched-tokens={CHUNK}"),
        # Room for one prompt: the next request gets the blocks of the previous one.
        sharing("d", "consumer", "--num-gpu-blocks-override=136"),
        root,
    )
    for each in fleet[:3]:
        each.wait_ready()
        ask(each, each.model, [text("The first request takes its time.")])
    return fleet


def loaded(d: EngineProcess) -> float:
    return counts(d).get(LOADED, 0)


def test_decoder_loads_chunks_before_the_prefiller_answers(fleet: Fleet) -> None:
    prompt = [20 + number % 400 for number in range(60 * CHUNK + 45)]
    expected = complete(fleet.plain, fleet.plain.model, prompt).tokens
    with ThreadPoolExecutor(2) as clients, counting(fleet.d) as gained:
        try:
            with fleet.p_stops_in_the_middle():
                from_d = clients.submit(
                    complete, fleet.d, fleet.d.model, prompt, kv_transfer_params=STREAMED
                )
                from_p = clients.submit(complete, fleet.p, fleet.p.model, prompt, 1, **FOR_DECODE)
            assert not from_p.done()
            assert not from_d.done()
        finally:
            fleet.p.resume()
        answer = from_d.result()
        handed_over = from_p.result().body["kv_transfer_params"]
    assert answer.tokens == expected
    assert answer.num_cached_tokens == len(prompt) - 1
    assert handed_over == {"kvshare": {"num_tokens": len(prompt) - 1, "size": 1}}
    assert gained["kvshare_tokens/announced"] == gained["kvshare_tokens/loaded"] == len(prompt) - 1
    assert gained["kvshare_tokens/hit"] == gained["kvshare_blocks/missed"] == 0, "no look-up"


def test_late_kv_of_an_aborted_request_overwrites_no_block(fleet: Fleet) -> None:
    """KV that arrives late is not written to blocks that now belong to another request."""
    abandoned = [30 + number * 3 % 400 for number in range(60 * CHUNK + 45)]
    other = [40 + number * 7 % 400 for number in range(len(abandoned))]
    expected = [
        complete(fleet.plain, fleet.plain.model, each).tokens for each in (other, abandoned)
    ]
    body = {"model": fleet.d.model, "prompt": abandoned, "max_tokens": 12}
    with ThreadPoolExecutor(1) as clients:
        try:
            with fleet.p_stops_in_the_middle():
                leaving = begin(fleet.d, "completions", body | {"kv_transfer_params": STREAMED})
                from_p = clients.submit(complete, fleet.p, fleet.p.model, abandoned, 1)
            leaving.close()
            wait_for_requests(fleet.d, 0)
        finally:
            fleet.p.resume()
        assert complete(fleet.d, fleet.d.model, other).tokens == expected[0]
        from_p.result()
    stored_kv(fleet.root, "t0of1")
    answer = complete(fleet.d, fleet.d.model, abandoned)
    assert answer.tokens == expected[1]
    assert answer.num_cached_tokens == len(abandoned) - 1


def test_decoder_computes_the_rest_when_the_prefiller_is_killed(fleet: Fleet) -> None:
    """The last test, because it kills P. The picture follows the part that P has computed, and D
    has no pixels of it."""
    encoded = ask(fleet.p, fleet.p.model, [picture(3, "three")])
    full = [text(STORY), picture(3, "three"), text("What is this?")]
    lean = [full[0], announced(encoded, "three"), full[2]]
    expected = ask(fleet.plain, fleet.plain.model, full).tokens
    others = (ask(fleet.plain, fleet.plain.model, [full[0], picture(n), full[2]]) for n in OTHERS)
    assert any(other.tokens != expected for other in others)
    with ThreadPoolExecutor(2) as clients, counting(fleet.d) as gained:
        with fleet.p_stops_in_the_middle():
            from_d = clients.submit(ask, fleet.d, fleet.d.model, lean, kv_transfer_params=STREAMED)
            from_p = clients.submit(ask, fleet.p, fleet.p.model, full, max_tokens=1)
        assert not from_p.done()
        fleet.p.kill()
        answer = from_d.result()
        assert isinstance(from_p.exception(), OSError)
    assert answer.tokens == expected
    # Not by vLLM's count of cached tokens: that is what a load was promised.
    assert CHUNK <= gained["kvshare_tokens/loaded"] < gained["kvshare_tokens/announced"]
    assert gained["kvshare_blocks/failed"] > 0
    if HAS_ENCODER_METRICS:
        assert gained["ecshare_items/loaded"] == 1
