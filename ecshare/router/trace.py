# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the stages, as the operator sees it.

It holds nothing that a client has written: no prompt, url, model, header or request id. Times are
those of `time.monotonic`.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ecshare.router.engines import Stage
from ecshare.router.errors import EngineError, RefusalError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

OUTCOMES = ("ok", "refused", "failed", "cancelled")
"""How a call of an engine may end. `refused`: a 4xx answer. `cancelled`: nobody waited for it."""
STATUSES = ("2xx", "3xx", "4xx", "429", "5xx", "client_gone")
ENGINES_OWN = "engine"
"""The kind of an error that is an engine's own answer, passed on."""

_MAX_CALLS = 100
_OVERLOADED = (408, 429)


@dataclass
class Call:
    """One request to one engine."""

    stage: Stage
    engine: str
    began_s: float = field(default_factory=time.monotonic)
    first_byte_s: float | None = None
    """When the answer began: with its head, or with the first event of a stream."""
    ended_s: float | None = None
    status: int = 0
    is_broken: bool = False
    """Whether the answer broke off."""
    outcome: str = "running"
    headers: dict[str, str] = field(default_factory=dict)
    """Sent to the engine: they name the call's span, where spans are exported."""

    def note_head(self, status: int, *, is_stream: bool) -> None:
        """Note the head of the answer. The head of a stream arrives before any token is there."""
        self.status = status
        if not is_stream:
            self.note_bytes()

    def note_bytes(self) -> None:
        """Note that a part of the answer has arrived."""
        if self.first_byte_s is None:
            self.first_byte_s = time.monotonic()

    def end(self, failure: BaseException | None) -> None:
        """Note that the call has ended, because of `failure` if that is an error."""
        self.ended_s = time.monotonic()
        self.outcome = "failed" if self.is_broken else _outcome(self.status, failure)


def _outcome(status: int, failure: BaseException | None) -> str:
    if status >= 500 or status in _OVERLOADED or isinstance(failure, EngineError):
        return "failed"
    if failure is not None and not isinstance(failure, RefusalError):
        return "cancelled"
    return "ok" if status < 400 else "refused"


@dataclass
class Trace:
    """A request, and the calls that were made for it."""

    began_s: float = field(default_factory=time.monotonic)
    at_s: float = field(default_factory=time.time)
    """When it came, in seconds since the epoch."""
    calls: list[Call] = field(default_factory=list)
    """At most 100."""
    first_byte_s: float | None = None
    """When a streamed answer began."""
    ended_s: float | None = None
    status: str = "running"
    """One of STATUSES, once it has ended."""
    error: str = ""
    """The kind of the error that the client got."""
    path: tuple[Stage, ...] = ()
    avoided: tuple[Stage, ...] = ()
    span: "Span | None" = None
    """The request's span, where spans are exported."""

    def add(self, call: Call) -> None:
        """Remember a call, unless there are too many."""
        if len(self.calls) < _MAX_CALLS:
            self.calls.append(call)

    def end(self, status: int | None, error: str) -> None:
        """Note how the request has ended; `status` is None if the client has gone."""
        self.ended_s = time.monotonic()
        self.status = _status(status)
        self.error = error or (ENGINES_OWN if status is not None and status >= 400 else "")

    def shown(self) -> dict[str, Any]:
        """Return it for the dashboard, in milliseconds since the request came."""
        return {
            "at_s": self.at_s,
            "status": self.status,
            "error": self.error,
            "path": self.path,
            "avoided": self.avoided,
            "first_byte_ms": self._since(self.first_byte_s),
            "end_ms": self._since(self.ended_s),
            "age_ms": self._since(time.monotonic()),
            "calls": [self._shown(call) for call in self.calls],
        }

    def _shown(self, call: Call) -> dict[str, Any]:
        return {
            "stage": call.stage,
            "engine": call.engine,
            "outcome": call.outcome,
            "begin_ms": self._since(call.began_s),
            "first_byte_ms": self._since(call.first_byte_s),
            "end_ms": self._since(call.ended_s),
        }

    def _since(self, time_s: float | None) -> float | None:
        return None if time_s is None else round((time_s - self.began_s) * 1000, 1)


def _status(status: int | None) -> str:
    if status is None:
        return "client_gone"
    return "429" if status == 429 else f"{status // 100}xx"
