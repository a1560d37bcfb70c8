# SPDX-License-Identifier: Apache-2.0
"""Passes D's answers on to clients."""

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator

from aiohttp import web

from ecshare.router.accounts import Passed
from ecshare.router.call import Call
from ecshare.router.client_request import Request
from ecshare.router.client_view import ClientView
from ecshare.router.config import RouterConfig
from ecshare.router.engines import Stage
from ecshare.router.errors import EngineError
from ecshare.router.events import read_opening
from ecshare.router.health import TimeLimits
from ecshare.router.middleware import RequestContext, end_stream, unavailable, verbatim
from ecshare.router.relay import Relay, lacks_model
from ecshare.router.retries import Attempt
from ecshare.router.work import decode_work

logger = logging.getLogger(__name__)


class _Client:
    """The client's end of a stream, while D's may still change."""

    def __init__(self, call: Call, content_type: str) -> None:
        self._call = call
        self._content_type = content_type

    async def pass_on(self, idle: bytes) -> None:
        """Send what is no event. Proxies then see that the connection is in use."""
        await (await self.stream()).write(idle)

    async def stream(self) -> web.StreamResponse:
        """Return the client's stream. Its head is sent, now if it was not before."""
        context = self._call.context
        if context.answer is None:
            headers = {
                "Content-Type": self._content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would hold the events back
            }
            context.answer = web.StreamResponse(headers=headers | context.response_headers(200))
            await context.answer.prepare(self._call.http)
        return context.answer


class Answers:
    """Asks D's and passes on what they answer. Belongs to the event loop's thread."""

    def __init__(self, config: RouterConfig, relay: Relay) -> None:
        self._config = config
        self._relay = relay
        self.paths: Counter[str] = Counter()
        """How many requests were answered, by the stages that worked for them."""

    async def by(
        self,
        attempt: Attempt,
        call: Call,
        request: Request,
        concurrent_stage: Stage | None = None,
    ) -> web.StreamResponse:
        """Pass on the answer of one D to what it is sent of the client's request.

        The client sees it as `ClientView` shows it.

        Raises:
            EngineError: it failed before the client has an event of an answer. Of the last attempt,
                an answer that tells of a failure is passed on instead.
        """
        context, began_s = call.context, time.monotonic()
        first_byte_s = self._first_byte_limit_s(request, concurrent_stage)
        limits = TimeLimits(first_byte_s=first_byte_s, is_last_resort=attempt.is_last)
        payload = context.payload(request, decode_work(context.work, request))
        path = call.client.endpoint.path
        async with self._relay.call(
            attempt.engine, path, payload, context.headers, limits
        ) as reply:
            if reply.failed and not attempt.is_last(reply.status):
                raise reply.failure()
            if reply.is_stream:
                chunks, client = reply.chunks(), _Client(call, reply.content_type)
                opening = await read_opening(chunks, client.pass_on)
                is_error = (opening.error_status or 0) >= 500
                reply.begin(is_error=is_error)
                if is_error and not attempt.is_last(opening.error_status):
                    reason, status = "the stream begins with an error", opening.error_status
                    raise EngineError(Stage.DECODE, reason, reached=True, status=status)
                self._count_answer(context, concurrent_stage)
                return await self._stream(context, client, opening.content, chunks)
            body = await reply.read(call.reservation)
            if lacks_model(reply, body) and not attempt.is_last(reply.status):
                raise reply.failure()
        self._count_answer(context, concurrent_stage)
        context.seconds[Stage.DECODE] = time.monotonic() - began_s
        context.passed_on = Passed()
        context.passed_on.add(body)
        shown = ClientView(context.dialect, context.prefill_usage).whole(body)
        return verbatim(reply.status, shown, reply.content_type, reply.returned)

    def _first_byte_limit_s(self, request: Request, concurrent_stage: Stage | None) -> float:
        if not request.get("stream"):  # the first byte arrives with the last
            return self._config.timeout_s
        waits_for_s = 0.0 if concurrent_stage is None else self._config.stage_timeout_s
        return self._config.first_byte_timeout_s + waits_for_s

    async def _stream(
        self,
        context: RequestContext,
        client: _Client,
        opening: bytes,
        rest: AsyncIterator[bytes],
    ) -> web.StreamResponse:
        """Pass D's events on to the client, as `ClientView` shows them, as they come."""
        context.first_event_s = time.monotonic()
        passed_on = context.passed_on = Passed(is_stream=True)
        view = ClientView(context.dialect, context.prefill_usage)
        passed_on.add(opening)
        answer = await client.stream()
        try:
            # aiohttp takes an empty chunk for the end. Nothing came, or comments alone: no opening.
            if shown := view.chunk(opening):
                await answer.write(shown)
            async for chunk in rest:
                passed_on.add(chunk)
                if shown := view.chunk(chunk):
                    await answer.write(shown)
            if shown := view.end():
                await answer.write(shown)
        except EngineError as failure:
            logger.warning("request %s: %s", context.request_id, failure)
            return await end_stream(context, unavailable(failure, self._config))
        await answer.write_eof()
        return answer

    def _count_answer(self, context: RequestContext, concurrent_stage: Stage | None) -> None:
        if concurrent_stage is not None:
            context.passed(concurrent_stage)
        context.passed(Stage.DECODE)
        self.paths[",".join(context.path)] += 1
