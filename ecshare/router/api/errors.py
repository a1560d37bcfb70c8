# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with one request.

Exception
├── ApiError         the router's own answer to the client, in OpenAI's error shape
├── RefusalError     an engine answered 4xx: the client's error, passed on unchanged
└── EngineError      an engine was unreachable, broke off, timed out or answered 5xx
"""

from typing import Any

from ecshare.router.types import Stage

GONE_STATUSES = (502, 503, 504)
"""What a proxy answers, too, for an engine that is gone."""
OVERLOADED_STATUSES = (408, 429)
"""What an engine that has too much to do answers."""
ENGINES_OWN = "engine"
"""The kind of an error that is an engine's own answer, passed on."""
_TOO_MANY_REQUESTS = 429


class ApiError(Exception):
    """An error in OpenAI's shape; `param` names the field of the request at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.reason: str | None = None

    def with_log_reason(self, reason: str) -> "ApiError":
        """Set the reason that only the log shows, as it may name our hosts. Returns this error."""
        self.reason = reason
        return self

    @property
    def kind(self) -> str:
        """What the metrics count it as."""
        return self.code or "invalid_request"

    def body(self) -> dict[str, Any]:
        """Return the JSON object that OpenAI's clients expect."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
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
