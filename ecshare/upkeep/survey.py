# SPDX-License-Identifier: Apache-2.0
"""Counts the objects of a store by model, kind, namespace, day, or last use. Writes nothing."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ecshare.store.integrity import Integrity
from ecshare.store.keys import Kind, kind_prefix, namespace_prefix, uses_prefix
from ecshare.upkeep.calls import Calls
from ecshare.upkeep.inventory import Inventory, Role
from ecshare.upkeep.listing import list_into
from ecshare.upkeep.notes import NoteReader, Pace
from ecshare.upkeep.selection import Namespace, Selection, read_namespaces
from ecshare.upkeep.uses import Numbers

_DAY_MINUTES = 1440
_RANGES = ((60, "1 h"), (1440, "1 d"), (3 * 1440, "3 d"), (7 * 1440, "7 d"), (30 * 1440, "30 d"))
_OLDER = "longer ago"
_NO_MANIFEST = "(no manifest)"


class By(StrEnum):
    """How objects are grouped."""

    MODEL = "model"
    TENANT = "tenant"
    KIND = "kind"
    NAMESPACE = "namespace"
    DAY = "day"
    USE = "use"


class Group(Struct):
    """One line. Names come from the store, and may be hostile."""

    name: str
    num_objects: int
    num_bytes: int
    stored: tuple[int, int]
    """The minutes at which the oldest and the youngest object were stored, since 1970."""
    used: int
    """The minutes since the last use of any object."""
    namespace: Namespace | None = None
    """The namespace, if the group has only one."""


class Survey:
    """One reading of a store. `close` removes its temporary file."""

    def __init__(self, calls: Calls, selection: Selection, integrity: Integrity | None) -> None:
        """Read what is chosen. `integrity`: notes of use without its MAC are ignored."""
        self.inventory = Inventory()
        self.now = int(time.time() // 60)
        """The minute at which it was read, since 1970."""
        self._calls = calls
        self._selection = selection
        self._integrity = integrity
        self._names: dict[tuple[str, str], Namespace] = {}
        self._last_uses: Numbers = np.zeros(0, np.uint32)
        self._chosen: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def close(self) -> None:
        """Remove the file with the names of objects."""
        self.inventory.close()

    async def read(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """List the store. `advance`: called with the number of keys of each page.

        Raises:
            StoreError: the store failed.
        """
        if self._selection.needs_facts:
            await self._read_names()
        await list_into(self.inventory, self._calls, self._prefixes(), advance)

    async def describe(self) -> None:
        """Read what else `groups` needs: manifests, and notes of use.

        Raises:
            StoreError: the store failed.
        """
        if not self._selection.needs_facts:
            await self._read_names()
        ages = self.inventory.ages(self.now)
        reader = NoteReader(
            self._calls, self._selection.kinds, self._integrity, Pace(self._calls.store)
        )
        await reader.merge(self.inventory, ages, self.now)
        self._last_uses = ages.candidates().ages
        *_, numbers = self.inventory.arrays()
        self._chosen = np.isin(numbers, self.chosen_spaces())

    async def _read_names(self) -> None:
        async for each in read_namespaces(self._calls, self._selection):
            self._names[str(each.kind), each.digest] = each

    def _prefixes(self) -> list[str]:
        """Return what to list: one prefix of the whole store, or some of it."""
        selection = self._selection
        if selection.is_empty and len(selection.kinds) == len(Kind):
            return [""]
        uses = [uses_prefix(kind) for kind in selection.kinds]
        if not selection.digests:
            return [*map(kind_prefix, selection.kinds), *uses]
        spaces = [
            namespace_prefix(kind, digest)
            for kind in selection.kinds
            for digest in sorted(selection.digests)
        ]
        return [*spaces, *uses]

    def _has(self, kind: str, digest: str) -> bool:
        if self._selection.is_empty:
            return True
        return kind in (*Kind,) and self._selection.has(self._namespace(kind, digest))

    def _namespace(self, kind: str, digest: str) -> Namespace:
        return self._names.get((kind, digest)) or Namespace(Kind(kind), digest, _NO_MANIFEST)

    def chosen_spaces(self) -> list[int]:
        """Return the numbers of the chosen spaces of the inventory."""
        spaces = self.inventory.spaces
        return [n for n, each in enumerate(spaces) if self._has(each.kind, each.namespace)]

    def groups(self, by: By) -> list[Group]:
        """Return the groups, the largest first; days and ranges of use in their order. Call
        `describe` before."""
        _, sizes, minutes, spaces = self.inventory.arrays()
        chosen = self._chosen
        names, numbers = self._grouped(by, minutes[chosen], spaces[chosen])
        sizes, minutes, used = sizes[chosen], minutes[chosen], self._last_uses[chosen]
        counts = np.bincount(numbers, minlength=len(names))
        totals = np.zeros(len(names), np.uint64)
        np.add.at(totals, numbers, sizes)
        oldest = np.full(len(names), 0xFFFFFFFF, np.uint32)
        youngest, latest = np.zeros(len(names), np.uint32), oldest.copy()
        np.minimum.at(oldest, numbers, minutes)
        np.maximum.at(youngest, numbers, minutes)
        np.minimum.at(latest, numbers, used)
        found = [
            Group(
                name,
                int(counts[n]),
                int(totals[n]),
                (int(oldest[n]), int(youngest[n])),
                int(latest[n]),
                space if isinstance(space, Namespace) else None,
            )
            for n, (name, space) in enumerate(names)
            if counts[n]
        ]
        if by not in (By.DAY, By.USE):
            found.sort(key=lambda group: group.num_bytes, reverse=True)
        return found

    def _grouped(
        self, by: By, minutes: Numbers, spaces: Numbers
    ) -> tuple[list[tuple[str, Namespace | None]], NDArray[np.int64]]:
        """Return the names of groups, and the number of its group for each object."""
        if by is By.DAY:
            days, numbers = np.unique(minutes // _DAY_MINUTES, return_inverse=True)
            return [(_date(int(day)), None) for day in days.tolist()], numbers
        if by is By.USE:
            edges = [edge for edge, _ in _RANGES]
            ranges = [f"within {words}" for _, words in _RANGES] + [_OLDER]
            numbers = np.searchsorted(edges, self._last_uses[self._chosen], side="left")
            return [(name, None) for name in ranges], numbers
        labels = [self._label(by, number) for number in range(len(self.inventory.spaces))]
        order = {label: n for n, label in enumerate(dict.fromkeys(labels))}
        of_spaces = np.array([order[label] for label in labels], np.int64)
        return [*order], of_spaces[spaces] if labels else spaces.astype(np.int64)

    def _label(self, by: By, number: int) -> tuple[str, Namespace | None]:
        space = self.inventory.spaces[number]
        if space.role is not Role.OBJECTS and space.role is not Role.BUFFER:
            return f"({space.role.value})", None
        if by is By.KIND:
            return space.kind, None
        namespace = self._namespace(space.kind, space.namespace)
        if by is By.NAMESPACE:
            return space.namespace, namespace
        return (namespace.model if by is By.MODEL else namespace.tenant), None


def _date(day: int) -> str:
    try:
        return f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}"
    except (OverflowError, OSError, ValueError):
        return "an invalid day"
