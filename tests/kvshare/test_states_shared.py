# SPDX-License-Identifier: Apache-2.0
"""Engines that share the KV and the states of a model with recurrent layers."""

import random
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec

from ecshare.store.format import unseal
from ecshare.store.keys import Kind, object_key
from kvshare.chunks.prefix import prompt_chunks
from kvshare.compat import most_blocks
from kvshare.scheduler.pieces import NULL_BLOCK, Pieces
from lab.vllm_loop import RUNNERS, RunnerName
from tests.kvshare.conftest import StartEngine, is_at_rest, sleep_and_wake, spin
from tests.kvshare.damage import flip_a_payload_bit
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.test_chunks import LONG, chunked, spoil
from tests.kvshare.test_stored_dtype import kv_of_4_bits
from tests.kvshare.test_windows import ask
from tests.kvshare.toy import (
    BLOCK,
    FOR_DECODE,
    GIVE_UP_S,
    LAYERS,
    ToyEngine,
    expected_answer,
    hybrid,
    make_request,
    objects,
    serve,
    window,
)
from tests.nightly import gate_tries
from tests.releases import loads_may_hang, needs_offered_states

__all__ = ["kv_of_4_bits"]

pytestmark = needs_offered_states

W = 3 * BLOCK
GROUPS: dict[str, tuple[KVCacheSpec, ...]] = {
    "one recurrent group": hybrid(1),
    "three recurrent groups": hybrid(3),
    "recurrent layers and windows": (*hybrid(2), window(W)),
}
WITHOUT_WINDOWS = {name: specs for name, specs in GROUPS.items() if "windows" not in name}
each_kind = pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
each_kind_without_windows = pytest.mark.parametrize(
    "specs", WITHOUT_WINDOWS.values(), ids=WITHOUT_WINDOWS
)
ENDS = (len(LONG) - 1) // BLOCK * BLOCK  # the last boundary in LONG
NEVER_S = 2 * GIVE_UP_S  # a test fails if D waits this long
SLAB = 8192  # bytes of a block or a state on its way to the store
STATES = "-s"  # in the names of their objects


