# SPDX-License-Identifier: Apache-2.0
"""Small HTTP servers for the router's tests: engines that record what they get, and a fleet."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ecshare.router.api.chat import CHAT
from ecshare.router.api.client_request import KV_PARAMS
from ecshare.router.app import Router
from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.fleet.health import Health
from ecshare.router.http.connections import Runner
from ecshare.router.options.config import RouterConfig
from ecshare.router.options.values import Secret
from ecshare.router.types import Stage
from tests.ecshare.router.answers import Answer, decoded, encoded, prefilled
from tests.ecshare.router.held import Held

STATUS_KEY = "a key to all that /health tells"
KEY = {"Authorization": f"Bearer {STATUS_KEY}"}
LOOPBACK = (ip_network("127.0.0.0/8"),)
"""Where the tests' servers of media are."""

Asked = asyncio.Task[tuple[aiohttp.ClientResponse, bytes]]


@contextmanager
def lease(pool: EnginePool, engine: Engine, tokens: int = 0) -> Iterator[None]:
    """Give an engine one more request, and its work, while the block runs."""
    pool.begin(engine, tokens)
    try:
        yield
    finally:
        pool.end(engine, tokens)


@dataclass
class FakeEngine:
    """One engine: `bodies`, `paths` and `headers` of the requests it got, in order."""

    answer: Answer
    url: str = ""
    models: tuple[str, ...] = ("m",)
    adapters: dict[str, str] = field(default_factory=dict)
    """Adapters, by name, with their base models."""
    key: str | None = None
    """The only Authorization that it takes; None: it does not look."""
    refusal: int = 401
    healthy: bool = True
    health_answers: asyncio.Event | None = None
    """It says whether it is healthy once this is set; None: at once."""
    on_health: Callable[[], None] | None = None
    """Called whenever it is asked for its health."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_model_lists: int = 0
    lists: asyncio.Event | None = None
    """Its model lists come once this is set; None: at once."""
    num_lists_awaited: int = 0
    list_left: asyncio.Event = field(default_factory=asyncio.Event)
    """Nobody waits for a model list any more that somebody has waited for."""
    keeps_connections: bool = False
    """Whether a connection may be used again. If not, each failure is one of a new connection."""
    resets_reused: bool = False
    """Whether it resets connections that are used again, as if it had closed them meanwhile."""
    num_connections: int = 0
    num_resets: int = 0

    def hold(self, answer: Answer | None = None) -> Held:
        """Hold this answer back, or the one that it gives now."""
        self.answer = held = Held(answer or self.answer)
        return held

    def _refuses(self, http: web.Request) -> web.Response | None:
        if self.key in (None, http.headers.get("Authorization")):
            return None
        return web.json_response({"error": "who is this?"}, status=self.refusal)

    async def _asked(self, http: web.Request) -> web.StreamResponse:
        body = json.loads(await http.read())
        self.bodies.append(body)
        self.paths.append(http.path)
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        return self._refuses(http) or await self.answer(http, body)

    async def _models(self, http: web.Request) -> web.Response:
        self.num_model_lists += 1
        if self.lists is not None:
            self.num_lists_awaited += 1
            try:
                await self.lists.wait()
            finally:
                self.num_lists_awaited -= 1
                self.list_left.set()
        cards = [{"id": name} for name in self.models]
        cards += [{"id": name, "parent": base} for name, base in self.adapters.items()]
        models = {"object": "list", "data": cards}
        return self._refuses(http) or web.json_response(models)

    async def _health(self, http: web.Request) -> web.Response:
        if self.on_health is not None:
            self.on_health()
        if self.health_answers is not None:
            await self.health_answers.wait()
        return web.Response(status=200 if self.healthy else 503)

    def _connection_middleware(self) -> Middleware:
        seen: set[asyncio.BaseTransport] = set()

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            assert request.transport is not None
            is_reused = request.transport in seen
            seen.add(request.transport)
            self.num_connections = len(seen)
            if is_reused and self.resets_reused:
                self.num_resets += 1
                request.transport.abort()
                return web.Response()
            return await handler(request)

        return middleware

    async def _close(self, http: web.Request, response: web.StreamResponse) -> None:
        if not self.keeps_connections:
            response.force_close()
            response.headers["Connection"] = "close"  # aiohttp has set its headers before this

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeEngine"]:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/{path:.*}", self._asked)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.middlewares.append(self._connection_middleware())
        app.on_response_prepare.append(self._close)
        options: dict[str, Any] = {"shutdown_timeout": 0.1, "max_field_size": 1 << 17}
        runner = web.AppRunner(app, handler_cancellation=True, **options)
        async with listening_on(runner) as self.url:
            yield self


def answer_all(engines: list[FakeEngine], answer: Answer) -> None:
    for engine in engines:
        engine.answer = answer


def asked(engines: list[FakeEngine]) -> list[int]:
    """Return how many requests the engines got, in order of the number."""
    return sorted(len(engine.bodies) for engine in engines)


@asynccontextmanager
async def listening_on(runner: web.BaseRunner, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve what a runner runs on a socket of its own; yields its url."""
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def listening(app: web.Application, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve any application on a socket of its own; yields its url."""
    async with listening_on(web.AppRunner(app, shutdown_timeout=0.1), host) as url:
        yield url


class Clock:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Fleet:
    """A router on a real socket, the engines behind it, and a client."""

    encoders: list[FakeEngine]
    prefillers: list[FakeEngine]
    decoders: list[FakeEngine]
    url: str
    client: aiohttp.ClientSession
    clock: Clock
    router: Router

    @property
    def e(self) -> FakeEngine:
        return self.encoders[0]

    @property
    def p(self) -> FakeEngine:
        return self.prefillers[0]

    @property
    def d(self) -> FakeEngine:
        return self.decoders[0]

    def is_left_out(self, engine: FakeEngine) -> bool:
        """Tell whether the router has found that this engine hangs."""
        return any(health.is_hung for health in self._health_of(engine))

    def is_watched(self, engine: FakeEngine) -> bool:
        """Tell whether the router looks whether this engine hangs."""
        return any(health.is_watched for health in self._health_of(engine))

    def _health_of(self, engine: FakeEngine) -> list[Health]:
        workers = (each for pool in self.router.pools.values() for each in pool)
        return [worker.health for worker in workers if worker.url == engine.url]

    def in_flight(self, *stages: str) -> int:
        """Return how many requests the engines of these stages, or of all, have by the router."""
        pools = [self.router.pools[Stage(each)] for each in stages or Stage]
        return sum(each.in_flight for pool in pools for each in (*pool, *pool.leaving))

    def count(self, topic: str, event: str) -> int:
        """Return how often something has happened, as the router counts it."""
        number: int = self.router.counts()[topic][event]
        return number

    def is_next(self, engine: FakeEngine) -> bool:
        """Tell whether this decoder is the one that the next request is sent to."""
        worker = self.router.pools[Stage.DECODE].choose()
        return worker is not None and worker.url == engine.url

    @contextmanager
    def busy(self, engine: FakeEngine) -> Iterator[None]:
        """Have the router believe that a decoder has more to do than others."""
        decoders = self.router.pools[Stage.DECODE]
        (worker,) = (each for each in decoders if each.url == engine.url)
        with lease(decoders, worker, tokens=10**9):
            yield

    async def post(
        self, body: object, headers: dict[str, str] | None = None, path: str = CHAT
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send a request; returns the answer with its body."""
        content = io.BytesIO(json.dumps(body).encode()) if isinstance(body, dict) else body
        async with self.client.post(self.url + path, data=content, headers=headers) as response:
            return response, await response.read()

    def start(self, body: object, path: str = CHAT) -> Asked:
        """Send a request, and wait for no answer."""
        return asyncio.create_task(self.post(body, path=path))

    async def way(self, body: object, path: str = CHAT) -> str:
        """Send a request that succeeds; returns the stages that worked for the answer."""
        response, answer = await self.post(body, path=path)
        assert response.status == 200, answer
        return str(response.headers["x-ecshare-path"])

    async def error(self, body: object, path: str = CHAT) -> tuple[int, dict[str, Any]]:
        """Send a request that fails; returns the status and OpenAI's error."""
        response, answer = await self.post(body, path=path)
        error: dict[str, Any] = json.loads(answer)["error"]
        return response.status, error

    def handed_over(self) -> list[Any]:
        """Return what each request to a D had of P, ordered by D."""
        return [body.get(KV_PARAMS) for engine in self.decoders for body in engine.bodies]

    async def health(self, key: str | None = STATUS_KEY) -> tuple[int, dict[str, Any]]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.client.get(self.url + "/health", headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def fleet(
    num_e: int = 1,
    num_p: int = 1,
    num_d: int = 1,
    encoders_more: tuple[str, ...] = (),
    prefillers_more: tuple[str, ...] = (),
    decoders_more: tuple[str, ...] = (),
    **options: Any,
) -> AsyncIterator[Fleet]:
    """Start engines and a router over them, and over further urls; `options` as in RouterConfig."""
    clock = Clock()
    async with AsyncExitStack() as stack:
        stages = [
            [await stack.enter_async_context(FakeEngine(answer).serving()) for _ in range(number)]
            for number, answer in ((num_e, encoded), (num_p, prefilled), (num_d, decoded))
        ]
        e_urls, p_urls, d_urls = (tuple(engine.url for engine in group) for group in stages)
        config = RouterConfig(
            encoders=e_urls + encoders_more,
            prefillers=p_urls + prefillers_more,
            decoders=d_urls + decoders_more,
            # Turns are taken, so that tests know who is next.
            **{"status_key": Secret(STATUS_KEY.encode()), "balance": "load", **options},
        )
        router = Router(config, clock)
        url = await stack.enter_async_context(listening_on(Runner(router.running, config)))
        client = await stack.enter_async_context(
            aiohttp.ClientSession(headers={"Content-Type": "application/json"})
        )
        yield Fleet(stages[0], stages[1], stages[2], url, client, clock, router)
