# SPDX-License-Identifier: Apache-2.0
"""Asks another engine of a stage where one fails, within a budget that all requests share."""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple, Protocol, TypeVar

from ecshare.router.api.errors import GONE_STATUSES, EngineError
from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.http.context import Events, RequestContext
from ecshare.router.types import Stage, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_ENGINES = 3
"""How many engines of a stage may get one request. If all of them fail, the request may be the
cause."""
_BURST = 100.0
"""Retries that may happen at once, such as when an engine with many requests dies."""
_PER_S = 1.0
"""Retries that are always allowed, so that light traffic is not without them."""


class _Part:
    """Limits some retries to a share of the requests, so that an outage does not multiply the load.

    Belongs to the event loop's thread.
    """

    def __init__(self, share: float, clock_s: Callable[[], float]) -> None:
        """`share`: retries that each request allows, from 0 (no retries at all) upwards."""
        self._share = share
        self._clock_s = clock_s
        self.left = _BURST if share else 0.0
        """How many retries are allowed, when `has_any` last looked."""
        self._filled_s = clock_s()
        self.num_spent = 0
        self.num_refused = 0

    @property
    def has_any(self) -> bool:
        """Whether a retry would be allowed now."""
        self._fill()
        return self.left >= 1

    def spend(self) -> bool:
        """Take one retry; False: there is none left."""
        if not self.has_any:
            self.num_refused += 1
            return False
        self.left -= 1
        self.num_spent += 1
        return True

    def _fill(self) -> None:
        now_s = self._clock_s()
        more = (now_s - self._filled_s) * _PER_S if self._share else 0.0
        self.left, self._filled_s = min(_BURST, self.left + more), now_s


class RetryBudget:
    """One part is for retries after an engine's answer, such as a 500, one for all other retries.

    A request may be the cause of such answers. Requests on which every engine fails must not use up
    the retries that others need when an engine is gone.
    """

    def __init__(self, share: float, clock_s: Callable[[], float]) -> None:
        """`share` is that of each part: retries that each request allows, 0 for none at all."""
        self._share = share
        self._parts = [_Part(share, clock_s) for _ in range(2)]

    def after(self, status: int | None) -> _Part:
        """Return the part for a retry after an answer with `status`; None: there was none."""
        return self._parts[status is None or status in GONE_STATUSES]

    def note_request(self) -> None:
        """Add what one request allows."""
        for part in self._parts:
            part.left += self._share

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return {
            "made": sum(part.num_spent for part in self._parts),
            "refused": sum(part.num_refused for part in self._parts),
        }


class IsLast(Protocol):
    """Tells whether no other engine of the stage would be asked if this one failed now: with an
    answer of `status`, or without one.
    """

    def __call__(self, status: int | None = None) -> bool:
        """`status` may be that of an error event."""


class Attempt(NamedTuple):
    """One try at one engine."""

    engine: Engine
    is_last: IsLast


def _anything(failure: EngineError) -> bool:
    return True


class Retries:
    """Chooses the engines of each stage. Belongs to the event loop's thread."""

    def __init__(
        self,
        pools: Mapping[Stage, EnginePool],
        budget: RetryBudget,
        events: Events,
        *,
        keeps_affinity: bool,
    ) -> None:
        """`events` hear of each retry. `keeps_affinity`: whether requests go to the engines
        that got similar ones before.
        """
        self._pools = pools
        self._budget = budget
        self._events = events
        self._keeps_affinity = keeps_affinity

    async def run(
        self,
        stage: Stage,
        call: Callable[[Attempt], Awaitable[T]],
        context: RequestContext,
        work: Work,
        may_move: Callable[[EngineError], bool] = _anything,
    ) -> T:
        """Return what `call` returns for an engine of the stage, and for another one if that fails.

        `may_move` tells whether another engine may be asked after a failure of this stage. A
        failure that `call` raises has left the client without an event of an answer.

        Raises:
            EngineError: no engine is available, the last one failed, or another stage did.
        """
        pool = self._pools[stage]
        tried: list[Engine] = []

        def another(status: int | None) -> Engine | None:
            has_more = len(tried) < _MAX_ENGINES and self._budget.after(status).has_any
            return pool.choose(tried, work) if has_more else None

        def is_last(status: int | None = None) -> bool:
            return another(status) is None

        work = work if self._keeps_affinity else work._replace(key=b"")
        engine = pool.choose(work=work) or self._any_decoder(stage, work)
        if engine is None:
            raise EngineError(stage, "no engine is available", reached=False)
        while True:
            tried.append(engine)
            try:
                return await call(Attempt(engine, is_last))
            except EngineError as failure:
                if failure.stage is not stage or not (failure.may_move and may_move(failure)):
                    raise
                following = another(failure.status)
                if following is None and failure.status is None and len(tried) < _MAX_ENGINES:
                    following = self._any_decoder(stage, work, tried)
                if following is None or not self._budget.after(failure.status).spend():
                    raise
                logger.warning(
                    "request %s tries another %s: %s", context.request_id, stage, failure
                )
                self._events.stage_retried(stage)
                engine = following

    def _any_decoder(
        self, stage: Stage, work: Work, tried: Collection[Engine] = ()
    ) -> Engine | None:
        """Return a D that is down: it may be back, and there is no other way to an answer. One that
        hangs is no second choice.
        """
        if stage is not Stage.DECODE:
            return None
        ranked = self._pools[stage].ranked(work.model)
        engine = next((each for each in ranked if each not in tried), None)
        return None if engine is None or (tried and engine.health.is_hung) else engine
