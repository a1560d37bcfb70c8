# SPDX-License-Identifier: Apache-2.0
"""Holds all objects of a store in little memory: 36 bytes an object, and their names in a file.

Listing a bucket costs a request for each thousand keys, so it is listed only once. A store that has
more objects than fit into memory is listed once for each part.
"""

import math
import os
import re
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple
from zlib import crc32

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ecshare.store.errors import StoreUnavailable
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
# Expired leases, and objects that a killed process has left.
_LEFT = re.compile(
    r"doctor-[0-9a-f]{16}|probe/(?:taking|bench)-[0-9a-f]{16}"
    rf"|{LEASES_PREFIX}(?:ec|kv)-[0-9]{{1,12}}(?:-[0-9a-f]{{16}})?|{CLOCK_PREFIX}[0-9a-f]{{32}}"
)
_USES = re.compile(rf"{USES_PREFIX}(?:ec|kv)/[0-9a-f]{{32}}")
# No object is larger; the sum of a million such sizes fits into 64 bits.
_MOST_BYTES = 1 << 44
_LATEST_MINUTE = 253_402_300_799 // 60  # of the year 9999: later days have no name
# An entry of the buffers for vLLM before V1, or the marker of one that was taken.
_BUFFERED = re.compile(r"[0-9a-f]{1,8}-[0-9a-f]{12}-[0-9a-f]{10}")
_GAP = "gap"
_DIGEST_BYTES = 32
_NAME_BYTES = _DIGEST_BYTES + 32
# The most small objects of each sort that are no candidates. A hostile writer can store any number.
_MOST_OTHERS = 100_000
# A space takes as much memory as this many objects.
_SPACE_OBJECTS = 16
_BLOCK = 1000  # objects whose names are read at once
MOST_KEYS = 200_000_000
"""A listing with more keys is endless, or too large for one process."""
_MOST_PARTS = 64


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
    """The common prefix of their keys, without the last slash."""
    kind: str
    """"ec", "kv" or "router"."""
    namespace: str


class TooManyObjects(StoreUnavailable):
    """The store has more objects than may be in memory."""


class Part(NamedTuple):
    """Some of all names: those whose `use_id` leaves the rest `number` when divided by `of`.

    Names are digests, so each part has its share of the bytes of a store.
    """

    number: int = 0
    of: int = 1

    def halves(self) -> list["Part"]:
        """Return two parts that have the names of this one.

        Raises:
            TooManyObjects: there are too many parts.
        """
        if self.of == _MOST_PARTS:
            raise TooManyObjects(f"the store has too many objects, even for {_MOST_PARTS} listings")
        return [Part(self.number + n * self.of, 2 * self.of) for n in range(2)]


WHOLE = Part()


class Small(Struct, frozen=True):
    """A small object of ours that is no candidate."""

    key: Key
    num_bytes: int
    minute: int


