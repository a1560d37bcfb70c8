# SPDX-License-Identifier: Apache-2.0
"""How requests end when the router stops: those in flight run on for a while, none begins."""

import asyncio
import logging

from ecshare.router.api.errors import ApiError

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0  # another router may answer at once


class RequestsInFlight:
    """The requests in flight and their deadlines. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._deadlines: set[asyncio.Timeout] = set()
        self._are_gone = asyncio.Event()
        self.is_draining = False
        """Whether no new request begins any more."""
        self._are_cut = False

    def __len__(self) -> int:
        return len(self._deadlines)

    def begin(self, timeout_s: float) -> asyncio.Timeout:
        """Return the deadline of a request, to be entered at once. `end` it within its block.

        It raises TimeoutError if the request must end; `ending` says why.

        Raises:
            ApiError: the router is stopping, and the request must not begin (503).
        """
        if self.is_draining:
            raise _stopping()
        deadline = asyncio.timeout(timeout_s)
        self._deadlines.add(deadline)
        return deadline

    def end(self, deadline: asyncio.Timeout) -> None:
        """Count a request no longer."""
        self._deadlines.remove(deadline)
        if not self._deadlines:
            self._are_gone.set()

    def ending(self) -> ApiError:
        """Return what the client of a request that must end now is told."""
        if self._are_cut:
            return _stopping()
        return ApiError(504, "The request took too long.", code="timeout")

    async def drain(self, limit_s: float, hurry: asyncio.Event) -> None:
        """Return when all requests have ended. After `limit_s`, or on `hurry`, they are ended."""
        self.is_draining = True
        if self._deadlines:
            number = len(self._deadlines)
            logger.info("stopping: %d requests in flight have up to %g s to end", number, limit_s)
            self._are_gone.clear()
            await _first_of(self._are_gone, hurry, limit_s)
        self._cut()

    def _cut(self) -> None:
        self._are_cut = True
        if self._deadlines:
            logger.warning("%d requests in flight are ended unfinished", len(self._deadlines))
        now_s = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now_s)


async def _first_of(one: asyncio.Event, other: asyncio.Event, limit_s: float) -> None:
    waits = [asyncio.create_task(event.wait()) for event in (one, other)]
    await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _stopping() -> ApiError:
    message = "The router is shutting down."
    return ApiError(503, message, code="shutting_down", retry_after_s=_RETRY_AFTER_S)
