# SPDX-License-Identifier: Apache-2.0
"""The state of one request, from its head to the end of its answer, and who hears of it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from ecshare.router.api.answer import ClientView, PrefillUsage
from ecshare.router.api.client_request import ClientRequest, Turn
from ecshare.router.api.errors import (
    ENGINES_OWN,
    OVERLOADED_STATUSES,
    Dialect,
    EngineError,
    RefusalError,
)
from ecshare.router.http.bodies import Blobs, Reservation
from ecshare.router.http.drain import RequestsInFlight
from ecshare.router.types import Stage, Work

MAX_CALLS = 100
"""How many calls of engines are remembered for one request."""
STATUS_CLASSES = ("2xx", "3xx", "4xx", "429", "5xx", "client_gone")
OUTCOMES = ("ok", "refused", "failed", "cancelled")
"""How a call of an engine may end. `refused`: a 4xx answer. `cancelled`: nobody waited for it."""
_NO_ANSWER = ClientView()


@dataclass(eq=False, slots=True)
class EngineCall:
    """One request to one engine, as operators see it. It holds nothing that a client has written.

    Times are those of `time.monotonic`.
    """

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
    """What subscribers have the engine sent besides."""


@dataclass(eq=False, slots=True)
class RequestContext:
    """One request on its way through the router. Belongs to the event loop's thread.

    Times are those of `time.monotonic`.
    """

    http: web.BaseRequest
    request_id: str
    dialect: Dialect
    """In which the client is told of errors."""
    route: str
    """The path of the route, `none` if there is none. It has nothing of a client's own path."""
    reservation: Reservation
    in_flight: RequestsInFlight
    headers: dict[str, str] = field(default_factory=dict)
    """Sent to the engines with the request."""
    marks: dict[str, str] = field(default_factory=dict)
    """Sent to the client with any answer."""
    began_s: float = field(default_factory=time.monotonic)
    at_s: float = field(default_factory=time.time)
    """When it came, in seconds since the epoch."""

    blobs: Blobs = field(default_factory=Blobs)
    turns: list[Turn] = field(default_factory=list)
    """The messages of the prompt, if P is asked only for what it has not stored."""
    new_media: list[str] = field(default_factory=list)
    """The items, as vLLM identifies them, that E has encoded for it and that were not stored."""
    has_lost_media: bool = False
    """Whether P or D failed as it does without the bytes and the embedding of an item."""
    work: Work = Work()
    """What P has to do for it."""
    prefill_usage: PrefillUsage = field(default_factory=PrefillUsage)
    """What P has told of the prompt."""

    path: list[Stage] = field(default_factory=list)
    """The stages that have worked for it."""
    avoided: list[Stage] = field(default_factory=list)
    """The stages that would have had nothing to do."""
    seconds: dict[Stage, float] = field(default_factory=dict)
    calls: list[EngineCall] = field(default_factory=list)
    """The calls of engines that were made for it, at most MAX_CALLS."""

    answer: web.StreamResponse | None = None
    """The answer whose head the client has. Of a stream it may have nothing but comments besides:
    another engine may still be asked, and goes on with it. Errors are sent as events of it."""
    first_event_s: float | None = None
    """When the first event of a stream was sent. From then on D's failure is an event of the
    stream, and no other engine is asked."""
    tail: ClientView = _NO_ANSWER
    """D's answer, as far as the client got it."""
    error: str = ""
    """The kind of the error that the client gets, for the metrics."""
    status: int | None = None
    """The status that the client got; None: it got none so far, or has gone."""
    status_class: str = "running"
    """Once it has ended, one of STATUS_CLASSES."""
    ended_s: float | None = None
    client: ClientRequest = field(init=False)
    """The request, once it is read."""

    def release(self) -> None:
        """Release what is large: an idle connection still refers to its last request."""
        self.blobs.clear()
        self.tail = _NO_ANSWER
        self.turns = []
        if hasattr(self, "client"):
            del self.client

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

    def begin_again(self) -> None:
        """Forget the stages that have worked for it: it goes through them in another way."""
        self.path.clear()
        self.avoided.clear()
        self.new_media.clear()

    def complete(self, answer: web.StreamResponse) -> None:
        """Add all that the head of an answer has besides, as far as it is known now."""
        answer.headers.update(self._response_headers(answer.status))
        if self.in_flight.is_draining:
            answer.force_close()  # clients open their next connection to another router

    def _response_headers(self, status: int) -> dict[str, str]:
        """Those of an error do not tell what was done, or was known before: engines may have
        refused the client.
        """
        # Hides the name and version of the HTTP library.
        shown = {"Server": "ecshare", "x-request-id": self.request_id, **self.marks}
        if not 200 <= status < 300:
            return shown
        if self.path:
            shown["x-ecshare-path"] = ",".join(self.path)
        if self.avoided:
            shown["x-ecshare-avoided"] = ",".join(self.avoided)
        if self.seconds:
            times = (f"{stage};dur={spent * 1000:.1f}" for stage, spent in self.seconds.items())
            shown["Server-Timing"] = ", ".join(times)
        return shown


