# SPDX-License-Identifier: Apache-2.0
"""Limits ordered saves to the memory of the workers."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvshare.chunks.prefix import ChunkKey
from kvshare.chunks.slabs import steps_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)

# A worker reports the end of each save. If it has not for this long, it never will.
_LOST_S = 120.0
# One spare chunk for every 16 chunks that fit into the memory, and no more than four.
_CHUNKS_A_SPARE = 16
_MOST_SPARE = 4


def most_ordered_bytes(buffer_bytes: int, chunk_bytes: int) -> int:
    """Return how much of a rank's `buffer_bytes` saves may be ordered for.

    A save needs contiguous memory, and free memory is split between saves of several sizes. So
    room for some chunks is left over: a worker must not have to drop a save that was ordered.
    """
    num_spare = min(_MOST_SPARE, buffer_bytes // max(1, chunk_bytes) // _CHUNKS_A_SPARE)
    return buffer_bytes - num_spare * chunk_bytes


def can_hold_state(buffer_bytes: int, chunk_bytes: int, state_bytes: int) -> bool:
    """Return whether a state of recurrent layers can be saved with the chunk at whose end it is.

    `state_bytes`: 0 for a model without states, of which any chunk can be saved.
    """
    limit_bytes = most_ordered_bytes(buffer_bytes, chunk_bytes)
    return not state_bytes or chunk_bytes + state_bytes <= limit_bytes


def log_limit(
    limit_bytes: int,
    chunk_bytes: int,
    chunk_tokens: int,
    step_tokens: int,
    states: tuple[int, int] = (0, 0),
) -> None:
    """Log how much memory saves may take; warn if one step may fill more than that, and if no state
    fits.

    `limit_bytes`, `chunk_bytes`: for one rank. `step_tokens`: the most that a step computes.
    `states`: the bytes of one state of recurrent layers, and of those of two steps.
    """
    logger.info("saves may take %d MiB of memory in each rank", limit_bytes >> 20)
    state_bytes, steps_state_bytes = states
    wanted_bytes = steps_bytes(chunk_bytes, chunk_tokens, step_tokens) + steps_state_bytes
    if not can_hold_state(limit_bytes, chunk_bytes, state_bytes):
        logger.warning(
            "This engine saves no KV: buffer_bytes is %d, and a state of this model's recurrent "
            "layers takes %d with the chunk before it. Without a state none of the KV could be "
            "loaded. Set it to %d, which holds two steps.",
            limit_bytes,
            state_bytes + chunk_bytes,
            wanted_bytes,
        )
    elif wanted_bytes > 2 * limit_bytes:
        logger.warning(
            "buffer_bytes is %d: it holds the KV of %d tokens, and a step of this engine may "
            "compute %d%s. What does not fit is not saved if its request ends with the step. Set "
            "it to %d, which holds two steps.",
            limit_bytes,
            limit_bytes // chunk_bytes * chunk_tokens,
            step_tokens,
            f" and states of {steps_state_bytes // 2} bytes" if state_bytes else "",
            wanted_bytes,
        )


@dataclass(slots=True)
class _Reservation(Generic[T]):
    owner: T
    num_bytes: int
    num_objects: int
    """The number of objects whose save has not ended."""
    ordered_s: float


class SaveBudget(Generic[T]):
    """Admits saves as long as the workers have memory for them.

    So the scheduler half knows at once what is not saved, and workers need not drop ordered saves.
    Each rank has `limit_bytes`, and saves its part of each chunk.

    An owner is a prompt; equal owners are one. Its first save also reserves memory for the rest of
    it. So if the store is slower than the engine, it gets some prompts as a whole, and not only the
    beginnings of all.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, limit_bytes: int, clock_s: Callable[[], float]) -> None:
        """Start without saves. `clock_s`: monotonic seconds."""
        self._limit_bytes = limit_bytes
        self._clock_s = clock_s
        self._saves: dict[ChunkKey, _Reservation[T]] = {}  # the oldest first
        self._used_bytes = 0
        self._kept: dict[T, int] = {}  # bytes reserved for the rest of each owner
        self._kept_bytes = 0
        self._is_full = False
        self._is_full_for_extra = False

    def admit(  # noqa: PLR0913 — all parameters of a save
        self,
        key: ChunkKey,
        num_bytes: int,
        num_objects: int,
        owner: T,
        rest_bytes: int = 0,
        *,
        is_extra: bool = False,
    ) -> bool:
        """Admit a save of `num_bytes` per rank, which stores `num_objects` over all ranks.

        `rest_bytes`: the most that later saves of `owner` need. There must be room for this with
        the first save too, and it is reserved until `release`, unless all of it exceeds the limit.
        False: there is no room. Then only saves with reserved memory are admitted until memory is
        freed: small saves must not overtake a large one. A save larger than the limit is admitted
        if there is no other. `is_extra`: it does not count to the rest of `owner`, whose reserved
        memory it leaves alone, and others need not wait until there is room for it.
        """
        self.remove_unreported()
        kept_bytes = self._kept.get(owner)
        if is_extra:
            rest_bytes = kept_bytes or 0
        elif kept_bytes is not None:
            rest_bytes = min(rest_bytes, max(0, kept_bytes - num_bytes))
        elif num_bytes + rest_bytes > self._limit_bytes:
            rest_bytes = 0
        if not self._has_room(num_bytes + rest_bytes, kept_bytes or 0):
            self._is_full |= not is_extra
            self._is_full_for_extra = True
            return False
        if not is_extra:
            self._kept[owner] = rest_bytes
            self._kept_bytes += rest_bytes - (kept_bytes or 0)
        # The chunk may be ordered again before its first save has ended.
        before = self._saves.pop(key, None)
        if before is not None:
            num_objects += before.num_objects
            num_bytes += before.num_bytes
            self._used_bytes -= before.num_bytes
        self._saves[key] = _Reservation(owner, num_bytes, num_objects, self._clock_s())
        self._used_bytes += num_bytes
        return True

    def release(self, owner: T) -> None:
        """Free the memory that is reserved for `owner`: it starts again, or has ended."""
        kept_bytes = self._kept.pop(owner, 0)
        if kept_bytes:
            self._kept_bytes -= kept_bytes
            self._is_full = self._is_full_for_extra = False

    def is_full(self, owner: T, *, is_extra: bool = False) -> bool:
        """Return whether `admit` would refuse any save of `owner`, since it has refused one and no
        memory was freed. `is_extra`: any that is as large as those, which are equally large.

        Thousands of requests may wait: this costs less than the pieces of a save.
        """
        is_full = self._is_full_for_extra if is_extra else self._is_full
        return is_full and not self._kept.get(owner)

    @property
    def reserved_bytes(self) -> int:
        """The memory in use by saves, and reserved for the rest of prompts."""
        return self._used_bytes + self._kept_bytes

    @property
    def is_crowded(self) -> bool:
        """Whether more than half of the memory is in use."""
        self.remove_unreported()
        return 2 * self._used_bytes > self._limit_bytes

    def owner(self, key: ChunkKey) -> T | None:
        """Return the owner of a save that has not ended; None if there is none."""
        save = self._saves.get(key)
        return save.owner if save is not None else None

    def ended(self, num_objects: Mapping[ChunkKey, int]) -> None:
        """Record how many more saves of each chunk have ended, stored or not."""
        for key, count in num_objects.items():
            save = self._saves.get(key)
            if save is not None:
                save.num_objects -= count
                if save.num_objects <= 0:
                    self._remove(key)

    def withdraw(self, keys: Iterable[ChunkKey]) -> None:
        """Remove saves that were admitted and will not be carried out."""
        for key in keys:
            if key in self._saves:
                self._remove(key)

    def _has_room(self, num_bytes: int, kept_bytes: int) -> bool:
        """Return whether an owner with `kept_bytes` reserved can take `num_bytes`."""
        if num_bytes <= kept_bytes:
            return True
        others_bytes = self._used_bytes + self._kept_bytes - kept_bytes
        fits = not others_bytes or others_bytes + num_bytes <= self._limit_bytes
        return fits and not self._is_full

    def remove_unreported(self) -> None:
        """Remove the oldest saves if their end was never reported, e.g. if a worker was killed. To
        be called once a step."""
        while self._saves:
            key, oldest = next(iter(self._saves.items()))
            if self._clock_s() - oldest.ordered_s < _LOST_S:
                return
            self._remove(key)

    def _remove(self, key: ChunkKey) -> None:
        self._used_bytes -= self._saves.pop(key).num_bytes
        self._is_full = self._is_full_for_extra = False
