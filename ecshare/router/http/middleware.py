# SPDX-License-Identifier: Apache-2.0
"""What all requests go through: a context, errors as answers, and the events of telemetry."""

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ecshare.router.api.errors import dialect_of
from ecshare.router.http.context import CONTEXT, RequestContext
from ecshare.router.http.events import Events
from ecshare.router.http.headers import forwarded, request_id
from ecshare.router.http.memory import MemoryBudget
from ecshare.router.http.origins import Origins
from ecshare.router.http.responses import answer_to_error, ended_with
from ecshare.router.options.config import RouterConfig

_NO_ROUTE = "none"


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