def end_of(prompt: Sequence[int]) -> int:
    """Return after how many tokens the last state that the same prompt can load is."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def test_log_names_the_shared_layers_and_their_bytes(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvshare")
    facts = start(specs=GROUPS["recurrent layers and windows"]).connector.scheduler._facts
    (sizes,) = [each for each in caplog.messages if each.startswith("KV of a token: ")]
    assert f"a chunk: {facts.grid.chunk_tokens} tokens, 2 objects" in sizes
    assert f"layers: {LAYERS} of full, {LAYERS} of window {W}, {2 * LAYERS} of state" in sizes
    (hybrids,) = [each for each in caplog.messages if each.startswith("hybrid model: ")]
    assert f"{facts.state_bytes} bytes and 1 objects in each rank" in hybrids


@each_kind
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk_blocks", gate_tries(5, 1))
def test_second_engine_computes_less_than_a_block(
    start: StartEngine,
    specs: Sequence[KVCacheSpec],
    chunk_blocks: int,
    is_async: bool,
    runner: RunnerName,
) -> None:
    engine = partial(
        start,
        specs=specs,
        is_async=is_async,
        runner=runner,
        store=chunked(chunk_blocks),
        num_blocks=160,
    )
    lengths = [2, BLOCK, 7, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 41, len(LONG)]
    prompts = [[number, *LONG[: length - 1]] for number, length in enumerate(lengths)]
    first = engine()
    for number, prompt in enumerate(prompts):
        assert serve(first, prompt, name=f"cold{number}").computed_prompt_tokens == len(prompt)
    second = engine()
    for number, prompt in enumerate(prompts):
        warm = serve(second, prompt, name=f"warm{number}")
        assert warm.computed_prompt_tokens == len(prompt) - end_of(prompt)
    assert "blocks/failed" not in second.counts


@each_kind
@pytest.mark.parametrize("budget", [7, 9, 30])
def test_prompt_computed_in_chunks_is_loaded(
    start: StartEngine, specs: Sequence[KVCacheSpec], budget: int
) -> None:
    engine = partial(start, specs=specs, store=chunked(3), num_blocks=160)
    serve(engine(max_num_batched_tokens=budget, max_num_seqs=4), LONG)
    assert serve(engine(), LONG).computed_prompt_tokens == len(LONG) - ENDS


@each_kind
def test_prompt_that_diverges_in_the_middle_loads_up_to_a_state(
    start: StartEngine, specs: Sequence[KVCacheSpec]
) -> None:
    """vLLM keeps a state at the end of each step; the others were never stored."""
    engine = partial(start, specs=specs, store=chunked(2), num_blocks=160)
    serve(engine(max_num_batched_tokens=4 * BLOCK, max_num_seqs=4), LONG)
    other = [*LONG[: 9 * BLOCK + 1], 7, 8, 9]
    assert serve(engine(), other).computed_prompt_tokens == len(other) - 8 * BLOCK


@each_kind
def test_most_of_a_conversation_is_loaded_in_each_turn(
    start: StartEngine, specs: Sequence[KVCacheSpec]
) -> None:
    engine = partial(start, specs=specs, store=chunked(3), num_blocks=160)
    engines = [engine(), engine()]
    talk: list[int] = []
    for turn in range(8):
        before = end_of(talk) if talk else 0
        talk += range(500 + 10 * turn, 500 + 10 * turn + 7)
        here = engines[turn % 2]
        assert here.scheduler.reset_prefix_cache()
        answer = serve(here, talk, max_tokens=11, name=f"turn{turn}")
        assert answer.computed_prompt_tokens <= len(talk) - before + 4 * BLOCK
        talk += answer.tokens


@each_kind
def test_local_hit_is_not_loaded_again(start: StartEngine, specs: Sequence[KVCacheSpec]) -> None:
    engine = partial(start, specs=specs, store=chunked(4), num_blocks=160)
    serve(engine(), LONG)
    second = engine()
    serve(second, LONG[: 6 * BLOCK + 1], max_tokens=1, name="short")
    assert serve(second, LONG, name="long").computed_prompt_tokens == len(LONG) - ENDS


@each_kind
def test_lost_object_is_computed_and_stored_again(
    start: StartEngine, tmp_path: Path, specs: Sequence[KVCacheSpec]
) -> None:
    engine = partial(start, specs=specs, store=chunked(4), num_blocks=160)
    serve(engine(), LONG, max_tokens=1)
    stored = objects(tmp_path)
    assert any(STATES in path.name for path in stored)
    for lost in stored:
        shutil.rmtree(tmp_path / "host")
        lost.unlink()
        reader = engine()
        answer = serve(reader, LONG, max_tokens=1)
        assert lost.exists() or answer.computed_prompt_tokens < BLOCK


@each_kind
def test_damaged_object_is_computed(
    start: StartEngine, tmp_path: Path, specs: Sequence[KVCacheSpec]
) -> None:
    engine = partial(start, specs=specs, store=chunked(4), num_blocks=160)
    serve(engine(), LONG, max_tokens=1)
    for damaged in objects(tmp_path):
        shutil.rmtree(tmp_path / "host")
        flip_a_payload_bit(damaged)
        serve(engine(), LONG, max_tokens=1)


@each_kind
def test_state_under_the_name_of_another_is_not_used(
    start: StartEngine, tmp_path: Path, specs: Sequence[KVCacheSpec]
) -> None:
    engine = partial(start, specs=specs, store=chunked(1), num_blocks=160)
    serve(engine(), LONG, max_tokens=1)
    before = set(objects(tmp_path))
    serve(engine(), [7, *LONG[1:]], max_tokens=1)
    own, others = (
        {path.name.rpartition("-")[2]: path for path in paths if STATES in path.name}
        for paths in (before, set(objects(tmp_path)) - before)
    )
    assert own.keys() == others.keys() != set()
    for part, path in own.items():
        path.write_bytes(others[part].read_bytes())
    shutil.rmtree(tmp_path / "host")
    reader = engine()
    assert serve(reader, LONG, max_tokens=1).computed_prompt_tokens == len(LONG)
    assert reader.counts["misses/corrupt"]


def test_state_names_the_release_that_stored_it(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels cannot be tried, and those of another release may order it in another way."""
    pages = []
    for release in ("0.1", "0.2"):
        monkeypatch.setattr("kvshare.worker.worker.vllm_release", lambda release=release: release)
        folder = tmp_path / release
        serve(start(specs=hybrid(1), folder=folder), LONG, max_tokens=1)
        path = next(path for path in objects(folder) if STATES in path.name)
        sealed = unseal(memoryview(path.read_bytes()), str(path.relative_to(folder / "store")))
        pages.append(sealed.spec.attributes["page"])
    assert len(set(pages)) == 2


