# SPDX-License-Identifier: Apache-2.0
"""Reads the notes and indexes of last uses from a store."""

import asyncio
import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ecshare.store.errors import ObjectCorrupt, ObjectMissing
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key, Kind, uses_prefix
from ecshare.store.objects import ObjectStore, read
from ecshare.upkeep.calls import Calls, batched
from ecshare.upkeep.inventory import Ages, Inventory, Part, Small
from ecshare.upkeep.listing import list_into
from ecshare.upkeep.uses import LIMIT_BYTES, Uses, unpack

_READS = 16
# Any writer to the store may add notes of any number and size.
_MOST_NOTES = 50_000
_MOST_NOTE_BYTES = 4 << 30
_MOST_UNMATCHED = 1 << 20
# How long to keep the use of an object that is not listed: its save may still be in flight.
_UNMATCHED_MINUTES = 60
_TRIES = 3


class Pace:
    """Pauses between parts of long work, so that other threads of the process go on."""

    def __init__(self, store: ObjectStore, rest: float = 0.0) -> None:
        """`rest`: how long to pause, as a multiple of the CPU time of the part before, with that of
        the threads in which `store`, used by this work alone, lists a folder."""
        self._store = store
        self._rest = rest
        self._begun_s = self._used_s()

    async def __call__(self) -> None:
        """Pause after one part of the work."""
        await asyncio.sleep(self._rest * (self._used_s() - self._begun_s))
        self._begun_s = self._used_s()

    def _used_s(self) -> float:
        in_threads = self._store.listing_s if isinstance(self._store, DirectoryStore) else 0.0
        return time.thread_time() + in_threads


class NoteReader:
    """Reads notes and indexes of some kinds of object."""

    def __init__(
        self, calls: Calls, kinds: Sequence[Kind], integrity: Integrity | None, pace: Pace
    ) -> None:
        """`integrity`: notes without its MAC are ignored."""
        self.prefixes = tuple(map(uses_prefix, kinds))
        """The prefixes of the keys of all notes to read."""
        self._calls = calls
        self._kinds = tuple(kinds)
        self._integrity = integrity
        self._pace = pace

    async def merge(
        self, inventory: Inventory, ages: Ages, now: int
    ) -> tuple[list[Key], dict[Kind, Uses]]:
        """Read all notes into `ages`; return their keys, and the uses of objects not in the store.

        `now`: minutes since 1970. Uses of other parts than the inventory's are left out.

        Raises:
            StoreError: the store failed.
        """
        merged: list[Key] = []
        unmatched = {kind: Uses.of([]) for kind in self._kinds}
        seen: set[Key] = set()
        pending = self._believed(inventory.uses)
        for _ in range(_TRIES):
            is_missing = False
            seen.update(note.key for note in pending)
            for some in batched(pending, _READS):
                bodies = await asyncio.gather(*(self._read(note.key) for note in some))
                for note, body in zip(some, bodies, strict=True):
                    is_missing |= body is None
                    uses = self._unpacked(body, note.key)
                    if uses is not None:
                        merged.append(note.key)
                        kind = Kind(note.key.split("/")[3])
                        left = ages.merge(uses, max(0, now - note.minute))
                        new = _new(left, inventory.part).cut(_MOST_UNMATCHED - len(unmatched[kind]))
                        unmatched[kind] = joined([unmatched[kind], new])
                await self._pace()
            if not is_missing:
                break
            pending = [note for note in await self._new_notes() if note.key not in seen]
        return merged, unmatched

    def _believed(self, notes: Sequence[Small]) -> list[Small]:
        """Return the latest of `notes`, within limits of number and bytes."""
        possible = [
            note
            for note in notes
            if note.num_bytes <= LIMIT_BYTES and note.key.startswith(self.prefixes)
        ]
        possible.sort(key=lambda note: note.minute, reverse=True)
        totals = accumulate(note.num_bytes for note in possible)
        latest = zip(possible[:_MOST_NOTES], totals, strict=False)
        return [note for note, total in latest if total <= _MOST_NOTE_BYTES]

    async def _new_notes(self) -> list[Small]:
        found = Inventory()
        try:
            await list_into(found, self._calls, self.prefixes)
            return self._believed(found.uses)
        finally:
            found.close()

    async def _read(self, key: Key) -> memoryview | None:
        """Return the bytes of a note; None: another cleaner has removed it."""
        try:
            return await self._calls.steady(lambda: read(self._calls.store, key, LIMIT_BYTES))
        except ObjectMissing:
            return None
        except ObjectCorrupt:
            return memoryview(b"")

    def _unpacked(self, body: memoryview | None, key: Key) -> Uses | None:
        try:
            return unpack(body, key, self._integrity) if body else None
        except ObjectCorrupt:
            return None


def _new(uses: Uses, part: Part) -> Uses:
    """Return the uses of names of `part` that may be stored soon."""
    chosen = (uses.ages <= _UNMATCHED_MINUTES) & (
        uses.ids % np.uint64(part.of) == np.uint64(part.number)
    )
    return Uses(uses.ids[chosen], uses.ages[chosen], uses.positions[chosen])


def joined(uses: Sequence[Uses]) -> Uses:
    """Return all these uses as one."""
    if not uses:
        return Uses.of([])
    names = ("ids", "ages", "positions")
    ids, ages, positions = (
        np.concatenate([getattr(each, name) for each in uses]) for name in names
    )
    return Uses(ids, ages, positions)
