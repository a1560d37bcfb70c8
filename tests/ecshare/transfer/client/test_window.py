# SPDX-License-Identifier: Apache-2.0
"""The window of saves in flight for stores of several kinds. Time is simulated."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreBusy, StoreError
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.transfer.client.priority import Admission, Priority
from ecshare.transfer.client.store_client import StoreClient
from lab.counted_time import CountedTime
from lab.throttled_store import Link, ThrottledStore

MIB = 1 << 20
MB = 1e6
CHUNK = 32 * MIB + 4096
TIMEOUT_S = 10.0
WAITING = 100
# The initial window in chunks, and the largest number of saves.
LEAST, MOST = 2, 64

S3 = Link(total=2000 * MB, connection=80 * MB, latency_s=0.03)
DISK = Link(total=1000 * MB, connection=1000 * MB, latency_s=0.001)


def in_counted_time(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=CountedTime) as runner:
        runner.run(test)


class Saves:
    """Saves, or operations of another `priority`, of `sizes` in turn, with a long queue."""

    def __init__(
        self,
        save: Callable[[int], Awaitable[None]],
        sizes: tuple[int, ...] = (CHUNK,),
        priority: Priority = Priority.SAVE,
    ) -> None:
        self.admission = Admission(TIMEOUT_S, grows=True)
        self.most = 0
        """The largest number in flight since the last call of `goes_on`."""
        self._save = save
        self._sizes = sizes
        self._priority = priority
        self._in_flight = 0
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def goes_on(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until_s, self.most = loop.time() + seconds, 0
        while loop.time() < until_s:
            while len(self._tasks) < WAITING:
                size = self._sizes[self._next % len(self._sizes)]
                self._next += 1
                self._tasks.add(asyncio.create_task(self._one(size)))
            _, self._tasks = await asyncio.wait(
                self._tasks, return_when=asyncio.FIRST_COMPLETED, timeout=seconds
            )

    async def _one(self, size: int) -> None:
        with suppress(StoreError):
            async with self.admission.admitted(self._priority, size):
                self._in_flight += 1
                self.most = max(self.most, self._in_flight)
                try:
                    await self._save(size)
                finally:
                    self._in_flight -= 1

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("sizes", "fills"),
    [((4 * MIB,), 42), ((14 * MIB,), 29), ((CHUNK,), 26), ((36 * MIB,), 26), ((CHUNK, MIB), 26)],
)
def test_window_grows_until_slow_connections_fill_the_store(
    sizes: tuple[int, ...], fills: int
) -> None:
    async def test() -> None:
        store = ThrottledStore(S3)
        saves = Saves(store.move, sizes)
        await saves.goes_on(20)
        before = store.moved_bytes
        await saves.goes_on(20)
        assert fills <= saves.most <= MOST
        assert store.moved_bytes - before > 0.75 * S3.total * 20
        await saves.end()

    in_counted_time(test())


@pytest.mark.parametrize("priority", [Priority.LOAD, Priority.POLL])
def test_load_window_grows_for_slow_connections(priority: Priority) -> None:
    async def test() -> None:
        loads = Saves(ThrottledStore(S3).move, priority=priority)
        await loads.goes_on(0.4)
        assert loads.most == 3
        await loads.goes_on(20)
        assert loads.most == 12
        await loads.end()

    in_counted_time(test())


@pytest.mark.parametrize("link", [DISK, Link(100 * MB, 100 * MB, 0.001)])
def test_window_stays_small_if_few_saves_fill_the_store(link: Link) -> None:
    async def test() -> None:
        saves = Saves(ThrottledStore(link).move)
        await saves.goes_on(10)
        assert saves.most <= 2 * LEAST
        await saves.goes_on(30)
        assert saves.most <= LEAST + 1
        await saves.end()

    in_counted_time(test())


def test_window_shrinks_when_the_store_becomes_slower() -> None:
    async def test() -> None:
        store = ThrottledStore(S3)
        saves = Saves(store.move)
        await saves.goes_on(20)
        store.become(Link(160 * MB, 80 * MB, 0.03))
        await saves.goes_on(30)
        await saves.goes_on(30)
        assert saves.most <= 2 * LEAST
        await saves.end()

    in_counted_time(test())


def test_window_shrinks_on_failures_and_grows_after_recovery() -> None:
    async def test() -> None:
        store, fails = ThrottledStore(S3), False

        async def save(size: int) -> None:
            await store.move(size)
            if fails:
                raise StoreBusy("slow down")

        saves = Saves(save)
        await saves.goes_on(20)
        fails = True
        await saves.goes_on(5)
        await saves.goes_on(5)
        assert saves.most == LEAST
        fails = False
        await saves.goes_on(40)
        assert saves.most >= 26
        await saves.end()

    in_counted_time(test())


def test_concurrent_failures_shrink_the_window_once() -> None:
    async def test() -> None:
        store, failing_since_s = ThrottledStore(S3), float("inf")
        loop = asyncio.get_running_loop()

        async def save(size: int) -> None:
            begun_s = loop.time()
            await store.move(size)
            if begun_s <= failing_since_s < loop.time():
                raise StoreBusy("slow down")

        saves = Saves(save)
        await saves.goes_on(20)
        failing_since_s = loop.time()
        await saves.goes_on(0.5)
        await saves.goes_on(0.5)
        assert 2 * LEAST < saves.most < 26
        await saves.end()

    in_counted_time(test())


def test_window_does_not_grow_if_each_save_takes_long() -> None:
    """A larger window would be faster, but closer to the time-out."""

    async def test() -> None:
        saves = Saves(ThrottledStore(Link(2000 * MB, 10 * MB, 0.03)).move)
        await saves.goes_on(60)
        assert saves.most == LEAST
        await saves.end()

    in_counted_time(test())


def test_window_does_not_grow_if_no_save_has_waited() -> None:
    async def test() -> None:
        store = ThrottledStore(S3)
        admission = Admission(TIMEOUT_S, grows=True)

        async def save() -> None:
            async with admission.admitted(Priority.SAVE, CHUNK):
                await store.move(CHUNK)

        for _ in range(12):
            await asyncio.gather(save(), save())
        many = [asyncio.create_task(save()) for _ in range(WAITING)]
        await asyncio.sleep(0.01)
        assert store.in_flight == LEAST
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)

    in_counted_time(test())


@pytest.mark.parametrize(
    ("url", "is_full"), [("s3://bucket/prefix", True), ("file://{folder}", False)]
)
def test_window_of_a_folder_does_not_grow(
    url: str, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {"key": "k", "secret": "hidden"} if is_full else {}
    most = 0

    async def test() -> None:
        opened = open_store(
            StoreConfig(url=url.format(folder=tmp_path), storage_options=options), "options"
        )
        client, store = StoreClient(opened, TIMEOUT_S), ThrottledStore(S3)

        async def save(_: ObjectStore) -> None:
            nonlocal most
            most = max(most, store.in_flight + 1)
            await store.move(CHUNK)

        await asyncio.gather(*(client.ask(save, Priority.SAVE, CHUNK) for _ in range(300)))
        await opened.close()

    in_counted_time(test())
    assert (most > 26) if is_full else (most == LEAST)
