# SPDX-License-Identifier: Apache-2.0
"""Whole engines with a toy model: D gets its request while P computes, or claims to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.fsspec.store import FsspecStore
from ecshare.store.keys import Key, Kind, object_key
from tests.kvshare.conftest import StartEngine, is_at_rest, spin
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.toy import (
    BLOCK,
    GIVE_UP_S,
    ToyEngine,
    chunks_for,
    expected_answer,
    make_request,
    serve,
)

PROMPT = list(range(100, 100 + 21 * BLOCK + 3))
CHUNK = 2 * BLOCK
STEP = 3 * BLOCK
STREAMED = {"kvshare": {"streamed": True}}
ALL = {"kvshare": {"num_tokens": len(PROMPT) - 1}}
NEVER_S = 2 * GIVE_UP_S  # a test fails if D waits this long


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the keys whose existence engines ask the store for."""
    keys: list[str] = []
    exists = FsspecStore.exists

    async def noted(self: FsspecStore, wanted: Sequence[Key]) -> list[bool]:
        keys.extend(wanted)
        return await exists(self, wanted)

    monkeypatch.setattr(FsspecStore, "exists", noted)
    return keys


def start_p(gated: StartEngine, **store: Any) -> ToyEngine:
    """Start a prefill engine that computes a few blocks a step."""
    few = {"max_num_batched_tokens": STEP, "max_num_seqs": 3}
    return gated("kv_producer", engine=few, chunk_tokens=CHUNK, **store)


def start_d(gated: StartEngine, *, is_async: bool = False, **store: Any) -> ToyEngine:
    return gated("kv_consumer", engine={"is_async": is_async}, chunk_tokens=CHUNK, **store)


def add_streamed(
    d: ToyEngine, name: str = "d", prompt: list[int] = PROMPT, params: Any = STREAMED
) -> None:
    d.add(make_request(name, prompt, 3, kv_transfer_params=params))


def load(d: ToyEngine, num_tokens: int) -> None:
    """Step until all whole chunks of these tokens are loaded."""
    due = num_tokens // CHUNK * (CHUNK // BLOCK)
    spin(d, lambda: d.counts.get("blocks/loaded", 0) >= due, "D does not load them")


def hand_over(p: ToyEngine, d: ToyEngine, params: dict[str, Any] = STREAMED) -> None:
    """Have D load each chunk of the prompt once P has computed it."""
    add_streamed(d, params=params)
    p.add(make_request("p", PROMPT, 1))
    for computed in range(STEP, len(PROMPT), STEP):
        p.step()
        load(d, computed)
    assert p.scheduler.has_unfinished_requests()
    p.run_out()
    check(d, computed=1)
    assert "blocks/failed" not in d.counts


def check(d: ToyEngine, computed: int, name: str = "d", prompt: list[int] = PROMPT) -> None:
    d.run_out()
    answer = d.answers[name]
    assert answer.tokens == expected_answer(prompt, 3)
    assert answer.computed_prompt_tokens == computed
    assert is_at_rest(d)


@pytest.mark.parametrize("params", [STREAMED, {"do_remote_prefill": True}])
@pytest.mark.parametrize("is_async", [False, True])
def test_d_loads_each_chunk_as_soon_as_p_has_computed_it(
    gated: StartEngine, asked: list[str], is_async: bool, params: dict[str, Any]
) -> None:
    p, d = start_p(gated), start_d(gated, is_async=is_async)
    asked.clear()
    hand_over(p, d, params)
    assert d.counts["tokens/announced"] == d.counts["tokens/loaded"] == len(PROMPT) - 1
    assert asked == []


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_d_loads_the_chunks_that_p_stored_before_it_died(gated: StartEngine, steps: int) -> None:
    # `wait_s` is long enough that D gives up only on missing chunks, not on a slow disk or core.
    p, d = start_p(gated), start_d(gated, wait_s=2.0)
    p.add(make_request("p", PROMPT, 1))
    for _ in range(steps):
        p.step()
    p.transfer.drain(GIVE_UP_S)
    add_streamed(d)
    spin(d, lambda: not d.scheduler.has_unfinished_requests(), "D does not answer")
    computed = steps * STEP // CHUNK * CHUNK
    check(d, len(PROMPT) - computed)
    assert d.counts["misses/late"] > 0
    assert d.counts.get("tokens/loaded", 0) == computed


def test_d_loads_chunks_that_p_had_before_the_request(gated: StartEngine) -> None:
    """P has some blocks from the store and some in its cache, also a prompt's partial chunk."""
    serve(gated("kv_both", chunk_tokens=CHUNK), PROMPT[: 7 * BLOCK])
    p, d = gated("kv_both", chunk_tokens=CHUNK), start_d(gated)
    serve(p, PROMPT[: 9 * BLOCK + 2], name="before")
    add_streamed(d)
    serve(p, PROMPT, max_tokens=1)
    check(d, computed=1)


def test_false_announcements_do_not_block_other_loads(gated: StartEngine) -> None:
    serve(start_p(gated), PROMPT)
    d = start_d(gated, buffer_bytes=1)
    for number in range(3):
        add_streamed(d, f"false {number}", [number, *PROMPT[: 3 * CHUNK]])
        d.step()
    d.add(make_request("true", PROMPT, 3))
    spin(d, lambda: bool(d.answers["true"].finish_reason), "D does not answer")
    assert d.answers["true"].computed_prompt_tokens == 1
    assert len(d.scheduler.requests) == 3
    for number in range(3):
        d.abort(f"false {number}")
    d.run_out()
    assert is_at_rest(d)
    assert d.transfer.in_flight == 0


