# SPDX-License-Identifier: Apache-2.0
"""Which heads each rank of an engine has, and where they are in stored shards; pure.

An engine of tensor-parallel size N stores KV in shards: shard i of `t<i>of<n>` holds the i-th n-th
of the heads. n is N; or the number of heads where there are more ranks than these: then vLLM gives
ranks that follow each other the same head, and the first of them stores it. So a reader needs to
know only n, and works out which shards hold its heads. It reads shards whole: the ranks of a host
share what one of them has fetched.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a stored shard that one rank holds."""

    first: int
    """Which of the shard's heads the first one is."""
    count: int
    first_own: int
    """Which of the rank's own heads it is."""


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A stored shard that holds heads of one rank."""

    number: int
    num_heads: int
    """Of the shard."""
    heads: Heads


def num_shards(num_heads: int, tp_size: int) -> int:
    """Return in how many shards an engine of `tp_size` stores `num_heads` heads."""
    return min(num_heads, tp_size)


def shard_of(tp_rank: int, tp_size: int, num_heads: int) -> int:
    """Return which shard a rank holds."""
    return tp_rank * num_shards(num_heads, tp_size) // tp_size


def is_first_holder(tp_rank: int, tp_size: int, num_heads: int) -> bool:
    """Whether a rank is the first one of those that hold its shard."""
    shard = shard_of(tp_rank, tp_size, num_heads)
    return tp_rank == 0 or shard_of(tp_rank - 1, tp_size, num_heads) != shard


def shard_slices(tp_rank: int, tp_size: int, num_heads: int, count: int) -> tuple[ShardSlice, ...]:
    """Return where the heads of a rank lie in `count` shards, in their order."""
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
    """Return the size that an engine of `tp_size` stores layers of so many `heads` each in.

    It tells all that a reader must know: larger ones store what the largest number of heads does.
    """
    return min(tp_size, max(heads, default=1))


def stored_tp_sizes(heads: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes that layers of so many `heads` each can be stored in."""
    numbers = tuple(heads)
    most = max(numbers, default=1)
    return (*(tp_size for tp_size in range(1, most) if is_possible(tp_size, numbers)), most)


def is_possible(tp_size: int, heads: Iterable[int]) -> bool:
    """Whether vLLM can spread layers of so many `heads` each over `tp_size` ranks."""
    return all(each % tp_size == 0 or tp_size % each == 0 for each in heads)
