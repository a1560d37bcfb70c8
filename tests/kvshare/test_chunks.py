# SPDX-License-Identifier: Apache-2.0
"""Chunks of several blocks, in whole engines with a toy model: the tokens are always right."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.errors import ConfigError
from ecshare.store.format import PROLOGUE_BYTES
from kvshare.chunks.prefix import Chunk, Grid
from kvshare.config import KVConfig
from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    Answer,
    ToyEngine,
    expected_answer,
    make_request,
    objects,
    serve,
)
from tests.nightly import gate_tries_only
from tests.releases import loads_may_hang

BLOCK_BYTES = LAYERS * HEADS * BLOCK * 2 * HEAD_SIZE * 4
LONG = list(range(100, 100 + 13 * BLOCK + 3))


def chunked(blocks: int, **more: Any) -> dict[str, Any]:
    return {"chunk_tokens": blocks * BLOCK, **more}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk_blocks", [2, 3, 5, 64])
def test_the_second_engine_computes_one_token(
    start: StartEngine, tmp_path: Path, chunk_blocks: int, is_async: bool
) -> None:
    lengths = [2, BLOCK, 7, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 41, len(LONG)]
    prompts = [[number, *LONG[: length - 1]] for number, length in enumerate(lengths)]
    first = start(is_async=is_async, store=chunked(chunk_blocks))
    for number, prompt in enumerate(prompts):
        cold = serve(first, prompt, name=f"cold{number}")
        assert cold.computed_prompt_tokens == len(prompt)
    second = start(is_async=is_async, store=chunked(chunk_blocks))
    for number, prompt in enumerate(prompts):
        assert serve(second, prompt, name=f"warm{number}").computed_prompt_tokens == 1
    assert "blocks/failed" not in second.counts
    num_chunks = sum(-(-(length // BLOCK) // chunk_blocks) for length in lengths)
    assert len(objects(tmp_path)) <= num_chunks + 2 * len(prompts), "tails, and ends of answers"


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3, 64])
def test_conversation_turns_hit_all_stored_blocks(start: StartEngine, chunk_blocks: int) -> None:
    """Each turn on another engine than the last one."""
    engines = [start(store=chunked(chunk_blocks), num_blocks=128) for _ in range(2)]
    talk: list[int] = []
    stored = 0
    for turn in range(6):
        talk += range(500 + 10 * turn, 500 + 10 * turn + 7)
        engine = engines[turn % 2]
        # Its local prefix cache must not hide a miss in the store.
        assert engine.scheduler.reset_prefix_cache()
        answer = serve(engine, talk, max_tokens=11, name=f"turn{turn}")
        assert answer.computed_prompt_tokens == len(talk) - stored
        talk += answer.tokens
        # The last token of an answer is sampled, not computed.
        stored = (len(talk) - 1) // BLOCK * BLOCK


def test_answer_is_stored_when_it_ends_with_one_partial_chunk_twice(
    start: StartEngine, tmp_path: Path
) -> None:
    engine = start(store=chunked(8))
    serve(engine, LONG, max_tokens=40)
    num_blocks = (len(LONG) + 39) // BLOCK
    stored = sum(path.stat().st_size - PROLOGUE_BYTES for path in objects(tmp_path))
    # The chunk in which the prompt ended is stored as its tail, and whole.
    assert stored <= (num_blocks + 8) * BLOCK_BYTES
    longer = [*LONG, *engine.answers["r"].tokens]
    fresh = start(store=chunked(8))
    assert serve(fresh, longer).computed_prompt_tokens == len(longer) - num_blocks * BLOCK


def test_local_hit_ending_inside_a_chunk_is_not_reloaded(start: StartEngine) -> None:
    serve(start(store=chunked(4)), LONG)
    engine = start(store=chunked(4))
    serve(engine, LONG[: 6 * BLOCK], max_tokens=1, name="short")
    engine.counts.clear()
    answer = serve(engine, LONG, name="long")
    assert answer.computed_prompt_tokens == 1
    assert engine.counts["blocks/loaded"] == 14 - 6, "local blocks are not loaded again"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk_blocks", [2, 3, 8])
def test_chunked_prefill_saves_every_chunk(
    start: StartEngine, chunk_blocks: int, is_async: bool
) -> None:
    store = chunked(chunk_blocks)
    first = start(max_num_batched_tokens=7, max_num_seqs=4, store=store, is_async=is_async)
    serve(first, LONG)
    assert serve(start(store=store), LONG).computed_prompt_tokens == 1


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk_blocks", [2, 3, 16])
def test_preempted_requests_reload_their_blocks_from_the_store(
    start: StartEngine, chunk_blocks: int, is_async: bool
) -> None:
    """There are too few blocks for all: preempted requests lose theirs to others."""
    prompts = [[number, *LONG[:9]] for number in range(6)]
    engine = start(num_blocks=20, is_async=is_async, store=chunked(chunk_blocks))
    requests = [make_request(f"r{number}", prompt, 20) for number, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, engine.run(*requests), strict=True):
        assert answer.tokens == expected_answer(prompt, 20)
    assert any(request.num_preemptions for request in requests)
    assert engine.counts["tokens/loaded"] > 0


def test_engines_with_different_chunk_tokens_do_not_share(start: StartEngine) -> None:
    serve(start(store=chunked(2)), LONG)
    other = start(store=chunked(3))
    assert serve(other, LONG).computed_prompt_tokens == len(LONG)
    assert "blocks/failed" not in other.counts


def test_saves_skip_loaded_chunks_without_visiting_each(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop over the hundreds of chunks of each prompt would block the scheduler's thread."""
    serve(start(store=chunked(2)), LONG)
    engine, looked_at = start(store=chunked(2)), set[int]()
    run = Grid.run

    def noted(grid: Grid, hashes: Sequence[bytes], first: int, end: int) -> Chunk:
        looked_at.add(first)
        return run(grid, hashes, first, end)

    engine.before_load = lambda: monkeypatch.setattr(Grid, "run", noted)
    serve(engine, LONG, max_tokens=2 * BLOCK)
    assert min(looked_at) == 12, "the chunks before it were loaded as a whole"


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
def test_partly_loaded_chunk_is_saved_whole_once_full(
    start: StartEngine, tmp_path: Path, chunk_blocks: int
) -> None:
    """It was loaded as a prompt's tail."""
    prompt = LONG[: 4 * BLOCK - 1]
    serve(start(store=chunked(chunk_blocks)), prompt, max_tokens=1)
    before = len(objects(tmp_path))
    answer = serve(start(store=chunked(chunk_blocks)), prompt, max_tokens=3)
    assert answer.computed_prompt_tokens == 1
    assert len(objects(tmp_path)) == before + 1
    longer = [*prompt, *answer.tokens[:2]]
    served = serve(start(store=chunked(chunk_blocks)), longer, name="longer")
    assert served.computed_prompt_tokens == len(longer) - 4 * BLOCK


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_lost_chunk_and_its_successors_are_recomputed_and_saved(
    start: StartEngine, tmp_path: Path, index: int
) -> None:
    engine = start(store=chunked(4))
    lost = lose(engine, tmp_path, index)
    answer = serve(start(store=chunked(4)), LONG)
    assert answer.computed_prompt_tokens == len(LONG) - 4 * index * BLOCK
    assert lost <= set(objects(tmp_path)), "and it is stored again"


