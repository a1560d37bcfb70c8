# SPDX-License-Identifier: Apache-2.0
"""What happens to requests and to calls of engines, for those that count, trace and log it."""

import time
from collections.abc import Callable, Sequence

from ecshare.router.api.errors import ENGINES_OWN
from ecshare.router.http.context import MAX_CALLS, EngineCall, RequestContext
from ecshare.router.types import Stage


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
        context.ended_s = time.monotonic()
        if context.status is not None and context.status >= 400:
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
        call.end(failure)
        for hear in self._call_ended:
            hear(context, call)

    def stage_retried(self, stage: Stage) -> None:
        """See `Subscriber`."""
        for hear in self._stage_retried:
            hear(stage)
