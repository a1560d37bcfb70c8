# SPDX-License-Identifier: Apache-2.0
"""The contract of a store, and sinks to read into."""

import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Protocol

from msgspec import Struct

from ecshare.store.buffers import fresh_buffer
from ecshare.store.errors import (
    ObjectCorrupt,
    ObjectMissing,
    ObjectUnreadable,
    StoreDenied,
    StoreUnavailable,
)
from ecshare.store.keys import PROBE_KEY, Key

Buffer = bytes | bytearray | memoryview

MOST_HASHED_BYTES = 512 << 20
"""The largest object of which an MD5 is computed: see `ObjectStore.stat`."""
_COPY_BYTES = 512 << 10
_PROBE_LIMIT_BYTES = 1 << 16
_MD5 = re.compile("[0-9a-f]{32}")


class ObjectInfo(Struct, frozen=True):
    """One line of a listing."""

    key: Key
    num_bytes: int
    modified_s: float
    """Seconds since the epoch, by the store's clock."""


class ObjectStat(Struct, frozen=True):
    """The metadata that a store has of an object."""

    num_bytes: int
    md5: str = ""
    """The MD5 of all its bytes, in hexadecimal digits; "": the store does not state one."""


class ByteRange(Struct, frozen=True):
    """The bytes of an object from `start` to before `stop`; at least one."""

    start: int
    stop: int


class Sink(Protocol):
    """The target of `get` for the bytes of one object. Any threads may write."""

    def begin(self, num_bytes: int) -> None:
        """Receive the object's size, before its first byte.

        Raises:
            ObjectCorrupt: the size is more than this sink accepts.
            OSError: there is no room for it.
        """

    def write(self, offset: int, piece: Buffer) -> None:
        """Take bytes of the object, which begin at `offset`.

        Pieces do not overlap. They arrive in any order, and from several threads at once. The
        caller may reuse `piece` on return.

        Raises:
            ObjectCorrupt: there are more bytes than announced.
            OSError: the bytes cannot be kept, or are no longer wanted.
        """


