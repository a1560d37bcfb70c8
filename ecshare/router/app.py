# SPDX-License-Identifier: Apache-2.0
"""The router's routes."""

from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

from aiohttp import hdrs, web

from ecshare.router.admin import Admin
from ecshare.router.bodies import read_body
from ecshare.router.call import Call
from ecshare.router.config import RouterConfig
from ecshare.router.connections import Runner
from ecshare.router.drain import RequestsInFlight
from ecshare.router.endpoints import PASSED_ON, SPLIT
from ecshare.router.engines import USUAL_BOUND, Engine, EnginePool, Stage, name_of
from ecshare.router.fleet import FleetWatch, fixed
from ecshare.router.flow import Flow
from ecshare.router.identity import is_inline
from ecshare.router.memory import MemoryBudget, Reservation
from ecshare.router.metrics import RouterMetrics, Sources
from ecshare.router.middleware import (
    CONTEXT,
    end_stream,
    json_response,
    request_middleware,
    send,
)
from ecshare.router.model_lists import MODELS, ModelLists
from ecshare.router.observer import Observer
from ecshare.router.origins import Origins
from ecshare.router.pages import Pages
from ecshare.router.probes import (
    Checked,
    HealthChecks,
    Probes,
    Readiness,
    engine_state,
    engine_states,
)
from ecshare.router.relay import Relay, answer_bytes
from ecshare.router.shared_reports import SharedReports

_SHUTDOWN_S = 5.0
_READERS = {**SPLIT, **PASSED_ON}


