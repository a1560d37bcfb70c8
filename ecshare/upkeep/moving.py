# SPDX-License-Identifier: Apache-2.0
"""Copies objects, manifests and size marks from a store or a tar to another one.

Each is verified on the way, and never replaces another one. Objects that the target has already,
with the same size, are neither read nor sent, so an interrupted copy continues where it stopped.
Objects and bytes in flight are bounded.
"""

import asyncio
import hashlib
import os
import re
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import Struct

from ecshare.store.errors import ObjectCorrupt, ObjectForeign, ObjectMissing
from ecshare.store.format import seal, unseal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import (
    FORMAT_VERSION,
    Key,
    Kind,
    is_object_key,
    is_safe_key,
    manifest_key,
    marks_prefix,
    namespace_prefix,
)
from ecshare.store.manifest import MAX_BYTES, parse_manifest
from ecshare.store.objects import read
from ecshare.upkeep.archive import Member, TarWriter, members
from ecshare.upkeep.calls import PAGE, Calls, InFlight
from ecshare.upkeep.inventory import is_buffered
from ecshare.upkeep.selection import Namespace, Selection, read_namespaces

MOST_BYTES = (4 << 30) + 4096
"""The size of the largest object that readers accept."""
_MARK = b"ecshare"
_RECORD = re.compile(
    rf"(?:ec|kv)/{FORMAT_VERSION}/(?:manifests/([0-9a-f]{{32}})|sizes/[0-9a-f]{{32}}/[1-9][0-9]{{0,5}})"
)
_MOST_IN_FLIGHT = 16  # where the store serves many calls
_FEW_IN_FLIGHT = 4
_BYTES_IN_FLIGHT = 256 << 20
_LARGE_BYTES = 1 << 20  # larger bodies are verified on a thread
_SHOWN = 10
_MOST_LISTED = 10_000


class Item(NamedTuple):
    """One object, manifest or mark to copy."""

    key: Key
    num_bytes: int
    modified_s: float
    offset: int = 0
    """The offset of its bytes in a tar."""


class Report(Struct):
    """Counts what was copied so far, and what was not."""

    num_copied: int = 0
    num_bytes: int = 0
    num_there: int = 0
    """Objects that the target had already."""
    num_gone: int = 0
    """Objects that were removed before they were read."""
    num_refused: int = 0
    refused: list[str] = []
    """The names and the reasons of the first of them. Texts may be hostile."""
    is_whole: bool = True
    """False: the source cannot be read to its end."""

    def refuse(self, name: str, why: object) -> None:
        """Count an object that is not copied."""
        self.num_refused += 1
        if len(self.refused) < _SHOWN:
            self.refused.append(f"{name}: {why}")


class Source(Protocol):
    """Where objects come from."""

    def items(self, report: Report) -> AsyncIterator[Item]:
        """Yield what can be copied; count the rest in `report`.

        Raises:
            StoreError: the source failed.
        """

    async def read(self, item: Item) -> memoryview:
        """Return the bytes, at most `item.num_bytes`.

        Raises:
            ObjectMissing, ObjectCorrupt: this item is gone, or cannot be read.
            StoreError: the source failed.
        """


class Target(Protocol):
    """Where objects go."""

    async def has(self, item: Item) -> bool:
        """Return whether the target has an object of this key and size."""

    async def put(self, item: Item, body: memoryview) -> bool:
        """Store `body`. Return False if the key exists: its object stays."""


class KeySet:
    """Holds keys with their sizes, in 8 bytes each.

    One in 10^12 other keys counts as contained: it is not copied, which costs a miss.
    """

    def __init__(self) -> None:
        self._found = array("Q")
        self._ids = np.zeros(0, np.uint64)

    def add(self, key: str, num_bytes: int) -> None:
        """Add a key. Call `sort` after the last one."""
        self._found.append(_id(key, num_bytes))

    def sort(self) -> None:
        """Make `has` find all keys that were added."""
        self._ids = np.sort(np.frombuffer(self._found, np.uint64))

    def has(self, key: str, num_bytes: int) -> bool:
        """Return whether this key was added with this size."""
        wanted = np.uint64(_id(key, num_bytes))
        at = int(np.searchsorted(self._ids, wanted))
        return at < len(self._ids) and bool(self._ids[at] == wanted)


def _id(key: str, num_bytes: int) -> int:
    size = 0 if _RECORD.fullmatch(key) else num_bytes  # the key alone identifies a record
    text = f"{key}\0{size}".encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little")