@each_kind
@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_requests_get_right_tokens(
    start: StartEngine, specs: Sequence[KVCacheSpec], is_async: bool
) -> None:
    prompts = [[number, *LONG[:9]] for number in range(6)]
    blocks = 26 + 6 * len(specs)
    engine = start(num_blocks=blocks, store=chunked(2), specs=specs, is_async=is_async)
    requests = [make_request(f"r{number}", prompt, 20) for number, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, engine.run(*requests), strict=True):
        assert answer.tokens == expected_answer(prompt, 20, engine.windows)
    assert any(request.num_preemptions for request in requests)


@pytest.mark.parametrize("budget", [3, 7, 64])
def test_request_holds_at_most_the_states_that_we_count(start: StartEngine, budget: int) -> None:
    """The count decides how many requests load at a time."""
    engine = start(specs=hybrid(1), max_num_batched_tokens=budget, max_num_seqs=2)
    manager = engine.scheduler.kv_cache_manager
    assert most_blocks(manager) == [(BLOCK, 2), (BLOCK, None)]
    engine.add(make_request("r", LONG, 9))
    most = 0
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        ids, _ = manager.get_block_ids("r") if "r" in engine.scheduler.requests else ([], [])
        most = max(most, sum(block != NULL_BLOCK for block in ids))
    assert most == 2


@each_kind
def test_states_stored_before_sleep_are_loaded_after_it(
    start: StartEngine, specs: Sequence[KVCacheSpec]
) -> None:
    engine = start(specs=specs, store=chunked(2), num_blocks=160)
    serve(engine, LONG, name="before")
    engine.connector.reset_cache()
    assert engine.scheduler.reset_prefix_cache()
    sleep_and_wake(engine)
    assert serve(engine, LONG, name="after").computed_prompt_tokens == len(LONG) - ENDS


@each_kind
def test_aborted_load_leaves_nothing_behind(
    start: StartEngine, specs: Sequence[KVCacheSpec]
) -> None:
    engine = partial(start, specs=specs, store=chunked(2), num_blocks=160)
    serve(engine(), LONG)
    reader = engine()
    for number in range(8):
        reader.add(make_request(f"r{number}", LONG, 3))
        for _ in range(number):
            reader.step()
        reader.abort(f"r{number}")
    reader.run_out()
    assert is_at_rest(reader)
    serve(reader, LONG, name="last")


def test_engines_with_other_layers_do_not_share(start: StartEngine) -> None:
    serve(start(specs=hybrid(2)), LONG)
    for specs in (hybrid(1), hybrid(3)):
        other = start(specs=specs)
        assert serve(other, LONG).computed_prompt_tokens == len(LONG)
        assert "blocks/failed" not in other.counts


@loads_may_hang
@each_kind
@pytest.mark.parametrize("seed", gate_tries(*range(4)))
def test_random_prompts_and_store_damage_give_right_tokens(
    start: StartEngine, tmp_path: Path, specs: Sequence[KVCacheSpec], seed: int
) -> None:
    dice = random.Random(seed)
    chunk_blocks = dice.choice([1, 2, 3, 7])
    stem = [dice.randrange(1000) for _ in range(60)]
    for turn in range(3):
        if turn:
            spoil(dice, tmp_path)
        engine = start(
            num_blocks=dice.choice([50, 80, 128]) * len(specs),
            is_async=dice.random() < 0.5,
            runner=dice.choice(RUNNERS),
            max_num_batched_tokens=dice.choice([9, 30, 2048]),
            max_num_seqs=8,
            store=chunked(chunk_blocks, buffer_bytes=dice.choice([40_000, 1 << 20])),
            specs=specs,
        )
        ask(engine, dice, stem, turn)


# --- states that are not stored ---


@each_kind
def test_chunks_and_states_after_a_state_that_the_store_refused_are_stored(
    gated: StartEngine, specs: Sequence[KVCacheSpec]
) -> None:
    """A later state needs the chunks before it, and no earlier state."""
    p, d = pair(gated, specs, chunk_tokens=3 * BLOCK)
    GatedFileSystem.broken.add(f"move {states_of(p, LONG[: 3 * BLOCK + 1])[-1]}")
    p.add(make_request("p", LONG, 1))
    p.step()
    settle(p)
    assert GatedFileSystem.failed == 1
    p.run_out()
    assert serve(d, LONG).computed_prompt_tokens == len(LONG) - ENDS


