# SPDX-License-Identifier: Apache-2.0
"""The router's routes, and the flow of one request through the stages.

The request is read, and its media get their identity. E (encode) encodes each distinct item, P
(prefill) prefills the conversation, D (decode) answers. Where an engine fails, another one of its
stage is asked; if E or P has none left, D gets the media and does all three. D may get its request
while P computes. It then loads what P has computed so far while P computes the rest.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
from aiohttp import hdrs, web

from ecshare.router import plan
from ecshare.router.bodies import read_body
from ecshare.router.chat import Chat, Media, Request, is_inline, read_chat
from ecshare.router.clients import KnownClients
from ecshare.router.concurrent import gather_all
from ecshare.router.config import RouterConfig
from ecshare.router.connections import Runner
from ecshare.router.drain import RequestsInFlight
from ecshare.router.encoded import EncodedMedia
from ecshare.router.engines import USUAL_BOUND, Engine, EnginePool, Stage, Work, name_of
from ecshare.router.errors import ApiError, EngineError, RefusalError
from ecshare.router.events import read_opening
from ecshare.router.fleet import FleetWatch, fixed
from ecshare.router.health import TimeLimits
from ecshare.router.hedging import hedged
from ecshare.router.limits import Place, StageLimits
from ecshare.router.memory import MemoryBudget, Reservation
from ecshare.router.metrics import RouterMetrics, Sources
from ecshare.router.middleware import (
    CONTEXT,
    RequestContext,
    end_stream,
    json_response,
    request_middleware,
    unavailable,
    verbatim,
)
from ecshare.router.models import ServedModels
from ecshare.router.observer import Observer
from ecshare.router.pages import Pages
from ecshare.router.prefilled import Known, PrefilledPrompts, turns_of
from ecshare.router.probes import Probes, Readiness, engine_states
from ecshare.router.relay import Relay, Reply
from ecshare.router.retries import Attempt, Retries, RetryBudget
from ecshare.router.shared_reports import SharedReports
from ecshare.router.work import decode_work, item_work, prompt_work

logger = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
_MODELS_TIMEOUT_S = 5.0
_MODELS_HEDGE_S = 0.2  # then another engine is asked as well
_SHUTDOWN_S = 5.0
_LOST_STATUSES = (500, 503)
"""What an engine answers to a request of which it has neither pixels nor embeddings, and to others
that fail."""
_MAX_LISTS = 3
"""How many engines may be asked for the same list of models."""


class _Job(NamedTuple):
    """A chat completion on its way through the stages."""

    http: web.Request
    chat: Chat
    reservation: Reservation

    @property
    def context(self) -> RequestContext:
        return self.http[CONTEXT]


class _Encoded(NamedTuple):
    """A request whose media E has encoded, now or before."""

    request: Request
    keys: tuple[bytes, ...]
    was_known: bool
    """Whether E was not asked for one of them."""


class _Stream(NamedTuple):
    """A streamed answer of D that has begun."""

    opening: bytes
    rest: AsyncIterator[bytes]
    content_type: str


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class Router:
    """The routes, over one `Relay`. Belongs to the event loop's thread."""

    relay: Relay

    def __init__(self, config: RouterConfig, clock_s: Callable[[], float]) -> None:
        self._config = config
        self._clock_s = clock_s
        urls = {
            Stage.ENCODE: config.encoders,
            Stage.PREFILL: config.prefillers,
            Stage.DECODE: config.decoders,
        }
        # Media of one request are best encoded at once, by all.
        bounds = {Stage.ENCODE: 1.0}
        self._pools = {
            stage: EnginePool(
                fixed(group), config.cool_down_s, clock_s, bounds.get(stage, USUAL_BOUND)
            )
            for stage, group in urls.items()
        }
        self._fleet = FleetWatch(self._pools, urls, config.engines_file)
        self._paths: Counter[str] = Counter()
        self._num_fallbacks = 0
        self._num_repeats = 0
        self._memory = MemoryBudget(config.max_in_flight_bytes)
        self._limits = StageLimits(
            self._pools,
            {
                Stage.ENCODE: config.max_encodes,
                Stage.PREFILL: config.max_prefills,
                Stage.DECODE: config.max_decodes,
            },
        )
        self.in_flight = RequestsInFlight()
        shows_urls = config.status_key is not None
        self._sources = Sources(self._pools, self._memory, self.counts, shows_urls)
        self._metrics = RouterMetrics(self._sources)
        self._observer = Observer(self._metrics)
        self._retry_budget = RetryBudget(config.retry_share, clock_s)
        self._retries = Retries(
            self._pools,
            self._retry_budget,
            self._metrics.count_retry,
            keeps_affinity=config.balance == "affinity",
        )
        self._prefilled = PrefilledPrompts(config.max_index_bytes, config.max_new_chars, clock_s)
        self._encoded = EncodedMedia(config.max_index_bytes, config.stage_timeout_s)
        self._served = ServedModels(self._served_models, clock_s)
        self._clients = KnownClients(self._ask_about_client, clock_s)
        self._health_check: asyncio.Task[list[tuple[Stage, Engine, bool]]] | None = None

    def application(self) -> web.Application:
        """Return the web application. The relay lives as long as the application runs."""
        app = web.Application(middlewares=[request_middleware(self._config)])
        app.cleanup_ctx.append(self._with_relay)
        app.router.add_post(CHAT, self.chat, expect_handler=_send_continue)
        app.router.add_get(MODELS, self.models, expect_handler=_send_continue)
        app.router.add_get("/health", self.health, expect_handler=_send_continue)
        decoders = self._pools[Stage.DECODE]
        readiness = Readiness(decoders, self._is_healthy, self.in_flight, self._clock_s)
        key = self._config.status_key
        probes = Probes(readiness, key, self.status)
        stages = partial(self._stages, is_full=True)
        pages = Pages(key, self._sources, self._metrics, self._observer, stages)
        for path, handler in {
            "/live": probes.live,
            "/ready": probes.ready,
            "/status": probes.status,
            **pages.routes(),
        }.items():
            app.router.add_get(path, handler, expect_handler=_send_continue)
        app.on_response_prepare.append(self._close_if_stopping)
        self._observer.attach(app)
        return app

    async def _close_if_stopping(self, http: web.Request, response: web.StreamResponse) -> None:
        """Have clients open their next connection to another router."""
        if self.in_flight.is_draining:
            response.force_close()
            response.headers["Connection"] = "close"  # aiohttp has set its headers before this

    async def _with_relay(self, app: web.Application) -> AsyncIterator[None]:
        self.relay = Relay(self._config, self._pools, self._observer)
        await self._fleet.start()
        if self._config.store is not None:
            self._encoded.shared = SharedReports(self._config.store, self._clock_s)
        yield
        await self._fleet.close()
        if self._encoded.shared is not None:
            await self._encoded.shared.close()
        await self._served.close()
        await self._clients.close()
        await self.relay.close()

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """Answer a chat completion, streamed or not, within the overall deadline."""
        context = http[CONTEXT]
        try:
            async with self.in_flight.begin(self._config.timeout_s):
                with self._memory.reservation() as reservation:
                    return await self._answer(http, reservation)
        except TimeoutError as exc:
            late = self.in_flight.ending()
            if context.answer is None:
                raise late from exc
            return await end_stream(context, late)
        finally:
            context.blobs.clear()  # an idle connection still refers to its last request

    async def models(self, http: web.Request) -> web.Response:
        """Pass on the model list of D, or of P if no D can be reached."""
        headers = http[CONTEXT].headers
        try:
            reply, body = await self._model_list(Stage.DECODE, headers)
        except EngineError:
            if not self._pools[Stage.PREFILL]:
                raise
            reply, body = await self._model_list(Stage.PREFILL, headers)
        return verbatim(reply.status, body, reply.content_type)

    async def health(self, http: web.Request) -> web.Response:
        """Check all engines: 200 if every stage has one that answers, else 503.

        Only clients with the status key see where the engines are and what they do.
        """
        key = self._config.status_key
        is_full = key is not None and key.matches(http.headers.get(hdrs.AUTHORIZATION))
        stages = await self._stages(is_full=is_full)
        complete = all(any(each["healthy"] for each in group) for group in stages.values())
        report: dict[str, Any] = {"status": "ok" if complete else "incomplete", "stages": stages}
        if is_full:
            report |= self.counts()
        return json_response(200 if complete else 503, report)

    def status(self) -> dict[str, Any]:
        """Return what holders of the status key are told."""
        return {
            "draining": self.in_flight.is_draining,
            "in_flight": len(self.in_flight),
            "stages": engine_states(self._pools, self._limits.used),
            "memory": self._memory.used_bytes,
            **self.counts(),
        }

    async def _stages(self, *, is_full: bool) -> dict[str, list[dict[str, Any]]]:
        """Check all engines, and return what is known of them, by stage."""
        stages: dict[str, list[dict[str, Any]]] = {}
        for stage, engine, healthy in await self.check_all():
            told: dict[str, Any] = {"name": name_of(stage, engine), "healthy": healthy}
            if is_full:
                state = self._pools[stage].state(engine)
                told |= {"url": engine.url, "in_flight": engine.in_flight, "state": state}
            stages.setdefault(stage, []).append(told)
        return stages

    def counts(self) -> dict[str, Any]:
        """Return what was counted since the start. docs/metrics.md explains it."""
        return {
            "answered": dict(self._paths),
            "fallbacks": self._num_fallbacks,
            "retries": self._retry_budget.status(),
            "encodes": self._encoded.status() | {"repeated": self._num_repeats},
            "prefills": self._prefilled.status(),
            "downloads": self.relay.media.status(),
        }

    async def check_all(self) -> list[tuple[Stage, Engine, bool]]:
        """Check the health of all engines at once; takes a few seconds at most.

        Callers at the same time share one check, so many callers cost the engines no more than one.
        """
        if self._health_check is None:
            self._health_check = asyncio.create_task(self._check_all())
        return await asyncio.shield(self._health_check)

    async def _check_all(self) -> list[tuple[Stage, Engine, bool]]:
        engines = [(stage, each) for stage, group in self._pools.items() for each in group]
        try:
            answers = await gather_all([self._is_healthy(each) for _, each in engines])
        finally:
            self._health_check = None
        return [(*engine, healthy) for engine, healthy in zip(engines, answers, strict=True)]

    async def _is_healthy(self, engine: Engine) -> bool:
        # A hung engine is known to be unhealthy, and would take long to answer.
        return not engine.is_hung and await self.relay.is_healthy(engine)

    async def _answer(self, http: web.Request, reservation: Reservation) -> web.StreamResponse:
        context = http[CONTEXT]
        body = await read_body(http, self._config, reservation, context.blobs)
        chat = read_chat(body, self._config.max_items)
        del body  # the decoded request takes several times the memory
        self._retry_budget.note_request()
        await self._check_model(chat, context)
        if not all(is_inline(item.source) for item in chat.items):
            await self._clients.check(context.headers)
        job = _Job(http, chat, reservation)
        media = await self._load(job)
        context.work = prompt_work(chat, media)
        # Every request ends at D. One that D has no room for must not keep E and P busy before.
        with self._limits.place(Stage.DECODE) as place:
            place.take()
            return await self._answer_from(job, media)

    async def _answer_from(self, job: _Job, media: list[Media]) -> web.StreamResponse:
        context = job.context
        try:
            answer = await self._through_stages(job, media, may_repeat=True)
            if answer is not None:
                return answer
        except EngineError as failure:
            if context.answer is not None or self._is_refused(failure):
                raise
            logger.warning("request %s falls back to decode alone: %s", context.request_id, failure)
            self._num_fallbacks += 1
            context.path.clear()
            context.avoided.clear()
        plain = plan.inline_request(job.chat, await self._complete(job, media))
        return await self._decode_alone(job.http, plain, context)

    def _is_refused(self, failure: EngineError) -> bool:
        """Tell whether a request ends because a stage has too much to do. D must not get its work
        as well, or the stage that no request can do without fails next.
        """
        to_refuse = failure.stage is Stage.DECODE or self._config.when_overloaded == "refuse"
        return failure.is_overload and to_refuse

    async def _load(self, job: _Job) -> list[Media]:
        """Return the request's media, without the bytes that it can do without."""
        options = plan.encoding_options(job.chat)

        def is_known(uuid: str) -> bool:
            return bool(self._encoded.known({uuid: plan.encoding_key(options, uuid)}))

        blobs = job.context.blobs
        return await self.relay.media.load(job.chat.items, blobs, job.reservation, is_known)

    async def _complete(self, job: _Job, media: list[Media]) -> list[Media]:
        """Return the request's media with all their bytes."""
        blobs = job.context.blobs
        return await self.relay.media.complete(job.chat.items, media, blobs, job.reservation)

    async def _through_stages(
        self, job: _Job, media: list[Media], *, may_repeat: bool
    ) -> web.StreamResponse | None:
        """Return the answer that E and P have worked for; None if there is neither.

        If P or D fails without an item that E was not asked for this time, all items go to E, once.

        Raises:
            ApiError: an item cannot be fetched that is needed after all.
            EngineError: a stage failed.
            RefusalError: a stage refused the request.
        """
        context, chat = job.context, job.chat
        if not chat.items or not self._pools[Stage.ENCODE]:
            plain = plan.inline_request(chat, media)
            return await self._from_prefill_on(job.http, plain, context, is_plain=True)
        encoded = await self._encode(job, media)
        try:
            answer = await self._from_prefill_on(job.http, encoded.request, context, is_plain=False)
            _check_accepted(answer)
        except (EngineError, RefusalError) as failure:
            if context.answer is not None or not self._may_be_wrong(encoded, failure):
                raise
            # The embeddings may be gone. If they are not, asking E again costs little.
            self._encoded.forget(encoded.keys)
            if not encoded.was_known or not may_repeat:
                raise
            logger.warning("request %s encodes its media again: %s", context.request_id, failure)
        else:
            self._encoded.confirm(encoded.keys)
            return answer
        self._num_repeats += 1
        self._metrics.count_retry(Stage.ENCODE)
        context.path.clear()
        context.avoided.clear()
        return await self._through_stages(job, media, may_repeat=False)

    def _may_be_wrong(self, encoded: _Encoded, failure: EngineError | RefusalError) -> bool:
        """Tell whether P or D may have failed because of what E is said to have reported."""
        if isinstance(failure, RefusalError):
            return self._encoded.is_hearsay(encoded.keys)
        return failure.status in _LOST_STATUSES

    async def _from_prefill_on(
        self, http: web.Request, request: Request, context: RequestContext, *, is_plain: bool
    ) -> web.StreamResponse | None:
        """Return D's answer; None if there is no P and the request `is_plain`."""
        if not self._pools[Stage.PREFILL]:
            return None if is_plain else await self._decode(http, request)
        if self._config.prefill == "needed":
            context.turns = turns_of(request)
            known = self._prefilled.find(context.turns)
            if known is not None:
                return await self._decode_known(http, request, known)
        answer = await self._prefill(http, request, context)
        if isinstance(answer, web.StreamResponse):
            return answer
        return await self._decode(http, answer)

    async def _decode_known(
        self, http: web.Request, request: Request, known: Known
    ) -> web.StreamResponse:
        """Return D's answer to a prompt that is stored, or nearly."""
        context = http[CONTEXT]
        context.avoided.append(Stage.PREFILL)
        try:
            answer = await self._decode(http, plan.decode_request(request, known.hand_over))
        except EngineError:
            self._prefilled.forget(context.turns)
            raise
        if answer.status == 200:
            self._prefilled.note_decoded(context.turns, known)
        return answer

    async def _encode(self, job: _Job, media: list[Media]) -> _Encoded:
        """Return the request to P, with what E reports of the items or has reported before."""
        context, chat = job.context, job.chat

        async def ask(request: Request, work: Work, place: Place) -> plan.Metadata | None:
            place.take()
            payload = context.payload(request, work)

            async def by(attempt: Attempt) -> Request:
                return await self.relay.ask(attempt.engine, CHAT, payload, context.headers)

            answer = await self._retries.run(Stage.ENCODE, by, context, work)
            return plan.reported_metadata(answer)

        keys = _encoding_keys(chat, media)
        known = self._encoded.known(keys)
        if len(known) == len(keys) and not plan.needs_bytes(chat, media, known):
            context.avoided.append(Stage.ENCODE)
            reports = await self._encoded.reports(keys, {})
        else:
            media = await self._complete(job, media)
            keys = _encoding_keys(chat, media)
            requests = plan.encode_requests(chat, media)
            with context.timed(Stage.ENCODE), self._limits.place(Stage.ENCODE) as place:
                works = {
                    held.uuid: item_work(keys[held.uuid], item)
                    for item, held in zip(chat.items, media, strict=True)
                }
                asks = {
                    uuid: partial(ask, each, works[uuid], place) for uuid, each in requests.items()
                }
                reports = await self._encoded.reports(keys, asks)
            if not reports.was_asked:
                context.path.remove(Stage.ENCODE)
                context.avoided.append(Stage.ENCODE)
        request = plan.metadata_request(chat, media, reports.metadata)
        return _Encoded(request, tuple(keys.values()), bool(reports.known))

    async def _prefill(
        self, http: web.Request, request: Request, context: RequestContext
    ) -> web.StreamResponse | Request:
        """Have P prefill; return the request to D, or D's answer if D was asked meanwhile.

        D is asked meanwhile if P is known to store KV while it computes, and is idle. Behind other
        requests D would hold cache blocks for KV that P has not begun to compute.
        """
        is_streamed = self._config.hand_over == "streamed"

        async def by(attempt: Attempt) -> web.StreamResponse | Request:
            engine = attempt.engine
            if is_streamed and engine.streams and not engine.in_flight:
                return await self._prefill_and_decode(http, engine, request, context)
            return plan.decode_request(request, await self._hand_over_of(engine, request, context))

        return await self._retries.run(Stage.PREFILL, by, context, context.work)

    async def _hand_over_of(
        self, engine: Engine, request: Request, context: RequestContext
    ) -> Request | None:
        """Return what P hands over to D."""
        with self._limits.place(Stage.PREFILL) as place, context.timed(Stage.PREFILL):
            place.take()
            payload = context.payload(plan.prefill_request(request), context.work)
            answer = await self.relay.ask(engine, CHAT, payload, context.headers)
        if context.turns:
            self._prefilled.note_prefilled(context.turns, answer)
        hand_over = plan.reported_hand_over(answer)
        self._pools[Stage.PREFILL].set_streams(engine, streams=plan.is_streamed(hand_over))
        return hand_over

    async def _prefill_and_decode(
        self, http: web.Request, engine: Engine, request: Request, context: RequestContext
    ) -> web.StreamResponse | Request:
        """Return D's answer; D loads KV while P computes.

        D's request is cancelled if P ends before D has begun to answer, without having stored what
        D waits for. Then the request to send to D instead is returned.

        Raises:
            EngineError: P or D failed.
            RefusalError: P or D refused the request.
        """
        streamed = plan.decode_request(request, plan.STREAMED)
        prefilling = asyncio.create_task(self._hand_over_of(engine, request, context))
        answering = asyncio.create_task(
            self._decode(http, streamed, concurrent_stage=Stage.PREFILL)
        )
        try:
            with self._pools[Stage.PREFILL].lease(engine):
                # Until the call holds its own lease: no other request may find the engine idle.
                await asyncio.sleep(0)
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
        """Ask D's in turn for all the work. The last one's answer counts, whatever it is."""

        async def by(attempt: Attempt) -> web.StreamResponse:
            return await self._decode_by(attempt, http, plain)

        work = decode_work(context.work, plain)
        return await self._retries.run(Stage.DECODE, by, context, work)

    async def _decode(
        self, http: web.Request, request: Request, concurrent_stage: Stage | None = None
    ) -> web.StreamResponse:
        """Pass on D's answer to a request that E and P have worked for.

        `concurrent_stage` is a stage that works for this answer at the same time.

        Raises:
            EngineError: D failed.
        """
        context = http[CONTEXT]

        async def by(attempt: Attempt) -> web.StreamResponse:
            not_last = attempt._replace(is_last=lambda: False)  # D alone is tried after it
            return await self._decode_by(not_last, http, request, concurrent_stage)

        def may_move(failure: EngineError) -> bool:
            return failure.status not in _LOST_STATUSES  # else it may be lost for every D

        work = decode_work(context.work, request)
        return await self._retries.run(Stage.DECODE, by, context, work, may_move)

    async def _decode_by(
        self,
        attempt: Attempt,
        http: web.Request,
        request: Request,
        concurrent_stage: Stage | None = None,
    ) -> web.StreamResponse:
        """Pass on the answer of one D.

        Raises:
            EngineError: it failed, and the attempt is not the last.
        """
        context, began_s = http[CONTEXT], time.monotonic()
        first_byte_s = self._first_byte_limit_s(request, concurrent_stage)
        limits = TimeLimits(first_byte_s=first_byte_s, is_last_resort=attempt.is_last)
        payload = context.payload(request, decode_work(context.work, request))
        async with self.relay.call(attempt.engine, CHAT, payload, context.headers, limits) as reply:
            if reply.failed and not attempt.is_last():
                raise reply.failure()
            if reply.is_stream:
                chunks = reply.chunks()
                opening = await read_opening(chunks)
                if (opening.error_status or 0) >= 500 and not attempt.is_last():
                    reason, status = "the stream begins with an error", opening.error_status
                    raise EngineError(Stage.DECODE, reason, reached=True, status=status)
                stream = _Stream(opening.content, chunks, reply.content_type)
                return await self._stream(http, stream, context, concurrent_stage)
            body = await reply.read()
        self._count_answer(context, concurrent_stage)
        context.seconds[Stage.DECODE] = time.monotonic() - began_s
        return verbatim(reply.status, body, reply.content_type, reply.retry_after)

    def _first_byte_limit_s(self, request: Request, concurrent_stage: Stage | None) -> float:
        if not request.get("stream"):  # the first byte arrives with the last
            return self._config.timeout_s
        waits_for_s = 0.0 if concurrent_stage is None else self._config.stage_timeout_s
        return self._config.first_byte_timeout_s + waits_for_s

    async def _stream(
        self,
        http: web.Request,
        stream: _Stream,
        context: RequestContext,
        concurrent_stage: Stage | None,
    ) -> web.StreamResponse:
        """Copy D's events to the client, byte for byte."""
        self._count_answer(context, concurrent_stage)
        headers = {
            "Content-Type": stream.content_type,
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold the events back
        }
        context.answer = web.StreamResponse(headers=headers | context.response_headers())
        await context.answer.prepare(http)
        try:
            await context.answer.write(stream.opening)
            async for chunk in stream.rest:
                await context.answer.write(chunk)
        except EngineError as failure:
            logger.warning("request %s: %s", context.request_id, failure)
            return await end_stream(context, unavailable(failure, self._config))
        await context.answer.write_eof()
        return context.answer

    def _count_answer(self, context: RequestContext, concurrent_stage: Stage | None) -> None:
        if concurrent_stage is not None:
            context.passed(concurrent_stage)
        context.passed(Stage.DECODE)
        self._paths[",".join(context.path)] += 1

    async def _check_model(self, chat: Chat, context: RequestContext) -> None:
        """Refuse a model that D does not serve. If D does not tell, the stages decide."""
        if chat.model is not None and await self._served.lacks(chat.model, context.headers):
            message = f"The model `{chat.model}` does not exist."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _served_models(self, headers: dict[str, str]) -> frozenset[str] | None:
        try:
            _, body = await self._model_list(Stage.DECODE, headers)
            served = msgspec.json.decode(body, type=_ModelList)
        except (EngineError, ValueError, RecursionError):  # an error's body is not a list either
            return None
        return frozenset(model.id for model in served.data)

    async def _model_list(self, stage: Stage, headers: Mapping[str, str]) -> tuple[Reply, bytes]:
        """Ask one engine for its models, and further engines if it is slow or fails."""
        engines = self._pools[stage].ranked(_MAX_LISTS)
        asked = [partial(self._model_list_of, stage, engine, headers) for engine in engines]
        return await hedged(asked, _MODELS_HEDGE_S)

    async def _model_list_of(
        self, stage: Stage, engine: Engine, headers: Mapping[str, str]
    ) -> tuple[Reply, bytes]:
        limits = TimeLimits(_MODELS_TIMEOUT_S)
        async with self.relay.call(engine, MODELS, None, headers, limits) as reply:
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


def _check_accepted(answer: web.StreamResponse | None) -> None:
    """Check that D has not refused the request.

    Raises:
        RefusalError: it has.
    """
    if isinstance(answer, web.Response) and 400 <= answer.status < 500:
        assert isinstance(answer.body, bytes)  # `verbatim` makes no other
        raise RefusalError(answer.status, answer.body, answer.content_type)


def _encoding_keys(chat: Chat, media: list[Media]) -> dict[str, bytes]:
    options = plan.encoding_options(chat)
    return {held.uuid: plan.encoding_key(options, held.uuid) for held in media}


async def _send_continue(http: web.Request) -> None:
    """Tell a client that waits for 100 Continue to send its body. aiohttp's own handler fails on
    malformed headers.
    """
    if http.headers.get(hdrs.EXPECT, "").lower() == "100-continue" and http.transport is not None:
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def make_runner(router: Router, config: RouterConfig) -> Runner:
    """Return the server; it does not listen yet."""
    return Runner(
        router.application(),
        config.client_timeout_s,
        config.max_connections,
        # A client that disconnects cancels its request, and with it all calls to engines.
        handler_cancellation=True,
        auto_decompress=False,  # see bodies.py
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
