# SPDX-License-Identifier: Apache-2.0
"""The common time limit of engines that close."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic

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
