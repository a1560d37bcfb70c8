# SPDX-License-Identifier: Apache-2.0
"""Sees every request come and go, and each call of an engine on its way."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ecshare.router.endpoints import SPLIT
from ecshare.router.engines import Engine, Stage, name_of
from ecshare.router.metrics import RouterMetrics
from ecshare.router.middleware import CONTEXT
from ecshare.router.trace import Call, Trace

if TYPE_CHECKING:
    from ecshare.router.spans import Spans

_MAX_REQUESTS = 100
_NO_ROUTE = "none"

# Tasks inherit it: a call of an engine finds the request that it is made for.
_CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)
_TRACE: web.RequestKey[Trace] = web.RequestKey("trace", Trace)


class Observer:
    """Counts and remembers what a router does. Belongs to the event loop's thread."""

    def __init__(self, metrics: RouterMetrics, spans: "Spans | None" = None) -> None:
        """`spans`: None where none are exported."""
        self._metrics = metrics
        self._spans = spans
        self._recent: deque[Trace] = deque(maxlen=_MAX_REQUESTS)

    def attach(self, app: web.Application) -> None:
        """Observe an application, once it has all its routes.

        Its own middleware, which turns errors into answers, stands inside.
        """
        for resource in app.router.resources():
            self._metrics.expect(resource.canonical)
        app.middlewares.insert(0, self._middleware())
        app.on_response_prepare.append(_note_first_byte)

    def recent(self) -> list[dict[str, Any]]:
        """Return the latest completions, the newest first, also those that are on their way."""
        return [trace.shown() for trace in reversed(self._recent)]

    def call(self, stage: Stage, engine: Engine) -> AbstractContextManager[Call]:
        """Observe a call of an engine while the block runs."""
        call = Call(stage, name_of(stage, engine))
        trace = _CURRENT.get()
        if trace is not None:
            trace.add(call)
        end_span = None
        if self._spans is not None and trace is not None and trace.span is not None:
            span, call.headers = self._spans.begin_call(call, trace.span)
            end_span = partial(self._spans.end_call, span, call)
        return _Observed(call, self._metrics, end_span)

    def _middleware(self) -> Middleware:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            trace = request[_TRACE] = Trace()
            route = _route(request)
            is_completion = route in SPLIT
            if is_completion:
                self._recent.append(trace)
                if self._spans is not None:
                    trace.span = self._spans.begin_request(route, request.headers)
            before = _CURRENT.set(trace if is_completion else None)
            status = None
            self._metrics.num_in_progress += 1
            try:
                response = await handler(request)
                status = response.status
            finally:
                _CURRENT.reset(before)
                self._metrics.num_in_progress -= 1
                self._end(request, route, status)
            return response

        return middleware

    def _end(self, request: web.Request, route: str, status: int | None) -> None:
        trace, context = request[_TRACE], request[CONTEXT]
        trace.path, trace.avoided = tuple(context.path), tuple(context.avoided)
        trace.first_byte_s = context.first_event_s
        trace.end(status, context.error)
        self._metrics.observe_request(route, trace)
        if self._spans is not None and trace.span is not None:
            self._spans.end_request(trace.span, trace, status)
            trace.span = None


class _Observed(AbstractContextManager[Call]):
    """A call that is counted when it has ended. A class: it is quicker than a generator."""

    def __init__(
        self, call: Call, metrics: RouterMetrics, end_span: Callable[[], None] | None
    ) -> None:
        self._call = call
        self._metrics = metrics
        self._end_span = end_span

    def __enter__(self) -> Call:
        return self._call

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        self._call.end(exc)
        self._metrics.observe_call(self._call)
        if self._end_span is not None:
            self._end_span()


def _route(request: web.Request) -> str:
    """Return the path of the route. A client's own path is never a label."""
    resource = request.match_info.route.resource
    return _NO_ROUTE if resource is None else resource.canonical


async def _note_first_byte(request: web.Request, response: web.StreamResponse) -> None:
    """Note that a streamed answer begins, unless comments do. Others are whole by then."""
    trace = None if isinstance(response, web.Response) else request.get(_TRACE)
    if trace is not None:
        trace.first_byte_s = request[CONTEXT].first_event_s
