# SPDX-License-Identifier: Apache-2.0
"""Removes what a person names: whole namespaces, or single embeddings.

Engines may store more of it meanwhile, so the listing is repeated until it finds nothing. Manifests
are removed last, so that an interrupted removal finds the same namespaces again.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ecshare.store.errors import ObjectCorrupt, StoreDenied, StoreError
from ecshare.store.keys import Key, Kind, kind_prefix, manifest_key, marks_prefix, namespace_prefix
from ecshare.upkeep.calls import PAGE, Calls, batched
from ecshare.upkeep.inventory import Inventory, Role
from ecshare.upkeep.listing import list_into
from ecshare.upkeep.selection import Namespace, Selection, read_namespaces
from ecshare.upkeep.uses import Ids

_BATCHES = 4  # of removals at once, where the store serves many calls
_MOST_ROUNDS = 10
MOST_EMBEDDINGS = 1 << 17
"""Items with more embeddings are not found by their identifiers."""
_HEX_OF_64_BITS = 16


def embedding_ids(identifiers: Iterable[str]) -> Ids:
    """Return the first 64 bits of the digests of all names that embeddings of these items may have.

    A name contains the number of embeddings, so all numbers are tried. Names of embeddings that
    were made with a LoRA adapter are not among them.
    """
    found = [
        hashlib.sha256(b"s%d::" % num + identifier.encode("utf-8", "surrogatepass")).digest()[:8]
        for identifier in identifiers
        for num in range(1, MOST_EMBEDDINGS + 1)
    ]
    return np.frombuffer(b"".join(found), ">u8").astype(np.uint64)


class Found(Struct):
    """The objects of one namespace that are to be removed."""

    namespace: Namespace
    num_objects: int
    num_bytes: int


class Removal:
    """One removal: `look` first, then `remove`."""

    def __init__(self, calls: Calls, selection: Selection, names: Ids | None = None) -> None:
        """Remove what is chosen; with `names` (see `embedding_ids`) only objects of these names."""
        self.found: list[Found] = []
        """What `remove` will remove, once `look` was called. A manifest may be all that is left."""
        self.known: list[Namespace] = []
        """All namespaces that have a manifest, chosen or not."""
        self.num_unknown = 0
        """Objects of namespaces without a manifest, whose model and tenant are unknown."""
        self.num_removed = 0
        self.num_late = 0
        """Of the removed objects, those that were stored after the removal began."""
        self.num_left = 0
        """Objects that remain: they cannot be removed, or engines store more all the time."""
        self.refusal: StoreError | None = None
        """The first error of an object that could not be removed, though the store serves."""
        self._calls = calls
        self._selection = selection
        self._names = names

    async def look(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """List what is chosen, and remove nothing. `advance`: called with the number of lines read.

        Raises:
            StoreError: the store failed.
        """
        selection = self._selection
        known = {}
        async for each in read_namespaces(self._calls, selection):
            known[each.kind, each.digest] = each
        self.known = [*known.values()]
        inventory = await self._listed(self._places(), advance)
        counts = self._counts(inventory)
        inventory.close()
        if self._names is None:
            counts = dict.fromkeys(known, (0, 0)) | counts
        for (kind, digest), (num, num_bytes) in counts.items():
            namespace = known.get((kind, digest))
            if namespace is None and selection.needs_facts:
                self.num_unknown += num
            namespace = namespace or Namespace(kind, digest)
            if selection.has(namespace):
                self.found.append(Found(namespace, num, num_bytes))
        self.found.sort(key=lambda each: each.num_bytes, reverse=True)

    async def remove(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """Remove what `look` has found. `advance`: called with the number of objects removed.

        Raises:
            StoreError: the store failed. What was removed is counted; run it again.
        """
        chosen = [each.namespace for each in self.found]
        places = [namespace_prefix(each.kind, each.digest) for each in chosen]
        for n in range(_MOST_ROUNDS):
            inventory = await self._listed(places, lambda _: None)
            try:
                numbers = np.flatnonzero(self._is_chosen(inventory) & _is_of(chosen, inventory))
                num_gone = await self._remove(inventory, numbers, advance)
            finally:
                inventory.close()
            self.num_late += num_gone if n else 0
            self.num_left = len(numbers) - num_gone
            if not num_gone:
                break
        else:
            self.num_left = num_gone  # as many as were stored since the round before
        if self._names is None and not self.num_left:
            keys = [key for each in chosen async for key in self._records(each)]
            for some in batched(keys, PAGE):
                await self._delete(some)

    def _places(self) -> list[str]:
        """Return the prefixes to list."""
        if self._selection.digests and self._names is None:
            return [
                namespace_prefix(kind, digest)
                for kind in self._selection.kinds
                for digest in sorted(self._selection.digests)
            ]
        return [kind_prefix(kind) for kind in self._selection.kinds]

    async def _listed(self, places: Sequence[str], advance: Callable[[int], None]) -> Inventory:
        inventory = Inventory()
        try:
            await list_into(inventory, self._calls, places, advance)
        except BaseException:
            inventory.close()
            raise
        return inventory

    def _is_chosen(self, inventory: Inventory) -> NDArray[np.bool_]:
        """Return of each object whether it has one of the names, if there are any."""
        ids, _, _, spaces = inventory.arrays()
        if self._names is None:
            return np.ones(len(ids), np.bool_)
        objects = np.array([each.role is Role.OBJECTS for each in inventory.spaces], np.bool_)
        digests = [int(each.namespace[:_HEX_OF_64_BITS] or "0", 16) for each in inventory.spaces]
        # See `use_id`.
        of_names = ids ^ np.array(digests, np.uint64)[spaces]
        return objects[spaces] & np.isin(of_names, self._names)

    def _counts(self, inventory: Inventory) -> dict[tuple[Kind, str], tuple[int, int]]:
        """Return the number and the bytes of the chosen objects of each namespace that has any."""
        _, sizes, _, spaces = inventory.arrays()
        is_chosen = self._is_chosen(inventory)
        chosen, num_spaces = spaces[is_chosen], len(inventory.spaces)
        numbers, totals = np.bincount(chosen, minlength=num_spaces), np.zeros(num_spaces, np.uint64)
        np.add.at(totals, chosen, sizes[is_chosen])
        counts: dict[tuple[Kind, str], tuple[int, int]] = {}
        for n in np.flatnonzero(numbers).tolist():
            space = inventory.spaces[n]
            if space.role is Role.REPORTS:  # a faulty server ignores the prefix of a listing
                continue
            key = Kind(space.kind), space.namespace
            num, num_bytes = counts.get(key, (0, 0))
            counts[key] = num + int(numbers[n]), num_bytes + int(totals[n])
        return counts

    async def _records(self, namespace: Namespace) -> AsyncIterator[Key]:
        """Yield the keys of a namespace's manifest and marks."""
        yield manifest_key(namespace.kind, namespace.digest)
        prefix = marks_prefix(namespace.kind, namespace.digest)
        async for page in self._calls.pages(self._calls.store.list(prefix)):
            for info in page:
                if info.key.startswith(prefix):
                    yield info.key

    async def _remove(
        self, inventory: Inventory, numbers: NDArray[np.int64], advance: Callable[[int], None]
    ) -> int:
        """Remove these objects; return how many are gone for certain."""
        num_before = self.num_removed
        parts = [numbers[start : start + PAGE] for start in range(0, len(numbers), PAGE)]
        for some in batched(parts, _BATCHES if self._calls.store.serves_many else 1):
            ended = await asyncio.gather(*(self._delete([*inventory.keys(part)]) for part in some))
            gone = sum(len(part) for part, is_gone in zip(some, ended, strict=True) if is_gone)
            self.num_removed += gone
            advance(gone)
        return self.num_removed - num_before

    async def _delete(self, keys: Sequence[Key]) -> bool:
        """Return whether all these objects are gone. One that cannot be removed stops no others.

        Raises:
            StoreError: the store failed.
        """
        try:
            await self._calls.steady(lambda: self._calls.store.delete(keys))
        except (StoreDenied, ObjectCorrupt) as exc:
            self.refusal = self.refusal or exc
            return False
        return True


def _is_of(chosen: Sequence[Namespace], inventory: Inventory) -> NDArray[np.bool_]:
    """Return of each object whether it is of one of these namespaces. A faulty server may list
    others."""
    digests = {(each.kind, each.digest) for each in chosen}
    is_of = [(each.kind, each.namespace) in digests for each in inventory.spaces]
    return np.array(is_of, np.bool_)[inventory.arrays()[3]]