@each_kind
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("is_async", gate_tries(True, False))
def test_state_that_waits_for_memory_is_stored_with_the_chunks_that_wait(
    gated: StartEngine, specs: Sequence[KVCacheSpec], runner: RunnerName, is_async: bool
) -> None:
    ours = {"specs": specs, "runner": runner, "is_async": is_async, "num_blocks": 160}
    writer = short_of_memory(gated, ours)
    writer.run_out()
    answer = serve(gated(engine=ours, chunk_tokens=BLOCK), WAITING)
    assert answer.computed_prompt_tokens == len(WAITING) - end_of(WAITING)


@each_kind_without_windows  # with windows there is memory for a part only
@pytest.mark.parametrize("runner", RUNNERS)
def test_state_that_waits_for_memory_is_stored_when_its_request_ends(
    gated: StartEngine, specs: Sequence[KVCacheSpec], runner: RunnerName
) -> None:
    ours = {"specs": specs, "runner": runner, "num_blocks": 160}
    writer = short_of_memory(gated, ours)
    writer.step()  # it reports that the memory is free
    writer.abort("second")
    writer.run_out()
    answer = serve(gated(engine=ours, chunk_tokens=BLOCK), WAITING)
    assert answer.computed_prompt_tokens == len(WAITING) - end_of(WAITING)


WAITING = [7, *LONG]


def short_of_memory(gated: StartEngine, ours: dict[str, Any]) -> ToyEngine:
    """Return an engine that has computed LONG, and WAITING while the saves of LONG took all memory.
    These have ended, and the answer to WAITING goes on."""
    writer = gated(engine=ours, chunk_tokens=BLOCK, buffer_bytes=16 * SLAB)
    GatedFileSystem.close_gate("put")
    writer.add(make_request("first", LONG, 1))
    spin(writer, lambda: bool(writer.answers["first"].tokens), "it is not computed")
    writer.add(make_request("second", WAITING, 40))
    spin(writer, lambda: bool(writer.answers["second"].tokens), "it is not computed")
    GatedFileSystem.open_gates()
    settle(writer)
    return writer


@each_kind
@pytest.mark.parametrize("save_after", gate_tries(2, 3))
@pytest.mark.parametrize("chunk_blocks", [1, 3])
@pytest.mark.parametrize("num_shared", [2, 8])
def test_state_at_the_end_of_what_enough_prompts_share_is_stored(
    start: StartEngine,
    specs: Sequence[KVCacheSpec],
    save_after: int,
    chunk_blocks: int,
    num_shared: int,
) -> None:
    """vLLM hands it over with the second prompt, if at all."""
    engine = partial(start, specs=specs, num_blocks=200)
    writer = engine(store=chunked(chunk_blocks, save_after=save_after))
    shared = LONG[: num_shared * BLOCK]
    prompts = [[*shared, *range(100 * n, 100 * n + 5 * BLOCK)] for n in range(save_after + 1)]
    for number, prompt in enumerate(prompts[:-1]):
        assert not writer.counts.get("blocks/saved")
        serve(writer, prompt, max_tokens=1, name=str(number))
    answer = serve(engine(store=chunked(chunk_blocks)), prompts[-1], max_tokens=1)
    assert answer.computed_prompt_tokens == 5 * BLOCK


def settle(engine: ToyEngine) -> None:
    """Wait until all saves have ended, so that the next step reports them."""
    while engine.transfer.in_flight:
        engine.transfer.wait_idle()


