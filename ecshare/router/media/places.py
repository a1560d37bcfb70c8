# SPDX-License-Identifier: Apache-2.0
"""A bound on what is under way for all requests together, which nobody can use up. Pure."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

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
        self._num_free = number
        self._used: Counter[str] = Counter()
        self._clock_s = clock_s
        self._held: OrderedDict[Place, float] = OrderedDict()
        """When each got on for the last time; first the one that has waited for longest."""

    @property
    def num_used(self) -> int:
        """The places that are taken now."""
        return self._number - self._num_free

    @property
    def are_scarce(self) -> bool:
        """Whether half of the places are taken."""
        return self._num_free < self._number / 2

    def take(self, owner: str) -> None:
        """Take one place for `owner`.

        Raises:
            FullError: none is free, or the owner has as many as are free.
        """
        if self._used[owner] >= self._num_free:
            if not self._used[owner]:
                del self._used[owner]
            raise FullError
        self._used[owner] += 1
        self._num_free -= 1

    def free(self, owner: str) -> None:
        """Give back a place that `owner` has."""
        self._used[owner] -= 1
        self._num_free += 1
        if not self._used[owner]:
            del self._used[owner]

    @contextmanager
    def place(self, end: Callable[[], None]) -> Iterator["Place"]:
        """Yield a place that is not taken yet, and is free when the block ends.

        `end` is called if others need the place, which they then have. It ends the block soon.
        """
        place = Place(self, end)
        try:
            yield place
        finally:
            place.leave()

    def note(self, place: "Place") -> None:
        """Note that what has this place gets on."""
        self._held[place] = self._clock_s()
        self._held.move_to_end(place)

    def forget(self, place: "Place") -> None:
        """Note that nobody has this place any more."""
        self._held.pop(place, None)

    def relieve(self) -> None:
        """End what is slowest, if few places are free."""
        slow_since_s = self._clock_s() - _SLOW_S
        for _ in range(_ENDED_FOR_ONE):
            place = next(iter(self._held), None)
            if place is None or self._held[place] > slow_since_s:
                return
            if self._num_free >= max(1, self._number // _KEPT_FREE):
                return
            place.give_up()


class Place:
    """One place, which may change its owner."""

    def __init__(self, places: Places, end: Callable[[], None]) -> None:
        self._places = places
        self._end = end
        self._num_bytes = 0
        self.owner: str | None = None
        self.was_given_up = False
        """Whether others needed it."""

    def take(self, owner: str) -> None:
        """Have the place belong to `owner` from now on.

        Raises:
            FullError: there is none for this owner.
        """
        self.leave()
        self._places.relieve()
        self._places.take(owner)
        self.owner = owner
        self._num_bytes = 0
        self._places.note(self)

    def received(self, num_bytes: int) -> None:
        """Note that so much more has come. A few bytes now and then do not count."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _SLOW_BYTES and self.owner is not None:
            self._num_bytes = 0
            self._places.note(self)

    def leave(self) -> None:
        """Have the place belong to nobody."""
        if self.owner is not None:
            self._places.free(self.owner)
            self._places.forget(self)
            self.owner = None

    def give_up(self) -> None:
        """Leave the place to others."""
        self.was_given_up = True
        self.leave()
        self._end()


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
