# SPDX-License-Identifier: Apache-2.0
"""Calls stores for commands and upkeep: with a time limit, with retries, and bounded in number."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from itertools import islice
from typing import TypeVar

from ecshare.store.errors import StoreBusy, StoreUnavailable
from ecshare.store.objects import ObjectInfo, ObjectStore

T = TypeVar("T")

PAGE = 1000
"""The most keys that one S3 request lists or removes."""
_TRIES = 3
_PAUSE_S = 1.0


class Calls:
    """Calls `store`, with a time limit and retries."""

    def __init__(self, store: ObjectStore, timeout_s: float) -> None:
        """`timeout_s`: for each call, and for each page of a listing."""
        self.store = store
        self._timeout_s = timeout_s

    async def steady(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call of the store. Retry it if the store is busy or too slow.

        Raises:
            StoreError: the store failed, or did not answer in time.
        """
        for left in reversed(range(_TRIES)):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await call()
            except StoreBusy:
                if not left:
                    raise
            except TimeoutError:
                if not left:
                    raise self._timed_out("an operation") from None
            await asyncio.sleep(_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    async def pages(self, listing: AsyncIterator[ObjectInfo]) -> AsyncIterator[list[ObjectInfo]]:
        """Yield the lines of a listing, at most `PAGE` at a time.

        Raises:
            StoreError: the store failed, or a page did not arrive in time.
        """
        async with aclosing(listing):  # type: ignore[type-var]
            while True:
                page: list[ObjectInfo] = []
                try:
                    async with asyncio.timeout(self._timeout_s):
                        async for info in listing:
                            page.append(info)
                            if len(page) == PAGE:
                                break
                except TimeoutError:
                    raise self._timed_out("the listing") from None
                if not page:
                    return
                yield page

    def _timed_out(self, what: str) -> StoreUnavailable:
        return StoreUnavailable(f"{what} did not end within {self._timeout_s:g} s")


class InFlight:
    """Bounds what is in flight: a number, and bytes. What is larger than all bytes goes alone.

    Belongs to the event loop's thread.
    """

    def __init__(self, max_bytes: int, most: float = math.inf) -> None:
        """Start empty. `most`: how many may be in flight."""
        self._max_bytes, self._most = max_bytes, most
        self._num = self._num_bytes = 0
        self._left = asyncio.Condition()

    async def enter(self, num_bytes: int) -> None:
        """Wait until there is room, and take it. The caller must call `leave`."""
        async with self._left:
            await self._left.wait_for(lambda: self._has_room(num_bytes))
            self._num += 1
            self._num_bytes += num_bytes

    async def leave(self, num_bytes: int) -> None:
        """Give back the room of one `enter`."""
        self._num -= 1
        self._num_bytes -= num_bytes
        async with self._left:
            self._left.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        fits = not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes
        return fits and self._num < self._most


def batched(items: Iterable[T], num: int) -> Iterator[list[T]]:
    """Yield the items, `num` at a time."""
    left = iter(items)
    while some := list(islice(left, num)):
        yield some
