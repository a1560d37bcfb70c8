# SPDX-License-Identifier: Apache-2.0
"""Records the uses of objects, until an engine writes them to the store as a note."""

import time
from collections.abc import Callable, Iterator, Sequence

from ecshare.store.keys import Key

Name = Key | bytes
"""The key of an object, or the name from which `object_key` makes it."""

MOST_PENDING = 1 << 16
"""As many uses as one note holds."""
_SLICE = 256
# Positions are below this: a chain of 16 million blocks.
_POSITIONS = 1 << 24


class UseRecord:
    """Holds, for each object that was used since the last `take`, when that was, and its position.

    An object of a chain can be used only with all before it. `position` is larger for those further
    from the beginning, so that the end of a chain is removed first. Of a chain that does not fit,
    the end is left out.

    One thread adds, another may take. Adding is a few dictionary writes, so hooks may do it.
    """

    def __init__(
        self, limit: int = MOST_PENDING, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Hold at most `limit` uses. `clock_s`: monotonic seconds."""
        self._limit = limit
        self._clock_s = clock_s
        # The minute and the position as one number: `zip` and `range` then add a whole chain.
        self._pending: dict[Name, int] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, name: Name, position: int = 0) -> None:
        """Record that the object was used now."""
        pending = self._pending
        if len(pending) < self._limit:
            pending[name] = self._minute() * _POSITIONS + min(position, _POSITIONS - 1)

    def add_chain(self, names: Sequence[Name], step: int) -> None:
        """Record that all objects of a chain were used now, the beginning first.

        `step`: the first one has this position, and each further one is `step` behind.
        """
        pending = self._pending
        room, base = self._limit - len(pending), self._minute() * _POSITIONS
        if room > 0:
            most = min(room, len(names), (_POSITIONS - 1) // step)
            first = base + step
            pending.update(zip(names, range(first, first + most * step, step), strict=False))

    def take(self) -> Iterator[list[tuple[Name, int, int]]]:
        """Remove all uses, and yield name, age in minutes and position of each, some at a time.

        The latest come first. To convert all at once would hold the interpreter's lock for tens of
        milliseconds.
        """
        taken, self._pending = self._pending, {}
        return _slices(taken, self._minute())

    def _minute(self) -> int:
        return int(self._clock_s() // 60)


def _slices(taken: dict[Name, int], now: int) -> Iterator[list[tuple[Name, int, int]]]:
    # The other thread may still add to it, once.
    while taken:
        some = [taken.popitem() for _ in range(min(_SLICE, len(taken)))]
        yield [(name, now - use // _POSITIONS, use % _POSITIONS) for name, use in some]
