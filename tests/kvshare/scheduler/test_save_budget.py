# SPDX-License-Identifier: Apache-2.0
"""Chunks without save memory are not announced, and chunks behind a gap are not saved."""

import logging
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from ecshare.store.keys import Kind, object_key
from kvshare.chunks.prefix import ChunkKey
from kvshare.chunks.slabs import slab_sizes
from kvshare.messages import Orders, Piece, Report
from kvshare.scheduler.save_budget import SaveBudget, can_hold_state, log_limit
from tests.kvshare.conftest import StartEngine, spin
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.toy import (
    BLOCK,
    GIVE_UP_S,
    ToyEngine,
    chunks_for,
    expected_answer,
    make_request,
)

SLAB = slab_sizes([1])(0, 1)
PROMPT = list(range(1, 10 * BLOCK + 2))
OTHER = list(range(500, 500 + 10 * BLOCK + 1))
NUM_CHUNKS = 10


def stored(engine: ToyEngine, prompt: list[int], chunk_blocks: int = 1) -> list[bool]:
    """Return for each chunk of `prompt` if the store has it."""
    names = {path.rpartition("/")[2] for path in GatedFileSystem.store}
    return [name in names for name in chunk_names(prompt, chunk_blocks)]


def chunk_names(prompt: list[int], chunk_blocks: int = 1) -> list[str]:
    """Return the part after the namespace of the objects' keys."""
    chunks = chunks_for(make_request("x", prompt), chunk_blocks)
    keys = (object_key(Kind.KV, "0" * 32, bytes(chunk.key), "t0of1") for chunk in chunks)
    return [key.rpartition("/")[2] for key in keys]


def is_served(engine: ToyEngine) -> bool:
    """Return whether all requests have ended and all orders were given."""
    return not engine.scheduler.requests and not engine.scheduler.finished_req_ids


def is_begun(engine: ToyEngine, name: str) -> bool:
    """Return whether some of this request's prompt is computed."""
    return engine.answers[name].computed_prompt_tokens > 0


def step_until_stored(engine: ToyEngine, prompt: list[int]) -> None:
    def is_stored() -> bool:
        # Uploads keep up with steps, or the answer would end before the last one is ordered.
        engine.transfer.drain(GIVE_UP_S)
        return all(stored(engine, prompt))

    spin(engine, is_stored, "it is not saved")


def announced(params: dict[str, Any] | None) -> int:
    """Return how many tokens the answer announces to the next engine."""
    return params["kvshare"]["num_tokens"] if params else 0


def test_only_saved_tokens_are_announced(gated: StartEngine) -> None:
    writer = gated(buffer_bytes=2 * SLAB)
    GatedFileSystem.close_gate("put")
    writer.add(make_request("a", PROMPT))
    spin(writer, lambda: is_served(writer), "no answer")
    GatedFileSystem.open_gates()
    writer.run_out()
    assert stored(writer, PROMPT) == [True] * 2 + [False] * 8
    params = writer.answers["a"].kv_transfer_params
    assert announced(params) == 2 * BLOCK
    assert writer.counts["blocks/dropped"] == 8

    reader = gated()
    (answer,) = reader.run(make_request("b", PROMPT, 2, kv_transfer_params=params))
    assert answer.tokens == expected_answer(PROMPT, 2)
    assert answer.computed_prompt_tokens == len(PROMPT) - 2 * BLOCK
    assert not {name for name in reader.counts if name.startswith("misses/")}


def test_prompt_without_save_memory_is_not_announced(gated: StartEngine) -> None:
    writer = gated(buffer_bytes=SLAB)
    GatedFileSystem.close_gate("put")
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        writer.add(make_request(name, prompt))
        spin(writer, lambda: is_served(writer), "no answer")
    GatedFileSystem.open_gates()
    writer.run_out()
    assert announced(writer.answers["a"].kv_transfer_params) == BLOCK
    assert writer.answers["b"].kv_transfer_params is None
    assert not any(stored(writer, OTHER))


def test_chunks_without_memory_are_saved_by_later_steps(gated: StartEngine) -> None:
    engine = gated(buffer_bytes=2 * SLAB)
    GatedFileSystem.close_gate("put")
    engine.add(make_request("a", PROMPT, max_tokens=200))
    spin(engine, lambda: len(engine.answers["a"].tokens) > 3, "no tokens")
    GatedFileSystem.open_gates()
    step_until_stored(engine, PROMPT)
    assert not engine.counts.get("blocks/dropped")


