# SPDX-License-Identifier: Apache-2.0
"""The router's routes."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from ecshare.router.api.endpoints import PASSED_ON, SPLIT
from ecshare.router.fleet.client import ANSWER_COST, MODELS, EngineClient
from ecshare.router.fleet.discovery import FleetWatch, fixed
from ecshare.router.fleet.engines import USUAL_BOUND, Engine, EnginePool
from ecshare.router.fleet.models import ModelLists
from ecshare.router.http.bodies import MemoryBudget, read_body
from ecshare.router.http.connections import Answerer
from ecshare.router.http.context import Events, RequestContext, Subscriber
from ecshare.router.http.dispatch import Dispatcher, Handler, Routes
from ecshare.router.http.drain import RequestsInFlight
from ecshare.router.http.responses import end_stream, ended_with, json_response
from ecshare.router.media.identity import is_inline
from ecshare.router.options.config import RouterConfig
from ecshare.router.siblings import Siblings
from ecshare.router.stages.pipeline import Pipeline
from ecshare.router.telemetry.metrics import RouterMetrics, Sources
from ecshare.router.telemetry.pages import Ask, Pages, merged, shows_key
from ecshare.router.telemetry.requests import AccessLog, RecentRequests
from ecshare.router.types import Stage

_NO_REPORTS: Mapping[Engine, bool] = {}
_READERS = {**SPLIT, **PASSED_ON}


class Router:
    """The routes, over one pipeline. Belongs to the event loop's thread."""

    # These live as long as the application runs.
    client: EngineClient
    _pipeline: Pipeline
    _lists: ModelLists

    def __init__(
        self, config: RouterConfig, clock_s: Callable[[], float], siblings: Siblings | None = None
    ) -> None:
        """`siblings`: the other workers, if the router has several."""
        self._config = config
        self._siblings = siblings or Siblings()
        self._clock_s = clock_s
        urls = {
            Stage.ENCODE: config.encoders,
            Stage.PREFILL: config.prefillers,
            Stage.DECODE: config.decoders,
        }
        # Media of one request are best encoded at once, by all.
        bounds = {Stage.ENCODE: 1.0}
        self.pools = {
            stage: EnginePool(
                stage, fixed(group), config.cool_down_s, clock_s, bounds.get(stage, USUAL_BOUND)
            )
            for stage, group in urls.items()
        }
        self._fleet = FleetWatch(self.pools, urls, config.engines_file)
        self._memory = MemoryBudget(config.max_in_flight_bytes)
        self.in_flight = RequestsInFlight()
        self._telemetry = Telemetry(
            config, Sources(self.pools, self._memory, self.counts, config.status_key is not None)
        )

    def routes(self) -> Routes:
        """Return who answers, by path and method."""
        pages = {
            MODELS: self._models,
            "/health": self._health,
            "/live": self._live,
            "/ready": self._ready,
            **self._telemetry.pages(self._siblings, self._all_known, self._all_checked),
        }
        return {
            **{path: {"POST": self._serve} for path in _READERS},
            **{path: {"GET": page, "HEAD": page} for path, page in pages.items()},
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Answerer]:
        """Yield who answers all requests. The pipeline lives until the block ends."""
        events, routes = self._telemetry.events, self.routes()
        self._telemetry.expect(routes)
        self.client = EngineClient(self._config, self.pools, events, self._clock_s)
        self._pipeline = Pipeline(self._config, self.client, events, self._siblings, self._clock_s)
        self._lists = ModelLists(self.pools, self.client.models, self._clock_s)
        self._siblings.answer("known", lambda _: msgspec.json.encode(self.known()))
        await self._siblings.start()
        await self._fleet.start()
        yield Dispatcher(self._config, self._memory, events, self.in_flight, routes).answer
        await self._fleet.close()
        await self._siblings.close()
        await self._lists.close()
        await self._pipeline.close()
        await self.client.close()
        await self._telemetry.close()

    async def _serve(self, context: RequestContext) -> web.StreamResponse:
        """Answer a request. Its answer counts until the client has taken it, all but a little at
        its end.
        """
        try:
            answer = await self._in_time(context)
        finally:
            context.release()
        body = answer.body if isinstance(answer, web.Response) else None
        num_bytes = len(body) if isinstance(body, bytes | bytearray) else 0
        context.reservation.keep(num_bytes * ANSWER_COST)
        if isinstance(answer, web.Response) and context.answer is not None:
            return await ended_with(context, answer)  # the client has the head of a stream
        if not answer.prepared:
            context.complete(answer)
            context.answer = answer  # the client may leave meanwhile
            await answer.prepare(context.http)
        await answer.write_eof()
        return answer

    async def _in_time(self, context: RequestContext) -> web.StreamResponse:
        """Return the answer, streamed or not, within the overall deadline."""
        try:
            async with self.in_flight.begin(self._config.timeout_s) as deadline:
                try:
                    return await self._answer(context)
                finally:
                    self.in_flight.end(deadline)
        except TimeoutError as exc:
            if context.answer is None:  # no variable: an error and its traceback form a cycle
                raise self.in_flight.ending() from exc
            return await end_stream(context, self.in_flight.ending())

    async def _answer(self, context: RequestContext) -> web.StreamResponse:
        body = await read_body(context.http, self._config, context.reservation, context.blobs)
        client = _READERS[context.route](body, self._config.max_items)
        del body  # the decoded request takes several times the memory
        self._pipeline.retry_budget.note_request()
        model = await self._lists.resolve(client.model, context.headers)
        context.client = client if model in (None, client.model) else client.for_model(model)
        if not all(is_inline(item.source) for item in client.items):
            await self._lists.check_client(context.headers)
        if context.route in SPLIT:
            return await self._pipeline.answer(context)
        return await self._pipeline.pass_on(context)

    async def _models(self, context: RequestContext) -> web.Response:
        cards = await self._lists.cards(context.headers)
        return json_response(200, {"object": "list", "data": [*cards.values()]})

    async def _health(self, context: RequestContext) -> web.Response:
        """Check all engines: 200 if every stage has one that answers, else 503.

        Only clients with the status key see where the engines are and what they do.
        """
        reports = await self.client.watch.reports()
        healthy = {engine for engine, is_healthy in reports.items() if is_healthy}
        groups = [group for pool in self.pools.values() if (group := pool.serving())]
        complete = all(healthy.intersection(group) for group in groups)
        report: dict[str, Any] = {"status": "ok" if complete else "incomplete"}
        if shows_key(self._config.status_key, context.http):
            known = await self._all_known(reports)
            report |= {"stages": known["engines"], **known["counts"]}
        else:
            stages = report["stages"] = {}
            for engine, is_healthy in reports.items():
                shown = {"name": engine.name, "healthy": is_healthy}
                stages.setdefault(engine.stage, []).append(shown)
        return json_response(200 if complete else 503, report)

    async def _live(self, context: RequestContext) -> web.Response:
        """Answer 200 as long as the process serves: a restart would not help otherwise."""
        return json_response(200, {"status": "live"})

    async def _ready(self, context: RequestContext) -> web.Response:
        """Answer 200 if a request could be answered now, else 503 with the reason."""
        obstacle = await self._obstacle()
        if obstacle is None:
            return json_response(200, {"status": "ready"})
        return json_response(503, {"status": "not ready", "reason": obstacle})

    async def _all_known(self, reports: Mapping[Engine, bool] = _NO_REPORTS) -> dict[str, Any]:
        """Return what all workers know. `reports`: of a check of the engines."""
        own = self.known(reports)
        theirs = await self._siblings.ask("known")
        known: dict[str, Any] = merged([own, *(msgspec.json.decode(each) for _, each in theirs)])
        return known

    async def _all_checked(self) -> dict[str, Any]:
        """Check all engines, and return what all workers know."""
        return await self._all_known(await self.client.watch.reports())

    def known(self, reports: Mapping[Engine, bool] = _NO_REPORTS) -> dict[str, Any]:
        """Return what this worker knows."""
        healthy = {engine: {"healthy": is_healthy} for engine, is_healthy in reports.items()}
        return {
            "draining": self.in_flight.is_draining,
            "in_flight": len(self.in_flight),
            "used": {stage: self._pipeline.limits.used(stage) for stage in self.pools},
            "engines": {
                stage: [each.shown() | healthy.get(each, {}) for each in (*pool, *pool.leaving)]
                for stage, pool in self.pools.items()
            },
            "memory": self._memory.used_bytes,
            "memory_limit": self._memory.limit_bytes,
            "counts": self.counts(),
        }

    def counts(self) -> dict[str, Any]:
        """Return what was counted since the start. docs/metrics.md explains it."""
        return self._pipeline.counts()

    async def _obstacle(self) -> str | None:
        """Return why no request can be answered now, None if one can."""
        if self.in_flight.is_draining:
            return "the router is shutting down"
        is_usable = await self.client.watch.any_is_healthy(self.pools[Stage.DECODE])
        return None if is_usable else "no decode engine is usable"


class Telemetry:
    """The subscribers that the options ask for, and their pages."""

    def __init__(self, config: RouterConfig, sources: Sources) -> None:
        self._key = config.status_key
        self._metrics = RouterMetrics(sources)
        self._recent = RecentRequests()
        subscribers: list[Subscriber] = [self._metrics, self._recent]
        # Imported by need: it needs the extra [otel].
        self._spans = None
        if config.otlp_traces_endpoint is not None:
            from ecshare.router.telemetry.spans import Spans

            self._spans = Spans.exported_to(config.otlp_traces_endpoint)
            subscribers.append(self._spans)
        if config.access_log:
            subscribers.append(AccessLog())
        self.events = Events(subscribers)

    def pages(self, siblings: Siblings, known: Ask, checked: Ask) -> Mapping[str, Handler]:
        """Return the pages for operators, by path. See `Pages`."""
        return Pages(self._key, self._metrics, self._recent, siblings, known, checked).routes()

    def expect(self, routes: Iterable[str]) -> None:
        """Show the series of these routes from the start."""
        self._metrics.expect(routes)

    async def close(self) -> None:
        """Export what is left."""
        if self._spans is not None:
            await self._spans.close()
