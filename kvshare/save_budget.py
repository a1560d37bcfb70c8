# SPDX-License-Identifier: Apache-2.0
"""The memory of the workers that ordered saves take."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ecshare.store.format import PROLOGUE_BYTES
from ecshare.transfer.staging import slab_bytes
from kvshare.prefix import ChunkKey

T = TypeVar("T")
SlabBytes = Callable[[int, int], int]
"""The memory that a rank needs to save so many blocks (the second) of a layer set (its number)."""

# A worker reports the end of each save. If it has not for so long, it never will.
_LOST_S = 120.0


def slab_sizes(block_bytes: Sequence[int]) -> SlabBytes:
    """Return a function for the size of slabs. `block_bytes`: of one block, by layer set."""

    def slab_bytes_of(layer_set: int, num_blocks: int) -> int:
        payload = num_blocks * block_bytes[layer_set]
        return slab_bytes(PROLOGUE_BYTES + payload)

    return slab_bytes_of


@dataclass(slots=True)
class _Save(Generic[T]):
    owner: T
    num_bytes: int
    num_objects: int
    """Those that have not ended yet."""
    ordered_s: float


class SaveBudget(Generic[T]):
    """Admits saves as long as the workers have memory for them.

    So the scheduler half knows at once what is not saved, and a worker need not drop a save that
    was ordered. Each rank has `limit_bytes`, and saves its part of each chunk.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, limit_bytes: int, clock_s: Callable[[], float]) -> None:
        """Begin with nothing ordered. `clock_s`: monotonic seconds."""
        self._limit_bytes = limit_bytes
        self._clock_s = clock_s
        self._saves: dict[ChunkKey, _Save[T]] = {}  # the oldest first
        self._used_bytes = 0
        self._is_full = False

    def admit(self, key: ChunkKey, num_bytes: int, num_objects: int, owner: T) -> bool:
        """Admit a save of `num_bytes` per rank, which stores `num_objects` over all ranks.

        False: there is no room. Nothing is admitted then until some save has ended, so that small
        saves do not overtake a large one. A save larger than the limit is admitted alone.
        """
        self._give_up_lost()
        if self._is_full or (self._used_bytes and self._used_bytes + num_bytes > self._limit_bytes):
            self._is_full = True
            return False
        # It may be ordered again before the first order has ended.
        before = self._saves.pop(key, None)
        if before is not None:
            num_objects += before.num_objects
            num_bytes += before.num_bytes
            self._used_bytes -= before.num_bytes
        self._saves[key] = _Save(owner, num_bytes, num_objects, self._clock_s())
        self._used_bytes += num_bytes
        return True

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