class Router:
    """The routes, over one `Relay`. Belongs to the event loop's thread."""

    # These live as long as the application runs.
    relay: Relay
    _flow: Flow
    _lists: ModelLists

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
        self.pools = {
            stage: EnginePool(
                fixed(group), config.cool_down_s, clock_s, bounds.get(stage, USUAL_BOUND)
            )
            for stage, group in urls.items()
        }
        self._fleet = FleetWatch(self.pools, urls, config.engines_file)
        self.admin = Admin(self.pools, self._fleet)
        self._memory = MemoryBudget(config.max_in_flight_bytes)
        self.in_flight = RequestsInFlight()
        shows_urls = config.status_key is not None
        self._sources = Sources(self.pools, self._memory, self.counts, shows_urls)
        self._metrics = RouterMetrics(self._sources)
        # Imported by need: it needs the extra [otel].
        self._spans = None
        if config.otlp_traces_endpoint is not None:
            from ecshare.router.spans import Spans

            self._spans = Spans.exported_to(config.otlp_traces_endpoint)
        self._observer = Observer(self._metrics, self._spans)
        self.health_checks = HealthChecks(self.pools, self._is_healthy, clock_s)

    def application(self) -> web.Application:
        """Return the web application. The relay lives as long as the application runs."""
        app = web.Application(middlewares=[request_middleware(self._config)])
        app.cleanup_ctx.append(self._with_relay)
        for path in _READERS:
            app.router.add_post(path, partial(self._serve, path))
        app.router.add_get(MODELS, self._models)
        app.router.add_get("/health", self.health)
        decoders = self.pools[Stage.DECODE]
        readiness = Readiness(decoders, self._is_healthy, self.in_flight, self._clock_s)
        key = self._config.status_key
        probes = Probes(readiness, key, self.status)
        pages = Pages(key, self._sources, self._metrics, self._observer, self._stages)
        for path, handler in {
            "/live": probes.live,
            "/ready": probes.ready,
            "/status": probes.status,
            **pages.routes(),
        }.items():
            app.router.add_get(path, handler)
        app.on_response_prepare.append(self._close_if_stopping)
        app.on_response_prepare.append(Origins(self._config.allow_origins).mark)
        self._observer.attach(app)
        for path in [route.canonical for route in app.router.resources()]:
            handler = _without_slash  # nobody asks there: no series waits for it
            app.router.add_route("*", path + "/", handler)
        return app

    async def _close_if_stopping(self, http: web.Request, response: web.StreamResponse) -> None:
        """Have clients open their next connection to another router."""
        if self.in_flight.is_draining:
            response.force_close()
            response.headers["Connection"] = "close"  # aiohttp has set its headers before this

    async def _with_relay(self, app: web.Application) -> AsyncIterator[None]:
        self.relay = Relay(self._config, self.pools, self._observer)
        self._flow = Flow(self._config, self.pools, self.relay, self._metrics, self._clock_s)
        self._lists = ModelLists(self.pools, self.relay, self._clock_s)
        await self._fleet.start()
        shared = None
        if self._config.store is not None:
            shared = self._flow.encoded.shared = SharedReports(self._config.store, self._clock_s)
        yield
        await self._fleet.close()
        if shared is not None:
            await shared.close()
        await self._lists.close()
        await self.relay.close()
        if self._spans is not None:
            await self._spans.close()

    async def _serve(self, path: str, http: web.Request) -> web.StreamResponse:
        """Answer a request. Its answer counts until the client has taken it."""
        context = http[CONTEXT]
        with self._memory.reservation() as reservation:
            try:
                answer = await self._in_time(path, http, reservation)
            finally:
                context.clear()
            reservation.keep(answer_bytes(answer))
            return await send(http, answer)

    async def _in_time(
        self, path: str, http: web.Request, reservation: Reservation
    ) -> web.StreamResponse:
        """Return the answer, streamed or not, within the overall deadline."""
        context = http[CONTEXT]
        try:
            async with self.in_flight.begin(self._config.timeout_s):
                return await self._answer(path, http, reservation)
        except TimeoutError as exc:
            late = self.in_flight.ending()
            if context.answer is None:
                raise late from exc
            return await end_stream(context, late)

    async def _models(self, http: web.Request) -> web.Response:
        return await self._lists.models(http)

    async def health(self, http: web.Request) -> web.Response:
        """Check all engines: 200 if every stage has one that answers, else 503.

        Only clients with the status key see where the engines are and what they do.
        """
        key = self._config.status_key
        is_full = key is not None and key.matches(http.headers.get(hdrs.AUTHORIZATION))
        checked = await self.health_checks.latest()
        stages = self._shown(checked, is_full=is_full)
        healthy = {engine for _, engine, is_healthy in checked if is_healthy}
        groups = [group for pool in self.pools.values() if (group := pool.serving())]
        complete = all(healthy.intersection(group) for group in groups)
        report: dict[str, Any] = {"status": "ok" if complete else "incomplete", "stages": stages}
        if is_full:
            report |= self.counts()
        return json_response(200 if complete else 503, report)

    def status(self) -> dict[str, Any]:
        """Return what holders of the status key are told."""
        return {
            "draining": self.in_flight.is_draining,
            "in_flight": len(self.in_flight),
            "stages": engine_states(self.pools, self._flow.limits.used),
            "memory": self._memory.used_bytes,
            **self.counts(),
        }

    async def _stages(self) -> dict[str, list[dict[str, Any]]]:
        """Check all engines, and return what is known of them, by stage."""
        return self._shown(await self.health_checks.latest(), is_full=True)

    def _shown(
        self, checked: Iterable[Checked], *, is_full: bool
    ) -> dict[str, list[dict[str, Any]]]:
        stages: dict[str, list[dict[str, Any]]] = {}
        for stage, engine, healthy in checked:
            told: dict[str, Any] = {"name": name_of(stage, engine), "healthy": healthy}
            if is_full:
                told |= engine_state(stage, self.pools[stage], engine)
            stages.setdefault(stage, []).append(told)
        return stages

    def counts(self) -> dict[str, Any]:
        """Return what was counted since the start. docs/metrics.md explains it."""
        return self._flow.counts()

    async def _is_healthy(self, engine: Engine) -> bool:
        # A hung engine is known to be unhealthy, and would take long to answer.
        return not engine.is_hung and await self.relay.is_healthy(engine)

    async def _answer(
        self, path: str, http: web.Request, reservation: Reservation
    ) -> web.StreamResponse:
        context = http[CONTEXT]
        body = await read_body(http, self._config, reservation, context.blobs)
        client = _READERS[path](body, self._config.max_items)
        del body  # the decoded request takes several times the memory
        self._flow.retry_budget.note_request()
        client = client.for_model(await self._lists.resolve(client.model, context.headers))
        if not all(is_inline(item.source) for item in client.items):
            await self._lists.check_client(context.headers)
        call = Call(http, client, reservation)
        return await (self._flow.answer(call) if path in SPLIT else self._flow.pass_on(call))


async def _without_slash(http: web.Request) -> web.StreamResponse:
    """Send a client whose path ends with a slash to the one without, as vLLM does."""
    path, mark, query = http.path_qs.partition("?")
    location = path.removesuffix("/") + mark + query
    return web.Response(status=307, headers={hdrs.LOCATION: location})


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
