# SPDX-License-Identifier: Apache-2.0
"""What all requests go through: a context, CORS, a route, errors as answers, telemetry's events."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from random import getrandbits

from aiohttp import hdrs, web
from multidict import CIMultiDictProxy

from ecshare.router.api.errors import ApiError, Dialect
from ecshare.router.http.bodies import MemoryBudget, Reservation
from ecshare.router.http.context import Events, RequestContext
from ecshare.router.http.drain import RequestsInFlight
from ecshare.router.http.responses import answer_to_error, ended_with, shown_path
from ecshare.router.options.config import RouterConfig
from ecshare.router.options.values import ANY_ORIGIN

Handler = Callable[[RequestContext], Awaitable[web.StreamResponse]]
Routes = Mapping[str, Mapping[str, Handler]]
"""Who answers, by path and method."""

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


class Dispatcher:
    """Has each request answered, also where nothing is at its path. Belongs to the event loop's
    thread.
    """

    def __init__(
        self,
        config: RouterConfig,
        memory: MemoryBudget,
        events: Events,
        in_flight: RequestsInFlight,
        routes: Routes,
    ) -> None:
        self._config = config
        self._memory = memory
        self._events = events
        self._in_flight = in_flight
        self._routes = routes
        self._origins = Origins(config.allow_origins)
        self._forwarded = (*FORWARDED, *config.forward_headers)

    async def answer(self, http: web.BaseRequest) -> web.StreamResponse:
        """Return the answer to a request; its head may have been sent."""
        context = self._begin(http)
        self._events.request_began(context)
        response: web.StreamResponse | None = None
        try:
            context.headers |= forwarded(http.headers, self._forwarded)
            if http.method == hdrs.METH_OPTIONS:
                response = self._origins.answer_preflight(http)
            if response is None:
                response = await self._handler(context)(context)
        except ConnectionResetError:
            if context.answer is None:
                raise
            response = context.answer  # the client disconnected during a stream
        except Exception as error:  # noqa: BLE001 — whatever it is, the client gets JSON
            response = await ended_with(context, answer_to_error(context, error, self._config))
        finally:
            context.status = None if response is None else response.status
            context.reservation.release()
            self._events.request_ended(context)
        if not response.prepared:
            context.complete(response)
        return response

    def _begin(self, http: web.BaseRequest) -> RequestContext:
        own_id = request_id(http.headers)
        path = http.rel_url.path_safe  # `/v1/%6dodels` is /v1/models, for vLLM too
        is_known = path in self._routes or path.removesuffix("/") in self._routes
        return RequestContext(
            http=http,
            request_id=own_id,
            dialect=dialect_of(path),
            route=path if is_known else _NO_ROUTE,
            reservation=Reservation(self._memory),
            in_flight=self._in_flight,
            headers={"X-Request-Id": own_id},
            marks=self._origins.marks(http),
        )

    def _handler(self, context: RequestContext) -> Handler:
        """Return who answers.

        Raises:
            ApiError: nobody does (404), or nobody with this method (405).
        """
        methods = self._routes.get(context.route)
        if methods is None:
            if context.route != _NO_ROUTE:
                return _without_slash
            message = f"There is no {shown_path(context.http)}."
            raise ApiError(404, message, code="unknown_url")
        handler = methods.get(context.http.method)
        if handler is None:
            message = f"{shown_path(context.http)} does not take {context.http.method}."
            error = ApiError(405, message, code="wrong_method")
            error.allow = ",".join(methods)
            raise error
        return handler


async def _without_slash(context: RequestContext) -> web.StreamResponse:
    """Send a client whose path ends with a slash to the one without, as vLLM does."""
    path, mark, query = context.http.path_qs.partition("?")
    location = path.removesuffix("/") + mark + query
    return web.Response(status=307, headers={hdrs.LOCATION: location})


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

    def answer_preflight(self, http: web.BaseRequest) -> web.Response | None:
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

    def marks(self, http: web.BaseRequest) -> dict[str, str]:
        """Return the headers that tell a browser whether the page may read the answer."""
        if not self._allowed:
            return {}
        shown = self._shown(http)
        marks: dict[str, str] = {} if shown is None else {hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: shown}
        if ANY_ORIGIN not in self._allowed:
            marks[hdrs.VARY] = hdrs.ORIGIN  # a cache must not mix them up
        return marks

    def _shown(self, http: web.BaseRequest) -> str | None:
        origin = http.headers.get(hdrs.ORIGIN)
        if origin is None:
            return None
        if ANY_ORIGIN in self._allowed:
            return ANY_ORIGIN
        return origin if origin in self._allowed else None
