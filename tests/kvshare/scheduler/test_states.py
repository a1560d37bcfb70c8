# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of a model with recurrent layers: which states it stores, finds and loads."""

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ecshare.store.keys import Key, Kind, gap_key, object_key
from ecshare.transfer.jobs import Tier
from kvshare.chunks.layers import AttentionWindow, LayerSet
from kvshare.chunks.prefix import Chunk, Grid, Prefix
from kvshare.messages import Piece, Report
from kvshare.scheduler import lookups
from kvshare.scheduler.cached_blocks import CachedBlocks
from kvshare.scheduler.search import KEYS_A_ROUND, StoredPrefix
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.scheduler.test_scheduler import (
    FULL,
    MOST_CALLS,
    NAMESPACE,
    SLAB,
    Bench,
    StartBench,
    bench,
    decode_calls,
    decode_calls_per_request,
    end_load,
)
from tests.kvshare.toy import BLOCK, make_request
from tests.releases import needs_offered_states

__all__ = ["bench"]

pytestmark = needs_offered_states

# Cache group 0 has attention, groups 1 and 2 have recurrent layers.
STATES = LayerSet(1, (1, 2), (("r.0", 0), ("r.1", 1)), AttentionWindow(), 1, 1, "state")
SETS = (FULL, STATES)
PART, STATE_PART = "t0of1", "t0of1-s1"
PROMPT = list(range(5 * BLOCK + 2))
OTHER = range(1000, 1000 + 3 * BLOCK)


def grid(chunk_blocks: int = 1) -> Grid:
    return Grid(BLOCK, chunk_blocks, has_states=True)


def chunks_of(prompt: Sequence[int], chunk_blocks: int = 1) -> list[Chunk]:
    prefix = Prefix.of(make_request("x", prompt), grid(chunk_blocks))
    return list(prefix.chunks(0, lambda _: b""))


