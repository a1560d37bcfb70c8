# SPDX-License-Identifier: Apache-2.0
"""What surrounds every answer: request id, where the time went, and errors in OpenAI's shape."""

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ecshare.router import plan
from ecshare.router.bulk import Bulk, Payload
from ecshare.router.chat import Request, too_deep
from ecshare.router.config import MIB, RouterConfig
from ecshare.router.errors import ApiError, EngineError, RefusalError
from ecshare.router.workers import Stage

logger = logging.getLogger(__name__)

_MAX_SHOWN_CHARS = 200
_FORWARDED = ("Authorization", "traceparent", "tracestate")


@dataclass
class RequestContext:
    """One request's way through the stages, as its headers and the log show it."""

    request_id: str
    headers: dict[str, str]
    """What the engines are sent besides the request."""
    seconds: dict[str, float] = field(default_factory=dict)
    path: list[Stage] = field(default_factory=list)
    answer: web.StreamResponse | None = None
    """The streamed answer, once it has begun: from there on errors travel inside it."""
    bulk: Bulk = field(default_factory=Bulk)

    @contextmanager
    def through(self, stage: Stage) -> Iterator[None]:
        """Time a stage; it counts as passed when the block ends well."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = time.monotonic() - began_s
        self.passed(stage)

    def passed(self, stage: Stage) -> None:
        """Note that a stage has had its part in the answer."""
        if stage not in self.path:
            self.path.append(stage)

    def payload(self, request: Request) -> Payload:
        """Return a request as an engine is sent it; raises ApiError where it is too deep."""
        try:
            return Payload(self.bulk, msgspec.json.encode(request))
        except RecursionError as exc:  # it could just be read, and our own fields are deeper
            raise too_deep() from exc

    def response_headers(self) -> dict[str, str]:
        """Return what is known of the context so far."""
        # Instead of the HTTP library's name and version, which are nobody's business.
        shown = {"Server": "ecshare", "x-request-id": self.request_id}
        if self.path:
            shown["x-ecshare-path"] = ",".join(self.path)
        if self.seconds:
            shown["Server-Timing"] = plan.server_timing(self.seconds)
        return shown


TRIP: web.RequestKey[RequestContext] = web.RequestKey("context", RequestContext)


def envelope(config: RouterConfig) -> Middleware:
    """Return the middleware that all requests pass, the ones without a route as well."""

    @web.middleware
    async def surround(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = request[TRIP] = _begin(request)
        began_s = time.monotonic()
        try:
            _check_headers(context)
            response = await handler(request)
        except ConnectionResetError:
            if context.answer is None:
                raise
            response = context.answer  # the client left in the middle of a stream
        except Exception as error:  # noqa: BLE001 — whatever it is, the client gets JSON
            response = _answer_of(error, request, config)
        if not response.prepared:
            response.headers.update(context.response_headers())
        if config.access_log:
            path, spent_ms = ",".join(context.path) or "-", (time.monotonic() - began_s) * 1000
            # The raw path: a line break in the other would begin a line of the client's own.
            what = f"{request.method} {_path(request)} {response.status}"
            logger.info("%s %s %s %.0f ms", context.request_id, what, path, spent_ms)
        return response

    return surround


def json_response(status: int, content: object) -> web.Response:
    """Return a JSON answer."""
    return verbatim(status, msgspec.json.encode(content), "application/json")


def verbatim(
    status: int, body: bytes, content_type: str, retry_after: str | None = None
) -> web.Response:
    """Return an engine's answer as it came."""
    response = web.Response(status=status, body=body, headers={"Content-Type": content_type})
    if retry_after is not None:
        response.headers["Retry-After"] = retry_after
    return response


async def end_stream(answer: web.StreamResponse, error: ApiError) -> web.StreamResponse:
    """Say inside a stream why it ends early; the break may lie within an event."""
    await answer.write(b"\n\ndata: " + msgspec.json.encode(error.body()) + b"\n\n")
    await answer.write_eof()
    return answer


def unavailable(failure: EngineError, config: RouterConfig) -> ApiError:
    """Return what the client is told; the reason, which names our hosts, is for the log."""
    if failure.reached:
        message = f"The {failure.stage} engine failed."
        return ApiError(502, message, code="engine_failed", retry_after_s=config.cool_down_s)
    message = f"No {failure.stage} engine can be reached."
    return ApiError(503, message, code="engine_unreachable", retry_after_s=config.cool_down_s)


def too_large(config: RouterConfig) -> ApiError:
    """Return the refusal of a body beyond the limit."""
    message = f"The body is larger than {config.max_body_bytes / MIB:g} MiB."
    return ApiError(413, message, code="request_too_large")


def _begin(request: web.Request) -> RequestContext:
    given = plan.acceptable_request_id(request.headers.get("x-request-id"))
    request_id = given or uuid.uuid4().hex
    headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
    return RequestContext(request_id, headers | {"X-Request-Id": request_id})


def _check_headers(context: RequestContext) -> None:
    """Refuse headers that cannot be passed on; raises ApiError naming the first."""
    for name, value in context.headers.items():
        try:
            value.encode()  # aiohttp reads bytes that are no UTF-8 as lone surrogates
        except UnicodeEncodeError as exc:
            raise ApiError(400, f"The header `{name}` is not UTF-8 text.") from exc


def _answer_of(error: Exception, request: web.Request, config: RouterConfig) -> web.Response:
    match error:
        case RefusalError():
            return verbatim(error.status, error.body, error.content_type)
        case ApiError():
            if error.reason:
                logger.warning("request %s: %s", request[TRIP].request_id, error.reason)
            shown = error
        case EngineError():
            logger.warning("request %s: %s", request[TRIP].request_id, error)
            shown = unavailable(error, config)
        case web.HTTPException():
            shown = _of_http(error, request, config)
        case web.RequestPayloadError():
            shown = ApiError(400, "The body cannot be read.")
        case _:
            logger.error("request %s failed", request[TRIP].request_id, exc_info=error)
            shown = ApiError(500, "The router failed.", code="internal_error")
    response = json_response(shown.status, shown.body())
    if shown.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(shown.retry_after_s)))
    return response


def _of_http(error: web.HTTPException, request: web.Request, config: RouterConfig) -> ApiError:
    match error.status:
        case 404:
            return ApiError(404, f"There is no {_path(request)}.", code="unknown_url")
        case 405:
            message = f"{_path(request)} does not take {request.method}."
            return ApiError(405, message, code="wrong_method")
        case 413:
            return too_large(config)
        case _:
            return ApiError(error.status, error.reason)


def _path(request: web.Request) -> str:
    return request.rel_url.raw_path[:_MAX_SHOWN_CHARS]
