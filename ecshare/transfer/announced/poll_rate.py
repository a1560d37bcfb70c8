# SPDX-License-Identifier: Apache-2.0
"""Limits how often all waits for announced objects together ask the store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

# Requests to the store in a second, by all together. Up to 25 that ask every 50 ms notice nothing.
_MOST_A_SECOND = 500
# By all together that have waited for longer than this: what they wait for comes late, if at all.
_OLD_S = 1.0
_MOST_OLD_A_SECOND = 100
# But none of them pauses for more than this part of its age: that much later it may see its object.
_LONGEST_PAUSE = 0.5
# The youngest count as this old: their first pause is no shorter.
_LEAST_AGE_S = 0.01
# Ages are added up again after so long, or when so many more wait: it takes 60 us for a thousand.
_RECOUNT_S = 0.05
_RECOUNT_GROWTH = 1.1


class Member:
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
        self._members: set[Member] = set()
        self._weight = 0.0
        self._counted_s = 0.0
        self._num_counted = self._num_old = 0

    @contextmanager
    def joined(self) -> Iterator[Member]:
        """Count a wait for the time of the body."""
        member = Member(self._clock_s())
        self._members.add(member)
        try:
            yield member
        finally:
            self._members.remove(member)

    def pause_s(self, member: Member) -> float:
        """Return the shortest time between two questions of `member`."""
        now_s = self._clock_s()
        is_larger = len(self._members) > _RECOUNT_GROWTH * self._num_counted
        if is_larger or now_s >= self._counted_s + _RECOUNT_S:
            self._counted_s, self._num_counted = now_s, len(self._members)
            ages_s = [_age_s(each, now_s) for each in self._members]
            self._weight = sum(1 / each for each in ages_s)
            self._num_old = sum(each > _OLD_S for each in ages_s)
        age_s = _age_s(member, now_s)
        pause_s = age_s * self._weight / _MOST_A_SECOND
        if age_s <= _OLD_S:
            return pause_s
        return max(pause_s, min(self._num_old / _MOST_OLD_A_SECOND, _LONGEST_PAUSE * age_s))


def _age_s(member: Member, now_s: float) -> float:
    return max(now_s - member.since_s, _LEAST_AGE_S)
