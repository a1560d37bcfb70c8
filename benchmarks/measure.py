# SPDX-License-Identifier: Apache-2.0
"""Clocks, readings and their statistics."""

import math
import random
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

_PAGE_BYTES = 4096

N = TypeVar("N")
R = TypeVar("R", bound=Hashable)


class Readings(Generic[R]):
    """Seconds (or any numbers) by their subject, one reading a round."""

    def __init__(self) -> None:
        self._values: defaultdict[R, list[float]] = defaultdict(list)

    def add(self, what: R, value: float) -> None:
        """Record one reading."""
        self._values[what].append(value)

    @contextmanager
    def timed(self, what: R) -> Iterator[None]:
        """Record the seconds that the body takes."""
        started_s = time.perf_counter()
        yield
        self.add(what, time.perf_counter() - started_s)

    def __contains__(self, what: R) -> bool:
        return what in self._values

    def median(self, what: R) -> float:
        """Return the median reading; KeyError if there is none."""
        if what not in self._values:
            raise KeyError(what)
        return statistics.median(self._values[what])

    def ratio(self, what: R, base: R) -> float:
        """Return the median of the ratios of each round's reading to that of `base`."""
        pairs = zip(self._values[what], self._values[base], strict=True)
        return statistics.median(value / other for value, other in pairs)

    def values(self, what: R) -> Sequence[float]:
        """Return all readings, in order."""
        return self._values[what]


def in_turn(names: Sequence[N], turn: int) -> Sequence[N]:
    """Return the names, starting with another one each turn: none is always first."""
    first = turn % len(names)
    return (*names[first:], *names[:first])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of all values do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def cpu_s() -> float:
    """Return the CPU seconds, user and system, that this process (no child) has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def touch(tensor: Tensor) -> None:
    """Read a byte of every page and the last one, so that lazily mapped pages are in memory."""
    flat = tensor.reshape(-1).view(torch.uint8)
    int(flat[::_PAGE_BYTES].sum()) + int(flat[-1])


def noise(num_bytes: int, seed: int = 0) -> bytearray:
    """Return bytes that neither a file system nor a server can compress."""
    return bytearray(random.Random(seed).randbytes(num_bytes))


def wait_until(is_true: Callable[[], bool], within_s: float, every_s: float = 0.001) -> None:
    """Call `is_true` until it returns True. Raises TimeoutError."""
    deadline_s = time.monotonic() + within_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not true within {within_s:g} s")
        time.sleep(every_s)