def test_chunks_after_a_failed_save_are_not_saved(
    gated: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(1, 100 * BLOCK + 2))
    engine = gated(
        engine={"num_blocks": 128, "max_num_batched_tokens": 2 * BLOCK, "max_num_seqs": 4}
    )
    GatedFileSystem.broken.add(f"move {chunk_names(prompt)[2]}")
    half, saves, lost = engine.connector.scheduler, list[Piece](), set[ChunkKey]()
    order, learn = half.orders, half.reported

    def ordered(output: SchedulerOutput) -> Orders:
        orders = order(output)
        saves.extend(orders.saves)
        return orders

    def reported(output: KVConnectorOutput) -> None:
        report = output.kv_connector_worker_meta
        lost.update(report.lost if isinstance(report, Report) else ())
        learn(output)

    monkeypatch.setattr(half, "orders", ordered)
    monkeypatch.setattr(half, "reported", reported)
    engine.add(make_request("a", prompt))

    def is_noticed() -> bool:
        engine.transfer.drain(20.0)  # an upload takes less than a step
        return bool(lost)

    spin(engine, is_noticed, "the gap is not noticed")
    num_ordered = len(saves)
    assert num_ordered < 100, "the gap was noticed too late to test this"
    engine.run_out()
    there = stored(engine, prompt)
    assert there[:3] == [True, True, False]
    assert not any(there[num_ordered:])
    assert announced(engine.answers["a"].kv_transfer_params) == 2 * BLOCK


def test_oldest_prompt_is_stored_whole_before_others(gated: StartEngine) -> None:
    engine = gated(buffer_bytes=(NUM_CHUNKS + 3) * SLAB)
    GatedFileSystem.close_gate("put")
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.add(make_request(name, prompt))
    spin(engine, lambda: is_served(engine), "no answer")
    GatedFileSystem.open_gates()
    engine.run_out()
    assert stored(engine, PROMPT) == [True] * NUM_CHUNKS
    assert stored(engine, OTHER) == [False] * NUM_CHUNKS
    assert announced(engine.answers["a"].kv_transfer_params) == len(PROMPT) - 1
    assert engine.answers["b"].kv_transfer_params is None


def test_chunked_prefill_keeps_its_reserved_memory(gated: StartEngine) -> None:
    few = {"max_num_batched_tokens": 4 * BLOCK, "max_num_seqs": 4}
    engine = gated(engine=few, buffer_bytes=(NUM_CHUNKS + 3) * SLAB)
    GatedFileSystem.close_gate("put")
    engine.add(make_request("a", PROMPT))
    spin(engine, lambda: is_begun(engine, "a"), "it does not begin")
    engine.add(make_request("b", OTHER[: 4 * BLOCK + 1]))  # exactly as much as is left now
    spin(engine, lambda: is_served(engine), "no answer")
    GatedFileSystem.open_gates()
    engine.run_out()
    assert all(stored(engine, PROMPT))
    assert announced(engine.answers["a"].kv_transfer_params) == len(PROMPT) - 1
    assert engine.answers["b"].kv_transfer_params is None


def test_aborted_prompt_releases_its_reserved_memory(gated: StartEngine) -> None:
    few = {"max_num_batched_tokens": 4 * BLOCK, "max_num_seqs": 4}
    engine = gated(engine=few, buffer_bytes=(NUM_CHUNKS + 3) * SLAB)
    engine.add(make_request("a", PROMPT))
    spin(engine, lambda: is_begun(engine, "a"), "it does not begin")
    engine.abort("a")
    engine.run_out()
    engine.run(make_request("b", OTHER))
    assert all(stored(engine, OTHER))


def test_new_prompt_does_not_overtake_one_that_waits_for_memory(gated: StartEngine) -> None:
    engine = gated(buffer_bytes=2 * SLAB)
    GatedFileSystem.close_gate("put")
    engine.add(make_request("a", PROMPT, max_tokens=200))
    spin(engine, lambda: len(engine.answers["a"].tokens) > 3, "no tokens")
    GatedFileSystem.open_gates()
    engine.transfer.drain(20.0)
    engine.step()  # the worker reports what was stored
    GatedFileSystem.close_gate("put")
    engine.add(make_request("b", OTHER[: 2 * BLOCK + 1]))
    spin(engine, lambda: bool(engine.answers["b"].finish_reason), "no answer")
    GatedFileSystem.open_gates()
    step_until_stored(engine, PROMPT)
    assert engine.answers["b"].kv_transfer_params is None


