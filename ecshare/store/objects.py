# SPDX-License-Identifier: Apache-2.0
"""The contract of a store, and sinks to read into."""

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
"""Of a larger object nobody computes an MD5: see `ObjectStore.stat`."""
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
    """What a store says of an object, without sending it."""

    num_bytes: int
    md5: str = ""
    """Of all its bytes, in hexadecimal digits; "": the store does not say."""


class ByteRange(Struct, frozen=True):
    """The bytes of an object from `start` to before `stop`; at least one."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """How many they are."""
        return self.stop - self.start


class Sink(Protocol):
    """Where `get` puts an object's bytes: one object, from any threads."""

    def begin(self, num_bytes: int) -> None:
        """Receive the object's size, before its first byte.

        Raises:
            ObjectCorrupt: the size is more than this sink accepts.
            OSError: there is no room for it.
        """

    def write(self, offset: int, piece: Buffer) -> None:
        """Take the bytes of the object from `offset` on.

        Pieces do not overlap. They come in any order, and from several threads at once. `piece`
        belongs to the caller again on return.
        """


class Memory:
    """A Sink in private memory, for objects of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = memoryview(b"")

    @property
    def body(self) -> memoryview:
        """What was written. Read only."""
        return self._buffer.toreadonly()

    def begin(self, num_bytes: int) -> None:
        """See Sink."""
        if not 0 <= num_bytes <= self._limit_bytes:
            raise ObjectCorrupt(f"corrupt object: {num_bytes} bytes, at most {self._limit_bytes}")
        self._buffer = fresh_buffer(num_bytes)

    def write(self, offset: int, piece: Buffer) -> None:
        """See Sink."""
        view = memoryview(piece)
        # A copy holds the interpreter's lock: let others have it in between.
        for start in range(0, len(view), _COPY_BYTES):
            part = view[start : start + _COPY_BYTES]
            self._buffer[offset + start : offset + start + len(part)] = part


def cut(byte_range: ByteRange, most_bytes: int) -> list[ByteRange]:
    """Return `byte_range` in pieces of at most that size."""
    starts = range(byte_range.start, byte_range.stop, most_bytes)
    return [ByteRange(start, min(start + most_bytes, byte_range.stop)) for start in starts]


class ObjectStore(Protocol):
    """Immutable objects under string keys; keys.py says which.

    Every write is atomic: a reader sees all of an object or none. An object never changes, so a
    second write of a key only makes it young again, and is never wrong. All methods may be called
    concurrently, from one event loop.

    Raises:
        StoreUnavailable, StoreDenied: the store fails, or refuses us (all methods).
        ValueError: a key or prefix is not one of keys.py (all methods).
    """

    @property
    def creates_once(self) -> bool:
        """Whether `put` returns True to only one of several concurrent writers of a key.

        As far as is known: the first write may show that it does not.
        """

    async def get(self, key: Key, sink: Sink) -> None:
        """Give the size of the object under `key` to `sink`, which may refuse it, then its bytes.

        When this raises, a call that ran out of time may still write to the sink.

        Raises:
            ObjectMissing: there is none.
            ObjectUnreadable, ObjectCorrupt: something lies there that cannot be read as an object.
            Exception: what the sink raises.
        """

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        """Write `body` under `key`. Return False if the store knows that it was there already.

        `replace`: write it in any case, so that the object is young again; readers see the former
        object or this one. For small objects that always have the same bytes, and in the place of
        a damaged one.

        `body` is read until this returns, and must not change before. When this raises, a call
        that ran out of time may still be reading it: do not use that memory again.

        Raises:
            ObjectUnreadable: something that is no object lies there, and is not replaced.
        """

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether `get` would find it."""

    async def stat(self, key: Key) -> ObjectStat:
        """Return what the store itself knows of the object, without `get` where it can.

        To find out whether bytes were damaged on their way. It may cost as much as reading the
        object.

        Raises:
            ObjectMissing: there is none.
        """

    async def delete(self, keys: Sequence[Key]) -> None:
        """Remove these; one that is missing is no error."""

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield all objects below `prefix` ("" or whole levels: "ec/2/"), in any order."""

    async def close(self) -> None:
        """Release connections and threads. Calls in flight may fail."""


async def read(store: ObjectStore, key: Key, limit_bytes: int) -> memoryview:
    """Return all bytes under `key`, in memory of their own.

    Raises:
        ObjectCorrupt: there are more than `limit_bytes`.
        ObjectMissing, StoreUnavailable, StoreDenied: as `ObjectStore.get`.
    """
    sink = Memory(limit_bytes)
    try:
        await store.get(key, sink)
    except ObjectUnreadable:
        raise
    except ObjectCorrupt as exc:
        raise ObjectCorrupt(f"{key}: {exc}") from exc
    return sink.body


def md5_of_etag(etag: object) -> str:
    """Return the MD5 that an ETag is in S3, for an object that was written at once; else ""."""
    text = etag.strip('"').lower() if isinstance(etag, str) else ""
    return text if _MD5.fullmatch(text) else ""


async def probe(store: ObjectStore, *, write: bool) -> None:
    """Find out at start whether `store` answers, and with `write` whether it takes objects.

    It asks for one key; what else lies under our prefixes cannot disturb it.

    Raises:
        StoreUnavailable, StoreDenied, StoreBusy: it does not, with the store's own words.
    """
    is_there = True
    try:
        await read(store, PROBE_KEY, _PROBE_LIMIT_BYTES)
    except ObjectMissing:
        is_there = False
    except ObjectCorrupt:
        pass
    if write:
        try:
            with suppress(ObjectUnreadable):
                await store.put(PROBE_KEY, b"ecshare")
        except ObjectMissing as exc:  # of a write it means that there is nothing to write to
            raise StoreUnavailable(f"the store takes no objects: {exc}") from exc
    elif not is_there:
        await _see_that_it_lists(store)


async def _see_that_it_lists(store: ObjectStore) -> None:
    """Tell a store in which there is no object yet from what is no store, or from no bucket.

    Under a prefix that nobody else knows there is nothing, be it odd or endless.
    """
    with suppress(StoreDenied):  # to read objects is all that is needed
        async with aclosing(store.list(f"probe-{secrets.token_hex(8)}/")) as found:  # type: ignore[type-var]
            async for _ in found:
                break
