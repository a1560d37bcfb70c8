# SPDX-License-Identifier: Apache-2.0
"""Measures a store with the engines' own client, and removes the objects that it stored."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectCorrupt, StoreDenied, StoreError
from ecshare.store.keys import Key
from ecshare.store.objects import Memory, ObjectStore
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient

_PREFIX = "probe/bench-"  # see inventory.py: cleaners remove what a killed process leaves
_TURNS = 6
# More than the client ever admits at once, so that its limits decide (priority.py).
_WORKERS = 64
_MOST_OPERATIONS = 100_000
_BATCH = 500

Operation = Callable[[ObjectStore], Awaitable[object]]


class Reading(NamedTuple):
    """The measured rates and times of one kind of operation. MB are 10^6 bytes."""

    what: str
    at_once: str
    number: int
    mb_per_s: float
    per_s: float
    p50_ms: float
    p99_ms: float


class Limits(NamedTuple):
    """How much to measure."""

    size: int
    """The bytes of an object."""
    seconds: float
    """The time for all turns together. Each does at least one operation."""
    most_bytes: int
    """The bytes to write and to read in all turns together; at least one object in each."""


class Measurement:
    """Measures look-ups, puts and reads: one at a time, and as many at once as engines do."""

    def __init__(self, store: ObjectStore, config: StoreConfig, limits: Limits) -> None:
        """`store`: opened with `config`."""
        self._store = store
        self._client = StoreClient(store, config.io_timeout_s)
        self._timeout_s = config.io_timeout_s
        self._limits = limits
        self._body = secrets.token_bytes(limits.size)
        self._stored: list[Key] = []
        self._tried: list[Key] = []

    async def run(self, advance: Callable[[], None]) -> list[Reading]:
        """Return all readings. `advance` is called after each operation.

        Objects remain until `remove`.

        Raises:
            StoreError: the store failed, or returned other bytes than were stored.
        """
        turns: Sequence[tuple[str, Priority, int, Callable[[int], Operation]]] = (
            ("put", Priority.SAVE, self._limits.size, self._put),
            ("look-up", Priority.LOOK_UP, 0, self._look_up),
            ("read", Priority.LOAD, self._limits.size, self._read),
        )
        return [
            await self._turn(what, priority, cost, make, num_workers, advance)
            for what, priority, cost, make in turns
            for num_workers in (1, _WORKERS)
        ]

    async def remove(self) -> str:
        """Remove all objects. Return "", or why some are left.

        Waits for puts in flight: they would store their objects afterwards.
        """
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                while self._client.num_in_flight:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        try:
            for start in range(0, len(self._tried), _BATCH):
                async with asyncio.timeout(6 * self._timeout_s):
                    await self._store.delete(self._tried[start : start + _BATCH])
        except (StoreError, TimeoutError) as exc:
            return str(exc) or "no answer"
        return ""

    async def _turn(  # noqa: PLR0913 — the terms of a turn
        self,
        what: str,
        priority: Priority,
        cost: int,
        make: Callable[[int], Operation],
        num_workers: int,
        advance: Callable[[], None],
    ) -> Reading:
        begun_s = time.perf_counter()
        until_s = begun_s + self._limits.seconds / _TURNS
        most = self._limits.most_bytes // (4 * cost) if cost else _MOST_OPERATIONS
        most = max(1, min(most, _MOST_OPERATIONS))
        taken: list[float] = []
        num_begun = 0

        def timed(operation: Operation) -> Operation:
            async def timed(store: ObjectStore) -> None:
                start_s = time.perf_counter()
                if taken and start_s > until_s:  # the client admitted it too late
                    return
                await operation(store)
                taken.append(time.perf_counter() - start_s)

            return timed

        async def work() -> None:
            nonlocal num_begun
            while num_begun < most and (not num_begun or time.perf_counter() < until_s):
                num_begun += 1
                await self._client.ask(timed(make(num_begun)), priority, cost)
                advance()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_workers):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        seconds = time.perf_counter() - begun_s
        at_once = "1" if num_workers == 1 else "as engines"
        return _reading(what, at_once, taken, cost, seconds)

    def _put(self, _: int) -> Operation:
        key = Key(_PREFIX + secrets.token_hex(8))
        self._tried.append(key)

        async def put(store: ObjectStore) -> None:
            try:
                await store.put(key, self._body)
            except StoreDenied:
                self._tried.remove(key)
                raise
            self._stored.append(key)

        return put

    def _look_up(self, number: int) -> Operation:
        """Every second look-up is of an object that exists."""
        key = self._stored[number % len(self._stored)]
        if number % 2:
            key = Key(_PREFIX + secrets.token_hex(8))
        return lambda store: store.exists([key])

    def _read(self, number: int) -> Operation:
        key = self._stored[number % len(self._stored)]

        async def read(store: ObjectStore) -> None:
            sink = Memory(len(self._body))
            await store.get(key, sink)
            if number == 1 and bytes(sink.body) != self._body:
                raise ObjectCorrupt("it returns other bytes than were stored; do not use it")

        return read


def _reading(
    what: str, at_once: str, taken: Sequence[float], num_bytes: int, seconds: float
) -> Reading:
    ordered = sorted(taken)
    last = len(ordered) - 1
    p50, p99 = (1e3 * ordered[min(last, int(part * len(ordered)))] for part in (0.5, 0.99))
    per_s = len(ordered) / max(seconds, 1e-9)
    return Reading(what, at_once, len(ordered), per_s * num_bytes / 1e6, per_s, p50, p99)