@each_kind
def test_engine_whose_buffer_holds_no_state_stores_nothing_and_logs_it_once(
    start: StartEngine,
    tmp_path: Path,
    specs: Sequence[KVCacheSpec],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No chunk could be loaded without a state."""
    engine = start(specs=specs, store=chunked(1, buffer_bytes=12_000), num_blocks=160)
    for turn in range(3):
        serve(engine, [turn, *LONG], name=f"r{turn}")
    assert not objects(tmp_path)
    assert engine.counts["declined/buffer_bytes"] >= 3 * (len(LONG) // BLOCK)
    assert caplog.text.count("This engine saves no KV: buffer_bytes is 12000") == 1


@each_kind
def test_d_does_not_wait_for_p_whose_buffer_holds_no_state(
    gated: StartEngine, specs: Sequence[KVCacheSpec]
) -> None:
    check_d_gives_up(*pair(gated, specs, buffer_bytes=12_000))


# --- options of the store ---


@each_kind
@pytest.mark.parametrize("runner", RUNNERS)
def test_states_are_stored_unchanged_by_engines_that_compress(
    start: StartEngine, specs: Sequence[KVCacheSpec], runner: RunnerName
) -> None:
    store = {**chunked(2), "compression": "zstd"}
    engine = partial(start, specs=specs, runner=runner, store=store, num_blocks=160)
    serve(engine(), LONG)
    assert serve(engine(), LONG).computed_prompt_tokens == len(LONG) - ENDS


@pytest.mark.usefixtures("kv_of_4_bits")
@each_kind
@pytest.mark.parametrize("runner", RUNNERS)
def test_engines_that_store_8_bit_floats_store_states_unchanged(
    start: StartEngine, tmp_path: Path, specs: Sequence[KVCacheSpec], runner: RunnerName
) -> None:
    store = {**chunked(2), "stored_dtype": "fp8"}
    engine = partial(start, specs=specs, runner=runner, store=store, num_blocks=160)
    serve(engine(), LONG)
    for path in objects(tmp_path):
        sealed = unseal(memoryview(path.read_bytes()), str(path.relative_to(tmp_path / "store")))
        is_state = sealed.spec.attributes["block_tokens"] == 1  # see docs/format.md
        assert is_state == ("stored_dtype" not in sealed.spec.attributes)
    assert serve(engine(), LONG).computed_prompt_tokens == len(LONG) - ENDS


# --- prefill and decode engines ---


def pair(gated: StartEngine, specs: Sequence[KVCacheSpec], **store: Any) -> list[ToyEngine]:
    """Return P, which computes a few blocks a step, and D."""
    few = {"max_num_batched_tokens": 3 * BLOCK, "max_num_seqs": 3}
    size = {"chunk_tokens": 2 * BLOCK, "wait_s": NEVER_S}
    kinds: dict[str, dict[str, Any]] = {"kv_producer": few, "kv_consumer": {}}
    return [
        gated(role, engine={"specs": specs, "num_blocks": 160, **engine}, **(size | store))
        for role, engine in kinds.items()
    ]


@each_kind
@pytest.mark.parametrize("num_tokens", [2, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, len(LONG)])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_d_computes_only_what_follows_the_last_state(
    gated: StartEngine, specs: Sequence[KVCacheSpec], num_tokens: int, is_streamed: bool
) -> None:
    p, d = pair(gated, specs)
    prompt = LONG[:num_tokens]
    if is_streamed:
        d.add(make_request("d", prompt, 3, kv_transfer_params={"kvshare": {"streamed": True}}))
        d.step()
    (told,) = p.run(make_request("p", prompt, 1, kv_transfer_params=FOR_DECODE))
    if not is_streamed:
        d.add(make_request("d", prompt, 3, kv_transfer_params=told.kv_transfer_params))
    d.run_out()
    assert d.answers["d"].tokens == expected_answer(prompt, 3, d.windows)
    assert d.answers["d"].computed_prompt_tokens == num_tokens - end_of(prompt)
    assert is_at_rest(d)
    assert "blocks/failed" not in d.counts


def states_of(engine: ToyEngine, prompt: Sequence[int]) -> list[str]:
    """Return the part after the namespace of the keys of the state at the end of `prompt`."""
    facts = engine.connector.scheduler._facts
    *_, last = prompt_chunks(make_request("x", prompt), facts.grid, facts.hash_function)
    name = bytes(facts.grid.state_of(last).key)
    keys = (object_key(Kind.KV, facts.namespace, name, part) for part in facts.state_names)
    return [key.rpartition("/")[2] for key in keys]


@each_kind
def test_d_does_not_wait_for_a_state_that_the_store_refused(
    gated: StartEngine, specs: Sequence[KVCacheSpec]
) -> None:
    p, d = pair(gated, specs)
    GatedFileSystem.broken.add(f"move {states_of(p, LONG)[-1]}")
    check_d_gives_up(p, d)


@each_kind
def test_d_does_not_wait_for_a_state_that_p_did_not_save(
    gated: StartEngine, specs: Sequence[KVCacheSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair(gated, specs)
    monkeypatch.setattr(Pieces, "saved_state", lambda *_: [])
    check_d_gives_up(p, d)


def check_d_gives_up(p: ToyEngine, d: ToyEngine) -> None:
    d.add(make_request("d", LONG, 3, kv_transfer_params={"kvshare": {"streamed": True}}))
    d.step()
    p.run(make_request("p", LONG, 1, kv_transfer_params=FOR_DECODE))
    d.run_out()
    assert d.answers["d"].tokens == expected_answer(LONG, 3, d.windows)
    assert d.counts["misses/given_up"] > 0
    assert "misses/late" not in d.counts
    assert is_at_rest(d)
