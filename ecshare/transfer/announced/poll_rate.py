# SPDX-License-Identifier: Apache-2.0
"""Limits how often all waits for announced objects together ask the store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

# Requests to the store in a second, by all waits together. Up to 25 waits that poll every 50 ms are
# not slowed down.
_MOST_A_SECOND = 500
# The limit for all waits older than this together: their objects arrive late, if at all.
_OLD_S = 1.0
_MOST_OLD_A_SECOND = 100
# But none of them pauses for more than this share of its age, which bounds how late it sees its
# object.
_LONGEST_PAUSE = 0.5
# The lowest age that a wait counts as having, so that no first pause is too short.
_LEAST_AGE_S = 0.01
# Ages are summed again after this time, or when the number of waits has grown by this factor: it
# takes 60 us for a thousand.
_RECOUNT_S = 0.05
_RECOUNT_GROWTH = 1.1


class Waiter:
    """One wait for an announced object."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s


class PollRate:
    """Divides a total rate among all waits.

    The rate of a wait falls with its age. An object that has not arrived for seconds will rarely be
    the next to arrive, and must not slow down new waits.

    Ownership: the I/O thread.
    """

    def __init__(self, clock_s: Callable[[], float] = monotonic) -> None:
        """Start without waits. `clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self._waiters: set[Waiter] = set()
        self._weight = 0.0
        self._counted_s = 0.0
        self._num_counted = self._num_old = 0

    @contextmanager
    def joined(self) -> Iterator[Waiter]:
        """Count a wait for the time of the body."""
        waiter = Waiter(self._clock_s())
        self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            self._waiters.remove(waiter)

    def pause_s(self, waiter: Waiter) -> float:
        """Return the shortest time between two requests of `waiter` to the store."""
        now_s = self._clock_s()
        is_larger = len(self._waiters) > _RECOUNT_GROWTH * self._num_counted
        if is_larger or now_s >= self._counted_s + _RECOUNT_S:
            self._counted_s, self._num_counted = now_s, len(self._waiters)
            ages_s = [_age_s(each, now_s) for each in self._waiters]
            self._weight = sum(1 / each for each in ages_s)
            self._num_old = sum(each > _OLD_S for each in ages_s)
        age_s = _age_s(waiter, now_s)
        pause_s = age_s * self._weight / _MOST_A_SECOND
        if age_s <= _OLD_S:
            return pause_s
        return max(pause_s, min(self._num_old / _MOST_OLD_A_SECOND, _LONGEST_PAUSE * age_s))


def _age_s(waiter: Waiter, now_s: float) -> float:
    return max(now_s - waiter.since_s, _LEAST_AGE_S)
