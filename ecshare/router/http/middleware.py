# SPDX-License-Identifier: Apache-2.0
"""What all requests go through: a context, CORS, errors as answers, the events of telemetry."""

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from ecshare.router.api.errors import ApiError, dialect_of
from ecshare.router.http.context import CONTEXT, RequestContext
from ecshare.router.http.events import Events
from ecshare.router.http.headers import forwarded, request_id
from ecshare.router.http.memory import MemoryBudget
from ecshare.router.http.responses import answer_to_error, ended_with
from ecshare.router.options.config import RouterConfig
from ecshare.router.options.values import ANY_ORIGIN

_NO_ROUTE = "none"
_METHODS = "GET, POST, HEAD, OPTIONS"
_KEPT_S = "600"


def request_middleware(config: RouterConfig, memory: MemoryBudget, events: Events) -> Middleware:
    """Return the middleware for all requests, including those that match no route."""
    origins = Origins(config.allow_origins)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = request[CONTEXT] = _begin(request, memory)
        events.request_began(context)
        try:
            response = await answered(context, handler)
            context.status = response.status
            return response
        finally:
            context.reservation.release()
            events.request_ended(context)
            del request[CONTEXT]  # each refers to the other: that cycle would keep the answer

    async def answered(context: RequestContext, handler: Handler) -> web.StreamResponse:
        http = context.http
        try:
            context.headers |= forwarded(http.headers, config.forward_headers)
            response = origins.answer_preflight(http) or await handler(http)
        except ConnectionResetError:
            if context.answer is None:
                raise
            return context.answer  # the client disconnected during a stream
        except Exception as error:  # noqa: BLE001 — whatever it is, the client gets JSON
            response = await ended_with(context, answer_to_error(context, error, config))
        if not response.prepared:
            response.headers.update(context.response_headers(response.status))
        return response

    return middleware


def _begin(http: web.Request, memory: MemoryBudget) -> RequestContext:
    own_id = request_id(http.headers)
    resource = http.match_info.route.resource
    return RequestContext(
        http,
        own_id,
        dialect_of(http.path),
        _NO_ROUTE if resource is None else resource.canonical,
        memory.reservation(),
        {"X-Request-Id": own_id},
    )


class Origins:
    """The origins that are allowed: none, some, or any. Credentials of browsers are not."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = frozenset(allowed)

    def answer_preflight(self, http: web.Request) -> web.Response | None:
        """Return the answer to a browser that asks what it may send; None: it asks something else.

        Raises:
            ApiError: its page's origin is not allowed.
        """
        asked = http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if http.method != hdrs.METH_OPTIONS or asked is None or hdrs.ORIGIN not in http.headers:
            return None
        if self._shown(http) is None:
            message = "Pages of this origin may not ask: --allow-origin does not name it."
            raise ApiError(400, message, code="origin_not_allowed")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_MAX_AGE: _KEPT_S,
        }
        wanted = http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
        if wanted is not None:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
        return web.Response(text="OK", headers=headers)

    async def mark(self, http: web.Request, response: web.StreamResponse) -> None:
        """Mark an answer, before it is sent, as one that the page may read."""
        shown = self._shown(http)
        if shown is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = shown
        if self._allowed and ANY_ORIGIN not in self._allowed:
            response.headers[hdrs.VARY] = hdrs.ORIGIN  # a cache must not mix them up

    def _shown(self, http: web.Request) -> str | None:
        origin = http.headers.get(hdrs.ORIGIN)
        if origin is None:
            return None
        if ANY_ORIGIN in self._allowed:
            return ANY_ORIGIN
        return origin if origin in self._allowed else None
