# SPDX-License-Identifier: Apache-2.0
"""Reads objects and verifies them as engines do: all, or a random sample of each namespace.

Like engines, it removes only what is proven to be damaged in the store: see `proof_missing`.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ecshare.store.errors import (
    ObjectCorrupt,
    ObjectForeign,
    ObjectMissing,
    ObjectUnreadable,
    StoreDenied,
)
from ecshare.store.format import unseal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key
from ecshare.store.objects import MOST_HASHED_BYTES, Memory, ObjectStat, probe, proof_missing, read
from ecshare.upkeep.calls import Calls, batched
from ecshare.upkeep.inventory import Inventory, Role

_AT_ONCE = 4
_MOST_DAMAGED = 100_000  # each costs memory for its key and a sentence


class Verified(Struct):
    """Counts what was found so far."""

    num_read: int = 0
    num_bytes: int = 0
    num_gone: int = 0
    """Objects that were removed after they had been listed."""
    num_foreign: int = 0
    """Intact objects without a MAC of the integrity key."""
    num_large: int = 0
    """Objects larger than 512 MiB, which are not read."""
    num_unreadable: int = 0
    """Objects that the store does not return to this user."""
    num_damaged: int = 0
    damaged: list[tuple[str, str]] = []
    """The keys of the first 100,000 of them, and what is wrong."""
    num_removed: int = 0


class Verification:
    """One verification of a store; `found` is filled while it runs."""

    def __init__(
        self, calls: Calls, inventory: Inventory, integrity: Integrity | None, *, repair: bool
    ) -> None:
        """Verify objects of `inventory`. `repair`: remove those proven to be damaged."""
        self.found = Verified()
        self._calls = calls
        self._inventory = inventory
        self._integrity = integrity
        self._repair = repair

    def choose(self, spaces: Sequence[int], sample: int | None) -> NDArray[np.int64]:
        """Return all objects in these spaces, or a random `sample` of each, in random order, so
        that an interrupted run has read objects of all spaces."""
        *_, numbers = self._inventory.arrays()
        own = [each for each in spaces if self._inventory.spaces[each].role is Role.OBJECTS]
        is_own = np.isin(numbers, np.array(own, np.uint32))
        chosen = np.random.default_rng().permutation(np.flatnonzero(is_own))
        if sample is None:
            return chosen
        by_space = np.argsort(numbers[chosen], kind="stable")
        _, starts, counts = np.unique(
            numbers[chosen][by_space], return_index=True, return_counts=True
        )
        place_in_space = np.arange(len(chosen)) - np.repeat(starts, counts)
        return chosen[np.sort(by_space[place_in_space < sample])]

    async def run(
        self, chosen: NDArray[np.int64], advance: Callable[[int], None] = lambda _: None
    ) -> None:
        """Read these objects of the inventory. `advance`: called with the number of objects read.

        Raises:
            StoreError: the store failed.
        """
        at_once = _AT_ONCE if self._calls.store.serves_many else 1
        for some in batched(self._inventory.keys(chosen), at_once):
            await asyncio.gather(*map(self._verify, some))
            advance(len(some))
        if self.found.num_gone:  # is the store itself gone?
            await self._calls.steady(lambda: probe(self._calls.store, write=False))

    async def _verify(self, key: Key) -> None:
        found, calls = self.found, self._calls
        sink = _Sink()
        try:
            await calls.steady(lambda: calls.store.get(key, sink))
            found.num_read += 1
            found.num_bytes += len(sink.body)
            # In a thread, so that other reads continue.
            await asyncio.to_thread(unseal, sink.body, key, integrity=self._integrity)
        except ObjectMissing:
            found.num_gone += 1
        except ObjectForeign:
            found.num_foreign += 1
        except ObjectUnreadable:
            found.num_unreadable += 1
        except ObjectCorrupt as exc:
            if sink.is_large:
                found.num_large += 1
            else:
                await self._add_damaged(key, str(exc))

    async def _add_damaged(self, key: Key, why: str) -> None:
        found = self.found
        found.num_damaged += 1
        if self._repair:
            stays = await self._remove(key)
            found.num_removed += stays is None
            why += f"; it stays: {stays}" if stays else ""
        if len(found.damaged) < _MOST_DAMAGED:
            found.damaged.append((str(key), why))

    async def _remove(self, key: Key) -> str | None:
        """Remove the object if its damage is proven. Return why it stays; None: it is gone."""
        calls = self._calls
        try:
            stated = await calls.steady(lambda: calls.store.stat(key))
            body = await calls.steady(lambda: read(calls.store, key, MOST_HASHED_BYTES))
            if reason := await asyncio.to_thread(self._proof_missing, key, stated, body):
                return reason
            await calls.steady(lambda: calls.store.delete([key]))
        except ObjectMissing:
            return None
        except (ObjectCorrupt, StoreDenied) as exc:
            return str(exc)
        return None

    def _proof_missing(self, key: Key, stated: ObjectStat, body: memoryview) -> str | None:
        try:
            unseal(body, key, integrity=self._integrity)
        except ObjectForeign as exc:
            return str(exc)
        except ObjectCorrupt:
            return proof_missing(stated, body)
        return "it is valid when read once more"


class _Sink(Memory):
    """Records whether it refused an object because of its size."""

    def __init__(self) -> None:
        super().__init__(MOST_HASHED_BYTES)
        self.is_large = False

    def begin(self, num_bytes: int) -> None:
        """See Sink."""
        self.is_large = num_bytes > MOST_HASHED_BYTES
        super().begin(num_bytes)