def test_aborting_one_of_two_streamed_requests_keeps_the_other(gated: StartEngine) -> None:
    p, d = start_p(gated), start_d(gated)
    for name in ("one", "two"):
        add_streamed(d, name)
    p.add(make_request("p", PROMPT, 1))
    p.step()
    load(d, 2 * CHUNK)  # one, twice
    d.abort("one")
    d.step()
    p.run_out()
    check(d, computed=1, name="two")


def test_d_loads_after_a_temporary_store_failure(gated: StartEngine) -> None:
    d = start_d(gated)
    GatedFileSystem.broken |= {"exists", "get"}
    add_streamed(d)
    spin(d, lambda: GatedFileSystem.failed > 0, "D asks for nothing")
    GatedFileSystem.broken.clear()
    serve(start_p(gated), PROMPT, max_tokens=1)
    check(d, computed=1)


def test_p_that_dropped_saves_announces_only_stored_tokens(gated: StartEngine) -> None:
    p = start_p(gated, buffer_bytes=1)
    GatedFileSystem.close_gate("put")
    p.add(make_request("p", PROMPT, 1))
    spin(p, lambda: not p.scheduler.has_unfinished_requests(), "P does not answer")
    assert p.answers["p"].kv_transfer_params == {"kvshare": {"num_tokens": CHUNK, "size": 1}}
    GatedFileSystem.open_gates()
    p.run_out()


@pytest.mark.parametrize("said", [{"num_tokens": len(PROMPT) - 1}, {"streamed": True}])
def test_d_waits_for_chunks_that_p_is_still_storing(
    gated: StartEngine, asked: list[str], said: dict[str, Any]
) -> None:
    p, d = start_p(gated), start_d(gated)
    GatedFileSystem.close_gate("put")
    p.add(make_request("p", PROMPT, 1))
    spin(p, lambda: not p.scheduler.has_unfinished_requests(), "P does not answer")
    asked.clear()
    d.add(make_request("d", PROMPT, 3, kv_transfer_params={"kvshare": said}))
    for _ in range(50):
        d.step()
    assert d.answers["d"].computed_prompt_tokens == 0
    GatedFileSystem.open_gates()
    check(d, computed=1)
    p.run_out()
    assert asked == []


# --- what P gives up ---


def chunk_name(number: int) -> str:
    """Return the part after the namespace in the key of a whole chunk of the prompt."""
    chunk = chunks_for(make_request("x", PROMPT), CHUNK // BLOCK)[number]
    return object_key(Kind.KV, "0" * 32, bytes(chunk.key), "t0of1").rpartition("/")[2]


def check_given_up(d: ToyEngine, num_loaded: int) -> None:
    check(d, computed=len(PROMPT) - num_loaded)
    check_did_not_wait(d)


def check_did_not_wait(d: ToyEngine) -> None:
    assert d.counts["misses/given_up"] > 0
    assert "misses/late" not in d.counts


def test_d_does_not_wait_for_chunks_p_had_no_memory_for(gated: StartEngine) -> None:
    p, d = start_p(gated, buffer_bytes=1), start_d(gated, wait_s=NEVER_S)
    add_streamed(d)
    GatedFileSystem.close_gate(f"move {chunk_name(0)}")
    p.add(make_request("p", PROMPT, 1))
    spin(p, lambda: not p.scheduler.has_unfinished_requests(), "P does not answer")
    GatedFileSystem.open_gates()
    check_given_up(d, num_loaded=CHUNK)
    p.run_out()


def test_d_does_not_wait_for_a_chunk_the_store_refused(gated: StartEngine) -> None:
    p, d = start_p(gated), start_d(gated, wait_s=NEVER_S)
    GatedFileSystem.broken.add(f"move {chunk_name(3)}")
    d.add(make_request("d", PROMPT, 3, kv_transfer_params=ALL))
    d.step()
    serve(p, PROMPT, max_tokens=1)
    check_given_up(d, num_loaded=3 * CHUNK)


def test_d_on_the_same_host_learns_of_given_up_chunks_without_store(
    gated: StartEngine, tmp_path: Path
) -> None:
    host: dict[str, Any] = {"host_cache_dir": f"{tmp_path}/one-host"}
    p, d = start_p(gated, **host), start_d(gated, wait_s=NEVER_S, **host)
    GatedFileSystem.broken.add("move")
    add_streamed(d)
    d.step()
    serve(p, PROMPT, max_tokens=1)
    d.run_out()
    # The host cache has chunks until the store has refused them: some may have been loaded.
    assert d.answers["d"].tokens == expected_answer(PROMPT, 3)
    check_did_not_wait(d)


def test_d_does_not_wait_for_a_request_aborted_on_p(gated: StartEngine) -> None:
    p, d = start_p(gated), start_d(gated, wait_s=NEVER_S)
    add_streamed(d)
    p.add(make_request("p", PROMPT, 1))
    for _ in range(4):
        p.step()
    p.abort("p")
    p.run_out()
    check_given_up(d, num_loaded=4 * STEP // CHUNK * CHUNK)


def test_dropped_save_of_a_plain_request_leaves_no_gap_marker(gated: StartEngine) -> None:
    engine = gated(buffer_bytes=1, chunk_tokens=CHUNK)
    GatedFileSystem.close_gate("put")
    engine.add(make_request("a", PROMPT, 2))
    spin(engine, lambda: not engine.scheduler.has_unfinished_requests(), "no answer")
    GatedFileSystem.open_gates()
    engine.run_out()
    assert engine.counts["blocks/dropped"] > 0
    assert not [path for path in GatedFileSystem.store if path.endswith(".gap")]
