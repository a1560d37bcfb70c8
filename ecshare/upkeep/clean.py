# SPDX-License-Identifier: Apache-2.0
"""Cleans a store: one listing, a plan, removals, and an index of last uses for the next run.

It may be killed at any point and run again, and several may run at once. What one has read and
removed of notes is in its index, which it writes first. A cleaner that misses a note because
another has removed it meanwhile lists the notes again, and finds that index.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import accumulate, islice
from typing import TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ecshare.store.errors import (
    ObjectCorrupt,
    ObjectMissing,
    StoreBusy,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from ecshare.store.folder.store import DirectoryStore, TemporaryFile
from ecshare.store.integrity import Integrity
from ecshare.store.keys import (
    CLEANED_KEY,
    CLEANED_PREFIX,
    UPKEEP_PREFIX,
    Key,
    Kind,
    new_uses_key,
    uses_prefix,
)
from ecshare.store.manifest import read_manifest
from ecshare.store.objects import ObjectInfo, ObjectStore, read
from ecshare.upkeep.budget import Budget
from ecshare.upkeep.inventory import Ages, Inventory, Role, Small
from ecshare.upkeep.plan import FOREVER, removals
from ecshare.upkeep.uses import LIMIT_BYTES, Uses, pack, unpack

T = TypeVar("T")

_PAGE = 1000
_SLICE = 50  # lines of a listing: a hook of an engine waits no longer than for these
_MOST_REFUSED = 3  # one after the other
_BATCHES = 4  # of removals at once, where the store serves many calls
_READS = 16
# Any writer to the store may add notes of any number and size.
_MOST_NOTES = 50_000
_MOST_NOTE_BYTES = 4 << 30
_MOST_UNMATCHED = 1 << 20
_MOST_MODELS = 256
# A note that could not be read, e.g. because it has a MAC of another key, is kept for so long.
_UNREAD_MINUTES = 48 * 60
# A use of an object that is not listed yet: its save may be under way.
_UNMATCHED_MINUTES = 60
_LEFTOVER_MINUTES = 24 * 60
_TEMPORARY_S = 3600.0
# Manifests are renewed every 6 hours at least.
_FEWEST_RECORD_MINUTES = 12 * 60
_RECORD_MINUTES = 7 * 24 * 60
# Temporary files elsewhere are not ours, whatever their names.
_OURS = re.compile(r"(?:ec|kv|router|upkeep|probe)/")
_TRIES = 3
_PAUSE_S = 1.0


class Pace:
    """Rests between parts of the work, `rest` times as long as they took."""

    def __init__(self, rest: float = 0.0) -> None:
        """`rest`: 0 for a process of its own; more within an engine."""
        self._rest = rest
        self._begun_s = time.thread_time()

    async def __call__(self) -> None:
        """End one part of the work."""
        used_s = time.thread_time() - self._begun_s
        await asyncio.sleep(self._rest * used_s)
        self._begun_s = time.thread_time()


class Row(Struct):
    """One line of a report: what a space had, and what of it was removed."""

    kind: str
    namespace: str
    what: str
    num_objects: int
    num_bytes: int
    num_removed: int
    removed_bytes: int
    model: str = ""
    """From the manifest: any writer to the store may have chosen it."""


class Report(Struct):
    """What a run has found and done so far."""

    rows: list[Row] = []
    num_to_remove: int = 0
    num_removed: int = 0
    num_others_removed: int = 0
    """Old notes, leases, manifests and the like."""
    num_temporary_removed: int = 0
    num_notes: int = 0
    """Notes and indexes that were merged."""
    num_foreign: int = 0
    """Keys that are not ours, which are left alone."""
    is_whole: bool = True
    """False: the run ended before all was removed, because its time was over."""


class Cleaner:
    """One run. `report` is filled while it runs, and says how far it came if it fails."""

    def __init__(  # noqa: PLR0913 — the terms of a run
        self,
        store: ObjectStore,
        budget: Budget,
        *,
        integrity: Integrity | None = None,
        kinds: Sequence[Kind] = tuple(Kind),
        timeout_s: float = 60.0,
        pace: Pace | None = None,
        most_s: float = float("inf"),
        is_dry: bool = False,
    ) -> None:
        """Clean `store`, or with `is_dry` only plan to.

        `integrity`: notes without its MAC are not believed. `kinds`: of which objects. `timeout_s`:
        for each call of the store. `most_s`: no removals after so long.
        """
        self.report = Report()
        self._store = store
        self._budget = budget
        self._integrity = integrity
        self._kinds = tuple(kinds)
        self._prefixes = tuple(map(uses_prefix, kinds))
        self._timeout_s = timeout_s
        self._pace = pace or Pace()
        self._most_s = most_s
        self._is_dry = is_dry
        self._begun_s = time.monotonic()
        self._refusal: StoreError | None = None
        """The first error of an object that could not be removed, though the store serves."""

    async def run(self) -> Report:
        """Clean, and return the report.

        Raises:
            StoreError: the store failed. All that was done is whole; run again.
        """
        inventory, temporary = Inventory(), list[TemporaryFile]()
        try:
            # A dry run writes nothing, so it cannot learn the store's time.
            now_s = time.time() if self._is_dry else await self._mark()
            await self._list(inventory, temporary)
            await self._clean(inventory, temporary, now_s)
        finally:
            inventory.close()
        return self.report

    async def _clean(
        self, inventory: Inventory, temporary: Sequence[TemporaryFile], now_s: float
    ) -> None:
        now = int(now_s // 60)
        ages = inventory.ages(now)
        merged, unmatched = await self._merge(inventory, ages, now)
        rules = self._budget.rules(inventory.spaces)
        chosen = removals(ages.candidates(), rules) if inventory.spaces else np.zeros(0, np.int64)
        await self._pace()
        self.report.num_foreign = inventory.num_foreign
        self.report.num_notes = len(merged)
        self.report.num_to_remove = len(chosen)
        self.report.rows = _rows(inventory, chosen)
        left = [
            file
            for file in temporary
            if now_s - file.modified_s > _TEMPORARY_S and _OURS.match(file.path)
        ]
        if self._is_dry:
            self.report.num_others_removed = len(self._others(inventory, chosen, merged, now))
            self.report.num_temporary_removed = len(left)
            return
        removed = await self._remove(inventory, chosen)
        # Exact: if the ages in an index were rounded anew in each run, they would drift.
        later = int((now_s + time.monotonic() - self._begun_s) // 60) - now
        await self._write_index(inventory, ages, removed, unmatched, later)
        # A namespace of which objects stay, although they were chosen, keeps its manifest.
        others = self._others(inventory, removed, merged, now)
        for some in _batched([*others, *merged], _PAGE):
            await self._delete(some)
        self.report.num_others_removed = len(others)
        if left and isinstance(self._store, DirectoryStore):
            await self._store.remove_temporary(left)
            self.report.num_temporary_removed = len(left)
        if self._refusal is not None:
            raise self._refusal

    async def name_models(self) -> None:
        """Fill in the models of the rows, as far as there are manifests.

        Raises:
            StoreError: the store failed.
        """
        kinds = {str(kind): kind for kind in Kind}
        for row in [row for row in self.report.rows if row.namespace][:_MOST_MODELS]:
            try:
                facts = await self._steady(
                    lambda row=row: read_manifest(self._store, kinds[row.kind], row.namespace)  # type: ignore[misc]
                )
            except ObjectCorrupt:
                continue
            row.model = str((facts or {}).get("model", ""))

    # --- reading ---

    async def _mark(self) -> float:
        """Record that this store is cleaned, so that engines note their uses. Return the time by
        the store's clock.

        Raises:
            StoreUnavailable: the store states no times.
        """
        await self._steady(lambda: self._store.put(CLEANED_KEY, b"ecshare", replace=True))
        async for page in self._pages(self._store.list(CLEANED_PREFIX)):
            for info in page:
                if info.key == CLEANED_KEY and info.modified_s > 0:
                    return info.modified_s
        raise StoreUnavailable("the store does not state when objects were stored")

    async def _list(self, inventory: Inventory, temporary: list[TemporaryFile]) -> None:
        """List the store."""
        prefixes = [*(f"{kind}/" for kind in self._kinds), UPKEEP_PREFIX]
        for prefix in [""] if len(self._kinds) == len(Kind) else prefixes:
            if isinstance(self._store, DirectoryStore):
                listing = self._store.list_into(prefix, temporary)
            else:
                listing = self._store.list(prefix)
            async for page in self._pages(listing):
                for some in _batched(page, _SLICE):
                    for info in some:
                        inventory.add(info)
                    await self._pace()

    async def _pages(self, listing: AsyncIterator[ObjectInfo]) -> AsyncIterator[list[ObjectInfo]]:
        """Yield the lines of a listing, some at a time.

        Raises:
            StoreError: the store failed, or does not go on.
        """
        async with aclosing(listing):  # type: ignore[type-var]
            while True:
                page: list[ObjectInfo] = []
                try:
                    async with asyncio.timeout(self._timeout_s):
                        async for info in listing:
                            page.append(info)
                            if len(page) == _PAGE:
                                break
                except TimeoutError:
                    raise self._late("the listing") from None
                if not page:
                    return
                yield page

    async def _merge(
        self, inventory: Inventory, ages: Ages, now: int
    ) -> tuple[list[Key], dict[Kind, Uses]]:
        """Read notes and indexes; return those that were, and uses of what is not stored yet."""
        merged: list[Key] = []
        unmatched: dict[Kind, list[Uses]] = {kind: [] for kind in self._kinds}
        seen: set[Key] = set()
        pending = self._believed(inventory.uses)
        for _ in range(_TRIES):
            is_missing = False
            seen.update(note.key for note in pending)
            for some in _batched(pending, _READS):
                bodies = await asyncio.gather(*(self._note(note.key) for note in some))
                for note, body in zip(some, bodies, strict=True):
                    is_missing |= body is None
                    uses = self._unpacked(body, note.key)
                    if uses is not None:
                        merged.append(note.key)
                        kind = Kind(note.key.split("/")[3])
                        unmatched[kind].append(_recent(ages.merge(uses, max(0, now - note.minute))))
                await self._pace()
            if not is_missing:
                break
            pending = [note for note in await self._new_notes() if note.key not in seen]
        return merged, {
            kind: _joined(uses).cut(_MOST_UNMATCHED) for kind, uses in unmatched.items()
        }

    def _believed(self, notes: Sequence[Small]) -> list[Small]:
        """Return the notes to read: the latest ones, within limits."""
        possible = [
            note
            for note in notes
            if note.num_bytes <= LIMIT_BYTES and note.key.startswith(self._prefixes)
        ]
        possible.sort(key=lambda note: note.minute, reverse=True)
        totals = accumulate(note.num_bytes for note in possible)
        believed = zip(possible[:_MOST_NOTES], totals, strict=False)
        return [note for note, total in believed if total <= _MOST_NOTE_BYTES]

    async def _new_notes(self) -> list[Small]:
        found = Inventory()
        try:
            for kind in self._kinds:
                async for page in self._pages(self._store.list(uses_prefix(kind))):
                    for info in page:
                        found.add(info)
            return self._believed(found.uses)
        finally:
            found.close()

    async def _note(self, key: Key) -> memoryview | None:
        """Return the bytes of a note; None: another cleaner has removed it."""
        try:
            return await self._steady(lambda: read(self._store, key, LIMIT_BYTES))
        except ObjectMissing:
            return None
        except ObjectCorrupt:
            return memoryview(b"")

    def _unpacked(self, body: memoryview | None, key: Key) -> Uses | None:
        try:
            return unpack(body, key, self._integrity) if body else None
        except ObjectCorrupt:
            return None

    # --- writing ---

    async def _remove(self, inventory: Inventory, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Remove objects in order, so that what is left after a failure is of use. Return those
        that were removed; of a batch that is refused none counts, though some may be gone."""
        removed = [np.zeros(0, np.int64)]
        batches = _batched(range(0, len(chosen), _PAGE), _BATCHES if self._store.serves_many else 1)
        num_refused = 0
        for starts in batches:
            if time.monotonic() - self._begun_s > self._most_s:
                self.report.is_whole = False
                break
            parts = [chosen[start : start + _PAGE] for start in starts]
            ended = await asyncio.gather(*(self._delete([*inventory.keys(part)]) for part in parts))
            removed += [part for part, is_gone in zip(parts, ended, strict=True) if is_gone]
            self.report.num_removed = sum(map(len, removed))
            num_refused = 0 if any(ended) else num_refused + 1
            if num_refused == _MOST_REFUSED:  # it is not a matter of single objects
                break
            await self._pace()
        return np.concatenate(removed)

    async def _delete(self, keys: Sequence[Key]) -> bool:
        """Return whether all these objects are gone. One that cannot be removed does not end the
        run: the next one would meet it again, before all others.

        Raises:
            StoreError: the store failed.
        """
        try:
            await self._steady(lambda: self._store.delete(keys))
        except (StoreDenied, ObjectCorrupt) as exc:
            self._refusal = self._refusal or exc
            return False
        return True

    async def _write_index(
        self,
        inventory: Inventory,
        ages: Ages,
        removed: NDArray[np.int64],
        unmatched: dict[Kind, Uses],
        later: int,
    ) -> None:
        """Store what is known of all that stays. `later`: the minutes since the ages were taken."""
        for kind in self._kinds:
            spaces = [n for n, space in enumerate(inventory.spaces) if space.kind == kind]
            known = _joined([ages.index(removed, spaces, later), unmatched[kind]])
            for part in known.parts():
                key = new_uses_key(kind)
                body = pack(part, key, self._integrity)
                await self._steady(lambda key=key, body=body: self._store.put(key, body))  # type: ignore[misc]
                await self._pace()

    def _others(
        self, inventory: Inventory, removed: NDArray[np.int64], merged: Sequence[Key], now: int
    ) -> list[Key]:
        """Return the keys of what else is to be removed without the objects `removed`: what is old,
        and of no use."""
        old = [each.key for each in inventory.leftovers if now - each.minute > _LEFTOVER_MINUTES]
        were_merged = set(merged)
        old += [
            note.key
            for note in inventory.uses
            if note.key not in were_merged
            and now - note.minute > _UNREAD_MINUTES
            and note.key.startswith(self._prefixes)
        ]
        living = _living(inventory, removed)
        for (kind, namespace), records in inventory.records.items():
            ttl = self._budget.ttl_minutes(kind, namespace)
            most = max(_RECORD_MINUTES if ttl == FOREVER else ttl, _FEWEST_RECORD_MINUTES)
            is_old = now - max(record.minute for record in records) > most
            if is_old and (kind, namespace) not in living:
                old += [record.key for record in records]
        return old

    async def _steady(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call of the store. Repeat it if the store is busy.

        Raises:
            StoreError: the store failed, or gave no answer.
        """
        for left in reversed(range(_TRIES)):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await call()
            except StoreBusy:
                if not left:
                    raise
            except TimeoutError:
                if not left:
                    raise self._late("an operation") from None
            await asyncio.sleep(_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    def _late(self, what: str) -> StoreUnavailable:
        return StoreUnavailable(f"{what} did not end within {self._timeout_s:g} s")


def _batched(items: Iterable[T], num: int) -> Iterator[list[T]]:
    left = iter(items)
    while some := list(islice(left, num)):
        yield some


def _living(inventory: Inventory, removed: NDArray[np.int64]) -> set[tuple[str, str]]:
    """Return kind and namespace of all that have objects without those `removed`."""
    _, _, _, spaces = inventory.arrays()
    stays = np.ones(len(spaces), np.bool_)
    stays[removed] = False
    kept = (inventory.spaces[number] for number in np.unique(spaces[stays]).tolist())
    return {
        (each.kind, each.namespace) for each in kept if each.role in (Role.OBJECTS, Role.BUFFER)
    }


def _rows(inventory: Inventory, chosen: NDArray[np.int64]) -> list[Row]:
    _, sizes, _, spaces = inventory.arrays()
    num = len(inventory.spaces)
    counts = np.bincount(spaces, minlength=num), np.bincount(spaces[chosen], minlength=num)
    totals = np.zeros(num, np.uint64), np.zeros(num, np.uint64)
    np.add.at(totals[0], spaces, sizes)
    np.add.at(totals[1], spaces[chosen], sizes[chosen])
    rows = [
        Row(
            space.kind,
            space.namespace,
            space.role.value,
            int(counts[0][n]),
            int(totals[0][n]),
            int(counts[1][n]),
            int(totals[1][n]),
        )
        for n, space in enumerate(inventory.spaces)
    ]
    return sorted(rows, key=lambda row: row.num_bytes, reverse=True)


def _recent(uses: Uses) -> Uses:
    recent = uses.ages <= _UNMATCHED_MINUTES
    return Uses(uses.ids[recent], uses.ages[recent], uses.positions[recent])


def _joined(uses: Sequence[Uses]) -> Uses:
    """Return all these uses as one."""
    if not uses:
        return Uses.of([])
    names = ("ids", "ages", "positions")
    ids, ages, positions = (
        np.concatenate([getattr(each, name) for each in uses]) for name in names
    )
    return Uses(ids, ages, positions)
