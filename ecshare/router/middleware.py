# SPDX-License-Identifier: Apache-2.0
"""What every answer has: a request id, timings, and errors in the shape of its API."""

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from ecshare.router import plan
from ecshare.router.accounts import Passed
from ecshare.router.blobs import Blobs, Payload
from ecshare.router.client_request import Request, too_deep
from ecshare.router.client_view import PrefillUsage
from ecshare.router.config import MIB, RouterConfig
from ecshare.router.dialects import (
    Dialect,
    dialect_of,
    error_body,
    error_event,
    error_of,
    restated,
)
from ecshare.router.engines import Stage, Work
from ecshare.router.errors import ApiError, EngineError, RefusalError
from ecshare.router.headers import forwarded
from ecshare.router.origins import Origins
from ecshare.router.prefilled import Turn
from ecshare.router.trace import ENGINES_OWN

logger = logging.getLogger(__name__)

_MAX_SHOWN_CHARS = 200
OVERLOAD_RETRY_AFTER_S = 2.0


@dataclass
class RequestContext:
    """The state of one request on its way through the stages; shown in headers and the log."""

    request_id: str
    headers: dict[str, str]
    """Sent to the engines with the request."""
    dialect: Dialect = Dialect.OPENAI
    """In which the client is told of errors."""
    seconds: dict[str, float] = field(default_factory=dict)
    path: list[Stage] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """The messages of the prompt, if P is asked only for what it has not stored."""
    avoided: list[Stage] = field(default_factory=list)
    """The stages that would have had nothing to do."""
    prefill_usage: PrefillUsage = field(default_factory=PrefillUsage)
    """What P has told of the prompt."""
    work: Work = Work()
    """What P has to do for it."""
    answer: web.StreamResponse | None = None
    """The answer whose head the client has. Of a stream it may have nothing but comments besides:
    another engine may still be asked, and goes on with it. Errors are sent as events of it."""
    first_event_s: float | None = None
    """When the first event of a stream was sent, in seconds of `time.monotonic`. From then on D's
    failure is an event of the stream, and no other engine is asked."""
    passed_on: Passed = field(default_factory=Passed)
    """D's answer, as far as the client got it."""
    blobs: Blobs = field(default_factory=Blobs)
    error: str = ""
    """The kind of the error that the client gets, for the metrics."""

    def clear(self) -> None:
        """Release what is large: an idle connection still refers to its last request."""
        self.blobs.clear()
        self.passed_on = Passed()
        self.turns = []

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Time a stage, and add it to the path if the block ends without an error."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = time.monotonic() - began_s
        self.passed(stage)

    def passed(self, stage: Stage) -> None:
        """Add a stage to the path."""
        if stage not in self.path:
            self.path.append(stage)

    def payload(self, request: Request, work: Work) -> Payload:
        """Return a request in the form that engines are sent.

        Raises:
            ApiError: it is nested too deeply.
        """
        try:
            return Payload(self.blobs, msgspec.json.encode(request), work)
        except RecursionError as exc:  # decoding just succeeded, and our fields add a level
            raise too_deep() from exc

    def response_headers(self, status: int) -> dict[str, str]:
        """Return the response headers as far as they are known now.

        With an error they do not tell what was done, or was known before: engines may have refused
        the client.
        """
        # Hides the name and version of the HTTP library.
        shown = {"Server": "ecshare", "x-request-id": self.request_id}
        if not 200 <= status < 300:
            return shown
        if self.path:
            shown["x-ecshare-path"] = ",".join(self.path)
        if self.avoided:
            shown["x-ecshare-avoided"] = ",".join(self.avoided)
        if self.seconds:
            shown["Server-Timing"] = plan.server_timing(self.seconds)
        return shown


CONTEXT: web.RequestKey[RequestContext] = web.RequestKey("context", RequestContext)


def request_middleware(config: RouterConfig) -> Middleware:
    """Return the middleware for all requests, including those that match no route."""
    origins = Origins(config.allow_origins)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = request[CONTEXT] = _begin(request)
        began_s = time.monotonic()
        try:
            context.headers |= forwarded(request.headers, config.forward_headers)
            response = origins.answer_preflight(request) or await handler(request)
        except ConnectionResetError:
            if context.answer is None:
                raise
            response = context.answer  # the client disconnected during a stream
        except Exception as error:  # noqa: BLE001 — whatever it is, the client gets JSON
            response = await _ended_with(_answer_of(error, request, config), context)
        if not response.prepared:
            response.headers.update(context.response_headers(response.status))
        if config.access_log:
            path, spent_ms = ",".join(context.path) or "-", (time.monotonic() - began_s) * 1000
            # The raw path: the decoded one may contain line breaks, and so forge log lines.
            what = f"{request.method} {_path(request)} {response.status}"
            avoided = f" avoided {','.join(context.avoided)}" if context.avoided else ""
            logger.info("%s %s %s %.0f ms%s", context.request_id, what, path, spent_ms, avoided)
        return response

    return middleware


