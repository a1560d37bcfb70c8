# SPDX-License-Identifier: Apache-2.0
"""The router's own errors, in the shape that the clients of each endpoint expect. Pure."""

from enum import Enum
from typing import Any

import msgspec

from ecshare.router.api.errors import ApiError

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _OpenAIError(msgspec.Struct):
    message: str


class _OpenAIBody(msgspec.Struct):
    error: _OpenAIError


class _WholeError(msgspec.Struct):
    message: str
    param: str | None = None
    code: str | int | None = None


class _WholeBody(msgspec.Struct):
    error: _WholeError


class Dialect(Enum):
    """Which API an endpoint belongs to."""

    OPENAI = "openai"
    RESPONSES = "responses"
    """Of OpenAI as well; its streams have another form."""
    ANTHROPIC = "anthropic"


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path, whether or not there is anything at it."""
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    return Dialect.RESPONSES if path.startswith("/v1/responses") else Dialect.OPENAI


def error_body(dialect: Dialect, error: ApiError) -> dict[str, Any]:
    """Return the JSON object of an error."""
    if dialect is Dialect.ANTHROPIC:
        return _anthropic(error.status, error.message)
    return error.body()


def error_event(dialect: Dialect, error: ApiError) -> bytes:
    """Return the event with which a stream ends. The stream may have stopped within an event."""
    name = b"" if dialect is Dialect.OPENAI else b"event: error\n"
    body = error_body(dialect, error)
    if dialect is Dialect.RESPONSES:
        told = {"code": error.kind, "message": error.message, "param": error.param}
        body = {"type": "error", **told, "sequence_number": 0}
    return b"\n\n" + name + b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_of(status: int, body: bytes | bytearray) -> ApiError:
    """Return an error that was to be a whole answer, for a stream that ends with it instead.

    An answer that is no error has no place in a stream either.
    """
    if status < 400:
        return ApiError(502, "The engine did not stream its answer.", code="engine_failed")
    try:
        given = msgspec.json.decode(body, type=_WholeBody).error
    except (ValueError, RecursionError):
        return ApiError(status, f"The engine answered HTTP {status}.")
    code = given.code if isinstance(given.code, str) else None
    return ApiError(status, given.message, param=given.param, code=code)


def restated(dialect: Dialect, status: int, body: bytes) -> bytes:
    """Return an engine's error for the client. E speaks OpenAI's dialect alone."""
    if dialect is not Dialect.ANTHROPIC:
        return body
    try:
        given = msgspec.json.decode(body, type=_OpenAIBody)
        is_anthropic = "type" in msgspec.json.decode(body, type=dict[str, Any])
    except (ValueError, RecursionError):
        return body
    return body if is_anthropic else msgspec.json.encode(_anthropic(status, given.error.message))


def _anthropic(status: int, message: str) -> dict[str, Any]:
    usual = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_KINDS.get(status, usual)
    return {"type": "error", "error": {"type": kind, "message": message}}