class Subscriber:
    """Hears of requests and calls. Runs on the event loop's thread, and must not raise or wait."""

    def request_began(self, context: RequestContext) -> None:
        """A request's head has come; nothing of it is read yet."""

    def request_ended(self, context: RequestContext) -> None:
        """The client has its answer, or has gone: `context.status` is None then."""

    def call_began(self, context: RequestContext, call: EngineCall) -> None:
        """A request is about to be sent to an engine, with `call.headers` besides its own."""

    def call_ended(self, context: RequestContext, call: EngineCall) -> None:
        """An engine has answered or failed, or nobody waits for it any more."""

    def stage_retried(self, stage: Stage) -> None:
        """A stage is asked again for one request."""


class Events:
    """Tells all subscribers, in their order. Belongs to the event loop's thread."""

    def __init__(self, subscribers: Sequence[Subscriber] = ()) -> None:
        # Only what a subscriber has defined is called: each call of an engine has two events.
        def hear(name: str) -> list[Callable[..., None]]:
            nothing = getattr(Subscriber, name)
            return [
                getattr(each, name)
                for each in subscribers
                if getattr(type(each), name) is not nothing
            ]

        self._request_began = hear("request_began")
        self._request_ended = hear("request_ended")
        self._call_began = hear("call_began")
        self._call_ended = hear("call_ended")
        self._stage_retried = hear("stage_retried")

    def request_began(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        for hear in self._request_began:
            hear(context)

    def request_ended(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        context.ended_s, status = time.monotonic(), context.status
        if status is None:
            context.status_class = "client_gone"
        else:
            context.status_class = "429" if status == 429 else f"{status // 100}xx"
            if status >= 400:
                context.error = context.error or ENGINES_OWN
        for hear in self._request_ended:
            hear(context)

    def call_began(self, context: RequestContext, call: EngineCall) -> None:
        """See `Subscriber`."""
        if len(context.calls) < MAX_CALLS:
            context.calls.append(call)
        for hear in self._call_began:
            hear(context, call)

    def call_ended(
        self, context: RequestContext, call: EngineCall, failure: BaseException | None
    ) -> None:
        """See `Subscriber`; `failure` is why the call has ended, if that is an error."""
        call.ended_s = time.monotonic()
        call.outcome = "failed" if call.is_broken else _outcome(call.status, failure)
        for hear in self._call_ended:
            hear(context, call)

    def stage_retried(self, stage: Stage) -> None:
        """See `Subscriber`."""
        for hear in self._stage_retried:
            hear(stage)


def _outcome(status: int, failure: BaseException | None) -> str:
    if status >= 500 or status in OVERLOADED_STATUSES or isinstance(failure, EngineError):
        return "failed"
    if failure is not None and not isinstance(failure, RefusalError):
        return "cancelled"
    return "ok" if status < 400 else "refused"
