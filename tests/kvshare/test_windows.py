# SPDX-License-Identifier: Apache-2.0
"""Engines with several cache groups or sliding windows."""

import random
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import RequestStatus

from tests.kvshare.conftest import StartEngine, is_at_rest, spin
from tests.kvshare.damage import flip_a_payload_bit
from tests.kvshare.gated import GatedFileSystem
from tests.kvshare.test_chunks import LONG, chunked, spoil
from tests.kvshare.toy import (
    BLOCK,
    ToyEngine,
    expected_answer,
    make_request,
    objects,
    serve,
    spec,
    window,
)
from tests.nightly import gate_tries
from tests.releases import loads_may_hang

W = 3 * BLOCK
SOME = 4  # of all objects; each takes an engine of its own
GROUPS: dict[str, tuple[KVCacheSpec, ...]] = {
    "two full groups": (spec(), spec()),
    "full and windows": (spec(), window(W), window(W)),
    "a window that no block divides": (spec(), window(W + 1)),
    "windows of two sizes": (window(2), spec(), window(5 * BLOCK)),
    "a window alone": (window(W),),
    "a window longer than all": (spec(), window(400)),
}
SMALL = (spec(), window(2 * BLOCK))
each_kind = pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)


@each_kind
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk_blocks", gate_tries(5, 1))
def test_the_second_engine_computes_one_token(
    start: StartEngine, specs: Sequence[KVCacheSpec], chunk_blocks: int, is_async: bool
) -> None:
    engine = partial(
        start, specs=specs, is_async=is_async, store=chunked(chunk_blocks), num_blocks=160
    )
    lengths = [2, BLOCK, 7, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 41, len(LONG)]
    prompts = [[number, *LONG[: length - 1]] for number, length in enumerate(lengths)]
    first = engine()
    for number, prompt in enumerate(prompts):
        assert serve(first, prompt, name=f"cold{number}").computed_prompt_tokens == len(prompt)
    second = engine()
    for number, prompt in enumerate(prompts):
        assert serve(second, prompt, name=f"warm{number}").computed_prompt_tokens == 1
    assert "blocks/failed" not in second.counts


@each_kind
@pytest.mark.parametrize("budget", [7, 9])
def test_chunked_prefill_stores_the_whole_prompt(
    start: StartEngine, specs: Sequence[KVCacheSpec], budget: int
) -> None:
    """vLLM frees a window's blocks while the prompt goes on."""
    engine = partial(start, specs=specs, store=chunked(3), num_blocks=160)
    serve(engine(max_num_batched_tokens=budget, max_num_seqs=4), LONG)
    assert serve(engine(), LONG).computed_prompt_tokens == 1


def test_tail_is_stored_though_the_window_has_passed_one_of_its_blocks(start: StartEngine) -> None:
    """The prompt's last token is computed by a step of its own, which needs one block less."""
    engine = partial(start, specs=(spec(), window(2 * BLOCK + 3)), store=chunked(8))
    prompt = LONG[: 7 * BLOCK + 3]
    serve(engine(max_num_batched_tokens=10, max_num_seqs=4), prompt, max_tokens=1)
    assert serve(engine(), prompt).computed_prompt_tokens == 1


@each_kind
def test_longer_prompt_loads_the_stored_prefix(
    start: StartEngine, specs: Sequence[KVCacheSpec]
) -> None:
    engine = partial(start, specs=specs, store=chunked(3), num_blocks=160)
    serve(engine(), LONG[: 7 * BLOCK + 1], max_tokens=1)
    longer = engine()
    assert serve(longer, LONG).computed_prompt_tokens == len(LONG) - 7 * BLOCK


@each_kind
def test_local_hit_is_not_loaded_again(start: StartEngine, specs: Sequence[KVCacheSpec]) -> None:
    engine = partial(start, specs=specs, store=chunked(4), num_blocks=160)
    serve(engine(), LONG)
    second = engine()
    serve(second, LONG[: 6 * BLOCK], max_tokens=1, name="short")
    assert serve(second, LONG, name="long").computed_prompt_tokens == 1


@each_kind
@pytest.mark.parametrize("save_after", gate_tries(2, 3))
@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_prompt_in_vllms_cache_is_stored_once_it_was_seen_often_enough(
    start: StartEngine, specs: Sequence[KVCacheSpec], chunk_blocks: int, save_after: int
) -> None:
    """A local hit has no blocks that a window has passed. vLLM's cache still has them."""
    engine = partial(start, specs=specs, num_blocks=160)
    writer = engine(store=chunked(chunk_blocks, save_after=save_after))
    for number in range(save_after):
        assert not writer.counts.get("blocks/saved")
        serve(writer, LONG, max_tokens=1, name=str(number))
    assert serve(engine(store=chunked(chunk_blocks)), LONG).computed_prompt_tokens == 1