def json_response(status: int, content: object) -> web.Response:
    """Return a JSON answer."""
    return verbatim(status, msgspec.json.encode(content), "application/json")


async def send(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Return `response` when the client has taken it, all but a little at its end.

    If the client has the head of a stream, an answer that is not streamed is an error for it.
    """
    context = http[CONTEXT]
    if isinstance(response, web.Response) and context.answer is not None:
        return await _ended_with(response, context)
    if not response.prepared:
        response.headers.update(context.response_headers(response.status))
        context.answer = response  # the client may leave meanwhile
        await response.prepare(http)
    await response.write_eof()
    return response


def verbatim(
    status: int,
    body: bytes | bytearray,
    content_type: str,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> web.Response:
    """Return an engine's answer, with those of its `headers` that the client gets."""
    return web.Response(status=status, body=body, headers={**headers, "Content-Type": content_type})


async def end_stream(context: RequestContext, error: ApiError) -> web.StreamResponse:
    """End a stream that has begun with an error event. It may have stopped within an event."""
    context.error = error.kind
    return await _end_with_event(context, error)


async def _ended_with(response: web.Response, context: RequestContext) -> web.StreamResponse:
    """Return `response`, or the stream that the client has the head of, ended with this error."""
    if context.answer is None or isinstance(context.answer, web.Response):
        return response
    assert isinstance(response.body, bytes | bytearray)  # `verbatim` makes no other
    context.error = context.error or ENGINES_OWN
    try:
        return await _end_with_event(context, error_of(response.status, response.body))
    except ConnectionResetError:
        return context.answer  # the client disconnected


async def _end_with_event(context: RequestContext, error: ApiError) -> web.StreamResponse:
    answer = context.answer
    assert answer is not None
    await answer.write(error_event(context.dialect, error))
    await answer.write_eof()
    return answer


def unavailable(failure: EngineError, config: RouterConfig) -> ApiError:
    """Return the error that the client gets. The reason may name our hosts, so only the log gets
    it.
    """
    if failure.is_overload:
        message = f"The {failure.stage} engines have too much to do."
        return ApiError(
            429,
            message,
            code="overloaded",
            retry_after_s=failure.retry_after_s or OVERLOAD_RETRY_AFTER_S,
        )
    if failure.reached:
        message = f"The {failure.stage} engine failed."
        return ApiError(502, message, code="engine_failed", retry_after_s=config.cool_down_s)
    message = f"No {failure.stage} engine can be reached."
    return ApiError(503, message, code="engine_unreachable", retry_after_s=config.cool_down_s)


def too_large(config: RouterConfig) -> ApiError:
    """Return the error for a body that exceeds the limit."""
    message = f"The body is larger than {config.max_body_bytes / MIB:g} MiB."
    return ApiError(413, message, code="request_too_large")


def _begin(request: web.Request) -> RequestContext:
    given = plan.acceptable_request_id(request.headers.get("x-request-id"))
    request_id = given or uuid.uuid4().hex
    return RequestContext(request_id, {"X-Request-Id": request_id}, dialect_of(request.path))


def _answer_of(error: Exception, request: web.Request, config: RouterConfig) -> web.Response:
    dialect = request[CONTEXT].dialect
    match error:
        case RefusalError():
            body = restated(dialect, error.status, error.body)
            return verbatim(error.status, body, error.content_type)
        case ApiError():
            if error.reason:
                logger.warning("request %s: %s", request[CONTEXT].request_id, error.reason)
            shown = error
        case EngineError():
            logger.warning("request %s: %s", request[CONTEXT].request_id, error)
            shown = unavailable(error, config)
        case web.HTTPException():
            shown = _of_http(error, request, config)
        case web.RequestPayloadError():
            shown = ApiError(400, "The body cannot be read.")
        case _:
            logger.error("request %s failed", request[CONTEXT].request_id, exc_info=error)
            shown = ApiError(500, "The router failed.", code="internal_error")
    request[CONTEXT].error = shown.kind
    response = json_response(shown.status, error_body(dialect, shown))
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
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
