# SPDX-License-Identifier: Apache-2.0
"""Admission of operations on the store: by priority, within limits of number and bytes."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum
from itertools import count

# Bandwidth x round trip: 8 objects of 8 MB in flight fill a fast link; small objects need 32
# (docs/decisions.md has figures). Saves get less, because they may wait. The limits have room for
# three and two objects of 32 MiB (large chunks of KV) with their headers. A poll may find its
# object, and is a load then.
_MAX_BYTES = {0: 97 << 20, 1: 0, 2: 65 << 20, 3: 97 << 20}
_MAX_NUMBER = {0: 32, 1: 4, 2: 8, 3: 32}


class Priority(IntEnum):
    """The priority of an operation: first what requests wait for, last what nobody waits for.

    SAVE includes the look-ups of saves. POLL is for objects that may never arrive, because they
    were only announced, or are guesses. Polls have a limit of their own.
    """

    LOAD = 0
    LOOK_UP = 1
    SAVE = 2
    POLL = 3


class Admission:
    """Admits operations on the store.

    No operation is admitted while a more urgent one waits. An operation larger than the limit is
    admitted when no other one of its priority is in flight. Ownership: the I/O thread.
    """

    def __init__(self) -> None:
        """Start with nothing in flight."""
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
                self._admit()  # it may have stood in the way of others
            raise
        try:
            yield
        finally:
            self._leave(priority, cost_bytes)

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
        if not self._number[priority]:
            return True
        is_small_enough = self._bytes[priority] + cost_bytes <= _MAX_BYTES[priority]
        return self._number[priority] < _MAX_NUMBER[priority] and is_small_enough

    def _leave(self, priority: Priority, cost_bytes: int) -> None:
        self._number[priority] -= 1
        self._bytes[priority] -= cost_bytes
        self._admit()
