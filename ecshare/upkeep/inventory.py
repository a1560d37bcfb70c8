# SPDX-License-Identifier: Apache-2.0
"""All objects of a store, in little memory: 36 bytes an object, and their names in a file.

A listing of a bucket costs a request for each thousand keys, so there is only one.
"""

import math
import os
import re
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ecshare.store.keys import (
    CLEANED_PREFIX,
    CLOCK_PREFIX,
    FORMAT_VERSION,
    LEASES_PREFIX,
    USES_PREFIX,
    Key,
    use_id,
)
from ecshare.store.objects import ObjectInfo
from ecshare.upkeep.plan import Candidates
from ecshare.upkeep.uses import Ids, Numbers, Uses

# kind/version/namespace, or router/version; then two digits, the digest, and a part.
_OBJECT = re.compile(
    r"((?:ec|kv)/[0-9]{1,4}/([0-9a-f]{32})|router/1)/([0-9a-f]{2})/((?=\3)[0-9a-f]{64})"
    r"(?:\.([a-z0-9_-]{1,32}))?"
)
_OF_NAMESPACE = re.compile(
    rf"((?:ec|kv)/{FORMAT_VERSION})/(?:manifests/([0-9a-f]{{32}})|sizes/([0-9a-f]{{32}})/[0-9]{{1,6}})"
)
_OLD_RECORD = re.compile(r"(?:ec|kv)/([0-9]{1,4})/(?:manifests|sizes)/[0-9a-f]{32}(?:/[0-9]{1,6})?")
# Leases that are over, and what a killed process has left.
_LEFT = re.compile(
    r"doctor-[0-9a-f]{16}|probe/taking-[0-9a-f]{16}"
    rf"|{LEASES_PREFIX}(?:ec|kv)-[0-9]{{1,12}}|{CLOCK_PREFIX}[0-9a-f]{{32}}"
)
_USES = re.compile(rf"{USES_PREFIX}(?:ec|kv)/[0-9a-f]{{32}}")
# More than an object can have; a million such sizes have a sum of 64 bits.
_MOST_BYTES = 1 << 44
# An entry of the buffers for vLLM before V1, or the marker of one that was taken.
_BUFFERED = re.compile(r"[0-9a-f]{1,8}-[0-9a-f]{12}-[0-9a-f]{10}")
_GAP = "gap"
_DIGEST_BYTES = 32
# Of small objects that are no candidates. A hostile writer can make any number.
_MOST_OTHERS = 200_000


class Role(Enum):
    """What the objects of a space are."""

    OBJECTS = "objects"
    BUFFER = "buffer"
    """Entries of the buffers for vLLM before V1."""
    GAPS = "notes of absence"
    REPORTS = "router reports"
    OLD = "an old format"


class Space(NamedTuple):
    """Objects with the same rules."""

    role: Role
    prefix: str
    """Of their keys, without the last slash."""
    kind: str
    """"ec", "kv" or "router"."""
    namespace: str


class Small(Struct, frozen=True):
    """A small object of ours that is no candidate."""

    key: Key
    num_bytes: int
    minute: int


