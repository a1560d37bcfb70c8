# SPDX-License-Identifier: Apache-2.0
"""What all requests go through: a context, CORS, errors as answers, the events of telemetry."""

import re
from collections.abc import Iterable, Mapping
from random import getrandbits

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from multidict import CIMultiDictProxy

from ecshare.router.api.errors import ApiError, Dialect
from ecshare.router.http.bodies import MemoryBudget, Reservation
from ecshare.router.http.context import CONTEXT, Events, RequestContext
from ecshare.router.http.responses import answer_to_error, ended_with
from ecshare.router.options.config import RouterConfig
from ecshare.router.options.values import ANY_ORIGIN

FORWARDED = (
    "Authorization",
    "traceparent",
    "tracestate",
    "baggage",
    "X-Session-ID",
    "X-Vllm-Priority",
    "endpoint-load-metrics-format",
)
"""What vLLM reads from clients, but for X-data-parallel-rank: the router chooses the engine, and a
rank would name a part of whichever it is."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NO_ROUTE = "none"
_METHODS = "GET, POST, HEAD, OPTIONS"
_KEPT_S = "600"


def request_middleware(config: RouterConfig, memory: MemoryBudget, events: Events) -> Middleware:
    """Return the middleware for all requests, including those that match no route."""
    origins = Origins(config.allow_origins)
    names = (*FORWARDED, *config.forward_headers)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = request[CONTEXT] = _begin(request, memory)
        events.request_began(context)
        response: web.StreamResponse | None = None
        try:
            context.headers |= forwarded(request.headers, names)
            if request.method == hdrs.METH_OPTIONS:
                response = origins.answer_preflight(request)
            if response is None:
                response = await handler(request)
        except ConnectionResetError:
            if context.answer is None:
                raise
            response = context.answer  # the client disconnected during a stream
        except Exception as error:  # noqa: BLE001 — whatever it is, the client gets JSON
            response = await ended_with(context, answer_to_error(context, error, config))
        finally:
            context.status = None if response is None else response.status
            context.reservation.release()
            events.request_ended(context)
            del request[CONTEXT]  # each refers to the other: that cycle would keep the answer
        if not response.prepared:
            response.headers.update(context.response_headers(response.status))
        return response

    return middleware


def _begin(http: web.Request, memory: MemoryBudget) -> RequestContext:
    own_id = request_id(http.headers)
    resource = http.match_info.route.resource
    route = _NO_ROUTE if resource is None else resource.canonical
    headers = {"X-Request-Id": own_id}
    return RequestContext(http, own_id, dialect_of(http.path), route, Reservation(memory), headers)


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path, whether or not there is anything at it."""
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    return Dialect.RESPONSES if path.startswith("/v1/responses") else Dialect.OPENAI


def request_id(headers: Mapping[str, str]) -> str:
    """Return the id that the client gives its request, a new one if it is not safe in headers and
    logs.
    """
    given = headers.get("x-request-id")
    return given if given and _REQUEST_ID.fullmatch(given) else f"{getrandbits(128):032x}"


def forwarded(headers: CIMultiDictProxy[str], names: Iterable[str]) -> dict[str, str]:
    """Return those of a client's headers that engines get.

    A header that is given several times becomes one list, but for the credential: a gateway before
    the router may have checked another one than the engines would.

    Raises:
        ApiError: one cannot be forwarded; names it.
    """
    sent = {name: ", ".join(headers.getall(name)) for name in names if name in headers}
    if "Authorization" in sent and len(headers.getall("Authorization")) > 1:
        raise ApiError(400, "There are several `Authorization` headers; send one.")
    for name, value in sent.items():
        try:
            value.encode()  # aiohttp reads bytes that are no UTF-8 as lone surrogates
        except UnicodeEncodeError as exc:
            raise ApiError(400, f"The header `{name}` is not UTF-8 text.") from exc
    return sent


class Origins:
    """The origins that are allowed: none, some, or any. Credentials of browsers are not."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = frozenset(allowed)

    def answer_preflight(self, http: web.Request) -> web.Response | None:
        """Return the answer to a browser that asks with OPTIONS what it may send; None: it asks
        something else.

        Raises:
            ApiError: its page's origin is not allowed.
        """
        asked = http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if asked is None or hdrs.ORIGIN not in http.headers:
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
        if ANY_ORIGIN not in self._allowed:
            response.headers[hdrs.VARY] = hdrs.ORIGIN  # a cache must not mix them up

    def _shown(self, http: web.Request) -> str | None:
        origin = http.headers.get(hdrs.ORIGIN)
        if origin is None:
            return None
        if ANY_ORIGIN in self._allowed:
            return ANY_ORIGIN
        return origin if origin in self._allowed else None
