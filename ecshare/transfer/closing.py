# SPDX-License-Identifier: Apache-2.0
"""The end of a process's engines: their common time limit, and a stop at exit."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic
from typing import Protocol

# vLLM closes its connectors one right after the other.
_NEXT_S = 0.1


class ClosingTime:
    """Lets engines that close one right after the other share one time limit.

    Ownership: the thread that closes.
    """

    def __init__(self, clock_s: Callable[[], float] = monotonic) -> None:
        """`clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self._ended_s = -inf
        self._used_s = 0.0

    @contextmanager
    def until(self, timeout_s: float) -> Iterator[float]:
        """Yield the time until which the body may wait, at most `timeout_s` from now."""
        begun_s = self._clock_s()
        if begun_s - self._ended_s > _NEXT_S:
            self._used_s = 0.0
        try:
            yield begun_s + max(0.0, timeout_s - self._used_s)
        finally:
            self._ended_s = self._clock_s()
            self._used_s += self._ended_s - begun_s


class _Stoppable(Protocol):
    def stop(self) -> None:
        """End the engine's threads; if they have ended, do nothing."""


_running: set[_Stoppable] = set()


def stop_at_exit(engine: _Stoppable) -> None:
    """Register `engine`, to be stopped when the process exits unless `has_stopped` is called."""
    _running.add(engine)


def has_stopped(engine: _Stoppable) -> None:
    """Unregister `engine`."""
    _running.discard(engine)


@atexit.register
def stop_all() -> None:
    """Stop engines that were not closed: a thread that runs while Python ends may crash it."""
    for engine in tuple(_running):
        engine.stop()
