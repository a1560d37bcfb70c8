# SPDX-License-Identifier: Apache-2.0
"""Finds engines that accept requests and never answer them.

An engine owes a first byte from when a request is sent to it. While it owes some and says nothing
at all, its /health is asked every few seconds. It hangs where that does not answer either, or where
it has been silent for longer than its requests may wait: vLLM's /health may well answer beside a
GPU that hangs. One that hangs is sent nothing more, and what waits there moves to another one.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from ecshare.router.workers import Worker, Workers

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 2.0


class SilentError(Exception):
    """An engine has not begun to answer; the request may go to another one."""


@dataclass(frozen=True)
class Patience:
    """How long a request waits for an engine; None: as long as its client does."""

    total_s: float | None = None
    first_byte_s: float | None = None
    """Where nothing else shows a fault. Only a request with such a limit is evidence of one."""
    is_last: Callable[[], bool] = lambda: False
    """Whether nobody else could answer, so that the request is better left waiting."""


class Wait:
    """One request that waits for its first byte, or has it."""

    def __init__(
        self,
        ward: "_Watched",
        limit_s: float,
        is_last: Callable[[], bool],
        timeout: asyncio.Timeout,
    ) -> None:
        self._ward = ward
        self.limit_s = limit_s
        self._is_last = is_last
        self._timeout = timeout
        self._num_heard = ward.num_heard
        self._began_s = asyncio.get_running_loop().time()

    @property
    def is_late(self) -> bool:
        """Whether it has lasted longer than it may."""
        return asyncio.get_running_loop().time() - self._began_s >= self.limit_s

    @property
    def was_in_vain(self) -> bool:
        """Whether it is late, and the engine has said nothing to anybody meanwhile."""
        return self.is_late and self._ward.num_heard == self._num_heard

    def heard(self) -> None:
        """Note that something has come of the answer."""
        self._ward.heard()
        if self in self._ward.waits:
            self._ward.waits.remove(self)
            if not self._timeout.expired():
                self._timeout.reschedule(None)

    def move_if_late(self) -> None:
        """Give the request up, for another engine, if it need wait no longer for this one."""
        may_move = self._ward.worker.is_hung or self.is_late
        if may_move and not self._is_last() and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False)
class _Watched:
    """What is known of one engine."""

    worker: Worker
    workers: Workers
    waits: set[Wait] = field(default_factory=set)
    num_heard: int = 0
    was_left: bool = False
    """A request has ended without a first byte since the engine was heard or found healthy."""
    used_up: float = 0.0
    """How much of the patience, 1 being all, it has been silent for while anybody waited."""
    watching: asyncio.Task[None] | None = None

    def leave_out(self, reason: str) -> None:
        self.used_up = 0.0
        if not self.worker.is_hung:
            self.workers.mark_hung(self.worker)
            logger.warning("the engine %s %s: it is left out", self.worker.url, reason)

    def heard(self) -> None:
        self.num_heard += 1
        self.was_left = False
        self.used_up = 0.0
        self.workers.mark_alive(self.worker)

    @property
    def is_of_interest(self) -> bool:
        return bool(self.waits) or self.was_left or self.worker.is_hung


class HealthWatch:
    """Over all engines of a router. Belongs to the event loop's thread."""

    def __init__(
        self, is_healthy: Callable[[Worker], Awaitable[bool]], shortest_limit_s: float
    ) -> None:
        """`is_healthy` asks an engine's /health; it takes a few seconds at most."""
        self._is_healthy = is_healthy
        self._every_s = min(_ASK_EVERY_S, shortest_limit_s)
        self._wards: dict[Worker, _Watched] = {}

    @asynccontextmanager
    async def waiting(
        self, worker: Worker, workers: Workers, limit_s: float, is_last: Callable[[], bool]
    ) -> AsyncIterator[Wait]:
        """Watch `worker`, one of `workers`, while the block waits for its answer.

        `limit_s` is for its first byte; `is_last` as in `Patience`.
        Raises SilentError where the engine hangs, or lets this request wait for too long, before
        `heard` is called on what is yielded.
        """
        ward = self._wards.setdefault(worker, _Watched(worker, workers))
        try:
            async with asyncio.timeout(None) as timeout:
                wait = Wait(ward, limit_s, is_last, timeout)
                with self._watched(ward, wait):
                    yield wait
        except TimeoutError as exc:
            if not timeout.expired():
                raise
            raise SilentError("does not begin to answer") from exc

    @contextmanager
    def _watched(self, ward: _Watched, wait: Wait) -> Iterator[None]:
        ward.waits.add(wait)
        if ward.watching is None:
            ward.watching = asyncio.create_task(self._watch(ward))
        try:
            yield
        finally:
            if wait in ward.waits:
                ward.waits.remove(wait)
                ward.was_left = True
                if wait.was_in_vain:
                    ward.leave_out("does not answer")

    async def close(self) -> None:
        """Stop watching."""
        tasks = [ward.watching for ward in self._wards.values() if ward.watching is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, ward: _Watched) -> None:
        try:
            while ward.is_of_interest:
                num_heard = ward.num_heard
                await asyncio.sleep(self._every_s)
                if ward.num_heard == num_heard:
                    await self._ask(ward)
                for wait in list(ward.waits):
                    wait.move_if_late()
        finally:
            ward.watching = None

    async def _ask(self, ward: _Watched) -> None:
        """Ask for the health of an engine that has said nothing for a while."""
        worker, num_heard = ward.worker, ward.num_heard
        is_healthy = await self._is_healthy(worker)
        if worker.is_hung:
            if is_healthy and ward.workers.try_again(worker):
                logger.info("the engine %s answers its /health again and is tried", worker.url)
            return
        if ward.num_heard != num_heard:
            return
        ward.was_left = False
        limit_s = min((wait.limit_s for wait in ward.waits), default=math.inf)
        ward.used_up += self._every_s / limit_s
        if not is_healthy:
            ward.leave_out("answers neither requests nor /health")
        elif ward.used_up >= 1:
            ward.leave_out("does not answer")
