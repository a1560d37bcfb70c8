# SPDX-License-Identifier: Apache-2.0
"""Chooses the objects to remove; pure.

Objects are removed in the order of their last use, the oldest first. Of those used in the same
minute the one furthest from the beginning of its chain goes first, because an object of a chain can
be used only with all before it. All objects of one name (the shards of a chunk) go together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ecshare.upkeep.uses import Numbers

Sizes = NDArray[np.uint64]
Order = NDArray[np.int64]
"""Numbers of objects."""

FOREVER = 0xFFFFFFFF
"""More minutes than any age."""
# A full store is cleaned down to this share of its goal, so that not every run removes objects.
_LOW_SHARE = 0.97
# Traffic is not steady.
_GROWTH_MARGIN = 1.25


@dataclass(frozen=True)
class Candidates:
    """All objects of a store that may be removed, as parallel arrays."""

    spaces: Numbers
    """The number of the space of each object: a namespace, or other objects that share rules."""
    sizes: Sizes
    """Bytes."""
    names: Numbers
    """The number of the name of each object; objects of one name have one age and position."""
    ages: Numbers
    """Minutes since the last use of the name."""
    positions: Numbers


@dataclass(frozen=True)
class Limit:
    """The most bytes that some spaces may have together."""

    spaces: frozenset[int]
    max_bytes: int
    growth: int = 0
    """Bytes that were stored since the last run: room is made for as many, and some more, so that
    the limit holds until the next one. At most for a third of the limit."""

    @property
    def goal(self) -> int:
        """The bytes that may stay after this run."""
        return self.max_bytes - min(int(_GROWTH_MARGIN * self.growth), self.max_bytes // 3)


@dataclass(frozen=True)
class Rules:
    """What may stay."""

    limits: Sequence[Limit] = ()
    ttls: Sequence[int] = ()
    """For each space: the minutes after which an object that is not used is removed."""
    holds: Sequence[int] = ()
    """For each space: the minutes for which no object is removed, whatever the limits are."""


def removals(objects: Candidates, rules: Rules) -> Order:
    """Return the objects to remove, in order.

    An object is removed only if it is older than the ttl of its space, or if its space is in a
    limit that is exceeded, or will be before the next run. Afterwards all limits hold, except for
    objects that are held.
    """
    ttls = np.array(rules.ttls, np.uint32)[objects.spaces]
    leaves = objects.ages > ttls
    if rules.limits:
        # Names too, so that objects of one name are neighbours.
        order = np.lexsort((objects.names, ~objects.positions, ~objects.ages))
        holds = np.array(rules.holds, np.uint32)[objects.spaces]
        held = (holds > 0) & (objects.ages <= holds)
        # The narrowest first: its removals count for wider ones.
        for limit in sorted(rules.limits, key=lambda each: len(each.spaces)):
            _remove_for(limit, objects, order, leaves, held)
    chosen: Order = np.flatnonzero(leaves)
    keys = (objects.names[chosen], ~objects.positions[chosen], ~objects.ages[chosen])
    in_order: Order = chosen[np.lexsort(keys)]
    return in_order


def _remove_for(
    limit: Limit,
    objects: Candidates,
    order: Order,
    leaves: NDArray[np.bool_],
    held: NDArray[np.bool_],
) -> None:
    """Mark in `leaves` what else must be removed for `limit`. `order`: that of removal."""
    is_inside = np.zeros(int(objects.spaces.max(initial=0)) + 1, np.bool_)
    is_inside[[space for space in limit.spaces if space < len(is_inside)]] = True
    stays = is_inside[objects.spaces] & ~leaves
    num_bytes = int(objects.sizes[stays].sum())
    if num_bytes <= limit.goal:
        return
    excess = num_bytes - int(limit.goal * _LOW_SHARE)
    queue = order[(stays & ~held)[order]]
    gone = np.cumsum(objects.sizes[queue])
    num = int(np.searchsorted(gone, excess)) + 1
    if num < len(queue):  # complete the last name
        last = objects.names[queue[num - 1]]
        while num < len(queue) and objects.names[queue[num]] == last:
            num += 1
    leaves[queue[:num]] = True


def hottest(candidates: Candidates, spaces: Sequence[int], max_bytes: int) -> Order:
    """Return the objects of `spaces` that were used last, the latest first, while they have at most
    `max_bytes`. Of those used in the same minute, the beginnings of chains come first."""
    mine = np.flatnonzero(np.isin(candidates.spaces, np.array(spaces, np.uint32)))
    latest: Order = mine[np.lexsort((candidates.positions[mine], candidates.ages[mine]))]
    totals = np.cumsum(candidates.sizes[latest])
    num = int(np.searchsorted(totals, np.uint64(max_bytes), side="right"))
    return latest[:num]
