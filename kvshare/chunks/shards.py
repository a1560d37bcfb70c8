# SPDX-License-Identifier: Apache-2.0
"""Which heads each rank of an engine has, and where they are in stored shards; pure.

An engine of tensor-parallel size N stores KV in n shards: `t<i>of<n>` holds the i-th n-th of the
heads. n is N, or the number of heads if there are fewer heads than ranks. In that case vLLM gives
consecutive ranks the same head, and the first of them stores it. So a reader needs to know only n
to find the shards that hold its heads. It reads whole shards, and the ranks of a host share each
download.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads that a stored shard and one rank have in common; they are consecutive in both."""

    first: int
    """Index of the first common head among the shard's heads."""
    count: int
    first_own: int
    """Index of the first common head among the rank's own heads."""


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A stored shard that holds heads of one rank."""

    number: int
    num_heads: int
    """All heads of the shard."""
    heads: Heads


def num_shards(num_heads: int, tp_size: int) -> int:
    """Return the number of shards in which an engine of `tp_size` stores `num_heads` heads."""
    return min(num_heads, tp_size)


def shard_of(tp_rank: int, tp_size: int, num_heads: int) -> int:
    """Return the number of the shard that a rank holds."""
    return tp_rank * num_shards(num_heads, tp_size) // tp_size


def is_first_holder(tp_rank: int, tp_size: int, num_heads: int) -> bool:
    """Return whether a rank is the first of the ranks that hold its shard."""
    shard = shard_of(tp_rank, tp_size, num_heads)
    return tp_rank == 0 or shard_of(tp_rank - 1, tp_size, num_heads) != shard


def shard_slices(tp_rank: int, tp_size: int, num_heads: int, count: int) -> tuple[ShardSlice, ...]:
    """Return the shards, out of `count`, that hold heads of a rank, in the order of the heads."""
    num_own = num_heads // num_shards(num_heads, tp_size)
    own_first = shard_of(tp_rank, tp_size, num_heads) * num_own
    own_end = own_first + num_own
    num_stored = num_heads // count
    found = []
    for shard in range(own_first // num_stored, -(-own_end // num_stored)):
        start = shard * num_stored
        first, end = max(own_first, start), min(own_end, start + num_stored)
        heads = Heads(first - start, end - first, first - own_first)
        found.append(ShardSlice(shard, num_stored, heads))
    return tuple(found)


def stored_tp_size(tp_size: int, heads: Iterable[int]) -> int:
    """Return the tensor-parallel size in which an engine of `tp_size` stores its chunks.

    `heads`: the KV heads of each layer set. An engine with more ranks than the largest of these
    numbers stores the same shards as an engine with that many ranks, so the result is at most that
    number. A reader needs to know nothing else.
    """
    return min(tp_size, max(heads, default=1))


def stored_tp_sizes(heads: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes in which chunks can be stored; `heads`: KV heads of each layer set."""
    numbers = tuple(heads)
    most = max(numbers, default=1)
    return (*(tp_size for tp_size in range(1, most) if is_possible(tp_size, numbers)), most)


def is_possible(tp_size: int, heads: Iterable[int]) -> bool:
    """Return whether vLLM can spread layer sets with so many `heads` each over `tp_size` ranks."""
    return all(each % tp_size == 0 or tp_size % each == 0 for each in heads)