def test_nothing_is_announced_while_the_store_refuses_saves(gated: StartEngine) -> None:
    engine = gated()
    GatedFileSystem.broken.add("put")
    for number in range(2):
        engine.run(make_request(str(number), [number, *PROMPT]))
    # One step computes the whole prompt, before the worker can report a failure.
    engine.run(make_request("a", PROMPT))
    assert engine.answers["a"].kv_transfer_params is None
    GatedFileSystem.broken.clear()

    def is_announced_again() -> bool:
        name = str(len(engine.answers))
        engine.run(make_request(name, [int(name), *OTHER]))
        return announced(engine.answers[name].kv_transfer_params) == len(OTHER)

    spin(engine, is_announced_again, "the store is back, and nothing is announced")


def test_saves_ended_while_idle_free_memory_for_the_next_prompt(
    gated: StartEngine,
) -> None:
    engine = gated(buffer_bytes=(NUM_CHUNKS + 1) * SLAB)
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.run(make_request(name, prompt))
        assert stored(engine, prompt) == [True] * NUM_CHUNKS
        assert announced(engine.answers[name].kv_transfer_params) == len(prompt) - 1


def test_saves_cancelled_by_a_reset_free_their_memory(gated: StartEngine) -> None:
    engine = gated(buffer_bytes=2 * SLAB, chunk_tokens=2 * BLOCK)
    engine.add(make_request("a", PROMPT[: 2 * BLOCK + 1], max_tokens=BLOCK + 1))
    # The answer ends in half a chunk, which the next step would save.
    spin(engine, lambda: not engine.scheduler.requests, "no answer")
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run_out()
    prompt = OTHER[: 4 * BLOCK + 1]
    engine.run(make_request("b", prompt))
    assert stored(engine, prompt, chunk_blocks=2) == [True] * 2


# --- the budget alone ---

A, B, C, D = (ChunkKey(name * 32) for name in (b"a", b"b", b"c", b"d"))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def budget(limit_bytes: int, clock: Clock | None = None) -> SaveBudget[str]:
    return SaveBudget(limit_bytes, clock or Clock())


def test_save_holds_memory_until_all_its_objects_ended() -> None:
    room = budget(10)
    assert room.admit(A, 6, 2, "a")
    assert not room.admit(B, 6, 1, "b")
    room.ended({A: 1})
    assert not room.admit(B, 6, 1, "b")
    room.ended({A: 1})
    assert room.admit(B, 6, 1, "b")


def test_small_save_does_not_overtake_a_large_one() -> None:
    room = budget(10)
    assert room.admit(A, 6, 1, "a")
    assert not room.admit(B, 6, 1, "b")
    assert not room.admit(C, 1, 1, "c")
    room.ended({A: 1})
    assert room.admit(B, 6, 1, "b")
    assert room.admit(C, 1, 1, "c")


def test_single_save_may_exceed_the_limit() -> None:
    room = budget(10)
    assert room.admit(A, 60, 1, "a")
    assert not room.admit(B, 1, 1, "b")
    room.ended({A: 1})
    assert room.admit(B, 1, 1, "b")


def test_memory_for_the_rest_of_a_prompt_is_reserved() -> None:
    room = budget(10)
    a, b = "first", "second"
    assert room.admit(A, 2, 1, a, rest_bytes=4)
    assert not room.admit(B, 5, 1, b)
    assert room.admit(C, 2, 1, a, rest_bytes=2)
    room.ended({A: 1, C: 1})
    assert room.admit(B, 5, 1, b, rest_bytes=3)
    assert room.admit(A, 2, 1, a)


def test_extra_save_takes_only_memory_that_is_not_reserved() -> None:
    room = budget(10)
    a, b = "first", "second"
    assert room.admit(A, 2, 1, a, rest_bytes=4)
    assert not room.admit(C, 5, 1, a, is_extra=True)
    assert room.admit(C, 2, 1, a, is_extra=True)
    assert room.admit(B, 2, 1, b), "the refused one does not wait for memory"
    assert room.admit(D, 4, 1, a)


def test_extra_save_before_the_first_one_of_a_prompt_reserves_nothing() -> None:
    room = budget(10)
    assert room.admit(A, 1, 1, "first", is_extra=True)
    assert room.admit(B, 2, 1, "first", rest_bytes=6)
    assert not room.admit(C, 2, 1, "second")


def test_released_reservation_is_free_again() -> None:
    room = budget(10)
    a, b = "first", "second"
    assert room.admit(A, 1, 1, a, rest_bytes=9)
    assert not room.admit(B, 9, 1, b)
    room.release(a)
    assert room.admit(B, 9, 1, b)


