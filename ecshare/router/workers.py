# SPDX-License-Identifier: Apache-2.0
"""The engines of each stage, how busy they are, and which one is next. Pure: the clock is given."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

_MAX_DOUBLINGS = 6


class Stage(StrEnum):
    """The three steps of a request."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Worker:
    """One engine as the router sees it; changed by its `Workers` only."""

    url: str
    in_flight: int = 0
    down_until_s: float = 0.0
    last_turn: int = 0
    streams: bool = False
    """Whether its last answer said that it stores KV while it computes."""
    is_hung: bool = False
    """It has accepted requests and answered none. It is left out until its /health answers."""
    num_hangs: int = 0
    """How often it has hung since it last answered. While there are some it is on trial: whatever
    its /health says, it gets one request at a time."""


class Workers:
    """The engines of one stage. Belongs to the event loop's thread; nothing here blocks."""

    def __init__(
        self, urls: Iterable[str], cool_down_s: float, clock_s: Callable[[], float]
    ) -> None:
        self._workers = [Worker(url) for url in urls]
        self._cool_down_s = cool_down_s
        self._clock_s = clock_s
        self._turn = 0

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def choose(self, but: Collection[Worker] = ()) -> Worker | None:
        """Return the least busy engine that is not cooling down, `but` none of these, if any.

        Among equals the one that has waited longest for its turn: light traffic goes round.
        """
        now_s = self._clock_s()
        live = [worker for worker in self._workers if _is_up(worker, now_s) and worker not in but]
        return min(live, key=_business, default=None)

    def soonest(self) -> Worker | None:
        """Return the engine whose cool-down ends first, for a caller with nothing to lose."""
        return min(self._workers, key=lambda each: (each.is_hung, each.down_until_s), default=None)

    def several(self, number: int) -> list[Worker]:
        """Return so many engines to ask one after the other, the best first; one if there is any.

        It is the one that `choose` or else `soonest` would give.
        """
        now_s = self._clock_s()
        live = [worker for worker in self._workers if _is_up(worker, now_s)]
        soonest = self.soonest()
        return sorted(live, key=_business)[:number] or [each for each in (soonest,) if each]

    @contextmanager
    def lease(self, worker: Worker) -> Iterator[None]:
        """Count one request in flight on `worker` while the block runs."""
        self._turn += 1
        worker.last_turn = self._turn
        worker.in_flight += 1
        try:
            yield
        finally:
            worker.in_flight -= 1

    def mark_failed(self, worker: Worker) -> None:
        """Send no request to `worker` until its cool-down is over."""
        down_until_s = self._clock_s() + self._cool_down_s
        worker.down_until_s = max(worker.down_until_s, down_until_s)

    def mark_answered(self, worker: Worker) -> None:
        """Forget the failure of an engine that answers again, unless it has hung."""
        if not worker.num_hangs:
            worker.down_until_s = 0.0

    def mark_hung(self, worker: Worker) -> None:
        """Send no request to `worker` until `try_again`, after a rest that doubles each time."""
        rest_s = self._cool_down_s * 2 ** min(worker.num_hangs, _MAX_DOUBLINGS)
        worker.down_until_s = max(worker.down_until_s, self._clock_s() + rest_s)
        worker.is_hung = True
        worker.num_hangs += 1

    def try_again(self, worker: Worker) -> bool:
        """Put one that hung on trial, as it is healthy; False: its rest is not over."""
        if self._clock_s() < worker.down_until_s:
            return False
        worker.is_hung = False
        return True

    def mark_alive(self, worker: Worker) -> None:
        """Forget that an engine hung: an answer of it has begun to come."""
        if worker.num_hangs:
            worker.is_hung = False
            worker.num_hangs = 0
            worker.down_until_s = 0.0

    def mark_streams(self, worker: Worker, *, streams: bool) -> None:
        """Remember whether a reader of what `worker` computes need not wait for its answer."""
        worker.streams = streams


def _is_up(worker: Worker, now_s: float) -> bool:
    is_tried = worker.num_hangs > 0 and worker.in_flight > 0
    return worker.down_until_s <= now_s and not worker.is_hung and not is_tried


def _business(worker: Worker) -> tuple[int, int]:
    return worker.in_flight, worker.last_turn