def test_chunks_after_one_with_reused_window_blocks_are_not_stored(
    start: StartEngine,
) -> None:
    writer = start(specs=(spec(), window(W)), num_blocks=40, store=chunked(1, save_after=2))
    serve(writer, LONG, max_tokens=1, name="first")
    serve(writer, [7, *LONG[: 6 * BLOCK]], max_tokens=1, name="other")  # takes blocks
    serve(writer, LONG, max_tokens=1, name="again")
    reader = start(specs=(spec(), window(W)), num_blocks=160, store=chunked(1))
    assert serve(reader, LONG).computed_prompt_tokens > BLOCK


def test_only_blocks_inside_the_window_are_loaded(start: StartEngine) -> None:
    engine = partial(start, specs=(spec(), window(W)), store=chunked(2), num_blocks=160)
    serve(engine(), LONG)
    second = engine()
    serve(second, LONG)
    # All 14 blocks of the one group; of the other, those of tokens 43 to 53.
    assert second.counts["blocks/loaded"] == 14 + 4


def test_most_of_a_conversation_is_loaded_in_each_turn(start: StartEngine) -> None:
    """vLLM still has the window's blocks when an answer ends, with rare exceptions."""
    engine = partial(start, specs=(spec(), window(W)), store=chunked(3), num_blocks=160)
    engines = [engine(), engine()]
    talk: list[int] = []
    computed = total = 0
    for turn in range(8):
        talk += range(500 + 10 * turn, 500 + 10 * turn + 7)
        here = engines[turn % 2]
        assert here.scheduler.reset_prefix_cache()
        answer = serve(here, talk, max_tokens=11, name=f"turn{turn}")
        computed += answer.computed_prompt_tokens
        total += len(talk)
        talk += answer.tokens
    assert computed < total / 3


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_tokens", range(5, 5 + BLOCK))
def test_block_freed_behind_a_window_is_not_saved_at_the_answers_end(
    start: StartEngine, num_tokens: int, is_async: bool
) -> None:
    """vLLM frees a block of the answer's last chunk, and another request refills it."""
    engine = partial(start, specs=(window(W + 1),), is_async=is_async, store=chunked(8))
    prompt, writer = LONG[: 4 * BLOCK + 1], engine("kv_producer", num_blocks=10)
    first = make_request("first", prompt, num_tokens)
    writer.add(first)
    while len(writer.answers["first"].tokens) < num_tokens - 3:
        writer.step()
    # It needs all free blocks, and the one that the first request frees.
    writer.add(make_request("other", LONG[-5 * BLOCK :], 4))
    writer.run_out()
    assert not first.num_preemptions
    said = [*prompt, *expected_answer(prompt, num_tokens, writer.windows)]
    serve(engine(), said[: (len(said) - 1) // BLOCK * BLOCK])  # compares its tokens


@each_kind
def test_lost_object_is_recomputed_and_saved_again_if_needed(
    start: StartEngine, tmp_path: Path, specs: Sequence[KVCacheSpec]
) -> None:
    """Each lost object in turn: tokens are right, and it is saved again if a load needed it."""
    engine = partial(start, specs=specs, store=chunked(4), num_blocks=160)
    serve(engine(), LONG, max_tokens=1)
    for lost in objects(tmp_path)[::SOME]:
        shutil.rmtree(tmp_path / "host")
        lost.unlink()
        reader = engine()
        answer = serve(reader, LONG, max_tokens=1)
        assert lost.exists() or answer.computed_prompt_tokens == 1


@each_kind
def test_damaged_object_is_recomputed(
    start: StartEngine, tmp_path: Path, specs: Sequence[KVCacheSpec]
) -> None:
    engine = partial(start, specs=specs, store=chunked(4), num_blocks=160)
    serve(engine(), LONG, max_tokens=1)
    for damaged in objects(tmp_path)[1::SOME]:
        shutil.rmtree(tmp_path / "host")
        flip_a_payload_bit(damaged)
        serve(engine(), LONG, max_tokens=1)


def test_engines_with_different_cache_groups_do_not_share(start: StartEngine) -> None:
    """Without the hybrid cache manager all layers keep all tokens, in other objects."""
    serve(start(specs=(spec(), window(W))), LONG)
    for specs in ((spec(),), (spec(), window(W + 1)), (spec(), spec())):
        other = start(specs=specs)
        assert serve(other, LONG).computed_prompt_tokens == len(LONG)
        assert "blocks/failed" not in other.counts


@each_kind
def test_preempted_requests_get_right_tokens(
    start: StartEngine, specs: Sequence[KVCacheSpec]
) -> None:
    prompts = [[number, *LONG[:9]] for number in range(6)]
    engine = start(num_blocks=10 * len(specs) + 4, store=chunked(2), specs=specs)
    requests = [make_request(f"r{number}", prompt, 20) for number, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, engine.run(*requests), strict=True):
        assert answer.tokens == expected_answer(prompt, 20, engine.windows)
    assert any(request.num_preemptions for request in requests)


@pytest.mark.parametrize("num_blocks", [23, 24])
def test_loads_wait_until_blocks_for_the_whole_prompt_are_free(
    start: StartEngine, num_blocks: int
) -> None:
    """vLLM counts blocks behind a window as held: it would let two load, and could run neither."""
    small = partial(start, specs=SMALL, max_num_batched_tokens=4 * BLOCK, max_num_seqs=4)
    prompts = [[number, *LONG[: 10 * BLOCK - 1]] for number in range(4)]
    writer = small(num_blocks=200)
    for number, prompt in enumerate(prompts):
        serve(writer, prompt[: 6 * BLOCK], max_tokens=1, name=str(number))
    reader = small(num_blocks=num_blocks)
    run_all(reader, prompts)
    assert reader.counts["tokens/loaded"] == 4 * 6 * BLOCK, "each waits until it has room"


def test_failed_load_does_not_block_other_requests(gated: StartEngine) -> None:
    """Its request has freed its blocks, and then needs more than it held."""
    small = {"specs": SMALL, "max_num_batched_tokens": 4 * BLOCK, "max_num_seqs": 4}
    prompts = [[number, *LONG[: 10 * BLOCK]] for number in range(3)]
    writer = gated(engine=small | {"num_blocks": 200}, chunk_tokens=64 * BLOCK)
    serve(writer, prompts[0], max_tokens=1, name="first")
    of_first = set(GatedFileSystem.store)
    for number, prompt in enumerate(prompts[1:]):
        serve(writer, prompt, max_tokens=1, name=str(number))
    of_others = set(GatedFileSystem.store) - of_first
    reader = gated(engine=small | {"num_blocks": 41}, chunk_tokens=64 * BLOCK)
    GatedFileSystem.close_gate("get")
    for number, prompt in enumerate(prompts):
        reader.add(make_request(str(number), prompt, 3))
    engine = reader.connector.scheduler.engine
    spin(reader, lambda: is_loading(reader, "1"), "the second one does not load beside the first")
    spin(reader, lambda: not engine.in_flight, "a look-up goes on")
    reader.step()  # it is loaded now, if it may be
    for path in of_first:
        if "t0of1" in path:
            del GatedFileSystem.store[path]
    GatedFileSystem.close_gate(*(f"get {path.rpartition('/')[2]}" for path in of_others))
    GatedFileSystem.open_gate("get")
    spin(reader, lambda: not is_loading(reader, "0"), "the load does not fail")
    GatedFileSystem.open_gates()
    reader.run_out()
    for number, prompt in enumerate(prompts):
        assert reader.answers[str(number)].tokens == expected_answer(prompt, 3, reader.windows)
    assert reader.answers["0"].computed_prompt_tokens == len(prompts[0])
    assert is_at_rest(reader)


def test_request_waiting_for_blocks_is_computed_after_wait_s(gated: StartEngine) -> None:
    """A load of another request delays it for `wait_s` at most."""
    small = {"specs": SMALL, "max_num_batched_tokens": 4 * BLOCK, "max_num_seqs": 4}
    prompts = [[number, *LONG[: 10 * BLOCK]] for number in range(2)]
    writer = gated(engine=small | {"num_blocks": 200})
    for number, prompt in enumerate(prompts):
        serve(writer, prompt, max_tokens=1, name=str(number))
    reader = gated(engine=small | {"num_blocks": 34}, wait_s=1.0, io_timeout_s=30.0)
    GatedFileSystem.close_gate("get")
    for number, prompt in enumerate(prompts):
        reader.add(make_request(str(number), prompt, 3))
    spin(reader, lambda: bool(reader.answers["1"].finish_reason), "it is kept waiting")
    assert reader.answers["1"].computed_prompt_tokens == len(prompts[1])
    assert is_loading(reader, "0")
    GatedFileSystem.open_gates()
    reader.run_out()
    assert reader.answers["0"].computed_prompt_tokens == 1


def is_loading(engine: ToyEngine, name: str) -> bool:
    status = engine.scheduler.requests[name].status
    return bool(status is RequestStatus.WAITING_FOR_REMOTE_KVS)


def run_all(engine: ToyEngine, prompts: Sequence[list[int]]) -> None:
    """Serve all at once and check their tokens."""
    requests = [make_request(str(number), prompt, 3) for number, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, engine.run(*requests), strict=True):
        assert answer.tokens == expected_answer(prompt, 3, engine.windows)


@loads_may_hang
@each_kind
@pytest.mark.parametrize("seed", gate_tries(*range(2)))
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
            num_blocks=dice.choice([26, 40, 128]) * len(specs),
            is_async=dice.random() < 0.5,
            max_num_batched_tokens=dice.choice([9, 30, 2048]),
            max_num_seqs=8,
            enable_prefix_caching=dice.random() < 0.7,
            store=chunked(chunk_blocks, buffer_bytes=dice.choice([1, 1 << 20])),
            specs=specs,
        )
        ask(engine, dice, stem, turn)


def ask(engine: ToyEngine, dice: random.Random, stem: list[int], turn: int) -> None:
    prompts = [
        [*stem[: dice.randrange(1, 60)], *dice.choices(range(1000), k=dice.randrange(12))]
        for _ in range(6)
    ]
    num_tokens = dice.choice([1, 5, 25])
    requests = [
        make_request(f"{turn}-{number}", prompt, num_tokens)
        for number, prompt in enumerate(prompts)
    ]
    answers = engine.run(*requests[:4]) + engine.run(*requests[4:])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == expected_answer(prompt, num_tokens, engine.windows)
