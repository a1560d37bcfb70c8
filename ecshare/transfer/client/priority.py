# SPDX-License-Identifier: Apache-2.0
"""Admission of operations on the store: by priority, within limits of number and bytes."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import IntEnum
from itertools import count
from typing import NamedTuple

from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreError
from ecshare.transfer.client.window import Window


class _Limits(NamedTuple):
    """Limits of the operations in flight: the initial ones, and the most to which they grow."""

    number: int
    num_bytes: int
    most_number: int
    most_factor: float
    """The largest factor by which the window multiplies `number` and `num_bytes`."""


# Bandwidth x round trip: 8 objects of 8 MB in flight fill a fast link; small objects need 32
# (docs/decisions.md has figures). Saves get less, because they may wait. The limits have room for
# three and two objects of 32 MiB (large chunks of KV) with their headers. Saves may grow up to the
# 64 connections of the cloud store, and up to about the default of `buffer_bytes`. Loads need less:
# a slow load uses several connections, and each takes room in the host cache.
_LOADS = _Limits(32, 97 << 20, 32, 4.0)
_LOOK_UPS = _Limits(4, 0, 4, 1.0)
_SAVES = _Limits(8, 65 << 20, 64, 16.0)
# An operation is slow if it takes more than this part of its time-out.
_SLOW = 0.25


class Priority(IntEnum):
    """The priority of an operation: first those that requests wait for.

    NOTE is for small writes that other engines wait for. SAVE includes the look-ups of saves. POLL
    is for objects that may never arrive, because they were only announced or guessed. Polls have a
    limit of their own.
    """

    LOAD = 0
    LOOK_UP = 1
    NOTE = 2
    SAVE = 3
    POLL = 4


# A poll that finds its object is a load.
_LIMITS = {
    Priority.LOAD: _LOADS,
    Priority.LOOK_UP: _LOOK_UPS,
    Priority.NOTE: _LOOK_UPS,
    Priority.SAVE: _SAVES,
    Priority.POLL: _LOADS,
}


class Admission:
    """Admits operations on the store.

    No operation is admitted while a more urgent one waits. An operation larger than the limit is
    admitted when no other one of its priority is in flight. The limits follow the measured
    throughput (see Window). Ownership: the I/O thread.
    """

    def __init__(self, timeout_s: float, *, grows: bool) -> None:
        """Start with nothing in flight.

        `timeout_s`: of one operation. `grows`: whether the limits may become larger than at first.
        """
        slow_s = _SLOW * timeout_s
        self._windows = {
            each: Window(limits.most_factor if grows else 1.0, slow_s)
            for each, limits in _LIMITS.items()
        }
        self._number = dict.fromkeys(Priority, 0)
        self._bytes = dict.fromkeys(Priority, 0)
        self._order = count()
        self._waiting: list[tuple[Priority, int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def admitted(self, priority: Priority, cost_bytes: int) -> AsyncIterator[None]:
        """Wait for admission, and hold it for the body. `cost_bytes`: the most it may move."""
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), cost_bytes, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(priority, cost_bytes)
            else:
                self._admit()  # the cancelled one may have blocked others
            raise
        try:
            with self._measured(priority, cost_bytes):
                yield
        finally:
            self._leave(priority, cost_bytes)

    @contextmanager
    def _measured(self, priority: Priority, cost_bytes: int) -> Iterator[None]:
        """Report the end of the body to the window of `priority`, unless it moves no bytes."""
        if not cost_bytes:
            yield
            return
        window, loop = self._windows[priority], asyncio.get_running_loop()
        moves, begun_s = window.moves, loop.time()
        try:
            yield
        except (ObjectMissing, ObjectCorrupt):
            raise  # the store works, but `cost_bytes` were not moved
        except StoreError:
            window.failed(moves)
            raise
        if self._waiting and self._waiting[0][0] == priority:
            seconds = loop.time() - begun_s
            window.succeeded(moves, cost_bytes, seconds, self._number[priority])

    def _admit(self) -> None:
        while self._waiting:
            priority, _, cost_bytes, turn = self._waiting[0]
            if not turn.done():
                if not self._has_room(priority, cost_bytes):
                    return
                self._number[priority] += 1
                self._bytes[priority] += cost_bytes
                turn.set_result(None)
            heapq.heappop(self._waiting)

    def _has_room(self, priority: Priority, cost_bytes: int) -> bool:
        number, limits = self._number[priority], _LIMITS[priority]
        factor = self._windows[priority].factor
        most_number = min(factor * limits.number, limits.most_number)
        most_bytes = factor * limits.num_bytes
        has_bytes = self._bytes[priority] + cost_bytes <= most_bytes
        return not number or (number < most_number and has_bytes)

    def _leave(self, priority: Priority, cost_bytes: int) -> None:
        self._number[priority] -= 1
        self._bytes[priority] -= cost_bytes
        self._admit()