class Inventory:
    """The objects of a listing. `close` removes its file.

    Minutes are those of the store's clock, since 1970.
    """

    def __init__(self, most: int = MOST_KEYS, part: Part = WHOLE) -> None:
        """Hold at most `most` objects, of the names of `part`; besides all other keys of ours."""
        self.part = part
        self._most = most
        self.spaces: list[Space] = []
        self.uses: list[Small] = []
        """Notes and indexes of uses."""
        self.records: dict[tuple[str, str], list[Small]] = {}
        """The manifest and marks of each namespace, by kind and namespace."""
        self.leftovers: list[Small] = []
        """Small objects that are removed once they are old enough."""
        self.num_foreign = 0
        """Keys that are not ours."""
        self._num_lines = 0
        self._numbers: dict[tuple[str, Role], int] = {}
        self._columns = _Columns()
        self._names = _Names()

    def __len__(self) -> int:
        return len(self._columns.ids)

    def close(self) -> None:
        """Remove the file with the names."""
        self._names.file.close()

    def add(self, info: ObjectInfo) -> None:
        """Add one line of the listing.

        Raises:
            TooManyObjects: there is no room for it.
            StoreUnavailable: the listing has too many lines.
        """
        self._num_lines += 1
        if self._num_lines > MOST_KEYS:
            raise StoreUnavailable(f"the listing of the store has more than {MOST_KEYS:,} keys")
        found = _OBJECT.fullmatch(info.key)
        # A faulty server may state any size and time.
        is_time = math.isfinite(info.modified_s)
        minute = max(0, min(int(info.modified_s // 60), _LATEST_MINUTE)) if is_time else 0
        num_bytes = max(0, min(info.num_bytes, _MOST_BYTES))
        if found is None:
            self._add_small(Small(info.key, num_bytes, minute))
            return
        prefix, namespace, _, digest, part = found.groups()
        role = _role(prefix, part)
        if role is None:  # a later format: only its own release knows what it means
            self.num_foreign += 1
            return
        identity = use_id(namespace or "0", digest)
        if identity % self.part.of != self.part.number:
            return
        columns = self._columns
        if len(columns.ids) + _SPACE_OBJECTS * len(self.spaces) >= self._most:
            raise TooManyObjects(f"the store has more than {self._most:,} objects")
        name = bytes.fromhex(digest) + (part or "").encode()
        # A note of absence is no use of its object, so it has an id of its own.
        columns.ids.append(identity ^ (role is Role.GAPS))
        columns.sizes.append(num_bytes)
        columns.minutes.append(minute)
        columns.spaces.append(self._number_of(role, prefix, namespace or ""))
        columns.parts.append(crc32(name))
        columns.places.append(self._names.append(name))

    def drop_repeated(self) -> None:
        """Count each key once, however often it was listed: the last line of it."""
        self.uses, self.leftovers = _once(self.uses), _once(self.leftovers)
        self.records = {owner: _once(records) for owner, records in self.records.items()}
        ids, _, _, spaces = self.arrays()
        parts = np.frombuffer(self._columns.parts, np.uint32)
        mixed = ids ^ (parts.astype(np.uint64) << np.uint64(32)) ^ spaces
        in_order = np.sort(mixed)
        repeated = in_order[1:][in_order[1:] == in_order[:-1]]
        if not len(repeated):
            return
        suspects = np.flatnonzero(np.isin(mixed, repeated))
        suspects = suspects[np.argsort(mixed[suspects], kind="stable")]
        stays = np.ones(len(ids), np.bool_)
        alike: dict[Key, int] = {}
        before = None
        for start in range(0, len(suspects), _BLOCK):
            some = suspects[start : start + _BLOCK]
            for number, now, key in zip(some, mixed[some], self.keys(some), strict=True):
                alike = alike if now == before else {}
                before = now
                if key in alike:
                    stays[alike[key]] = False
                alike[key] = number
        self._columns.keep(stays)

    def _number_of(self, role: Role, prefix: str, namespace: str) -> int:
        number = self._numbers.get((prefix, role))
        if number is None:
            number = self._numbers[prefix, role] = len(self.spaces)
            self.spaces.append(Space(role, prefix, prefix.partition("/")[0], namespace))
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
        if owned:
            kind, namespace = owned[1][:2], owned[2] or owned[3]
            if len(self.records) < _MOST_OTHERS or (kind, namespace) in self.records:
                self.records.setdefault((kind, namespace), []).append(small)
            return
        sort = self.leftovers if is_left else self.uses
        if len(sort) < _MOST_OTHERS:
            sort.append(small)

    def keys(self, numbers: NDArray[np.int64]) -> Iterator[Key]:
        """Yield the keys of these objects."""
        for number in numbers.tolist():
            name = self._names.read(self._columns.places[number])
            digest, part = name[:_DIGEST_BYTES].hex(), name[_DIGEST_BYTES:].decode()
            prefix = self.spaces[self._columns.spaces[number]].prefix
            yield Key(f"{prefix}/{digest[:2]}/{digest}" + (f".{part}" if part else ""))

    @property
    def latest_s(self) -> float:
        """Return when the latest object was stored, in seconds since 1970; at most this host's
        time. It replaces the store's clock if the store takes no more objects."""
        latest = max(self._columns.minutes, default=0)
        return min(60.0 * latest, time.time())

    def growth(self, since: int) -> list[int]:
        """Return the bytes of each space that were stored in the minute `since` or later."""
        _, sizes, minutes, spaces = self.arrays()
        is_new = minutes >= np.uint32(max(0, since))
        totals = np.zeros(len(self.spaces), np.uint64)
        np.add.at(totals, spaces[is_new], sizes[is_new])
        return [int(total) for total in totals]

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
    """Id, size, minute of modification, space, checksum of the name, and its place in the file of
    names, of each object."""

    def __init__(self) -> None:
        self.ids, self.sizes, self.places = array("Q"), array("Q"), array("Q")
        self.minutes, self.spaces, self.parts = array("I"), array("I"), array("I")

    def keep(self, stays: NDArray[np.bool_]) -> None:
        for name, column in vars(self).items():
            left = np.frombuffer(column, column.typecode)[stays]
            setattr(self, name, array(column.typecode, left.tobytes()))


class _Names:
    """The names of objects, in a file: they are needed only for those that are removed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(buffering=1 << 20)  # noqa: SIM115 — its owner closes it
        self._end = 0

    def append(self, name: bytes) -> int:
        """Write `name`; return its place."""
        place = self._end
        self._end += self.file.write(bytes((len(name),)) + name)
        return place

    def read(self, place: int) -> bytes:
        self.file.flush()
        found = os.pread(self.file.fileno(), 1 + _NAME_BYTES, place)
        return found[1 : 1 + found[0]]


def _once(smalls: Sequence[Small]) -> list[Small]:
    return list({small.key: small for small in smalls}.values())


class Ages:
    """The last use of each name: first that of its youngest object, then also by notes of use."""

    def __init__(self, inventory: Inventory, now: int) -> None:
        """`now`: the minute by the store's clock. Later times count as `now`."""
        ids, self._sizes, minutes, self._spaces = inventory.arrays()
        self.ids, self._names = _unique(ids)
        """The `use_id` of each name, sorted."""
        ages = np.uint32(now) - np.minimum(minutes, np.uint32(now))
        self._modified = np.full(len(self.ids), 0xFFFFFFFF, np.uint32)
        np.minimum.at(self._modified, self._names, ages)
        self._noted = np.full(len(self.ids), 0xFFFFFFFF, np.uint32)
        self._positions = np.zeros(len(self.ids), np.uint32)

    def merge(self, uses: Uses, age: int) -> Uses:
        """Merge a note that is `age` minutes old. Return its uses of objects not in the store."""
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
        """Return the last uses of the names that stay, where the listing does not show them.

        `removed`: numbers of objects. `spaces`: those of the index. `later`: minutes since `now`.
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


def role_of(key: str) -> Role | None:
    """Return the role of the object under `key`; None: not an object, or of a later format."""
    found = _OBJECT.fullmatch(key)
    return _role(found[1], found[5]) if found else None


def is_buffered(part: str) -> bool:
    """Return whether this is the part of an entry of the buffers for vLLM before V1, or of the
    marker of one that was taken."""
    return _BUFFERED.fullmatch(part) is not None


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
    return Role.BUFFER if is_buffered(part) else Role.OBJECTS
