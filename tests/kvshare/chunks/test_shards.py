# SPDX-License-Identifier: Apache-2.0
"""Shards of every engine size, read by every other size, head by head."""

from collections.abc import Iterator

import pytest

from kvshare.chunks.shards import (
    Heads,
    ShardSlice,
    is_first_holder,
    is_possible,
    num_shards,
    shard_of,
    shard_slices,
    stored_tp_size,
    stored_tp_sizes,
)

HEADS = (1, 2, 3, 4, 6, 8, 12, 32)
MOST_RANKS = 64


def held(tp_size: int, num_heads: int) -> list[list[int]]:
    """Return the heads of each rank, as vLLM's QKVParallelLinear assigns them."""
    if tp_size >= num_heads:
        replicas = tp_size // num_heads
        return [[rank // replicas] for rank in range(tp_size)]
    each = num_heads // tp_size
    return [[*range(rank * each, (rank + 1) * each)] for rank in range(tp_size)]


def engines(num_heads: int) -> Iterator[int]:
    return (size for size in range(1, MOST_RANKS + 1) if is_possible(size, [num_heads]))


@pytest.mark.parametrize("num_heads", HEADS)
def test_every_head_is_stored_in_exactly_one_shard(num_heads: int) -> None:
    for tp_size in engines(num_heads):
        stored: dict[int, list[int]] = {}
        for rank, heads in enumerate(held(tp_size, num_heads)):
            if is_first_holder(rank, tp_size, num_heads):
                share = shard_of(rank, tp_size, num_heads)
                assert share not in stored
                stored[share] = heads
        assert [*stored] == [*range(num_shards(num_heads, tp_size))]
        assert [head for heads in stored.values() for head in heads] == [*range(num_heads)]


@pytest.mark.parametrize("num_heads", HEADS)
def test_every_reader_finds_its_heads_in_the_shards_of_every_writer(num_heads: int) -> None:
    for writer in engines(num_heads):
        count = num_shards(num_heads, writer)
        shares = [
            [*range(n * num_heads // count, (n + 1) * num_heads // count)] for n in range(count)
        ]
        for reader in engines(num_heads):
            for rank, heads in enumerate(held(reader, num_heads)):
                found: list[int] = []
                for each in shard_slices(rank, reader, num_heads, count):
                    first, end = each.heads.first, each.heads.first + each.heads.count
                    assert each.num_heads == len(shares[each.number])
                    assert 0 <= first < end <= each.num_heads
                    assert each.heads.first_own == len(found)
                    found += shares[each.number][first:end]
                assert found == heads


def test_shard_slices_of_some_ranks() -> None:
    assert shard_slices(1, 2, 8, 1) == (ShardSlice(0, 8, Heads(4, 4, first_own=0)),)
    assert shard_slices(0, 1, 8, 2) == (
        ShardSlice(0, 4, Heads(0, 4, first_own=0)),
        ShardSlice(1, 4, Heads(0, 4, first_own=4)),
    )
    assert shard_slices(0, 2, 6, 3) == (
        ShardSlice(0, 2, Heads(0, 2, first_own=0)),
        ShardSlice(1, 2, Heads(0, 1, first_own=2)),
    )


def test_engines_with_more_ranks_than_heads_store_the_same_shards() -> None:
    assert num_shards(2, 8) == num_shards(2, 2) == 2
    assert shard_slices(5, 8, 2, 2) == shard_slices(1, 2, 2, 2)


def test_stored_tp_sizes_of_some_models() -> None:
    assert stored_tp_sizes([8]) == (1, 2, 4, 8)
    assert stored_tp_sizes([6]) == (1, 2, 3, 6)
    assert stored_tp_sizes([8, 1]) == (1, 2, 4, 8)
    assert stored_tp_sizes([1]) == (1,)
    assert stored_tp_sizes([6, 4]) == (1, 2, 6)


@pytest.mark.parametrize("heads", [[8], [6], [8, 1], [8, 4], [6, 4], [1]])
def test_every_engine_stores_in_one_of_the_stored_tp_sizes(heads: list[int]) -> None:
    for tp_size in range(1, MOST_RANKS + 1):
        if is_possible(tp_size, heads):
            size = stored_tp_size(tp_size, heads)
            assert size in stored_tp_sizes(heads)
            for each in heads:
                assert num_shards(each, size) == num_shards(each, tp_size)
