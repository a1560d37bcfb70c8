# SPDX-License-Identifier: Apache-2.0
"""Chooses the objects to remove; pure.

Objects leave in the order of their last use, the oldest first. Of those used in the same minute the
one furthest from the beginning of its chain leaves first, because what stays is of use only with
all before it. All objects of one name (the shards of a chunk) leave together.
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
# A store that is full is cleaned to this share of its budget, so that not every run has to remove.
_LOW_SHARE = 0.97


@dataclass(frozen=True)
class Candidates:
    """All objects of a store that may be removed, as parallel arrays."""

    spaces: Numbers
    """The number of the space of each: one namespace of one kind, or others that share rules."""
    sizes: Sizes
    """Bytes."""
    names: Numbers
    """The number of the name of each; objects of one name have the same age and position."""
    ages: Numbers
    """Minutes since the last use of the name."""
    positions: Numbers


@dataclass(frozen=True)
class Limit:
    """The most bytes that some spaces may have together."""

    spaces: frozenset[int]
    max_bytes: int


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

    An object is removed only if it is older than the ttl of its space, or if its space is in an
    exceeded limit. Afterwards all limits hold, except for objects that are held.
    """
    ttls = np.array(rules.ttls, np.uint32)[objects.spaces]
    leaves = objects.ages > ttls
    if rules.limits:
        # Not positions alone: objects of one name must be neighbours.
        order = np.lexsort((objects.names, ~objects.positions, ~objects.ages))
        holds = np.array(rules.holds, np.uint32)[objects.spaces]
        held = (holds > 0) & (objects.ages <= holds)
        # The narrowest first: what it removes, wider ones need not.
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
    """Mark in `leaves` what else must be removed for `limit`; `order`: of removal."""
    is_inside = np.zeros(int(objects.spaces.max(initial=0)) + 1, np.bool_)
    is_inside[[space for space in limit.spaces if space < len(is_inside)]] = True
    stays = is_inside[objects.spaces] & ~leaves
    num_bytes = int(objects.sizes[stays].sum())
    if num_bytes <= limit.max_bytes:
        return
    excess = num_bytes - int(limit.max_bytes * _LOW_SHARE)
    queue = order[(stays & ~held)[order]]
    gone = np.cumsum(objects.sizes[queue])
    num = int(np.searchsorted(gone, excess)) + 1
    if num < len(queue):  # to the end of the name
        last = objects.names[queue[num - 1]]
        while num < len(queue) and objects.names[queue[num]] == last:
            num += 1
    leaves[queue[:num]] = True
