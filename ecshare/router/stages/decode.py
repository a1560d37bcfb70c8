# SPDX-License-Identifier: Apache-2.0
"""Decode: D answers, and its answer is passed on to the client."""

import logging
import time
from collections import Counter

from aiohttp import web

from ecshare.router.api.answer import ClientView, read_opening
from ecshare.router.api.client_request import Request
from ecshare.router.api.errors import EngineError
from ecshare.router.fleet.client import Call, EngineClient, lacks_model
from ecshare.router.fleet.health import TimeLimits
from ecshare.router.fleet.retries import Attempt, Retries
from ecshare.router.http.bodies import Payload
from ecshare.router.http.context import RequestContext
from ecshare.router.http.responses import end_stream, unavailable
from ecshare.router.options.config import RouterConfig
from ecshare.router.stages import plan
from ecshare.router.types import Stage

logger = logging.getLogger(__name__)

LOST_STATUSES = (500, 503)
"""What an engine answers to a request of which it has neither pixels nor embeddings, and to others
that fail."""


class Decode:
    """Asks decode engines and passes on what they answer. Belongs to the event loop's thread."""

    def __init__(self, config: RouterConfig, client: EngineClient, retries: Retries) -> None:
        self._config = config
        self._client = client
        self._retries = retries
        self.paths: Counter[str] = Counter()
        """How many requests were answered, by the stages that worked for them."""

    async def alone(self, context: RequestContext, plain: Request) -> web.StreamResponse:
        """Ask D's in turn for all the work. The last one's answer counts, whatever it is."""

        payload = _payload(context, plain)
        limit_s = self._first_byte_limit_s(plain)

        async def ask(attempt: Attempt) -> web.StreamResponse:
            return await self._forward(context, attempt, payload, limit_s)

        return await self._retries.run(Stage.DECODE, ask, context, payload.work)

    async def after(
        self, context: RequestContext, request: Request, concurrent_stage: Stage | None = None
    ) -> web.StreamResponse:
        """Pass on D's answer to a request that E and P have worked for.

        `concurrent_stage` is a stage that works for this answer at the same time.

        Raises:
            EngineError: D failed.
        """
        payload, has_embeddings = _payload(context, request), bool(context.client.items)
        limit_s = self._first_byte_limit_s(request, concurrent_stage)

        async def ask(attempt: Attempt) -> web.StreamResponse:
            nonlocal payload
            not_last = attempt._replace(is_last=_is_never_last)  # D alone is tried after it
            try:
                return await self._forward(context, not_last, payload, limit_s, concurrent_stage)
            except EngineError as failure:
                again = plan.serves_again(request) if failure.reached else request
                if again is not request:
                    payload = _payload(context, again)
                raise

        def may_move(failure: EngineError) -> bool:
            # Else an embedding may be lost, for every D.
            return not has_embeddings or failure.status not in LOST_STATUSES

        return await self._retries.run(Stage.DECODE, ask, context, payload.work, may_move)

    async def _forward(
        self,
        context: RequestContext,
        attempt: Attempt,
        payload: Payload,
        first_byte_limit_s: float,
        concurrent_stage: Stage | None = None,
    ) -> web.StreamResponse:
        """Pass on the answer of one D, as `ClientView` shows it.

        Raises:
            EngineError: it failed before the client has an event of an answer. Of the last attempt,
                an answer that tells of a failure is passed on instead.
        """
        began_s = time.monotonic()
        limits = TimeLimits(first_byte_s=first_byte_limit_s, is_last_resort=attempt.is_last)
        async with self._client.call(context, attempt.engine, payload, limits) as call:
            if call.failed and not attempt.is_last(call.status):
                raise call.failure()
            if call.is_stream:
                return await self._stream(context, attempt, call, concurrent_stage)
            body = await call.read(context.reservation)
            if call.status == 404 and lacks_model(body) and not attempt.is_last(call.status):
                raise call.failure()
        self._count(context, concurrent_stage)
        context.seconds[Stage.DECODE] = time.monotonic() - began_s
        view = context.tail = ClientView(context.dialect, context.prefill_usage)
        return web.Response(status=call.status, body=view.whole(body), headers=call.returned())

    def _first_byte_limit_s(self, request: Request, concurrent_stage: Stage | None = None) -> float:
        if not request.get("stream"):  # the first byte arrives with the last
            return self._config.timeout_s
        waits_for_s = 0.0 if concurrent_stage is None else self._config.stage_timeout_s
        return self._config.first_byte_timeout_s + waits_for_s

    async def _stream(
        self,
        context: RequestContext,
        attempt: Attempt,
        call: Call,
        concurrent_stage: Stage | None,
    ) -> web.StreamResponse:
        """Pass D's events on to the client, as they come.

        Raises:
            EngineError: the stream begins with an error, and another D may be asked.
        """

        async def pass_on(idle: bytes) -> None:
            # No event. Proxies then see that the connection is in use.
            await (await _begun(context, call.content_type)).write(idle)

        opening = await read_opening(call.chunk, pass_on)
        is_error = (opening.error_status or 0) >= 500
        call.begin(is_error=is_error)
        if is_error and not attempt.is_last(opening.error_status):
            reason, status = "the stream begins with an error", opening.error_status
            raise EngineError(Stage.DECODE, reason, reached=True, status=status)
        self._count(context, concurrent_stage)
        context.first_event_s = time.monotonic()
        view = context.tail = ClientView(context.dialect, context.prefill_usage)
        answer = await _begun(context, call.content_type)
        chunk = opening.content
        try:
            # aiohttp takes an empty chunk for the end. Nothing came, or comments alone: no opening.
            while chunk:
                if shown := view.chunk(chunk):
                    await answer.write(shown)
                chunk = await call.chunk()
            if shown := view.end():
                await answer.write(shown)
        except EngineError as failure:
            logger.warning("request %s: %s", context.request_id, failure)
            return await end_stream(context, unavailable(failure, self._config))
        await answer.write_eof()
        return answer

    def _count(self, context: RequestContext, concurrent_stage: Stage | None) -> None:
        if concurrent_stage is not None:
            context.passed(concurrent_stage)
        context.passed(Stage.DECODE)
        self.paths[",".join(context.path)] += 1


async def _begun(context: RequestContext, content_type: str) -> web.StreamResponse:
    """Return the client's stream. Its head is sent, now if it was not before."""
    if context.answer is None:
        headers = {
            "Content-Type": content_type,
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold the events back
        }
        context.answer = web.StreamResponse(headers=headers)
        context.complete(context.answer)
        await context.answer.prepare(context.http)
    return context.answer


def _payload(context: RequestContext, request: Request) -> Payload:
    return Payload(context.blobs, request, plan.decode_work(context.work, request))


def _is_never_last(status: int | None = None) -> bool:
    return False
