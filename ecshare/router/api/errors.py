# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with one request, and how the clients of each API are told. Pure.

Exception
├── ApiError         the router's own answer to the client
├── RefusalError     an engine answered 4xx: the client's error, passed on unchanged
└── EngineError      an engine was unreachable, broke off, timed out or answered 5xx
"""

from enum import Enum
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from ecshare.router.types import Stage

GONE_STATUSES = (502, 503, 504)
"""What a proxy answers, too, for an engine that is gone."""
OVERLOADED_STATUSES = (408, 429)
"""What an engine that has too much to do answers."""
ENGINES_OWN = "engine"
"""The kind of an error that is an engine's own answer, passed on."""
_TOO_MANY_REQUESTS = 429
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


class ApiError(Exception):
    """An error that the router reports; `param` names the field of the request at fault.

    `reason` is for the log alone, as it may name our hosts.
    """

    allow: str = ""
    """The methods that the path takes, if it does not take the request's."""

    def __init__(  # noqa: PLR0913 — the fields of OpenAI's errors
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.reason = reason

    @property
    def kind(self) -> str:
        """What the metrics count it as."""
        return self.code or "invalid_request"

    def body(self) -> dict[str, Any]:
        """Return the JSON object that OpenAI's clients expect."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == _TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class RefusalError(Exception):
    """A 4xx answer of an engine, with its unchanged body."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"an engine answered {status}")
        self.status = status
        self.body = body
        self.content_type = content_type


class EngineError(Exception):
    """A stage gave no usable answer. `reached` is false if no connection could be made.

    `status` is the HTTP status that the engine answered, None if it answered something else.
    """

    retry_after_s: float | None = None
    """When the engine says that it may have room again."""
    is_overload: bool
    """Whether the stage has too much to do."""
    may_move: bool = True
    """Whether another engine of the stage may do better."""

    def __init__(
        self, stage: Stage, reason: str, *, reached: bool, status: int | None = None
    ) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reached = reached
        self.status = status
        self.is_overload = status == _TOO_MANY_REQUESTS

    def note_overload(self) -> "EngineError":
        """Note that all engines of the stage have too much to do. Returns this error."""
        self.is_overload = True
        self.may_move = False
        return self


class Dialect(Enum):
    """Which API an endpoint belongs to."""

    OPENAI = "openai"
    RESPONSES = "responses"
    """Of OpenAI as well; its streams have another form."""
    ANTHROPIC = "anthropic"


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


class _Error(Struct):
    message: str
    param: Any = None
    code: Any = None


class _Body(Struct):
    error: _Error
    type: Any = UNSET
    """Which Anthropic's errors have."""


def _engines_error(body: bytes | bytearray) -> _Body | None:
    try:
        return msgspec.json.decode(body, type=_Body)
    except (ValueError, RecursionError):
        return None


def error_of(status: int, body: bytes | bytearray) -> ApiError:
    """Return an error that was to be a whole answer, for a stream that ends with it instead.

    An answer that is no error has no place in a stream either.
    """
    if status < 400:
        return ApiError(502, "The engine did not stream its answer.", code="engine_failed")
    given = _engines_error(body)
    if given is None:
        return ApiError(status, f"The engine answered HTTP {status}.")
    param, code = (
        each if isinstance(each, str) else None for each in (given.error.param, given.error.code)
    )
    return ApiError(status, given.error.message, param=param, code=code)


def restated(dialect: Dialect, status: int, body: bytes) -> bytes:
    """Return an engine's error for the client. E speaks OpenAI's dialect alone."""
    given = _engines_error(body) if dialect is Dialect.ANTHROPIC else None
    if given is None or given.type is not UNSET:
        return body
    return msgspec.json.encode(_anthropic(status, given.error.message))


def _anthropic(status: int, message: str) -> dict[str, Any]:
    usual = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_KINDS.get(status, usual)
    return {"type": "error", "error": {"type": kind, "message": message}}