def test_reservation_of_a_dead_prompt_is_not_reused_by_identity() -> None:
    """Python may give a dead object's `id` to a new one."""

    class Prompt:
        pass

    room = SaveBudget[Prompt](10, Clock())
    gone = Prompt()
    identity = id(gone)
    assert room.admit(A, 2, 1, gone, rest_bytes=8)
    room.ended({A: 1})
    del gone
    prompts = [Prompt() for _ in range(100)]
    alike = [prompt for prompt in prompts if id(prompt) == identity]
    assert not room.admit(B, 8, 1, (alike or prompts)[0])


def test_prompt_larger_than_the_limit_is_saved_as_memory_frees() -> None:
    room = budget(10)
    a = "first"
    assert room.admit(A, 4, 1, a, rest_bytes=8)
    assert room.admit(B, 4, 1, a, rest_bytes=4)
    assert not room.admit(C, 4, 1, a)
    room.ended({A: 1})
    assert room.admit(C, 4, 1, a)


def test_chunk_ordered_twice_holds_memory_twice() -> None:
    room = budget(10)
    assert room.admit(A, 4, 1, "first")
    assert room.admit(A, 4, 1, "second")
    assert room.owner(A) == "second"
    assert not room.admit(B, 4, 1, "b")
    room.ended({A: 1})
    assert not room.admit(B, 4, 1, "b")
    room.ended({A: 1, B: 7, C: 1})
    assert room.admit(B, 4, 1, "b")
    assert room.owner(A) is None


def test_withdrawn_save_frees_its_memory() -> None:
    room = budget(10)
    assert room.admit(A, 10, 1, "a")
    room.withdraw([A, B])
    assert room.admit(B, 10, 1, "b")


def test_budget_is_crowded_above_half_of_the_memory() -> None:
    room = budget(10)
    assert room.admit(A, 5, 1, "a")
    assert not room.is_crowded
    assert room.admit(B, 1, 1, "b")
    assert room.is_crowded
    room.ended({B: 1})
    assert not room.is_crowded


def test_idle_engine_with_pending_saves_waits_in_every_step(
    gated: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = gated(buffer_bytes=NUM_CHUNKS * SLAB)
    GatedFileSystem.close_gate("put")
    engine.add(make_request("r", PROMPT))
    spin(engine, lambda: is_served(engine), "the request does not end")
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1

    monkeypatch.setattr(engine.transfer, "wait_idle", wait)
    for _ in range(20):
        assert engine.has_work
        engine.step()
    assert waits == 20


def test_memory_of_an_unreported_save_is_freed_after_120_s() -> None:
    clock = Clock()
    room = budget(10, clock)
    assert room.admit(A, 10, 1, "a")
    clock.now_s = 119.0
    assert not room.admit(B, 10, 1, "b")
    clock.now_s = 121.0
    assert room.admit(B, 10, 1, "b")
    room.ended({A: 1})
    assert not room.admit(C, 1, 1, "c")


def test_log_warns_if_buffer_bytes_is_below_one_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvshare")
    log_limit(limit_bytes=1000, chunk_bytes=100, chunk_tokens=16, step_tokens=160)
    assert not caplog.messages
    log_limit(limit_bytes=1000, chunk_bytes=100, chunk_tokens=16, step_tokens=161)
    (line,) = caplog.messages
    assert "holds the KV of 160 tokens" in line
    assert "Set it to 2200" in line


def test_log_warns_if_the_states_of_one_step_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvshare")
    log_limit(1000, chunk_bytes=100, chunk_tokens=16, step_tokens=80, states=(250, 1000))
    assert not caplog.messages
    log_limit(1000, chunk_bytes=100, chunk_tokens=16, step_tokens=80, states=(250, 1500))
    (line,) = caplog.messages
    assert "may compute 80 and states of 750 bytes" in line
    assert "Set it to 2500" in line


@pytest.mark.parametrize(("state_bytes", "fits"), [(900, True), (901, False)])
def test_log_warns_if_a_state_and_the_chunk_before_it_do_not_fit(
    caplog: pytest.LogCaptureFixture, state_bytes: int, fits: bool
) -> None:
    caplog.set_level(logging.WARNING, "kvshare")
    log_limit(1000, 100, chunk_tokens=16, step_tokens=16, states=(state_bytes, 2 * state_bytes))
    assert can_hold_state(1000, 100, state_bytes) == fits
    assert bool(caplog.messages) != fits
    if not fits:
        (line,) = caplog.messages
        assert "saves no KV: buffer_bytes is 1000" in line
        assert "takes 1001 with the chunk before it" in line
        assert "Set it to 2002" in line


def test_engine_start_logs_a_buffer_below_one_step(
    gated: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    gated(buffer_bytes=SLAB)
    assert "buffer_bytes is" in caplog.text
