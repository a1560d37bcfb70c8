# SPDX-License-Identifier: Apache-2.0
"""The search, compared with a reference that probes every chunk."""

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from kvshare.chunks.prefix import Chunk, ChunkKey, Grid, Prefix, Tail
from kvshare.scheduler.search import KEYS_A_ROUND, StoredPrefix, infer_tp_sizes, longest_stored

BLOCK_TOKENS = 16


@pytest.fixture(autouse=True, scope="module")
def _none_hash() -> None:
    init_none_hash(sha256)


def prefix_of(num_blocks: int, chunk_blocks: int, *, has_tail: bool) -> Prefix:
    hashes = tuple(hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(num_blocks))
    before = hashes[-1] if hashes else None
    first = num_blocks // chunk_blocks * chunk_blocks
    tail = Tail(first, num_blocks + 1 - first, before, (1, 2, 3), None) if has_tail else None
    return Prefix(Grid(BLOCK_TOKENS, chunk_blocks), hashes, tail)


def tail_chunk(prefix: Prefix) -> list[Chunk]:
    return [prefix.tail.chunk(prefix.grid, sha256)] if prefix.tail else []


def search(
    prefix: Prefix,
    start_block: int,
    is_there: Callable[[Chunk], bool],
    chunks_a_round: int = KEYS_A_ROUND,
) -> tuple[StoredPrefix, list[list[Chunk]]]:
    """Search; return what was found and the rounds that it took."""
    questions = longest_stored(prefix, start_block, sha256, chunks_a_round)
    rounds: list[list[Chunk]] = []
    try:
        chunks = next(questions)
        while True:
            rounds.append(chunks)
            chunks = questions.send([is_there(chunk) for chunk in chunks])
    except StopIteration as end:
        return end.value, rounds


def longest(prefix: Prefix, start_block: int, is_there: Callable[[Chunk], bool]) -> list[Chunk]:
    """Search by probing every chunk."""
    number = first = start_block // prefix.grid.chunk_blocks
    while number < prefix.num_whole and is_there(prefix.whole(number)):
        number += 1
    found = [prefix.whole(each) for each in range(first, number)]
    ends = prefix.partials(number, start_block)
    if number == prefix.num_whole:
        ends = [*tail_chunk(prefix), *ends]
    return found + [end for end in ends if is_there(end)][:1]


@st.composite
def prefixes(draw: st.DrawFn, most_blocks: int = 300) -> tuple[Prefix, int]:
    """Draw a prefix and the block at which the local hit ends."""
    num_blocks = draw(st.integers(0, most_blocks))
    chunk_blocks = draw(st.sampled_from([1, 2, 3, 8, 16]))
    prefix = prefix_of(num_blocks, chunk_blocks, has_tail=draw(st.booleans()))
    return prefix, draw(st.integers(0, num_blocks))


def keys(found: StoredPrefix) -> list[ChunkKey]:
    return [chunk.key for chunk in found.chunks]


@given(prefixes(), st.integers(0, 300), st.sets(st.integers(0, 300), max_size=8), st.booleans())
def test_search_finds_the_longest_stored_prefix_in_three_rounds(
    of: tuple[Prefix, int], num_stored: int, ends: set[int], tail_is_there: bool
) -> None:
    """Whole chunks are stored up to some block, partial ones wherever prompts ended."""
    prefix, start_block = of

    def is_there(chunk: Chunk) -> bool:
        if chunk in tail_chunk(prefix):
            return tail_is_there
        if chunk.num_blocks == prefix.grid.chunk_blocks:
            return chunk.first_block + chunk.num_blocks <= num_stored
        return chunk.first_block + chunk.num_blocks in ends

    found, rounds = search(prefix, start_block, is_there)
    assert keys(found) == [chunk.key for chunk in longest(prefix, start_block, is_there)]
    asked = [chunk.key for chunks in rounds for chunk in chunks]
    assert len(set(asked)) == len(asked), "a chunk was probed twice"
    assert len(rounds) <= 3
    assert all(len(chunks) <= KEYS_A_ROUND for chunks in rounds)


