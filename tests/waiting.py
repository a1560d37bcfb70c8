# SPDX-License-Identifier: Apache-2.0
"""Waiting for other threads and processes, and clocks that a test can advance."""

import asyncio
import inspect
import time
from collections.abc import Callable

import pytest

_PAUSE_S = 0.002
_WITHIN_S = 30.0


def wait_until(
    is_so: Callable[[], object],
    within_s: float = _WITHIN_S,
    otherwise: str = "",
    pause_s: float = _PAUSE_S,
) -> None:
    """Return as soon as `is_so` returns true. `pause_s`: between two calls, if each is expensive.

    Raises:
        AssertionError: it is not within `within_s`; says `otherwise`.
    """
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, otherwise or f"not within {within_s} s"
        time.sleep(pause_s)


async def until(is_so: Callable[[], object], within_s: float = _WITHIN_S) -> None:
    """As `wait_until`, without blocking the event loop. `is_so` may return an awaitable.

    Raises:
        TimeoutError: it is not within `within_s`.
    """
    async with asyncio.timeout(within_s):
        while not (await found if inspect.isawaitable(found := is_so()) else found):
            await asyncio.sleep(_PAUSE_S)


class LoopClock:
    """The running event loop's time, which a test can advance; due timers fire at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._real_s = loop.time
        self._ahead_s = 0.0
        monkeypatch.setattr(loop, "time", lambda: self._real_s() + self._ahead_s)

    def forward(self, seconds: float) -> None:
        """Let `seconds` have passed."""
        self._ahead_s += seconds


class Clock:
    """`time.monotonic` of this process, which a test can advance.

    Threads that sleep or poll notice it when they wake up.
    """

    def __init__(self) -> None:
        self._real_s = time.monotonic
        self._ahead_s = 0.0

    def now_s(self) -> float:
        """Return the time of `time.monotonic`."""
        return self._real_s() + self._ahead_s

    def forward(self, seconds: float) -> None:
        """Let `seconds` have passed."""
        self._ahead_s += seconds
