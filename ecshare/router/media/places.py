# SPDX-License-Identifier: Apache-2.0
"""A bound on what is under way for all requests together, which nobody can use up. Pure."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice

_AT_ONCE = 8
_KEPT_FREE = 8
"""One in so many places, while any download is slow."""
_SLOW_BYTES = 64 * 1024
_SLOW_S = 2.0
"""A download is slow once it has got no more than _SLOW_BYTES in this time."""
_ENDED_FOR_ONE = 2
"""How many slow ones end for one that begins, so that places become free, but not all at once."""


class FullError(Exception):
    """There is no place for more. Those that have one are not disturbed."""


class Places:
    """A number of places, for downloads or look-ups. Belongs to the event loop's thread.

    No owner, such as a host, has more places than are free besides: one that never answers gets
    half of them, and each further one half of the rest. Hosts are cheap: when few places are free,
    the slowest downloads end for those that begin.
    """

    def __init__(self, number: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._number = number
        self._used: Counter[str] = Counter()
        self.num_used = 0
        """The places that are taken now."""
        self.clock_s = clock_s
        self.progress_s: dict[Place, float] = {}
        """When each download got on for the last time; first the one that waits for longest."""

    @property
    def are_scarce(self) -> bool:
        """Whether more than half of the places are taken."""
        return self.num_used > self._number / 2

    def take(self, owner: str) -> None:
        """Take one place for `owner`.

        Raises:
            FullError: none is free, or the owner has as many as are free.
        """
        if self._used[owner] >= self._number - self.num_used:
            raise FullError
        self._used[owner] += 1
        self.num_used += 1

    def free(self, owner: str) -> None:
        """Give back a place that `owner` has."""
        self.num_used -= 1
        self._used[owner] -= 1
        if not self._used[owner]:
            del self._used[owner]

    def relieve(self) -> None:
        """End what is slowest, if few places are free."""
        slow_since_s = self.clock_s() - _SLOW_S
        for place, progress_s in list(islice(self.progress_s.items(), _ENDED_FOR_ONE)):
            is_enough_free = self._number - self.num_used >= max(1, self._number // _KEPT_FREE)
            if progress_s > slow_since_s or is_enough_free:
                return
            place.give_up()


class Place:
    """A place for a download while a block runs, which may change its owner."""

    def __init__(self, places: Places, end: Callable[[], None]) -> None:
        """`end` is called if others need the place, which they then have. It ends the block."""
        self._places = places
        self._end = end
        self._num_bytes = 0
        self.owner: str | None = None
        self.was_given_up = False
        """Whether others needed it."""

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()

    def take(self, owner: str) -> None:
        """Have the place belong to `owner` from now on.

        Raises:
            FullError: there is none for this owner.
        """
        self._leave()
        self._places.relieve()
        self._places.take(owner)
        self.owner = owner
        self._get_on()

    def received(self, num_bytes: int) -> None:
        """Note that so much more has come. A few bytes now and then do not count."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _SLOW_BYTES and self.owner is not None:
            self._get_on()

    def give_up(self) -> None:
        """Leave the place to others."""
        self.was_given_up = True
        self._leave()
        self._end()

    def _get_on(self) -> None:
        self._num_bytes = 0
        self._places.progress_s.pop(self, None)  # to put it at the end
        self._places.progress_s[self] = self._places.clock_s()

    def _leave(self) -> None:
        if self.owner is not None:
            self._places.free(self.owner)
            del self._places.progress_s[self]
            self.owner = None


class Turns:
    """The downloads of one request: a few at once, and one while places are scarce.

    So half of the places are for the first downloads of requests.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._num_begun = 0
        self._has_ended = asyncio.Event()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the request's next turn, which ends with the block."""
        while self._num_begun >= (1 if self._places.are_scarce else _AT_ONCE):
            self._has_ended.clear()
            await self._has_ended.wait()
        self._num_begun += 1
        try:
            yield
        finally:
            self._num_begun -= 1
            self._has_ended.set()