@given(prefixes(), st.data())
def test_found_chunks_are_contiguous_whatever_is_stored(
    of: tuple[Prefix, int], data: st.DataObject
) -> None:
    """Any chunks may be missing."""
    prefix, start_block = of
    there = data.draw(st.sets(st.integers(0, len(prefix.hashes) + 1)))
    found, rounds = search(
        prefix, start_block, lambda chunk: chunk.first_block + chunk.num_blocks in there
    )
    asked = {chunk.key for chunks in rounds for chunk in chunks}
    for before, after in zip(found.chunks, found.chunks[1:], strict=False):
        assert before.first_block + before.num_blocks == after.first_block
    for chunk in found.chunks:
        is_there = chunk.first_block + chunk.num_blocks in there
        assert is_there or chunk.key not in asked
    if found.chunks:
        last = found.chunks[-1]
        assert last.first_block + last.num_blocks in there
        assert last.first_block + last.num_blocks > start_block
    assert not set(found.missing) & set(keys(found))


@pytest.mark.parametrize("chunk_tokens", [64, 128, 256, 512])
@given(st.integers(0, 2048))
@example(0)
@example(2048)
def test_32k_tokens_take_three_rounds_at_most(chunk_tokens: int, num_stored: int) -> None:
    prefix = prefix_of(2048, chunk_tokens // BLOCK_TOKENS, has_tail=True)
    end = num_stored // prefix.grid.chunk_blocks * prefix.grid.chunk_blocks

    def is_there(chunk: Chunk) -> bool:
        end_block = chunk.first_block + chunk.num_blocks
        return end_block <= end or end_block == num_stored or num_stored == 2048

    found, rounds = search(prefix, 0, is_there)
    assert sum(chunk.num_blocks for chunk in found.chunks) == num_stored + (num_stored == 2048)
    waves = [-(-len(chunks) // KEYS_A_ROUND) for chunks in rounds]
    assert sum(waves) <= 3
    if num_stored in (0, 2048) and prefix.grid.chunk_blocks <= 16:
        assert len(rounds) == 1


@pytest.mark.parametrize(("chunks_a_round", "most_rounds"), [(16, 4), (10, 4), (4, 6)])
@given(st.integers(0, 2048))
def test_smaller_rounds_find_the_same_prefix(
    chunks_a_round: int, most_rounds: int, num_stored: int
) -> None:
    """32k tokens where chunks may be stored in two, three or more sizes."""
    prefix = prefix_of(2048, 16, has_tail=True)
    end = num_stored // 16 * 16

    def is_there(chunk: Chunk) -> bool:
        end_block = chunk.first_block + chunk.num_blocks
        return end_block <= end or end_block == num_stored

    found, rounds = search(prefix, 0, is_there, chunks_a_round)
    assert keys(found) == [chunk.key for chunk in longest(prefix, 0, is_there)]
    assert len(rounds) <= most_rounds
    # The partial chunks of one chunk are probed together.
    assert all(len(chunks) <= max(chunks_a_round, 16) for chunks in rounds)


@given(st.lists(st.sampled_from([1, 2, None]), max_size=12))
def test_unprobed_chunks_get_the_only_tp_size_found(sizes: list[int | None]) -> None:
    prefix = prefix_of(len(sizes), 1, has_tail=False)
    chunks = [prefix.whole(number) for number in range(len(sizes))]
    known = {chunk.key: size for chunk, size in zip(chunks, sizes, strict=True) if size}
    filled = dict(known)
    unclear = infer_tp_sizes(chunks, filled)
    asked = set(known.values())
    assert unclear == (
        [chunk for chunk in chunks if chunk.key not in known] if len(asked) == 2 else []
    )
    if len(asked) == 1:
        assert set(filled.values()) == asked
        assert len(filled) == len(chunks)


def test_short_prompt_is_searched_in_one_round() -> None:
    prefix = prefix_of(16 + 13, 16, has_tail=True)
    found, rounds = search(
        prefix, 0, lambda chunk: chunk.first_block + chunk.num_blocks in {16, 20}
    )
    assert [chunk.num_blocks for chunk in found.chunks] == [16, 4]
    assert len(rounds) == 1


def test_found_prefix_ends_before_a_chunk_of_unknown_tp_size() -> None:
    """It was removed between two rounds, so its size is unknown."""
    chunks = tuple(Chunk(ChunkKey(bytes([n])), n, 1, n, 1) for n in range(3))
    found = StoredPrefix(chunks, ()).in_tp_sizes({chunks[0].key: 1, chunks[2].key: 2})
    assert found.chunks == chunks[:1]
    assert found.missing == (chunks[1].key,)
