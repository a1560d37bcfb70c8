# SPDX-License-Identifier: Apache-2.0
"""The memory of the workers that ordered saves take."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvshare.chunks.prefix import ChunkKey
from kvshare.chunks.slabs import steps_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)

# A worker reports the end of each save. If it has not for so long, it never will.
_LOST_S = 120.0
# Chunks for which there is room beyond what is ordered: one for so many of them, at most so many.
_CHUNKS_A_SPARE = 16
_MOST_SPARE = 4


def most_ordered_bytes(buffer_bytes: int, chunk_bytes: int) -> int:
    """Return how much of a rank's `buffer_bytes` saves may be ordered for.

    A save needs memory in one piece, and what is free lies between saves of several sizes. So room
    for some chunks is left: a worker that must drop what was ordered breaks a promise.
    """
    num_spare = min(_MOST_SPARE, buffer_bytes // max(1, chunk_bytes) // _CHUNKS_A_SPARE)
    return buffer_bytes - num_spare * chunk_bytes


def log_limit(limit_bytes: int, chunk_bytes: int, chunk_tokens: int, step_tokens: int) -> None:
    """Log how much memory saves may take; a warning if one step may fill more than that.

    `limit_bytes`, `chunk_bytes`: of one rank. `step_tokens`: the most that a step computes.
    """
    logger.info("saves may take %d MiB of memory in each rank", limit_bytes >> 20)
    wanted_bytes = steps_bytes(chunk_bytes, chunk_tokens, step_tokens)
    if wanted_bytes > 2 * limit_bytes:
        logger.warning(
            "buffer_bytes is %d: it holds the KV of %d tokens, and a step of this engine may "
            "compute %d. What does not fit is not saved if its request ends with the step. Set it "
            "to %d, which holds two steps.",
            limit_bytes,
            limit_bytes // chunk_bytes * chunk_tokens,
            step_tokens,
            wanted_bytes,
        )


@dataclass(slots=True)
class _Reservation(Generic[T]):
    owner: T
    num_bytes: int
    num_objects: int
    """Those that have not ended yet."""
    ordered_s: float


class SaveBudget(Generic[T]):
    """Admits saves as long as the workers have memory for them.

    So the scheduler half knows at once what is not saved, and a worker need not drop a save that
    was ordered. Each rank has `limit_bytes`, and saves its part of each chunk.

    An owner is a prompt; equal owners are one. With its first save, memory is kept for the rest of
    it: a store that takes less than is computed then gets some prompts as a whole, and not the
    beginnings of all.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, limit_bytes: int, clock_s: Callable[[], float]) -> None:
        """Begin with nothing ordered. `clock_s`: monotonic seconds."""
        self._limit_bytes = limit_bytes
        self._clock_s = clock_s
        self._saves: dict[ChunkKey, _Reservation[T]] = {}  # the oldest first
        self._used_bytes = 0
        self._kept: dict[T, int] = {}  # bytes for the owners that have begun
        self._kept_bytes = 0
        self._is_full = False

    def admit(
        self, key: ChunkKey, num_bytes: int, num_objects: int, owner: T, rest_bytes: int = 0
    ) -> bool:
        """Admit a save of `num_bytes` per rank, which stores `num_objects` over all ranks.

        `rest_bytes`: what later saves of `owner` need at most. With its first save, this must have
        room too, and is kept for it until `release`; unless all of it exceeds the limit.
        False: there is no room. Then no more is admitted, except from what is kept, until there is
        more room: small saves must not overtake a large one. A save larger than the limit is
        admitted alone.
        """
        self._give_up_lost()
        kept_bytes = self._kept.get(owner)
        if kept_bytes is not None:
            rest_bytes = min(rest_bytes, max(0, kept_bytes - num_bytes))
        elif num_bytes + rest_bytes > self._limit_bytes:
            rest_bytes = 0
        if not self._has_room(num_bytes + rest_bytes, kept_bytes or 0):
            self._is_full = True
            return False
        self._kept[owner] = rest_bytes
        self._kept_bytes += rest_bytes - (kept_bytes or 0)
        # It may be ordered again before the first order has ended.
        before = self._saves.pop(key, None)
        if before is not None:
            num_objects += before.num_objects
            num_bytes += before.num_bytes
            self._used_bytes -= before.num_bytes
        self._saves[key] = _Reservation(owner, num_bytes, num_objects, self._clock_s())
        self._used_bytes += num_bytes
        return True

    def release(self, owner: T) -> None:
        """Keep nothing for `owner` any more: it begins anew, or will be deleted."""
        kept_bytes = self._kept.pop(owner, 0)
        if kept_bytes:
            self._kept_bytes -= kept_bytes
            self._is_full = False

    @property
    def is_crowded(self) -> bool:
        """Whether more than half of the memory is in use."""
        self._give_up_lost()
        return 2 * self._used_bytes > self._limit_bytes

    def owner(self, key: ChunkKey) -> T | None:
        """Return the owner of a save that has not ended; None if there is none."""
        save = self._saves.get(key)
        return save.owner if save is not None else None

    def ended(self, num_objects: Mapping[ChunkKey, int]) -> None:
        """Record how many more objects of each chunk are stored, or given up."""
        for key, count in num_objects.items():
            save = self._saves.get(key)
            if save is not None:
                save.num_objects -= count
                if save.num_objects <= 0:
                    self._forget(key)

    def withdraw(self, keys: Iterable[ChunkKey]) -> None:
        """Remove saves that were admitted and will not be carried out."""
        for key in keys:
            if key in self._saves:
                self._forget(key)

    def _has_room(self, num_bytes: int, kept_bytes: int) -> bool:
        """Whether `num_bytes` can be taken by an owner for whom `kept_bytes` are kept."""
        if num_bytes <= kept_bytes:
            return True
        others_bytes = self._used_bytes + self._kept_bytes - kept_bytes
        fits = not others_bytes or others_bytes + num_bytes <= self._limit_bytes
        return fits and not self._is_full

    def _give_up_lost(self) -> None:
        """Forget the oldest saves if their end was never reported, e.g. as a worker was killed."""
        while self._saves:
            key, oldest = next(iter(self._saves.items()))
            if self._clock_s() - oldest.ordered_s < _LOST_S:
                return
            self._forget(key)

    def _forget(self, key: ChunkKey) -> None:
        self._used_bytes -= self._saves.pop(key).num_bytes
        self._is_full = False
