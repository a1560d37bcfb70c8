# SPDX-License-Identifier: Apache-2.0
"""Answers to clients: whole, streamed, and errors in the shape of their API."""

import logging

import msgspec
from aiohttp import hdrs, web

from ecshare.router.api.errors import (
    ENGINES_OWN,
    ApiError,
    EngineError,
    RefusalError,
    error_body,
    error_event,
    error_of,
    restated,
)
from ecshare.router.http.context import RequestContext
from ecshare.router.options.config import RouterConfig

logger = logging.getLogger(__name__)

_MAX_SHOWN_CHARS = 200
_OVERLOAD_RETRY_AFTER_S = 2.0


def json_response(status: int, content: object) -> web.Response:
    """Return a JSON answer."""
    return verbatim(status, msgspec.json.encode(content), "application/json")


def verbatim(status: int, body: bytes, content_type: str) -> web.Response:
    """Return an answer with this body."""
    return web.Response(status=status, body=body, headers={"Content-Type": content_type})


async def end_stream(context: RequestContext, error: ApiError) -> web.StreamResponse:
    """End a stream that has begun with an error event. It may have stopped within an event."""
    context.error = error.kind
    return await _end_with_event(context, error)


async def ended_with(context: RequestContext, response: web.Response) -> web.StreamResponse:
    """Return `response`, or the stream that the client has the head of, ended with this error."""
    if context.answer is None or isinstance(context.answer, web.Response):
        return response
    assert isinstance(response.body, bytes | bytearray)  # we make no other
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
        wait_s = failure.retry_after_s or _OVERLOAD_RETRY_AFTER_S
        return ApiError(429, message, code="overloaded", retry_after_s=wait_s)
    if failure.reached:
        message = f"The {failure.stage} engine failed."
        return ApiError(502, message, code="engine_failed", retry_after_s=config.cool_down_s)
    message = f"No {failure.stage} engine can be reached."
    return ApiError(503, message, code="engine_unreachable", retry_after_s=config.cool_down_s)


def answer_to_error(
    context: RequestContext, error: Exception, config: RouterConfig
) -> web.Response:
    """Return what the client is told of an error, and log what only the operator is told."""
    match error:
        case RefusalError():
            body = restated(context.dialect, error.status, error.body)
            return verbatim(error.status, body, error.content_type)
        case ApiError():
            if error.reason:
                logger.warning("request %s: %s", context.request_id, error.reason)
            shown = error
        case EngineError():
            logger.warning("request %s: %s", context.request_id, error)
            shown = unavailable(error, config)
        case web.RequestPayloadError():
            shown = ApiError(400, "The body cannot be read.")
        case _:
            logger.error("request %s failed", context.request_id, exc_info=error)
            shown = ApiError(500, "The router failed.", code="internal_error")
    context.error = shown.kind
    response = json_response(shown.status, error_body(context.dialect, shown))
    if shown.allow:
        response.headers[hdrs.ALLOW] = shown.allow
    if shown.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(shown.retry_after_s)))
    return response


def shown_path(request: web.BaseRequest) -> str:
    """Return the start of a request's raw path: the decoded one may contain line breaks."""
    return request.rel_url.raw_path[:_MAX_SHOWN_CHARS]
