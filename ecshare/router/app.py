# SPDX-License-Identifier: Apache-2.0
"""The router's routes, and the flow of one request through the stages.

Flow: read -> media get their identity -> E encodes each distinct item -> P prefills the
conversation -> D answers. When E or P fails, D gets the pictures and does all three, and where that
D fails too, another one. D may get its request beside P, and then loads what P has computed while P
computes the rest.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import hdrs, web

from ecshare.router import plan
from ecshare.router.bodies import read_body
from ecshare.router.chat import Chat, Media, Request, is_inline, read_chat
from ecshare.router.clients import Clients
from ecshare.router.concurrent import gather_all
from ecshare.router.config import RouterConfig
from ecshare.router.connections import Runner
from ecshare.router.errors import ApiError, EngineError, RefusalError
from ecshare.router.health import Patience
from ecshare.router.memory import Memory, Share
from ecshare.router.middleware import (
    TRIP,
    RequestContext,
    end_stream,
    envelope,
    json_response,
    unavailable,
    verbatim,
)
from ecshare.router.models import ServedModels
from ecshare.router.race import first_good
from ecshare.router.relay import Relay, Reply
from ecshare.router.workers import Stage, Worker, Workers

logger = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
_MODELS_TIMEOUT_S = 5.0
_MODELS_ANOTHER_S = 0.2  # then another engine is asked for its list too
_SHUTDOWN_S = 5.0
_MAX_DECODERS = 3
"""Most D's that one request is sent to as a whole: what kills them all is perhaps the request."""


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class Router:
    """The routes, over one `Relay`. Everything here belongs to the event loop's thread."""

    relay: Relay

    def __init__(self, config: RouterConfig, clock_s: Callable[[], float]) -> None:
        self._config = config
        self._clock_s = clock_s
        self._stages = {
            stage: Workers(urls, config.cool_down_s, clock_s)
            for stage, urls in (
                (Stage.ENCODE, config.encoders),
                (Stage.PREFILL, config.prefillers),
                (Stage.DECODE, config.decoders),
            )
        }
        self._paths: Counter[str] = Counter()
        self._num_fallbacks = 0
        self._memory = Memory(config.max_in_flight_bytes)
        self._served = ServedModels(self._served_models, clock_s)
        self._clients = Clients(self._ask_about_client, clock_s)
        self._asking_all: asyncio.Task[list[tuple[Stage, Worker, bool]]] | None = None

    def application(self) -> web.Application:
        """Return the web application; the relay lives as long as it runs."""
        app = web.Application(middlewares=[envelope(self._config)])
        app.cleanup_ctx.append(self._with_relay)
        app.router.add_post(CHAT, self.chat, expect_handler=_expected)
        app.router.add_get(MODELS, self.models, expect_handler=_expected)
        app.router.add_get("/health", self.health, expect_handler=_expected)
        return app

    async def _with_relay(self, app: web.Application) -> AsyncIterator[None]:
        self.relay = Relay(self._config, self._stages)
        yield
        await self._served.close()
        await self._clients.close()
        await self.relay.close()

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """Answer a chat completion, streamed or not, within the overall deadline."""
        context = http[TRIP]
        try:
            async with asyncio.timeout(self._config.timeout_s):
                with self._memory.share() as share:
                    return await self._answer(http, context, share)
        except TimeoutError as exc:
            late = ApiError(504, "The request took too long.", code="timeout")
            if context.answer is None:
                raise late from exc
            return await end_stream(context.answer, late)
        finally:
            context.bulk.clear()  # the connection keeps its last request while it is idle

    async def models(self, http: web.Request) -> web.Response:
        """Pass on the model list of D, or of P when no D can be reached."""
        headers = http[TRIP].headers
        try:
            reply, body = await self._model_list(Stage.DECODE, headers)
        except EngineError:
            if not self._stages[Stage.PREFILL]:
                raise
            reply, body = await self._model_list(Stage.PREFILL, headers)
        return verbatim(reply.status, body, reply.content_type)

    async def health(self, http: web.Request) -> web.Response:
        """Ask all engines; 200 when every stage has one that answers, else 503.

        Where the engines are and what they do is for those who show the status key.
        """
        key = self._config.status_key
        is_full = key is not None and key.is_shown_by(http.headers.get(hdrs.AUTHORIZATION))
        stages: dict[str, list[dict[str, Any]]] = {}
        for stage, worker, healthy in await self.ask_all():
            group = stages.setdefault(stage, [])
            group.append({"name": f"{stage}-{len(group) + 1}", "healthy": healthy})
            if is_full:
                group[-1] |= {"url": worker.url, "in_flight": worker.in_flight}
        complete = all(any(each["healthy"] for each in group) for group in stages.values())
        report: dict[str, Any] = {"status": "ok" if complete else "incomplete", "stages": stages}
        if is_full:
            report |= {"answered": dict(self._paths), "fallbacks": self._num_fallbacks}
        return json_response(200 if complete else 503, report)

    async def ask_all(self) -> list[tuple[Stage, Worker, bool]]:
        """Ask every engine at once whether it is healthy; takes a few seconds at most.

        All who ask meanwhile have the same answers: many of them cost the engines no more than one.
        """
        if self._asking_all is None:
            self._asking_all = asyncio.create_task(self._ask_all())
        return await asyncio.shield(self._asking_all)

    async def _ask_all(self) -> list[tuple[Stage, Worker, bool]]:
        workers = [(stage, each) for stage, group in self._stages.items() for each in group]
        try:
            answers = await gather_all([self._is_healthy(each) for _, each in workers])
        finally:
            self._asking_all = None
        return [(*worker, healthy) for worker, healthy in zip(workers, answers, strict=True)]

    async def _is_healthy(self, worker: Worker) -> bool:
        # Of one that hangs it is known, and to ask it would take long.
        return not worker.is_hung and await self.relay.is_healthy(worker)

    async def _answer(
        self, http: web.Request, context: RequestContext, share: Share
    ) -> web.StreamResponse:
        body = await read_body(http, self._config, share, context.bulk)
        chat = read_chat(body, self._config.max_items)
        del body  # what is decoded takes several times as much
        await self._check_model(chat, context)
        if not all(is_inline(item.source) for item in chat.items):
            await self._clients.check(context.headers)
        media = await self.relay.load_media(chat.items, context.bulk, share)
        plain = plan.plain_request(chat, media)
        try:
            request = await self._encoded(chat, media, plain, context)
            if self._stages[Stage.PREFILL]:
                answer = await self._prefill(http, request, context)
                if isinstance(answer, web.StreamResponse):
                    return answer
                request = answer
            if request is not plain:
                return await self._decode(http, request)
        except EngineError as failure:
            if context.answer is not None:
                raise
            logger.warning("request %s falls back to decode alone: %s", context.request_id, failure)
            self._num_fallbacks += 1
            context.path.clear()
        return await self._decode_alone(http, plain, context)

    async def _encoded(
        self, chat: Chat, media: list[Media], plain: Request, context: RequestContext
    ) -> Request:
        """Return what P is to be sent: without the media that E has encoded."""
        if not chat.items or not self._stages[Stage.ENCODE]:
            return plain
        with context.through(Stage.ENCODE):
            reports = await self._encode(plan.encode_requests(chat, media), context)
        return plan.lean_request(chat, media, reports)

    async def _encode(
        self, requests: Mapping[str, Request], context: RequestContext
    ) -> dict[str, plan.Metadata | None]:
        """Have all items encoded at once; returns what is known of each, by uuid."""
        answers = await gather_all(
            [
                self.relay.ask(Stage.ENCODE, CHAT, context.payload(request), context.headers)
                for request in requests.values()
            ]
        )
        reports = map(plan.reported_metadata, answers)
        return dict(zip(requests, reports, strict=True))

    async def _prefill(
        self, http: web.Request, request: Request, context: RequestContext
    ) -> web.StreamResponse | Request:
        """Have P prefill; return what D is to be sent, or D's answer if it was asked meanwhile.

        It is asked beside a P that is known to store KV while it computes, and has nothing else to
        do: behind other requests D would hold room in its cache for what P has not begun.
        """
        worker = self._stages[Stage.PREFILL].choose()
        is_streamed = self._config.hand_over == "streamed"
        if is_streamed and worker is not None and worker.streams and not worker.in_flight:
            return await self._side_by_side(http, worker, request, context)
        return plan.decode_request(request, await self._handed_over(worker, request, context))

    async def _handed_over(
        self, worker: Worker | None, request: Request, context: RequestContext
    ) -> Request | None:
        """Return what P hands over to D; no `worker`: any one that is up."""
        with context.through(Stage.PREFILL):
            payload = context.payload(plan.prefill_request(request))
            answer = await self.relay.ask(worker or Stage.PREFILL, CHAT, payload, context.headers)
        hand_over = plan.reported_hand_over(answer)
        if worker is not None:
            streams = plan.is_streamed(hand_over)
            self._stages[Stage.PREFILL].mark_streams(worker, streams=streams)
        return hand_over

    async def _side_by_side(
        self, http: web.Request, worker: Worker, request: Request, context: RequestContext
    ) -> web.StreamResponse | Request:
        """Return D's answer, which loads while P computes.

        Where P ends before D has begun to answer, and has not done what D waits for, D's request is
        cancelled: raises what P has raised, or returns what D is to be sent instead.
        """
        streamed = plan.decode_request(request, plan.STREAMED)
        prefilling = asyncio.create_task(self._handed_over(worker, request, context))
        answering = asyncio.create_task(self._decode(http, streamed, beside=Stage.PREFILL))
        try:
            with self._stages[Stage.PREFILL].lease(worker):
                await asyncio.sleep(0)  # until the call has begun: nobody else shall find it free
            await asyncio.wait((prefilling, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and context.answer is None:
                hand_over = prefilling.result()
                if not plan.is_streamed(hand_over):
                    return plan.decode_request(request, hand_over)
            return await answering
        finally:
            for task in (prefilling, answering):
                task.cancel()
            await asyncio.gather(prefilling, answering, return_exceptions=True)

    async def _decode_alone(
        self, http: web.Request, plain: Request, context: RequestContext
    ) -> web.StreamResponse:
        """Ask one D after the other, each once; the last one's answer counts whatever it is."""
        decoders = self._stages[Stage.DECODE]
        # All may be cooling down: there is no other way to an answer than to ask one of them.
        worker = decoders.choose() or decoders.soonest()
        asked: list[Worker] = []

        def another() -> Worker | None:
            return decoders.choose(asked) if len(asked) < _MAX_DECODERS else None

        while worker is not None:
            asked.append(worker)
            try:
                return await self._decode(http, plain, worker, is_last=lambda: not another())
            except EngineError as failure:
                worker = another()
                if worker is None:
                    raise
                logger.warning("request %s tries another decode: %s", context.request_id, failure)
        raise EngineError(Stage.DECODE, "there is none", reached=False)

    async def _decode(
        self,
        http: web.Request,
        request: Request,
        to: Stage | Worker = Stage.DECODE,
        *,
        is_last: Callable[[], bool] = lambda: False,
        beside: Stage | None = None,
    ) -> web.StreamResponse:
        """Pass D's answer on. A failed one is an EngineError, unless this is the last way to one.

        `beside`: a stage that is at work for this answer meanwhile.
        """
        context, began_s = http[TRIP], time.monotonic()
        first_byte_s = self._first_byte_limit_s(request, beside)
        patience = Patience(first_byte_s=first_byte_s, is_last=is_last)
        payload = context.payload(request)
        async with self.relay.call(to, CHAT, payload, context.headers, patience) as reply:
            if reply.failed and not is_last():
                raise EngineError(Stage.DECODE, f"HTTP {reply.status}", reached=True)
            if reply.is_stream:
                return await self._stream(http, reply, context, beside)
            body = await reply.read()
        self._passed(context, beside)
        context.seconds[Stage.DECODE] = time.monotonic() - began_s
        return verbatim(reply.status, body, reply.content_type, reply.retry_after)

    def _first_byte_limit_s(self, request: Request, beside: Stage | None) -> float:
        if not request.get("stream"):  # the first byte comes with the last
            return self._config.timeout_s
        waits_for_s = 0.0 if beside is None else self._config.stage_timeout_s
        return self._config.first_byte_timeout_s + waits_for_s

    async def _stream(
        self, http: web.Request, reply: Reply, context: RequestContext, beside: Stage | None
    ) -> web.StreamResponse:
        """Copy D's events to the client, byte for byte.

        Nothing is sent before D's first byte: until then another D can take over.
        """
        chunks = reply.chunks()
        first = await anext(chunks, b"")
        self._passed(context, beside)
        headers = {
            "Content-Type": reply.content_type,
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold the events back
        }
        context.answer = web.StreamResponse(headers=headers | context.response_headers())
        await context.answer.prepare(http)
        try:
            await context.answer.write(first)
            async for chunk in chunks:
                await context.answer.write(chunk)
        except EngineError as failure:
            logger.warning("request %s: %s", context.request_id, failure)
            return await end_stream(context.answer, unavailable(failure, self._config))
        await context.answer.write_eof()
        return context.answer

    def _passed(self, context: RequestContext, beside: Stage | None) -> None:
        if beside is not None:
            context.passed(beside)
        context.passed(Stage.DECODE)
        self._paths[",".join(context.path)] += 1

    async def _check_model(self, chat: Chat, context: RequestContext) -> None:
        """Refuse a model that D does not serve. When D cannot say, the stages will."""
        if chat.model is not None and await self._served.lacks(chat.model, context.headers):
            message = f"The model `{chat.model}` does not exist."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _served_models(self, headers: dict[str, str]) -> frozenset[str] | None:
        try:
            _, body = await self._model_list(Stage.DECODE, headers)
            served = msgspec.json.decode(body, type=_ModelList)
        except (EngineError, ValueError, RecursionError):  # also an error's body is no list
            return None
        return frozenset(model.id for model in served.data)

    async def _model_list(self, stage: Stage, headers: Mapping[str, str]) -> tuple[Reply, bytes]:
        """Ask one engine for its list, and others as well where that one is slow or fails."""
        workers = self._stages[stage].several(_MAX_DECODERS)
        asked = [partial(self._model_list_of, stage, worker, headers) for worker in workers]
        return await first_good(asked, _MODELS_ANOTHER_S)

    async def _model_list_of(
        self, stage: Stage, worker: Worker, headers: Mapping[str, str]
    ) -> tuple[Reply, bytes]:
        patience = Patience(_MODELS_TIMEOUT_S)
        async with self.relay.call(worker, MODELS, None, headers, patience) as reply:
            body = await reply.read()
        if reply.failed:
            raise EngineError(stage, f"HTTP {reply.status}", reached=True)
        return reply, body

    async def _ask_about_client(self, headers: Mapping[str, str]) -> None:
        reply, body = await self._model_list(Stage.DECODE, headers)
        if reply.status in (401, 403):
            raise RefusalError(reply.status, body, reply.content_type)
        if reply.status != 200:
            reason = f"{MODELS} is HTTP {reply.status}, which says nothing of the client"
            raise EngineError(Stage.DECODE, reason, reached=True)


async def _expected(http: web.Request) -> None:
    """Let a client that asked for it send its body; aiohttp's own fails on other bytes."""
    if http.headers.get(hdrs.EXPECT, "").lower() == "100-continue" and http.transport is not None:
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def make_runner(router: Router, config: RouterConfig) -> Runner:
    """Return the server, not yet listening."""
    return Runner(
        router.application(),
        config.client_timeout_s,
        config.max_connections,
        # A client that leaves cancels its request, and with it every call to an engine.
        handler_cancellation=True,
        auto_decompress=False,  # see bodies.py
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