class Inventory:
    """What a listing has found. `close` removes its file.

    Minutes are those of the store's clock, since 1970.
    """

    def __init__(self) -> None:
        self.spaces: list[Space] = []
        self.uses: list[Small] = []
        """Notes and indexes of uses."""
        self.records: dict[tuple[str, str], list[Small]] = {}
        """The manifest and marks of each namespace, by kind and namespace."""
        self.leftovers: list[Small] = []
        """Small objects that are removed once they are old enough."""
        self.num_foreign = 0
        """Keys that are not ours."""
        self._num_others = 0
        self._numbers: dict[tuple[str, Role], int] = {}
        self._columns = _Columns()
        self._names = _Names()

    def __len__(self) -> int:
        return len(self._columns.ids)

    def close(self) -> None:
        """Remove the file with the names."""
        self._names.file.close()

    def add(self, info: ObjectInfo) -> None:
        """Add one line of the listing."""
        found = _OBJECT.fullmatch(info.key)
        # A faulty server may state any size and time.
        is_time = math.isfinite(info.modified_s)
        minute = max(0, min(int(info.modified_s // 60), 0xFFFFFFFF)) if is_time else 0
        num_bytes = max(0, min(info.num_bytes, _MOST_BYTES))
        if found is None:
            self._add_small(Small(info.key, num_bytes, minute))
            return
        prefix, namespace, _, digest, part = found.groups()
        role = _role(prefix, part)
        if role is None:  # a later format: only its own release knows what it means
            self.num_foreign += 1
            return
        name = bytes.fromhex(digest) + (part or "").encode()
        columns, kind = self._columns, prefix.partition("/")[0]
        # That an object will not be stored says nothing about its last use.
        columns.ids.append(use_id(namespace or "0", digest) ^ (role is Role.GAPS))
        columns.sizes.append(num_bytes)
        columns.minutes.append(minute)
        columns.spaces.append(self._number_of(Space(role, prefix, kind, namespace or "")))
        self._names.append(name)

    def _number_of(self, space: Space) -> int:
        number = self._numbers.get((space.prefix, space.role))
        if number is None:
            number = self._numbers[space.prefix, space.role] = len(self.spaces)
            self.spaces.append(space)
        return number

    def _add_small(self, small: Small) -> None:
        key = small.key
        if key.startswith(CLEANED_PREFIX) or key == "probe/object":
            return
        owned = _OF_NAMESPACE.fullmatch(key)
        old = _OLD_RECORD.fullmatch(key)
        is_old = old is not None and int(old[1]) < FORMAT_VERSION
        is_left = is_old or _LEFT.fullmatch(key)
        if not (owned or is_left or _USES.fullmatch(key)):
            self.num_foreign += 1
            return
        self._num_others += 1
        if self._num_others > _MOST_OTHERS:
            return
        if owned:
            kind, namespace = owned[1][:2], owned[2] or owned[3]
            self.records.setdefault((kind, namespace), []).append(small)
        elif is_left:
            self.leftovers.append(small)
        else:
            self.uses.append(small)

    def keys(self, numbers: NDArray[np.int64]) -> Iterator[Key]:
        """Yield the keys of these objects."""
        for number in numbers.tolist():
            name = self._names.read(number)
            digest, part = name[:_DIGEST_BYTES].hex(), name[_DIGEST_BYTES:].decode()
            prefix = self.spaces[self._columns.spaces[number]].prefix
            yield Key(f"{prefix}/{digest[:2]}/{digest}" + (f".{part}" if part else ""))

    def ages(self, now: int) -> "Ages":
        """Return when each name was last modified, in minutes before the minute `now`."""
        return Ages(self, now)

    def arrays(self) -> tuple[Ids, NDArray[np.uint64], Numbers, Numbers]:
        """Return id, size, minute and space of each object, without a copy."""
        columns = self._columns
        return (
            np.frombuffer(columns.ids, np.uint64),
            np.frombuffer(columns.sizes, np.uint64),
            np.frombuffer(columns.minutes, np.uint32),
            np.frombuffer(columns.spaces, np.uint32),
        )


class _Columns:
    """Id, size, minute of modification and space of each object."""

    def __init__(self) -> None:
        self.ids, self.sizes = array("Q"), array("Q")
        self.minutes, self.spaces = array("I"), array("I")


class _Names:
    """The names of objects, in a file: they are needed only for those that are removed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(buffering=1 << 20)  # noqa: SIM115 — its owner closes it
        self._offsets = array("Q")
        self._end = 0

    def append(self, name: bytes) -> None:
        self._offsets.append(self._end)
        self.file.write(name)
        self._end += len(name)

    def read(self, number: int) -> bytes:
        begin, is_last = self._offsets[number], number + 1 == len(self._offsets)
        end = self._end if is_last else self._offsets[number + 1]
        self.file.flush()
        return os.pread(self.file.fileno(), end - begin, begin)


class Ages:
    """The last use of each name: first that of its youngest object, then also by notes of use."""

    def __init__(self, inventory: Inventory, now: int) -> None:
        """`now`: the minute by the store's clock. An object of the future is of now."""
        ids, self._sizes, minutes, self._spaces = inventory.arrays()
        self.ids, self._names = _unique(ids)
        """The `use_id` of each name, sorted."""
        ages = np.uint32(now) - np.minimum(minutes, np.uint32(now))
        self._modified = np.full(len(self.ids), 0xFFFFFFFF, np.uint32)
        np.minimum.at(self._modified, self._names, ages)
        self._noted = np.full(len(self.ids), 0xFFFFFFFF, np.uint32)
        self._positions = np.zeros(len(self.ids), np.uint32)

    def merge(self, uses: Uses, age: int) -> Uses:
        """Take in a note that is `age` minutes old. Return its uses of what is not stored."""
        found = np.searchsorted(self.ids, uses.ids)
        found[found == len(self.ids)] = 0
        is_known = self.ids[found] == uses.ids if len(self.ids) else np.zeros(len(uses), np.bool_)
        at, ages = found[is_known], _older(uses.ages, age)
        np.minimum.at(self._noted, at, ages[is_known])
        np.maximum.at(self._positions, at, uses.positions[is_known])
        return Uses(uses.ids[~is_known], ages[~is_known], uses.positions[~is_known])

    def last_uses(self) -> Numbers:
        """Return the minutes since the last use of each name.

        A chunk is often stored some minutes after the prompt that it belongs to was noted. If that
        counted as a later use, it would outlive the chunks before it.
        """
        is_save_of_use = self._noted - np.minimum(self._modified, self._noted) <= _SAVED_WITHIN
        is_noted = self._noted != np.uint32(0xFFFFFFFF)
        latest = np.minimum(self._noted, self._modified)
        last: Numbers = np.where(is_noted & is_save_of_use, self._noted, latest)
        return last

    def candidates(self) -> Candidates:
        """Return all objects, for the plan."""
        ages = self.last_uses()
        names = self._names
        return Candidates(self._spaces, self._sizes, names, ages[names], self._positions[names])

    def index(self, removed: NDArray[np.int64], spaces: Sequence[int], later: int) -> Uses:
        """Return what is known of the names that stay, and cannot be told from the listing.

        `removed`: objects. `spaces`: of which to return it. `later`: the minutes since `now`.
        """
        stays = np.isin(self._spaces, np.array(spaces, np.uint32))
        stays[removed] = False
        names = np.zeros(len(self.ids), np.bool_)
        names[self._names[stays]] = True
        ages = self.last_uses()
        names &= (ages < self._modified) | (self._positions > 0)
        return Uses(self.ids[names], _older(ages[names], later), self._positions[names])


# Minutes within which an object is saved after the use that was noted.
_SAVED_WITHIN = np.uint32(10)


def _older(ages: Numbers, minutes: int) -> Numbers:
    """Return `ages` plus `minutes`, at most the largest number."""
    total = np.minimum(ages.astype(np.uint64) + np.uint64(max(0, minutes)), np.uint64(0xFFFFFFFF))
    older: Numbers = total.astype(np.uint32)
    return older


def _unique(ids: Ids) -> tuple[Ids, Numbers]:
    """Return the sorted ids without repetitions, and the place of each of `ids` among them."""
    unique, places = np.unique(ids, return_inverse=True)
    return unique, places.astype(np.uint32)


def _role(prefix: str, part: str | None) -> Role | None:
    kind, version, *_ = prefix.split("/")
    if kind == "router":
        return Role.REPORTS if part is None else None
    if int(version) != FORMAT_VERSION:
        return Role.OLD if int(version) < FORMAT_VERSION else None
    if part is None:
        return Role.OBJECTS
    if part == _GAP:
        return Role.GAPS
    return Role.BUFFER if _BUFFERED.fullmatch(part) else Role.OBJECTS
