# SPDX-License-Identifier: Apache-2.0
"""Cleans a store: one listing, a plan, removals, and an index of last uses for the next run.

A store with more objects than fit into memory is listed, planned and cleaned part by part.

It may be killed at any point and run again, and several may run at once. A cleaner stores its index
before it removes the notes that it has merged. If another cleaner removes a note before this one
reads it, this one lists the notes again, and finds the other one's index.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ecshare.store.errors import (
    ObjectCorrupt,
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
)
from ecshare.store.objects import ObjectStore, stored_at
from ecshare.upkeep.budget import Budget, Tenants
from ecshare.upkeep.calls import PAGE, Calls, batched
from ecshare.upkeep.inventory import WHOLE, Ages, Inventory, Role, TooManyObjects
from ecshare.upkeep.listing import Advance, list_into
from ecshare.upkeep.notes import NoteReader, Pace, joined
from ecshare.upkeep.plan import FOREVER, removals
from ecshare.upkeep.selection import read_all, read_namespace
from ecshare.upkeep.uses import Uses, pack

MOST_OBJECTS = 50_000_000
"""In memory: 5 GB while they are sorted."""
_MOST_REFUSED = 3  # one after the other
_BATCHES = 4  # of removals at once, where the store serves many calls
_MOST_MODELS = 256
# How long to keep a note that cannot be read, e.g. because it has a MAC of another key.
_UNREAD_MINUTES = 48 * 60
_LEFTOVER_MINUTES = 24 * 60
_TEMPORARY_S = 3600.0
# Between runs, for the growth of a store: two kinds of objects have cleaners of their own, and a
# person may run one at any time.
_SHORTEST_MINUTES, _LONGEST_MINUTES = 20, 24 * 60
# Manifests are renewed every 6 hours at least.
_FEWEST_RECORD_MINUTES = 12 * 60
_RECORD_MINUTES = 7 * 24 * 60
# Temporary files elsewhere are not ours, whatever their names.
_OURS = re.compile(r"(?:ec|kv|router|upkeep|probe)/")


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
    """From the manifest, as `tenant`: any writer to the store may have chosen it."""
    tenant: str = ""


class Report(Struct):
    """Counts what a run has found and done so far."""

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
    num_parts: int = 0
    """How many parts of the store were listed and cleaned; one, if its objects fit into memory."""


class _Progress(Struct):
    """What the parts of a run share."""

    now_s: float
    """By the store's clock, when the run began; 0: not known yet."""
    last_s: float
    """When the last run began; 0: there was none."""
    tenants: Tenants | None = None
    living: set[tuple[str, str]] = set()
    """Kind and namespace of all that have objects that stay."""
    merged: list[Key] | None = None
    """The notes that all parts have merged."""

    @property
    def now(self) -> int:
        """Return the minute at which the run began."""
        return int(self.now_s // 60)


class Cleaner:
    """One run. `report` is updated while it runs, and is valid if it fails."""

    def __init__(  # noqa: PLR0913 — the terms of a run
        self,
        store: ObjectStore,
        budget: Budget,
        *,
        integrity: Integrity | None = None,
        kinds: Sequence[Kind] = tuple(Kind),
        timeout_s: float = 60.0,
        rest: float = 0.0,
        most_s: float = float("inf"),
        most_objects: int = MOST_OBJECTS,
        is_dry: bool = False,
    ) -> None:
        """Clean `store`, or with `is_dry` only plan to.

        `integrity`: notes without its MAC are ignored. `kinds`: those of the objects to clean.
        `timeout_s`: for each call of the store. `rest`: see `Pace`. `most_s`: seconds after which
        it removes no more. `most_objects`: the most in memory, 110 bytes each; a store with more is
        cleaned in parts.
        """
        self.report = Report()
        self._budget = budget
        self._integrity = integrity
        self._kinds = tuple(kinds)
        self._calls = Calls(store, timeout_s)
        self._pace = Pace(store, rest)
        self._notes = NoteReader(self._calls, kinds, integrity, self._pace)
        self._most_s = most_s
        self._most_objects = most_objects
        self._is_dry = is_dry
        self._begun_s = time.monotonic()
        self._refusal: StoreError | None = None
        """The first error of an object that could not be removed, though the store serves."""

    async def run(self, advance: Advance = lambda _: None) -> Report:
        """Clean, and return the report. `advance`: called with the number of keys that were listed,
        and of objects that were removed, since the last call.

        Raises:
            StoreError: the store failed. What was done is consistent; run again.
        """
        progress = _Progress(*await self._mark())
        parts = [WHOLE]
        while parts and self.report.is_whole:
            inventory = Inventory(self._most_objects, parts[-1])
            try:
                temporary = await self._list(inventory, advance)
                parts.pop()
                self.report.num_parts += 1
                await self._clean(inventory, progress, advance)
                if not parts:
                    await self._clean_others(inventory, temporary, progress)
            except TooManyObjects:
                parts = [half for part in parts for half in part.halves()]
            finally:
                inventory.close()
        if self._refusal is not None:
            raise self._refusal
        return self.report

    async def _clean(self, inventory: Inventory, progress: _Progress, advance: Advance) -> None:
        """Remove objects of one part, and write what is known of the others."""
        progress.now_s = progress.now_s or inventory.latest_s
        now, last = progress.now, int(progress.last_s // 60)
        ages = inventory.ages(now)
        merged, unmatched = await self._notes.merge(inventory, ages, now)
        if progress.tenants is None:
            progress.tenants = await self._tenants(inventory)
        # The first run of a store does not know how fast it grows.
        interval = min(max(now - last, _SHORTEST_MINUTES), _LONGEST_MINUTES)
        growth = inventory.growth(now - interval) if last else ()
        rules = self._budget.rules(inventory.spaces, progress.tenants, growth, inventory.part.of)
        chosen = removals(ages.candidates(), rules) if inventory.spaces else np.zeros(0, np.int64)
        await self._pace()
        if progress.merged is not None:
            merged = list({*progress.merged} & {*merged})
        progress.merged = merged
        report = self.report
        report.num_foreign, report.num_notes = inventory.num_foreign, len(merged)
        report.num_to_remove += len(chosen)
        report.rows = _rows(inventory, chosen, report.rows)
        removed = chosen
        if not self._is_dry:
            removed = await self._remove(inventory, chosen, advance)
            # Exact: if the ages in an index were rounded anew in each run, they would drift.
            later = int((progress.now_s + time.monotonic() - self._begun_s) // 60) - now
            await self._write_index(inventory, ages, removed, unmatched, later)
        # With `removed` and not `chosen`: a namespace keeps its manifest if a removal was refused.
        progress.living |= _living(inventory, removed)

    async def _clean_others(
        self, inventory: Inventory, temporary: Sequence[TemporaryFile], progress: _Progress
    ) -> None:
        """Remove what is left when all parts are clean."""
        merged, store = progress.merged or [], self._calls.store
        others = self._others(inventory, progress)
        left = [
            file
            for file in temporary
            if progress.now_s - file.modified_s > _TEMPORARY_S and _OURS.match(file.path)
        ]
        if not self._is_dry:
            for some in batched([*others, *merged], PAGE):
                await self._delete(some)
            if left and isinstance(store, DirectoryStore):
                await store.remove_temporary(left)
        self.report.num_others_removed = len(others)
        self.report.num_temporary_removed = len(left)

    async def name_models(self) -> None:
        """Fill in the models and tenants of the rows, as far as there are manifests.

        Raises:
            StoreError: the store failed.
        """
        kinds = {str(kind): kind for kind in Kind}
        for row in [row for row in self.report.rows if row.namespace][:_MOST_MODELS]:
            found = await read_namespace(self._calls, kinds[row.kind], row.namespace)
            if found is not None:
                row.model, row.tenant = found.model, found.tenant

    # --- reading ---

    async def _tenants(self, inventory: Inventory) -> dict[tuple[str, str], str]:
        """Return the tenants of all namespaces that have a manifest, if the budget names tenants.

        Raises:
            StoreError: the store failed.
        """
        if not self._budget.has_tenants:
            return {}
        tenants = {}
        for kind in self._kinds:
            digests = [digest for each, digest in inventory.records if each == kind]
            async for found in read_all(self._calls, kind, digests):
                tenants[str(kind), found.digest] = found.tenant
                await self._pace()
        return tenants

    async def _mark(self) -> tuple[float, float]:
        """Record that this store is cleaned, so that engines note their uses.

        Return the time by the store's clock, and that of the last run, in seconds since 1970. The
        first is 0 if the store is full, or does not write for another reason; the second is 0 if
        there was no run. A dry run writes nothing, so it takes this host's time.

        Raises:
            StoreUnavailable: the store states no times.
        """
        calls, store = self._calls, self._calls.store
        last_s = await calls.steady(lambda: stored_at(store, CLEANED_PREFIX, CLEANED_KEY))
        if self._is_dry:
            return time.time(), last_s
        try:
            await calls.steady(lambda: store.put(CLEANED_KEY, b"ecshare", replace=True))
            now_s = await calls.steady(lambda: stored_at(store, CLEANED_PREFIX, CLEANED_KEY))
        except StoreUnavailable:  # a full quota may be a denial; other faults will show again
            return 0.0, last_s
        if now_s <= 0:
            raise StoreUnavailable("the store does not state when objects were stored")
        return now_s, last_s

    async def _list(self, inventory: Inventory, advance: Advance) -> list[TemporaryFile]:
        """List the store; return the temporary files that it has."""
        prefixes = [*(f"{kind}/" for kind in self._kinds), UPKEEP_PREFIX]
        if len(self._kinds) == len(Kind):
            prefixes = [""]
        store, temporary = self._calls.store, list[TemporaryFile]()
        listing = store.list
        if isinstance(store, DirectoryStore):
            listing = partial(store.list_into, temporary=temporary)
        await list_into(inventory, self._calls, prefixes, advance, rest=self._pace, listing=listing)
        return temporary

    # --- writing ---

    async def _remove(
        self, inventory: Inventory, chosen: NDArray[np.int64], advance: Advance
    ) -> NDArray[np.int64]:
        """Remove objects in order, so that the rest can be used after a failure. Return those that
        were removed, without those of batches that were refused, of which some may be gone."""
        removed = [np.zeros(0, np.int64)]
        at_once = _BATCHES if self._calls.store.serves_many else 1
        batches = batched(range(0, len(chosen), PAGE), at_once)
        num_refused = 0
        for starts in batches:
            if time.monotonic() - self._begun_s > self._most_s:
                self.report.is_whole = False
                break
            parts = [chosen[start : start + PAGE] for start in starts]
            ended = await asyncio.gather(*(self._delete([*inventory.keys(part)]) for part in parts))
            gone = [part for part, is_gone in zip(parts, ended, strict=True) if is_gone]
            removed += gone
            num_gone = sum(map(len, gone))
            advance(num_gone)
            self.report.num_removed += num_gone
            num_refused = 0 if any(ended) else num_refused + 1
            if num_refused == _MOST_REFUSED:  # the cause is not in single objects
                break
            await self._pace()
        return np.concatenate(removed)

    async def _delete(self, keys: Sequence[Key]) -> bool:
        """Return whether all these objects are gone. One that cannot be removed does not end the
        run, because the next run would meet it first.

        Raises:
            StoreError: the store failed.
        """
        try:
            await self._calls.steady(lambda: self._calls.store.delete(keys))
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
        """Store the last uses of all objects that stay. `later`: minutes since `ages` was made."""
        for kind in self._kinds:
            spaces = [n for n, space in enumerate(inventory.spaces) if space.kind == kind]
            known = joined([ages.index(removed, spaces, later), unmatched[kind]])
            for part in known.parts():
                key = new_uses_key(kind)
                body = pack(part, key, self._integrity)
                await self._calls.steady(partial(self._calls.store.put, key, body))
                await self._pace()

    def _others(self, inventory: Inventory, progress: _Progress) -> list[Key]:
        """Return the keys of small objects that are old and useless, when all parts are clean."""
        now, tenants = progress.now, progress.tenants or {}
        old = [each.key for each in inventory.leftovers if now - each.minute > _LEFTOVER_MINUTES]
        were_merged = {*(progress.merged or ())}
        old += [
            note.key
            for note in inventory.uses
            if note.key not in were_merged
            and now - note.minute > _UNREAD_MINUTES
            and note.key.startswith(self._notes.prefixes)
        ]
        for (kind, namespace), records in inventory.records.items():
            ttl = self._budget.ttl_minutes(kind, namespace, tenants.get((kind, namespace), ""))
            most = max(_RECORD_MINUTES if ttl == FOREVER else ttl, _FEWEST_RECORD_MINUTES)
            is_old = now - max(record.minute for record in records) > most
            if is_old and (kind, namespace) not in progress.living:
                old += [record.key for record in records]
        return old


def _living(inventory: Inventory, removed: NDArray[np.int64]) -> set[tuple[str, str]]:
    """Return kind and namespace of all that keep objects when `removed` are gone."""
    _, _, _, spaces = inventory.arrays()
    stays = np.ones(len(spaces), np.bool_)
    stays[removed] = False
    kept = (inventory.spaces[number] for number in np.unique(spaces[stays]).tolist())
    return {
        (each.kind, each.namespace) for each in kept if each.role in (Role.OBJECTS, Role.BUFFER)
    }


def _rows(inventory: Inventory, chosen: NDArray[np.int64], before: Sequence[Row]) -> list[Row]:
    """Return the rows of this part and of those `before`."""
    _, sizes, _, spaces = inventory.arrays()
    num = len(inventory.spaces)
    counts = np.bincount(spaces, minlength=num), np.bincount(spaces[chosen], minlength=num)
    totals = np.zeros(num, np.uint64), np.zeros(num, np.uint64)
    np.add.at(totals[0], spaces, sizes)
    np.add.at(totals[1], spaces[chosen], sizes[chosen])
    rows = {(row.kind, row.namespace, row.what): row for row in before}
    for n, space in enumerate(inventory.spaces):
        place = space.kind, space.namespace, space.role.value
        row = rows.setdefault(place, Row(*place, 0, 0, 0, 0))
        row.num_objects += int(counts[0][n])
        row.num_bytes += int(totals[0][n])
        row.num_removed += int(counts[1][n])
        row.removed_bytes += int(totals[1][n])
    return sorted(rows.values(), key=lambda row: row.num_bytes, reverse=True)
