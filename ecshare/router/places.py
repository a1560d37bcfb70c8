# SPDX-License-Identifier: Apache-2.0
"""A bound on what is under way for all requests together, which nobody can use up. Pure."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

_AT_ONCE = 8


class FullError(Exception):
    """There is no place for more. Those that have one are not disturbed."""


class Places:
    """A number of places, for downloads or look-ups. Belongs to the event loop's thread.

    No owner, such as a host, has more places than are free besides: one that never answers gets
    half of them, and each further one half of the rest.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._num_free = number
        self._used: Counter[str] = Counter()

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
    def place(self) -> Iterator["Place"]:
        """Yield a place that is not taken yet, and is free when the block ends."""
        place = Place(self)
        try:
            yield place
        finally:
            if place.owner is not None:
                self.free(place.owner)


class Place:
    """One place, which may change its owner."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.owner: str | None = None

    def take(self, owner: str) -> None:
        """Have the place belong to `owner` from now on.

        Raises:
            FullError: there is none for this owner.
        """
        if self.owner is not None:
            self._places.free(self.owner)
            self.owner = None
        self._places.take(owner)
        self.owner = owner


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