async def copy(  # noqa: PLR0913 — what is copied, and how
    source: Source,
    target: Target,
    integrity: Integrity | None,
    report: Report,
    *,
    serves_many: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy all from `source` that is not in `target`, counting in `report`.

    `integrity`: objects without its MAC are refused. `advance`: called with the number of items
    that were processed since the last call.

    Raises:
        StoreError, OSError: source or target failed. Each object that was copied is complete.
    """
    in_flight = InFlight(_BYTES_IN_FLIGHT, _MOST_IN_FLIGHT if serves_many else _FEW_IN_FLIGHT)

    async def one(item: Item) -> None:
        try:
            body = await source.read(item)
            if len(body) > _LARGE_BYTES:
                await asyncio.to_thread(verify, body, item.key, integrity)
            else:
                verify(body, item.key, integrity)
            if await target.put(item, body):
                report.num_copied += 1
                report.num_bytes += len(body)
            else:
                report.num_there += 1
        except ObjectMissing:
            report.num_gone += 1
        except ObjectCorrupt as exc:
            report.refuse(item.key, exc)
        finally:
            await in_flight.leave(item.num_bytes)
            advance(1)

    try:
        async with asyncio.TaskGroup() as tasks:
            async for item in source.items(report):
                if await target.has(item):
                    report.num_there += 1
                    advance(1)
                    continue
                await in_flight.enter(item.num_bytes)
                if is_object_key(item.key):
                    tasks.create_task(one(item))
                else:  # an interrupted copy must not leave objects without their manifest
                    await one(item)
    except ExceptionGroup as exc:
        raise exc.exceptions[0] from None  # further ones have the same cause


def most_bytes(name: str) -> int:
    """Return the largest size of what is copied under this name; 0: it is not copied.

    Notes of absence are not copied, nor are the buffers for vLLM before V1: a copy could be taken
    a second time.
    """
    if is_object_key(name):
        part = name.rpartition(".")[2] if "." in name else ""
        return 0 if part == "gap" or is_buffered(part) else MOST_BYTES
    found = _RECORD.fullmatch(name)
    if found is None:
        return 0
    return MAX_BYTES if found[1] else len(_MARK)


def verify(body: memoryview, key: Key, integrity: Integrity | None) -> None:
    """Check that `body` belongs under `key`, a name that `most_bytes` accepts.

    Raises:
        ObjectCorrupt: it does not.
    """
    if is_object_key(key):
        unseal(body, key, integrity=integrity)
    elif "/manifests/" in key:
        parse_manifest(body, key.rpartition("/")[2])
    elif body != _MARK:
        raise ObjectCorrupt("corrupt object: it is no size mark")


class StoreSource:
    """Reads the chosen namespaces of a store: of each the manifest and marks first, then objects.

    Call `choose` first.
    """

    def __init__(self, calls: Calls, selection: Selection) -> None:
        self._calls = calls
        self._selection = selection
        self.known: list[Namespace] = []
        """All namespaces that have a manifest, chosen or not, once `items` has begun."""
        self.chosen: list[Namespace] = []

    async def choose(self) -> None:
        """Find the chosen namespaces. One that the selection names needs no manifest.

        Raises:
            StoreError: the store failed.
        """
        self.known = [each async for each in read_namespaces(self._calls, self._selection)]
        self.chosen = [each for each in self.known if self._selection.has(each)]
        found = {(each.kind, each.digest) for each in self.known}
        if not self._selection.needs_facts:
            self.chosen += [
                Namespace(kind, digest)
                for kind in self._selection.kinds
                for digest in sorted(self._selection.digests)
                if (kind, digest) not in found
            ]

    async def items(self, report: Report) -> AsyncIterator[Item]:
        """See Source."""
        known = {(each.kind, each.digest) for each in self.known}
        for namespace in self.chosen:
            kind, digest = namespace.kind, namespace.digest
            if (kind, digest) in known:  # the size of the manifest is unknown, and small
                yield Item(manifest_key(kind, digest), MAX_BYTES, 0.0)
            for prefix in (marks_prefix(kind, digest), namespace_prefix(kind, digest)):
                async for page in self._calls.pages(self._calls.store.list(prefix)):
                    for info in page:
                        # A faulty server may list other keys.
                        most = most_bytes(info.key) if info.key.startswith(prefix) else 0
                        if 0 <= info.num_bytes <= most:
                            yield Item(info.key, info.num_bytes, info.modified_s)
                        elif most:
                            report.refuse(info.key, f"{info.num_bytes:,} bytes, at most {most:,}")

    async def read(self, item: Item) -> memoryview:
        """See Source."""
        store = self._calls.store
        return await self._calls.steady(lambda: read(store, item.key, item.num_bytes))


class TarSource:
    """Reads a tar, which may be hostile."""

    def __init__(self, fd: int) -> None:
        """Read from `fd`, which the caller closes; see `open_tar`."""
        self._fd = fd

    async def items(self, report: Report) -> AsyncIterator[Item]:
        """See Source."""
        found = members(self._fd)
        while some := await asyncio.to_thread(_next_page, found):
            for member in some:
                if isinstance(member, ObjectCorrupt):
                    report.is_whole = False
                    report.refuse("the rest", member)
                elif why := _refusal(member):
                    report.refuse(member.name, why)
                else:
                    yield Item(Key(member.name), member.num_bytes, 0.0, member.offset)

    async def read(self, item: Item) -> memoryview:
        """See Source."""
        return await asyncio.to_thread(_read_at, self._fd, item.offset, item.num_bytes)


def _next_page(found: Iterator[Member]) -> list[Member | ObjectCorrupt]:
    """Return the next members, and after them the error of a broken tar."""
    some: list[Member | ObjectCorrupt] = []
    try:
        some += islice(found, PAGE)
    except ObjectCorrupt as exc:
        some.append(exc)
    return some


def _refusal(member: Member) -> str:
    """Return why this member is not copied; "": it is."""
    most = most_bytes(member.name) if is_safe_key(member.name) else 0
    if not member.is_file:
        return "it is not a regular file"
    if not most:
        return "this is no name of an object of this format"
    return f"{member.num_bytes:,} bytes, at most {most:,}" if member.num_bytes > most else ""


def _read_at(fd: int, offset: int, num_bytes: int) -> memoryview:
    body = memoryview(bytearray(num_bytes))
    at = 0
    while at < num_bytes:
        num = os.preadv(fd, [body[at:]], offset + at)
        if not num:
            raise ObjectCorrupt("the tar became shorter while it was read")
        at += num
    return body


class StoreTarget:
    """Stores objects in a store."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._listed: dict[str, KeySet] = {}
        """The keys of each namespace that was listed, by their common prefix."""

    async def has(self, item: Item) -> bool:
        """See Target. Lists a namespace when its first object is asked for."""
        kind, _, namespace, *_ = item.key.split("/")
        if namespace in ("manifests", "sizes"):
            return False
        prefix = namespace_prefix(Kind(kind), namespace)
        if prefix not in self._listed:
            if len(self._listed) == _MOST_LISTED:
                self._listed.clear()
            keys = self._listed[prefix] = KeySet()
            async for page in self._calls.pages(self._calls.store.list(prefix)):
                for info in page:
                    keys.add(info.key, info.num_bytes)
            keys.sort()
        return self._listed[prefix].has(item.key, item.num_bytes)

    async def put(self, item: Item, body: memoryview) -> bool:
        """See Target."""
        return await self._calls.steady(lambda: self._calls.store.put(item.key, body))


class RekeyTarget:
    """Stores objects of a store there again: with a MAC of our key, if theirs is of the accepted
    one."""

    def __init__(self, calls: Calls, integrity: Integrity) -> None:
        self._calls = calls
        self._integrity = integrity.of_one_key()

    async def has(self, item: Item) -> bool:
        """See Target. Manifests and marks have no MAC."""
        return not is_object_key(item.key)

    async def put(self, item: Item, body: memoryview) -> bool:
        """See Target. Return False if the object has a MAC of our key already."""
        signed = await asyncio.to_thread(_with_our_mac, body, item.key, self._integrity)
        if signed is None:
            return False
        await self._calls.steady(lambda: self._calls.store.put(item.key, signed, replace=True))
        return True


def _with_our_mac(body: memoryview, key: Key, integrity: Integrity) -> bytearray | None:
    """Return a verified object with a MAC of our key; None: it has one."""
    try:
        unseal(body, key, integrity=integrity)
    except ObjectForeign:
        signed = bytearray(body)
        seal(memoryview(signed), unseal(body, key, verify=False).spec, key, integrity)
        return signed
    return None


class TarTarget:
    """Writes objects to a tar."""

    def __init__(self, writer: TarWriter) -> None:
        self._writer = writer
        self._keys = KeySet()
        for member in writer.members():
            self._keys.add(member.name, member.num_bytes)
        self._keys.sort()
        self._lock = asyncio.Lock()

    async def has(self, item: Item) -> bool:
        """See Target."""
        return self._keys.has(item.key, item.num_bytes)

    async def put(self, item: Item, body: memoryview) -> bool:
        """See Target."""
        async with self._lock:
            await asyncio.to_thread(self._writer.add, item.key, body, item.modified_s)
        return True