def lose(engine: ToyEngine, folder: Path, index: int) -> set[Path]:
    """Store LONG chunk by chunk, delete the objects of one chunk, and return their paths."""
    lengths = [4 * BLOCK, 8 * BLOCK, 12 * BLOCK, len(LONG)]
    before: set[Path] = set()
    added: set[Path] = set()
    for number, length in enumerate(lengths):
        serve(engine, LONG[:length], max_tokens=1, name=f"upto{length}")
        new, before = set(objects(folder)) - before, set(objects(folder))
        if number == index:
            added = new
    shutil.rmtree(folder / "host")
    for path in added:
        path.unlink()
    return added


@loads_may_hang
@pytest.mark.parametrize("seed", gate_tries_only(range(2), range(8)))
def test_random_prompts_and_store_damage_give_right_tokens(
    start: StartEngine, tmp_path: Path, seed: int
) -> None:
    """Random: shared prefixes, engine options, deleted and damaged objects, and announcements that
    are true or false."""
    dice = random.Random(seed)
    chunk_blocks = dice.choice([2, 3, 4, 7])
    stem = [dice.randrange(1000) for _ in range(60)]
    for turn in range(3):
        if turn:
            spoil(dice, tmp_path)
        engine = start(
            num_blocks=dice.choice([26, 40, 128]),
            is_async=dice.random() < 0.5,
            max_num_batched_tokens=dice.choice([9, 30, 2048]),
            max_num_seqs=8,
            enable_prefix_caching=dice.random() < 0.7,
            store=chunked(chunk_blocks, buffer_bytes=dice.choice([1, 1 << 20]), wait_s=0.2),
        )
        prompts = [
            [*stem[: dice.randrange(1, 60)], *dice.choices(range(1000), k=dice.randrange(12))]
            for _ in range(6)
        ]
        max_tokens = dice.choice([1, 5, 25])
        requests = [
            make_request(
                f"{turn}-{number}",
                prompt,
                max_tokens,
                kv_transfer_params=dice.choice([None, None, {"kvshare": {"streamed": True}}]),
            )
            for number, prompt in enumerate(prompts)
        ]
        for prompt, answer in zip(prompts, answers(engine, requests), strict=True):
            assert answer.tokens == expected_answer(prompt, max_tokens)


def answers(engine: ToyEngine, requests: list[Any]) -> list[Answer]:
    """Serve four requests together, then the rest."""
    first = engine.run(*requests[:4])
    return first + engine.run(*requests[4:])


def spoil(dice: random.Random, folder: Path) -> None:
    shutil.rmtree(folder / "host", ignore_errors=True)
    for path in objects(folder):
        fate = dice.random()
        if fate < 0.2:
            path.unlink()
        elif fate < 0.3:
            body = bytearray(path.read_bytes())
            body[dice.randrange(len(body))] ^= 1
            path.unlink()
            path.write_bytes(body)


# --- the option ---


def config(chunk_tokens: int | None) -> KVConfig:
    return KVConfig(url="/nowhere", chunk_tokens=chunk_tokens)


def test_chunk_tokens_must_be_a_multiple_of_the_block_size() -> None:
    assert config(256).chunk_blocks(16) == 16
    assert config(256).chunk_blocks(128) == 2
    with pytest.raises(ConfigError, match=r"chunk_tokens: 250 tokens .* use 240 or 256"):
        config(250).chunk_blocks(16)


def test_block_larger_than_chunk_tokens_is_the_chunk() -> None:
    assert config(64).chunk_blocks(128) == 1


@pytest.mark.parametrize(("block_tokens", "blocks"), [(16, 16), (48, 6), (256, 1), (544, 1)])
def test_default_chunk_tokens_fits_any_block_size(block_tokens: int, blocks: int) -> None:
    assert config(None).chunk_blocks(block_tokens) == blocks


def test_engine_start_rejects_bad_chunk_tokens(start: StartEngine) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.chunk_tokens: 10 tokens"):
        start(store={"chunk_tokens": 10})
