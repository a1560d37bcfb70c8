# SPDX-License-Identifier: Apache-2.0
"""The latest completions, as the dashboard shows them, and the access log."""

import logging
import time
from collections import deque
from operator import attrgetter
from typing import Any, NamedTuple

from ecshare.router.api.endpoints import SPLIT
from ecshare.router.http.context import EngineCall, RequestContext, Subscriber
from ecshare.router.http.responses import shown_path
from ecshare.router.types import Stage

logger = logging.getLogger(__name__)

_MAX_REQUESTS = 100


class _Ended(NamedTuple):
    """What is kept of a request that has ended, as in `RequestContext`."""

    began_s: float
    at_s: float
    first_event_s: float | None
    ended_s: float | None
    status_class: str
    error: str
    path: list[Stage]
    avoided: list[Stage]
    calls: list[EngineCall]


_KEPT = attrgetter(*_Ended._fields)


class RecentRequests(Subscriber):
    """Remembers the latest completions, also those that are on their way."""

    def __init__(self) -> None:
        self._running: dict[RequestContext, None] = {}
        self._ended: deque[_Ended] = deque(maxlen=_MAX_REQUESTS)

    def request_began(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        if context.route in SPLIT:
            self._running[context] = None

    def request_ended(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        if context in self._running:
            del self._running[context]
            self._ended.append(_Ended(*_KEPT(context)))

    def shown(self) -> list[dict[str, Any]]:
        """Return them, the newest first, with times in milliseconds since each came."""
        both: list[RequestContext | _Ended] = [*self._running, *self._ended]
        latest = sorted(both, key=lambda each: -each.began_s)
        return [_shown(each) for each in latest[:_MAX_REQUESTS]]


def _shown(request: RequestContext | _Ended) -> dict[str, Any]:
    def since(time_s: float | None) -> float | None:
        return None if time_s is None else round((time_s - request.began_s) * 1000, 1)

    def of_call(call: EngineCall) -> dict[str, Any]:
        return {
            "stage": call.stage,
            "engine": call.engine,
            "outcome": call.outcome,
            "begin_ms": since(call.began_s),
            "first_byte_ms": since(call.first_byte_s),
            "end_ms": since(call.ended_s),
        }

    return {
        "at_s": request.at_s,
        "status": request.status_class,
        "error": request.error,
        "path": request.path,
        "avoided": request.avoided,
        "first_byte_ms": since(request.first_event_s),
        "end_ms": since(request.ended_s),
        "age_ms": since(time.monotonic()),
        "calls": [of_call(call) for call in request.calls],
    }


class AccessLog(Subscriber):
    """Writes the line when the answer has ended."""

    def request_ended(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        if context.status is None or context.ended_s is None:
            return
        what = f"{context.http.method} {shown_path(context.http)} {context.status}"
        path = ",".join(context.path) or "-"
        avoided = f" avoided {','.join(context.avoided)}" if context.avoided else ""
        spent_ms = (context.ended_s - context.began_s) * 1000
        logger.info("%s %s %s %.0f ms%s", context.request_id, what, path, spent_ms, avoided)
