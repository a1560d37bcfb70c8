# SPDX-License-Identifier: Apache-2.0
"""The end of the engines of a process: how long they may take, and that none is forgotten."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic
from typing import Protocol

# vLLM closes its connectors one right after the other.
_NEXT_S = 0.1


class ClosingTime:
    """Gives those that close one right after the other the time of one, together.

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
        """End its threads; if they have ended, do nothing."""


_running: set[_Stoppable] = set()


def stop_at_exit(engine: _Stoppable) -> None:
    """Keep `engine`, and stop it when the process exits, unless `has_stopped` comes first."""
    _running.add(engine)


def has_stopped(engine: _Stoppable) -> None:
    """Keep `engine` no longer."""
    _running.discard(engine)


@atexit.register
def stop_all() -> None:
    """Stop what was not closed: a thread that still runs while Python ends may crash it."""
    for engine in tuple(_running):
        engine.stop()
