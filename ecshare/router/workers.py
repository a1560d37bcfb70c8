# SPDX-License-Identifier: Apache-2.0
"""The engines of each stage, how busy they are, and which one is next. Pure: the clock is given."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


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
        live = [
            worker for worker in self._workers if worker.down_until_s <= now_s and worker not in but
        ]
        return min(live, key=lambda worker: (worker.in_flight, worker.last_turn), default=None)

    def soonest(self) -> Worker | None:
        """Return the engine whose cool-down ends first, for a caller with nothing to lose."""
        return min(self._workers, key=lambda worker: worker.down_until_s, default=None)

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
        worker.down_until_s = self._clock_s() + self._cool_down_s

    def mark_answered(self, worker: Worker) -> None:
        """Forget the failure of an engine that answers again."""
        worker.down_until_s = 0.0

    def mark_streams(self, worker: Worker, *, streams: bool) -> None:
        """Remember whether a reader of what `worker` computes need not wait for its answer."""
        worker.streams = streams
