# SPDX-License-Identifier: Apache-2.0
"""Tests of what every ObjectStore must do. They need pytest and pytest-asyncio in "auto" mode.

To run them over a store of your own, inherit from `StoreContract` and yield an empty store:

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def store(self):
            store = MyStore(...)
            yield store
            await store.close()
"""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

import pytest

from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreUnavailable
from ecshare.store.keys import PROBE_KEY, Key, Kind, manifest_key, object_key
from ecshare.store.objects import Buffer, Memory, ObjectInfo, ObjectStore, probe, read

MIB = 1 << 20
NAMESPACE = "00112233445566778899aabbccddeeff"
KEY = object_key(Kind.EC, NAMESPACE, "an object")
OTHER = object_key(Kind.EC, NAMESPACE, "another object")
ABSENT = object_key(Kind.EC, NAMESPACE, "never stored", "r0")

# Below, at and above the sizes at which a store may begin to work in pieces.
SIZES = (0, 1, 4096, 4 * MIB, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 20 * MIB + 3)
LIMIT = 64 * MIB


class Listener(Memory):
    """Records the calls that it receives."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.sizes: list[int] = []
        self.spans: list[tuple[int, int]] = []

    def begin(self, num_bytes: int) -> None:
        """See Sink."""
        self.sizes.append(num_bytes)
        super().begin(num_bytes)

    def write(self, offset: int, piece: Buffer) -> None:
        """See Sink."""
        assert self.sizes, "bytes before their number"
        self.spans.append((offset, offset + len(piece)))
        super().write(offset, piece)


class _Trouble(OSError):
    pass


class Troubled(Memory):
    """Fails on every write."""

    def write(self, offset: int, piece: Buffer) -> None:
        """See Sink."""
        raise _Trouble(f"{len(piece)} bytes at {offset}")


class StoreContract:
    """The suite. `store` is empty, and no other process uses it."""

    create_only = True
    """True if a put of a stored object returns False."""
    one_winner = True
    """True if only one of several concurrent puts of an object returns True."""
    creates_once = True
    """The expected value of the store's own `creates_once`."""
    racing_writers_fail = False
    """True if concurrent puts may be refused, even of different objects. A second try stores the
    object."""

    states_md5 = True
    """True if `stat` returns the MD5."""

    @pytest.fixture
    def store(self) -> AsyncIterator[ObjectStore]:
        """The store to test."""
        raise NotImplementedError

    @pytest.mark.parametrize("size", SIZES)
    async def test_an_object_comes_back_as_it_was_put(self, store: ObjectStore, size: int) -> None:
        """Of any size. The returned buffer is read-only."""
        body = os.urandom(size)
        assert await store.put(KEY, body) is True
        found = await read(store, KEY, LIMIT)
        assert isinstance(found, memoryview)
        assert found.readonly
        assert bytes(found) == body

    @pytest.mark.parametrize("size", [0, 4096, 20 * MIB + 3])
    async def test_it_states_what_it_holds(self, store: ObjectStore, size: int) -> None:
        """Engines remove an object as damaged by what `stat` returns: no MD5 is better than a wrong
        one."""
        body = os.urandom(size)
        await store.put(KEY, body)
        stated = await store.stat(KEY)
        assert stated.num_bytes == size
        md5 = hashlib.md5(body, usedforsecurity=False).hexdigest()
        assert stated.md5 == (md5 if self.states_md5 else "")
        with pytest.raises(ObjectMissing):
            await store.stat(OTHER)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    async def test_any_buffer_can_be_put(self, store: ObjectStore, kind: type) -> None:
        """Also one that the caller changes after the put."""
        body = bytearray(b"0123456789")
        await store.put(KEY, kind(body))
        body[:] = b"----------"
        assert bytes(await read(store, KEY, LIMIT)) == b"0123456789"

    async def test_a_sink_hears_the_size_then_each_byte_once(self, store: ObjectStore) -> None:
        """The size comes first, the bytes in any order."""
        body = os.urandom(20 * MIB + 3)
        await store.put(KEY, body)
        sink = Listener(LIMIT)
        await store.get(KEY, sink)
        assert sink.sizes == [len(body)]
        at = 0
        for start, stop in sorted(sink.spans):
            assert start == at
            at = stop
        assert at == len(body)
        assert sink.body == body

    async def test_an_object_beyond_the_sinks_limit_is_refused_by_its_size(
        self, store: ObjectStore
    ) -> None:
        """Before any byte of its body is written to the sink."""
        await store.put(KEY, os.urandom(12 * MIB))
        sink = Listener(12 * MIB - 1)
        with pytest.raises(ObjectCorrupt, match=str(12 * MIB)):
            await store.get(KEY, sink)
        assert sink.sizes == [12 * MIB]
        assert not sink.spans
        assert await store.exists([KEY]) == [True]

    async def test_what_a_sink_raises_comes_out(self, store: ObjectStore) -> None:
        """The sink's own exception, not a StoreError."""
        await store.put(KEY, b"0123456789")
        with pytest.raises(_Trouble):
            await store.get(KEY, Troubled(LIMIT))

    async def test_a_slice_of_a_larger_buffer_can_be_put(self, store: ObjectStore) -> None:
        """As transfers do: a slab is often larger than the object in it."""
        slab = memoryview(bytearray(os.urandom(100_000)))
        await store.put(KEY, slab[1000:50_000])
        assert await read(store, KEY, LIMIT) == slab[1000:50_000]

    async def test_a_missing_object_is_an_error_of_its_own(self, store: ObjectStore) -> None:
        """ObjectMissing, which is also a FileNotFoundError."""
        with pytest.raises(ObjectMissing) as caught:
            await read(store, ABSENT, LIMIT)
        assert isinstance(caught.value, FileNotFoundError)
        assert ABSENT in str(caught.value)

    async def test_a_second_put_changes_nothing(self, store: ObjectStore) -> None:
        """It returns False, if the store can detect it."""
        await store.put(KEY, b"the same bytes")
        second = await store.put(KEY, b"the same bytes")
        assert second is (not self.create_only)
        assert bytes(await read(store, KEY, LIMIT)) == b"the same bytes"

    async def test_a_put_that_replaces_takes_the_place_of_what_is_there(
        self, store: ObjectStore
    ) -> None:
        """Also where no object is stored. Both puts return True."""
        await store.put(KEY, b"damaged")
        assert await store.put(KEY, b"mended", replace=True) is True
        assert bytes(await read(store, KEY, LIMIT)) == b"mended"
        assert await store.put(OTHER, b"new", replace=True) is True
        assert await self._listed(store, "") == {KEY: 6, OTHER: 3}
        assert await store.put(KEY, b"anew") is (not self.create_only)

    async def test_what_was_replaced_is_young_again(self, store: ObjectStore) -> None:
        """By the store's own clock, which expiry rules use, and which may count whole seconds."""
        await store.put(KEY, b"the same bytes")
        before_s = await self._modified_s(store, KEY)
        deadline_s = time.monotonic() + 30
        while await self._modified_s(store, KEY) <= before_s:
            assert time.monotonic() < deadline_s
            await store.put(KEY, b"the same bytes", replace=True)

    async def test_an_object_is_there_while_it_is_replaced(self, store: ObjectStore) -> None:
        """A reader gets all of it, at any moment."""
        body = os.urandom(100_000)
        await store.put(KEY, body)
        for _ in range(5):
            writing = asyncio.ensure_future(store.put(KEY, body, replace=True))
            while not writing.done():
                assert bytes(await read(store, KEY, LIMIT)) == body
            assert await writing

    async def test_it_says_whether_it_creates_once(self, store: ObjectStore) -> None:
        """After its first write."""
        await store.put(KEY, b"the same bytes")
        assert store.creates_once is self.creates_once

    async def test_of_racing_writers_one_wins(self, store: ObjectStore) -> None:
        """The stored object is whole, whichever put wins."""
        body = os.urandom(2 * MIB)
        puts = (store.put(KEY, bytes(body)) for _ in range(8))
        won = await asyncio.gather(*puts, return_exceptions=True)
        failed = [result for result in won if isinstance(result, BaseException)]
        assert all(isinstance(each, StoreUnavailable) for each in failed), failed
        assert not failed or self.racing_writers_fail
        assert any(result is True for result in won)
        assert won.count(True) == 1 or not self.one_winner
        assert bytes(await read(store, KEY, LIMIT)) == body

    async def test_a_reader_sees_all_of_an_object_or_none(self, store: ObjectStore) -> None:
        """Read repeatedly while it is being written."""
        body = os.urandom(12 * MIB)
        writing = asyncio.ensure_future(store.put(KEY, body))
        while not writing.done():
            try:
                assert bytes(await read(store, KEY, LIMIT)) == body
            except ObjectMissing:
                continue
        assert await writing

    async def test_many_objects_at_once(self, store: ObjectStore) -> None:
        """Each reader gets the object that it asked for."""
        bodies = {
            object_key(Kind.KV, NAMESPACE, str(n), "r0"): os.urandom(1000 + n) for n in range(64)
        }
        await self._put_at_once(store, bodies)
        found = await asyncio.gather(*(read(store, key, LIMIT) for key in bodies))
        assert [bytes(body) for body in found] == [*bodies.values()]

    async def test_existence_is_answered_in_order(self, store: ObjectStore) -> None:
        """For one key, many, none, and one key twice."""
        keys = [object_key(Kind.EC, NAMESPACE, str(n)) for n in range(70)]
        await self._put_at_once(store, dict.fromkeys(keys[::2], b"x"))
        assert await store.exists(keys) == [n % 2 == 0 for n in range(70)]
        assert await store.exists([keys[0], keys[1], keys[0]]) == [True, False, True]
        assert await store.exists([]) == []

    async def test_a_deleted_object_is_gone(self, store: ObjectStore) -> None:
        """Deleting a missing object is no error, and deletes no other."""
        await store.put(KEY, b"one")
        await store.put(OTHER, b"two")
        await store.delete([KEY, ABSENT])
        await store.delete([KEY])
        await store.delete([])
        assert await store.exists([KEY, OTHER]) == [False, True]
        with pytest.raises(ObjectMissing):
            await read(store, KEY, LIMIT)

    async def test_a_deleted_object_can_be_put_again(self, store: ObjectStore) -> None:
        """This is how a corrupt one is replaced."""
        await store.put(KEY, b"damaged")
        await store.delete([KEY])
        assert await store.put(KEY, b"mended")
        assert bytes(await read(store, KEY, LIMIT)) == b"mended"

    async def test_a_listing_names_what_is_below_its_prefix(self, store: ObjectStore) -> None:
        """Levels are whole: "ec/2" is no part of "ec/20"."""
        manifest = manifest_key(Kind.KV, NAMESPACE)
        sizes = {KEY: 10, OTHER: 20, manifest: 30, Key("ec/20/x"): 40}
        for key, size in sizes.items():
            await store.put(key, bytes(size))
        assert await self._listed(store, "") == sizes
        assert await self._listed(store, "ec/2/") == {KEY: 10, OTHER: 20}
        assert await self._listed(store, "kv/2/manifests/") == {manifest: 30}
        assert await self._listed(store, "kv/3/") == {}

    async def test_a_listing_knows_when_objects_were_stored(self, store: ObjectStore) -> None:
        """To the accuracy of the store's clock."""
        await store.put(KEY, b"x")
        (found,) = [info async for info in store.list("")]
        assert isinstance(found, ObjectInfo)
        assert abs(found.modified_s - time.time()) < 120

    async def test_a_listing_of_an_empty_store_is_empty(self, store: ObjectStore) -> None:
        """And no error."""
        assert await self._listed(store, "") == {}

    async def test_calls_that_are_cancelled_end_and_leave_a_working_store(
        self, store: ObjectStore
    ) -> None:
        """The caller decides how long to wait."""
        body = os.urandom(MIB)
        keys = [object_key(Kind.EC, NAMESPACE, str(n)) for n in range(100)]
        calls: list[Coroutine[Any, Any, Any]] = [store.put(key, body) for key in keys]
        calls += [read(store, KEY, LIMIT), store.exists(keys), store.stat(KEY)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        cancelled = [task for task in tasks if task.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in cancelled)
        assert await store.put(OTHER, body)
        assert await read(store, OTHER, LIMIT) == body

    async def test_a_probe_of_a_working_store_passes(self, store: ObjectStore) -> None:
        """Also repeatedly. Only a writer's probe leaves an object."""
        await probe(store, write=False)
        assert await self._listed(store, "") == {}
        await probe(store, write=True)
        await probe(store, write=True)
        assert [*await self._listed(store, "")] == [PROBE_KEY]

    async def _put_at_once(self, store: ObjectStore, bodies: Mapping[Key, bytes]) -> None:
        puts = (store.put(key, body) for key, body in bodies.items())
        put = await asyncio.gather(*puts, return_exceptions=True)
        for (key, body), result in zip(bodies.items(), put, strict=True):
            if isinstance(result, StoreUnavailable) and self.racing_writers_fail:
                await store.put(key, body)
            elif isinstance(result, BaseException):
                raise result

    async def _modified_s(self, store: ObjectStore, key: Key) -> float:
        return {info.key: info.modified_s async for info in store.list("")}[key]

    async def _listed(self, store: ObjectStore, prefix: str) -> dict[Key, int]:
        return {info.key: info.num_bytes async for info in store.list(prefix)}