def store(here: Bench, prompt: Sequence[int], *ends: int, chunk_blocks: int = 1) -> None:
    """Store dummy chunks of `prompt`, and the states at the ends of some of its blocks."""
    chunks = chunks_of(prompt, chunk_blocks)
    here.put(chunks, PART)
    states = [grid().state_of(each) for each in chunks if each.end_tokens // BLOCK in ends]
    assert len(states) == len(ends)
    here.put(states, STATE_PART)


def step(
    here: Bench,
    request: Request,
    start: int,
    end: int,
    states: dict[int, list[tuple[int, int]]],
    first_block: int = 10,
    *,
    has_loaded: bool = False,
) -> list[Piece]:
    """Compute tokens `start` to `end` in a step; return the pieces that it saves.

    `states`: for each number of tokens, the groups and blocks that vLLM hands over. `has_loaded`:
    it is the first step of the request, after a load up to `start`.
    """
    here.half.allocated(request, [], 0)
    request.num_computed_tokens = end
    block_ids = ([*range(first_block, first_block - (-end // BLOCK))], [0, 0], [0, 0])
    output = SchedulerOutput.make_empty()
    if start and not has_loaded:
        output.scheduled_cached_reqs = CachedRequestData(
            [request.request_id], set(), [], {}, [None], [start], [0]
        )
    else:
        output.scheduled_new_reqs.append(
            NewRequestData(request.request_id, [], [], None, None, block_ids, start, None)
        )
    output.num_scheduled_tokens[request.request_id] = end - start
    output.total_num_scheduled_tokens = end - start
    handed_over = [
        (group, block, tokens) for tokens, blocks in states.items() for group, block in blocks
    ]
    output.kv_connector_block_state = KVConnectorBlockState(
        set(), lambda _: (), {request.request_id: handed_over}
    )
    return list(here.half.orders(output).saves)


def states_in(pieces: Sequence[Piece]) -> list[tuple[tuple[int, ...], ...]]:
    """Return the blocks of each state in `pieces`."""
    return [piece.block_ids for piece in pieces if piece.layer_set == STATES.number]


# --- look-ups ---


@pytest.mark.parametrize(
    ("ends", "expected"), [((), 0), ((2,), 2), ((2, 4), 4), ((5,), 5), ((1, 2, 3, 4, 5), 5)]
)
def test_hit_ends_at_the_last_stored_state(
    bench: StartBench, ends: tuple[int, ...], expected: int
) -> None:
    here = bench(layer_sets=SETS)
    store(here, PROMPT, *ends)
    assert here.ask(make_request("r", PROMPT)) == expected * BLOCK


def test_state_beyond_a_missing_chunk_is_not_loaded(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    chunks = chunks_of(PROMPT)
    here.put([*chunks[:3], *chunks[4:]], PART)
    here.put([grid().state_of(chunks[1]), grid().state_of(chunks[4])], STATE_PART)
    assert here.ask(make_request("r", PROMPT)) == 2 * BLOCK


def test_state_after_the_whole_prompt_is_not_loaded(bench: StartBench) -> None:
    """The last token is computed, on top of the state before it."""
    here = bench(layer_sets=SETS)
    prompt = PROMPT[: 4 * BLOCK]
    store(here, [*prompt, 7], 3, 4)
    assert here.ask(make_request("same", prompt)) == 3 * BLOCK
    assert here.ask(make_request("longer", [*prompt, 7])) == 4 * BLOCK


def test_state_inside_a_chunk_is_found_with_its_partial_chunk(bench: StartBench) -> None:
    here = bench(layer_sets=SETS, chunk_blocks=3)
    store(here, PROMPT, 5, chunk_blocks=3)
    assert here.ask(make_request("same", PROMPT)) == 5 * BLOCK
    assert here.ask(make_request("next", [*PROMPT[: 5 * BLOCK], *OTHER])) == 5 * BLOCK
    assert here.ask(make_request("other", [*PROMPT[: 4 * BLOCK], *OTHER])) == 0


def test_partial_chunk_without_state_does_not_hide_the_state_before_it(bench: StartBench) -> None:
    here = bench(layer_sets=SETS, chunk_blocks=3)
    store(here, PROMPT, 3, chunk_blocks=3)
    assert here.ask(make_request("r", PROMPT)) == 3 * BLOCK


def test_one_state_is_found_among_hundreds_of_chunks(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    prompt = list(range(200 * BLOCK + 1))
    store(here, prompt, 7)
    assert here.ask(make_request("r", prompt)) == 7 * BLOCK


@pytest.mark.parametrize("num_objects", [1, 5, 40])
@pytest.mark.parametrize("ends", [(200,), (190,), (7,), ()])
def test_state_of_many_objects_is_found_in_few_rounds(
    bench: StartBench, ends: tuple[int, ...], num_objects: int
) -> None:
    """Of a state at the end of block 150, and of the last one, an object is missing."""
    sets = (FULL, *(replace(STATES, number=1 + n) for n in range(num_objects)))
    facts = bench(layer_sets=sets).half._facts
    prefix = Prefix.of(make_request("r", range(200 * BLOCK + 1)), grid())
    chunks = list(prefix.chunks(0, lambda _: b""))
    stored = {key for chunk in chunks for key in lookups._keys(facts, chunk, 1)}
    for block in (*ends, *((150, 200) if num_objects > 1 else ())):
        keys = lookups._keys(facts, grid().state_of(chunks[block - 1]), 1)
        stored.update(keys if block in ends else keys[:-1])
    query = lookups._Query(facts, prefix, 0, (1,))()
    found, rounds = answer(query, stored)
    if num_objects <= KEYS_A_ROUND:  # otherwise the load notices it
        assert [chunk.end_tokens for chunk in found[-1:]] == [n * BLOCK for n in ends]
    assert rounds <= 2 + -(-200 // KEYS_A_ROUND) + 2


def answer(
    query: Generator[Sequence[Key], Any, StoredPrefix], stored: set[Key]
) -> tuple[tuple[Chunk, ...], int]:
    """Answer a query by what is stored; return what it finds, and the number of rounds."""
    asked, rounds = next(query), 1
    while True:
        where = [Tier.STORE if key in stored else None for key in asked]
        try:
            asked, rounds = query.send(where), rounds + 1
        except StopIteration as end:
            return end.value.chunks, rounds


def test_whole_hit_in_the_host_cache_is_found_at_once(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    here.engine.host.is_in_memory = True
    store(here, PROMPT, 5)
    assert here.half.num_loadable_tokens(make_request("r", PROMPT), 0) == 5 * BLOCK


def test_local_hit_that_reaches_the_last_state_leaves_nothing_to_load(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    store(here, PROMPT, 3)
    assert here.ask(make_request("r", PROMPT), 3 * BLOCK) == 0
    assert here.ask(make_request("s", PROMPT), 2 * BLOCK) == BLOCK


def test_longest_partial_chunk_does_not_hide_a_shorter_one_with_a_state(bench: StartBench) -> None:
    here = bench(layer_sets=SETS, chunk_blocks=3)
    store(here, PROMPT[: 4 * BLOCK + 1], 4, chunk_blocks=3)
    here.put(chunks_of(PROMPT, 3)[-1:], PART)
    assert here.ask(make_request("r", PROMPT)) == 4 * BLOCK


def test_blocks_after_the_last_state_are_counted_as_missed(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    store(here, PROMPT, 3)
    here.ask(make_request("r", PROMPT))
    stats = here.half.take_stats()
    assert stats is not None
    assert stats.data["blocks/missed"] == 2


def test_stored_chunk_without_its_state_is_not_stored_again(bench: StartBench) -> None:
    """The state at its end was not stored."""
    here = bench(layer_sets=SETS, chunk_blocks=3)
    step(here, make_request("first", PROMPT), 0, 5 * BLOCK, {})
    here.put(chunks_of(PROMPT, 3), PART)
    again = make_request("again", PROMPT)
    assert here.ask(again) == 0
    found = step(here, again, 0, 5 * BLOCK, {5 * BLOCK: [(1, 31), (2, 32)]})
    assert [piece.layer_set for piece in found] == [STATES.number]


# --- loads ---


def test_state_is_loaded_to_the_block_before_the_first_computed_token(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    store(here, PROMPT, 1, 4)
    request = make_request("r", PROMPT)
    num_tokens = here.ask(request)
    tables = [[50, 51, 52, 53, 54], [0, 0, 0, 60, 61], [0, 0, 0, 70, 71]]
    here.half.allocated(request, tables, num_tokens)
    (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
    *attention, state = order.pieces
    assert [piece.block_ids for piece in attention] == [((50 + n,),) for n in range(4)]
    assert (state.layer_set, state.block_ids) == (STATES.number, ((60,), (70,)))


def test_state_counts_towards_the_bytes_of_a_load_in_flight(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    store(here, PROMPT, 4)
    here.forget_host_cache()
    request = make_request("r", PROMPT)
    here.half.allocated(
        request, [[50, 51, 52, 53], [0, 0, 0, 60], [0, 0, 0, 70]], here.ask(request)
    )
    assert here.half._loads.under_way() == [(4 * BLOCK + here.half._facts.state_tokens, 0.0)]


def test_load_without_a_block_for_the_state_is_not_ordered(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    store(here, PROMPT, 4)
    request = make_request("r", PROMPT)
    with pytest.raises(ValueError, match="no place for the state"):
        here.half.allocated(request, [[50, 51, 52, 53], [0] * 4, [0] * 4], here.ask(request))


def test_state_is_not_loaded_if_vllm_computes_from_another_token(bench: StartBench) -> None:
    """Computed on from another token, with this state, all tokens would be wrong."""
    here = bench(layer_sets=SETS)
    store(here, PROMPT, 4)
    request = make_request("r", PROMPT)
    tables = [[50, 51, 52, 53], [0, 0, 0, 60], [0, 0, 0, 70]]
    with pytest.raises(ValueError, match="no place for the state"):
        here.half.allocated(request, tables, here.ask(request) - 1)


def test_announced_prompt_waits_for_its_state(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    request = make_request("r", PROMPT, kv_transfer_params={"kvshare": {"num_tokens": 5 * BLOCK}})
    assert here.half.num_loadable_tokens(request, 0) == 5 * BLOCK
    here.half.allocated(request, [[1, 2, 3, 4, 5], [0] * 4 + [6], [0] * 4 + [7]], 5 * BLOCK)
    (order,) = here.half.orders(SchedulerOutput.make_empty()).loads
    assert order.is_announced
    assert order.pieces[-1].block_ids == ((6,), (7,))


def test_announced_states_of_another_tp_size_are_not_awaited(
    bench: StartBench, caplog: pytest.LogCaptureFixture
) -> None:
    here = bench(layer_sets=SETS)
    told = {"kvshare": {"num_tokens": 5 * BLOCK, "size": 2}}
    for name in "ab":
        assert here.ask(make_request(name, PROMPT, kv_transfer_params=told)) == 0
    assert caplog.text.count("tensor-parallel size 2") == 1


# --- saves ---


def test_states_at_the_end_of_a_prompt_are_stored(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    request = make_request("r", PROMPT)
    found = step(here, request, 0, 5 * BLOCK, {5 * BLOCK: [(1, 31), (2, 32)]})
    assert states_in(found) == [((31,), (32,))]
    assert len(found) == 5 + 1


def test_both_ends_of_a_prompt_of_full_blocks_are_stored(bench: StartBench) -> None:
    """The same prompt can load the one before its last block, a longer one that after it."""
    here = bench(layer_sets=SETS, chunk_blocks=2, options={"save_answers": False})
    request = make_request("r", PROMPT[: 4 * BLOCK])
    first = step(here, request, 0, 3 * BLOCK, {3 * BLOCK: [(1, 31), (2, 32)]})
    second = step(here, request, 3 * BLOCK, 4 * BLOCK, {4 * BLOCK: [(1, 41), (2, 42)]})
    assert states_in([*first, *second]) == [((31,), (32,)), ((41,), (42,))]
    # The chunk ends where the state does.
    assert [piece.num_blocks for piece in first if not piece.layer_set] == [2, 1]


def test_state_that_is_not_complete_is_not_stored(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    assert not states_in(step(here, make_request("r", PROMPT), 0, 20, {20: [(1, 31)]}))


def test_state_inside_a_block_is_not_stored(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    found = step(here, make_request("r", PROMPT), 0, 22, {22: [(1, 31), (2, 32)]})
    assert not states_in(found)


def test_states_are_stored_when_the_chunks_since_the_last_one_have_as_many_bytes(
    bench: StartBench,
) -> None:
    here = bench(layer_sets=SETS)
    # In this bench, a block and a state take one slab each: every block would pay.
    every = here.half._facts.state_tokens
    assert every == BLOCK
    object.__setattr__(here.half._facts, "layer_sets", (FULL, STATES, STATES, STATES))
    assert here.half._facts.state_tokens == 3 * BLOCK
    request = make_request("r", list(range(9 * BLOCK + 1)))
    stored = [
        n
        for n in range(9)
        if states_in(
            step(here, request, n * BLOCK, (n + 1) * BLOCK, {(n + 1) * BLOCK: [(1, 1), (2, 2)]})
        )
    ]
    assert stored == [2, 5, 8]


def test_state_is_not_stored_beyond_the_limit_of_its_request(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    request = make_request("r", PROMPT, kv_transfer_params={"kvshare_save": False})
    assert not step(here, request, 0, 20, {20: [(1, 31), (2, 32)]})


def test_state_of_a_stored_chunk_is_not_stored_beyond_the_limit(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    step(here, make_request("stored", PROMPT), 0, 5 * BLOCK, {})
    request = make_request("r", PROMPT, kv_transfer_params={"kvshare_save": False})
    assert not step(here, request, 0, 5 * BLOCK, {5 * BLOCK: [(1, 31), (2, 32)]})


def test_state_handed_over_before_its_request_is_computed_is_not_stored(
    bench: StartBench,
) -> None:
    """Its limit is not known before."""
    here = bench(layer_sets=SETS)
    step(here, make_request("stored", PROMPT), 0, 5 * BLOCK, {})
    request = make_request("r", PROMPT, kv_transfer_params={"kvshare_save": False})
    here.half.allocated(request, [], 0)
    output = SchedulerOutput.make_empty()
    handed_over = {"r": [(1, 31, 5 * BLOCK), (2, 32, 5 * BLOCK)]}
    output.kv_connector_block_state = KVConnectorBlockState(set(), lambda _: (), handed_over)
    assert not here.half.orders(output).saves


def test_state_that_another_connector_has_loaded_is_not_stored(bench: StartBench) -> None:
    """Nor one that was computed from it: it may be wrong."""
    here = bench(layer_sets=SETS)
    step(here, make_request("stored", PROMPT), 0, 5 * BLOCK, {})
    request = make_request("r", PROMPT)
    tables = ([*range(30, 34)], [0, 0, 0, 40], [0, 0, 0, 50])
    here.half.allocated(request, [], 0)
    here.half.admitted(request, lambda: tables, 0)
    here.half.orders(SchedulerOutput.make_empty())  # it waits for a load that is not ours
    states = {n * BLOCK: [(1, 40 + n), (2, 50 + n)] for n in (4, 5)}
    assert not step(here, request, 4 * BLOCK, 5 * BLOCK, states)


def test_loaded_state_counts_as_the_last_one_that_is_stored(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    object.__setattr__(here.half._facts, "layer_sets", (FULL, STATES, STATES, STATES))
    prompt = [*range(9 * BLOCK + 1)]
    store(here, prompt, 4)
    request = make_request("r", prompt)
    tables = [[*range(50, 54)], [0, 0, 0, 60], [0, 0, 0, 70]]
    here.half.allocated(request, tables, here.ask(request))
    end_load(here)
    states = {5 * BLOCK: [(1, 31), (2, 32)]}
    first = step(here, request, 4 * BLOCK, 5 * BLOCK, states, has_loaded=True)
    assert not states_in(first), "it is one block after the loaded one"
    later = step(here, request, 5 * BLOCK, 7 * BLOCK, {7 * BLOCK: [(1, 31), (2, 32)]})
    assert states_in(later)


def test_restarted_request_stores_states_from_its_first_token_on(bench: StartBench) -> None:
    """The store may have lost those before the point where it was preempted."""
    here = bench(layer_sets=SETS)
    request = make_request("r", list(range(9 * BLOCK + 1)))
    assert states_in(step(here, request, 0, 8 * BLOCK, {8 * BLOCK: [(1, 31), (2, 32)]}))
    assert states_in(step(here, request, 0, 2 * BLOCK, {2 * BLOCK: [(1, 31), (2, 32)]}))


def test_last_part_of_an_answer_is_not_stored(bench: StartBench) -> None:
    """There is no state where an answer ends, so nobody could load it."""
    here = bench(layer_sets=SETS, chunk_blocks=3)
    request = make_request("r", PROMPT[: 3 * BLOCK], 9)
    step(here, request, 0, 3 * BLOCK, {})
    request.append_output_token_ids([*range(BLOCK + 1)])
    step(here, request, 3 * BLOCK, 4 * BLOCK, {})
    here.half.finished(request)
    assert not here.half.orders(SchedulerOutput.make_empty()).leaving


def test_state_is_stored_once(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    handed_over = {20: [(1, 31), (2, 32)]}
    assert states_in(step(here, make_request("r", PROMPT), 0, 20, handed_over))
    assert not step(here, make_request("s", PROMPT), 0, 20, handed_over)


def test_lost_state_is_stored_again(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    handed_over = {20: [(1, 31), (2, 32)]}
    *_, state = step(here, make_request("r", PROMPT), 0, 20, handed_over)
    report = Report(frozenset({state.key}), not_saved=frozenset({state.key}))
    here.half.reported(KVConnectorOutput(kv_connector_worker_meta=report))
    again = step(here, make_request("s", PROMPT), 0, 20, handed_over)
    assert [piece.key for piece in again] == [state.key]


def test_prompt_is_announced_up_to_its_last_stored_state(bench: StartBench) -> None:
    here = bench(layer_sets=SETS)
    for_decode = {"do_remote_decode": True}
    whole, without = (
        make_request(name, prompt, kv_transfer_params=for_decode)
        for name, prompt in (("whole", PROMPT), ("without", [*OTHER, *PROMPT]))
    )
    step(here, whole, 0, 20, {20: [(1, 31), (2, 32)]})
    step(here, without, 0, 20, {})
    told = [here.half.finished(request) for request in (whole, without)]
    assert told == [{"kvshare": {"num_tokens": 20, "size": 1}}, None]


@pytest.mark.parametrize("is_new", [False, True])
def test_blocks_to_which_running_states_are_copied_are_not_saved_afterwards(
    bench: StartBench, is_new: bool
) -> None:
    """V2 copies states before the worker saves what a request that has ended leaves behind."""
    here = bench(layer_sets=SETS, chunk_blocks=2)
    gone, kept = make_request("gone", PROMPT, 9), make_request("kept", [*OTHER, *PROMPT], 9)
    for request, first_block in ((gone, 10), (kept, 20)):
        step(here, request, 0, 2 * BLOCK - 1, {}, first_block)
        # The last token of the chunk is computed when the request ends.
        request.num_computed_tokens = 2 * BLOCK
        here.half._tracked[request.request_id].progress.end_tokens = 2 * BLOCK
    here.half.finished(gone)
    here.half.finished(kept)
    output = SchedulerOutput.make_empty()
    tables = ([5], [0, 11], [0, 6])
    if is_new:
        output.scheduled_new_reqs.append(
            NewRequestData("unknown", [], [], None, None, tables, 0, None)
        )
        output.num_scheduled_tokens["unknown"] = 1
    else:
        output.scheduled_cached_reqs = CachedRequestData(
            ["unknown"], set(), [], {}, [tables], [0], [0]
        )
    (left,) = here.half.orders(output).leaving
    assert left.block_ids == ((20, 21),)


@pytest.mark.parametrize(
    ("ends", "computed", "expected"),
    [
        ((), 4, "chunk 4"),  # an abort: the last chunk is missing
        ((2,), 4, "chunk 4"),  # chunks after the last state are stored: D has loaded them
        ((), 5, "state 5"),  # D has loaded all chunks, and waits for the state
        ((2,), 5, "state 5"),
    ],
)
def test_absence_note_is_written_for_what_the_next_engine_awaits(
    bench: StartBench, ends: tuple[int, ...], computed: int, expected: str
) -> None:
    here = bench(layer_sets=SETS)
    request = make_request("r", PROMPT, kv_transfer_params={"do_remote_decode": True})
    states = {n * BLOCK: [(1, 31), (2, 32)] for n in ends}
    step(here, request, 0, computed * BLOCK, states)
    here.half.finished(request)
    here.engine.drain(20.0)
    chunks = chunks_of(PROMPT)
    named = {f"chunk {n}": chunk for n, chunk in enumerate(chunks)}
    named |= {f"state {n}": grid().state_of(chunk) for n, chunk in enumerate(chunks, 1)}
    notes = {
        gap_key(object_key(Kind.KV, NAMESPACE, bytes(chunk.key))).rpartition("/")[2]: name
        for name, chunk in named.items()
    }
    written = [path.rpartition("/")[2] for path in GatedFileSystem.store if path.endswith(".gap")]
    assert [notes[path] for path in written] == [expected]


def test_saves_in_flight_that_a_lookup_misses_are_announced(bench: StartBench) -> None:
    """Another request with the same beginning asks the store too early."""
    here = bench(layer_sets=SETS)
    request = make_request("r", PROMPT)
    step(here, request, 0, 5 * BLOCK, {5 * BLOCK: [(1, 31), (2, 32)]})
    step(here, request, 5 * BLOCK, len(PROMPT), {})
    assert here.ask(make_request("other", [*PROMPT[: 2 * BLOCK], *OTHER])) == 0
    assert here.half.finished(request) == {"kvshare": {"num_tokens": 5 * BLOCK, "size": 1}}


# --- memory ---


def end(here: Bench, pieces: Sequence[Piece]) -> None:
    """Report that all saves of `pieces` have ended."""
    report = Report(frozenset(), ended=Counter(piece.key for piece in pieces))
    here.half.reported(KVConnectorOutput(kv_connector_worker_meta=report))


@pytest.mark.parametrize("chunk_blocks", [1, 4])
@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("num_tokens", [5 * BLOCK + 2, 5 * BLOCK + 1, 5 * BLOCK, 4 * BLOCK])
def test_computed_prompt_reserves_no_memory(
    bench: StartBench, num_tokens: int, offered: bool, chunk_blocks: int
) -> None:
    """Its answer may take minutes. vLLM does not hand over each state."""
    here = bench(layer_sets=SETS, chunk_blocks=chunk_blocks)
    request = make_request("r", PROMPT[:num_tokens], 100)
    last = (num_tokens - 1) // BLOCK * BLOCK
    saved = step(here, request, 0, last, {last: [(1, 31), (2, 32)]} if offered else {})
    saved += step(here, request, last, num_tokens, {})
    end(here, saved)
    assert here.half.reserved_bytes == 0


def test_state_has_memory_that_other_prompts_cannot_take(bench: StartBench) -> None:
    # Room for one prompt with its state, and for a chunk.
    here = bench(layer_sets=SETS, options={"buffer_bytes": 7 * SLAB})
    one, two = (make_request(name, prompt) for name, prompt in (("1", PROMPT), ("2", OTHER)))
    step(here, one, 0, 4 * BLOCK, {})
    assert not step(here, two, 0, 3 * BLOCK, {})
    found = step(here, one, 4 * BLOCK, 5 * BLOCK, {5 * BLOCK: [(1, 31), (2, 32)]})
    assert states_in(found) == [((31,), (32,))]


def test_state_inside_a_prompt_does_not_take_memory_reserved_for_the_last_one(
    bench: StartBench,
) -> None:
    """A prompt without its last state is of no use to the next turn of its conversation."""
    here = bench(layer_sets=SETS, options={"buffer_bytes": 6 * SLAB})
    request = make_request("r", PROMPT)
    states = {n: [(1, n), (2, n)] for n in (3 * BLOCK, 5 * BLOCK)}
    assert not states_in(step(here, request, 0, 3 * BLOCK, {3 * BLOCK: states[3 * BLOCK]}))
    found = step(here, request, 3 * BLOCK, 5 * BLOCK, {5 * BLOCK: states[5 * BLOCK]})
    assert states_in(found) == [((5 * BLOCK,), (5 * BLOCK,))]


# --- what a step costs ---


@pytest.mark.parametrize("prompt_blocks", [2, 200])
def test_decode_step_of_a_hybrid_costs_no_more_than_of_another_model(
    bench: StartBench, prompt_blocks: int
) -> None:
    here = bench(layer_sets=SETS, chunk_blocks=16)
    prompt = list(range(prompt_blocks * BLOCK + 1))
    requests = [make_request(str(number), [number, *prompt[1:]], 9) for number in range(40)]
    for request in requests:
        step(here, request, 0, len(prompt), {len(prompt) - 1: [(1, 31), (2, 32)]})
    assert decode_calls_per_request(here, requests) <= MOST_CALLS


@pytest.mark.parametrize("prompt_blocks", [5, 200])
def test_cost_of_states_that_wait_for_memory_does_not_grow_with_the_prompt(
    bench: StartBench, monkeypatch: pytest.MonkeyPatch, prompt_blocks: int
) -> None:
    """Of each prompt the chunks are stored already. vLLM's cache has all states."""
    monkeypatch.setattr(CachedBlocks, "state", lambda *_: {1: 31, 2: 32})
    here = bench(layer_sets=SETS, options={"buffer_bytes": 8 * SLAB})
    prompt = list(range(prompt_blocks * BLOCK + 1))
    requests = [make_request(str(number), [number, *prompt[1:]], 9) for number in range(40)]
    for request in requests:
        for chunk in chunks_of(request.prompt_token_ids or ()):
            here.half._saves._stored.add(chunk.key)
    fill(here)
    for request in requests:
        states = {n * BLOCK: [(1, 30 + n), (2, 40 + n)] for n in range(1, prompt_blocks + 1)}
        assert not step(here, request, 0, len(prompt), states)
    decode_calls(here, requests)  # flushes what the last steps left
    assert decode_calls(here, requests) <= (MOST_CALLS + 4) * len(requests)


def fill(here: Bench) -> None:
    """Take all memory for saves."""
    taken = step(here, make_request("taken", [*OTHER, *PROMPT, *OTHER], 9), 0, 11 * BLOCK, {})
    assert len(taken) == 8