class Memory:
    """A Sink in private memory, for objects of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = memoryview(b"")

    @property
    def body(self) -> memoryview:
        """Return the written bytes, read-only."""
        return self._buffer.toreadonly()

    def begin(self, num_bytes: int) -> None:
        """See Sink.

        Raises:
            ObjectCorrupt: the object is larger than `limit_bytes`.
        """
        if not 0 <= num_bytes <= self._limit_bytes:
            raise ObjectCorrupt(f"corrupt object: {num_bytes} bytes, at most {self._limit_bytes}")
        self._buffer = fresh_buffer(num_bytes)

    def write(self, offset: int, piece: Buffer) -> None:
        """See Sink."""
        view = memoryview(piece)
        # A copy holds the interpreter's lock: release it between parts for other threads.
        for start in range(0, len(view), _COPY_BYTES):
            part = view[start : start + _COPY_BYTES]
            self._buffer[offset + start : offset + start + len(part)] = part


def cut(byte_range: ByteRange, most_bytes: int) -> list[ByteRange]:
    """Return `byte_range` in pieces of at most that size."""
    starts = range(byte_range.start, byte_range.stop, most_bytes)
    return [ByteRange(start, min(start + most_bytes, byte_range.stop)) for start in starts]


class ObjectStore(Protocol):
    """Immutable objects under string keys; keys.py defines the keys.

    Every write is atomic: a reader sees the whole object or none. An object never changes, so a
    second write of a key restarts its age and changes nothing else. All methods may be called
    concurrently, from one event loop.

    A store has no time limit of its own. The caller decides how long to wait, and then cancels the
    call. A cancelled call must end at once. Its thread or connection may continue for a while, and
    still read the body of a `put` or write to the sink of a `get`.

    Raises:
        StoreUnavailable: the store fails (all methods).
        StoreDenied: the store refuses the operation (all methods).
        ValueError: a key or prefix is not one of keys.py (all methods).
    """

    @property
    def creates_once(self) -> bool:
        """Return whether `put` returns True to only one of several concurrent writers of a key.

        As far as the store knows: its first write may show the opposite.
        """

    @property
    def serves_many(self) -> bool:
        """Return whether more concurrent calls may increase the throughput.

        True for object storage, where each call has its own connection. False for a disk, and where
        few threads serve the calls.
        """

    async def get(self, key: Key, sink: Sink) -> None:
        """Pass the size of the object under `key` to `sink`, which may refuse it, then its bytes.

        Raises:
            ObjectMissing: there is no object.
            ObjectUnreadable, ObjectCorrupt: the key exists, but cannot be read as an object.
            Exception: any error of the sink.
        """

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        """Write `body` under `key`. Return False if the store knows that it existed before.

        `replace`: write it in any case, so that its age restarts. Readers see the old object or the
        new one. Use it for small objects, such as those that always have the same bytes, and to
        replace a damaged object.

        `body` is read until this returns, and must not change before; nor after, if this raises.

        Raises:
            ObjectUnreadable: the key exists, is not an object, and is not replaced.
        """

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether `get` would find it."""

    async def stat(self, key: Key) -> ObjectStat:
        """Return what the store itself states about the object, without `get` if possible.

        Callers use it to find out whether bytes were damaged in transit. It may cost as much as
        reading the object.

        Raises:
            ObjectMissing: there is no object.
        """

    async def delete(self, keys: Sequence[Key]) -> None:
        """Remove these objects. A missing one is not an error."""

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield all objects below `prefix` ("" or whole levels: "ec/2/"), in any order."""

    async def close(self) -> None:
        """Release connections and threads. Calls in flight may fail."""


async def read(store: ObjectStore, key: Key, limit_bytes: int) -> memoryview:
    """Return all bytes under `key`, in new memory.

    Raises:
        ObjectCorrupt: there are more than `limit_bytes`.
        ObjectMissing, StoreUnavailable, StoreDenied: see `ObjectStore.get`.
    """
    sink = Memory(limit_bytes)
    try:
        await store.get(key, sink)
    except ObjectUnreadable:
        raise
    except ObjectCorrupt as exc:
        raise ObjectCorrupt(f"{key}: {exc}") from exc
    return sink.body


async def stored_at(store: ObjectStore, prefix: str, key: Key) -> float:
    """Return when `key` was stored by the store's clock, in seconds since 1970; 0: it is not there.

    A listing tells the time at every store. `prefix`: of few keys, and of `key`.

    Raises:
        StoreError: the store failed.
    """
    async with aclosing(store.list(prefix)) as found:  # type: ignore[type-var]
        async for info in found:
            if info.key == key:
                return info.modified_s
    return 0.0


def md5_of_etag(etag: object) -> str:
    """Return the MD5 in an ETag of S3; "" if the ETag is not an MD5, as after multipart uploads."""
    text = etag.strip('"').lower() if isinstance(etag, str) else ""
    return text if _MD5.fullmatch(text) else ""


def proof_missing(stated: ObjectStat, body: memoryview) -> str | None:
    """Return why `body` may differ from the stored bytes; None: its MD5 is the stored object's."""
    if not stated.md5:
        return "the store states no MD5 of it, so the damage may have happened on the way"
    if hashlib.md5(body, usedforsecurity=False).hexdigest() != stated.md5:
        return "its MD5 is not the one that the store states: it was damaged on the way"
    return None


async def probe(store: ObjectStore, *, write: bool) -> None:
    """Check at start that `store` answers and, with `write`, that it accepts objects.

    It uses a single key, so other objects under our prefixes do not matter.

    Raises:
        StoreUnavailable, StoreDenied, StoreBusy: it does not. The message quotes the store.
    """
    exists = True
    try:
        await read(store, PROBE_KEY, _PROBE_LIMIT_BYTES)
    except ObjectMissing:
        exists = False
    except ObjectCorrupt:
        pass
    if write:
        try:
            with suppress(ObjectUnreadable):
                await store.put(PROBE_KEY, b"ecshare")
        except ObjectMissing as exc:  # a write that gets "not found": there is no bucket or folder
            raise StoreUnavailable(f"the store takes no objects: {exc}") from exc
    elif not exists:
        await _check_listing(store)


async def _check_listing(store: ObjectStore) -> None:
    """Check that an empty store is a store: not a missing bucket, nor another kind of server.

    It lists a random prefix, which has no objects.
    """
    with suppress(StoreDenied):  # permission to read objects is enough
        async with aclosing(store.list(f"probe-{secrets.token_hex(8)}/")) as found:  # type: ignore[type-var]
            async for _ in found:
                break
