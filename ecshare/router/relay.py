# SPDX-License-Identifier: Apache-2.0
"""The HTTP client for engines, and the calls to engines.

Foreign exceptions end here: engines raise EngineError or RefusalError.
Cancelling a call closes its connection, and so tells the engine that nobody waits for the answer
any more.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import aiohttp
import msgspec
from aiohttp import web

from ecshare.router.blobs import Payload
from ecshare.router.client_request import Request
from ecshare.router.config import RouterConfig
from ecshare.router.engines import Engine, EnginePool, Stage, Work
from ecshare.router.errors import GONE_STATUSES, EngineError, RefusalError
from ecshare.router.events import carries_data
from ecshare.router.headers import returned
from ecshare.router.health import HealthMonitor, PendingRequest, SilentError, TimeLimits
from ecshare.router.media import MediaLoader
from ecshare.router.memory import Reservation
from ecshare.router.observer import Observer
from ecshare.router.trace import Call
from ecshare.store.integrity import TOKEN_HEADER

CONNECT_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 2.0
_PROBE_TIMEOUT_S = 4.0  # longer: requests move to other engines if it fails
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_ANSWER_COST = 2
"""Bytes of memory for each byte of an answer: it is copied once more when it is sent."""
_WHOLE_SECONDS = re.compile(r"[0-9]{1,3}|[1-3][0-9]{3}")
_NEVER_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ValueError)
# uvicorn, which serves vLLM, closes idle connections after 5 s. Close them earlier, or requests
# are written to connections that are being closed, and must be sent twice.
_KEEP_IDLE_S = 4.0
_EVENT = (b"data:", b"event:")
_LEAST_S = 0.001  # 0 would be no limit
_IS_REUSED: ContextVar[bool] = ContextVar("is_reused")
"""Whether the connection of the task's last request to an engine had served another one before."""


class _Connector(aiohttp.TCPConnector):
    """A pool that tells of each connection whether it was used before."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used: WeakSet[object] = WeakSet()

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[aiohttp.tracing.Trace],
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.connector.Connection:
        _IS_REUSED.set(False)
        connection = await super().connect(req, traces, timeout)
        _IS_REUSED.set(connection.protocol in self._used)
        self._used.add(connection.protocol)
        return connection


class Reply:
    """An engine's answer. Status and headers are known; the body may still arrive."""

    def __init__(
        self,
        stage: Stage,
        response: aiohttp.ClientResponse,
        wait: PendingRequest | None,
        note_good: Callable[[], None],
    ) -> None:
        """`note_good` is called when the engine has begun to serve the request."""
        self.stage = stage
        self._note_good = note_good
        self.call: Call | None = None
        self._wait = wait
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")
        self.retry_after = response.headers.get("Retry-After")
        self.returned = returned(response.headers)
        self.is_stream = self.status == 200 and self.content_type.startswith("text/event-stream")
        self._has_begun = not self.is_stream
        # Overload counts as failure: another engine or another path may succeed.
        self.failed = response.status >= 500 or response.status in (408, 429)
        # The head of a stream arrives before any token is computed, and so may comments in it.
        if not self.is_stream:
            if response.status not in GONE_STATUSES:
                self._heard()
            if not self.failed:
                note_good()

    def failure(self) -> EngineError:
        """Return the error of an answer that `failed`."""
        reason = f"HTTP {self.status}"
        error = EngineError(self.stage, reason, reached=True, status=self.status)
        error.retry_after_s = _seconds(self.retry_after)
        return error

    def _heard(self) -> None:
        if self.call is not None:
            self.call.note_bytes()
        if self._wait is not None:
            self._wait.note_received()

    def begin(self, *, is_error: bool) -> None:
        """Note that a stream has begun: with an error, or with a part of an answer. Its data are
        signs of life from now on.
        """
        self._has_begun = True
        self._heard()
        if not is_error:
            self._note_good()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, unchanged.

        Raises:
            EngineError: it breaks off.
        """
        line = b""
        try:
            async for chunk in self._response.content.iter_any():
                has_data = True
                if self.is_stream and (
                    line or not (chunk.startswith(_EVENT) and chunk.endswith(b"\n"))
                ):
                    has_data, line = carries_data(line, chunk)
                if has_data and self._has_begun:
                    self._heard()
                yield chunk
            self._heard()
        except (aiohttp.ClientError, TimeoutError) as exc:
            if self.call is not None:
                self.call.is_broken = True  # the reader may handle the error within the call
            raise EngineError(self.stage, f"the answer broke off: {exc}", reached=True) from exc

    async def read(self, reservation: Reservation | None = None) -> bytearray:
        """Return the whole body. The memory for it is taken from `reservation`, if there is one.

        Raises:
            ApiError: there is no memory for it.
            EngineError: it breaks off or is far too large.
        """
        body = bytearray()
        async for chunk in self.chunks():
            if reservation is not None:
                reservation.take(len(chunk) * _ANSWER_COST)
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise EngineError(self.stage, "the answer is too large", reached=True)
        return body


class Relay:
    """A pooled HTTP client for engines, and the loader of media. Create and close it inside the
    event loop.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Mapping[Stage, EnginePool],
        observer: Observer | None = None,
    ) -> None:
        """`observer` sees the calls of engines that have a body."""
        self._config = config
        self._observer = observer
        token = config.router_token
        self._own_headers = {TOKEN_HEADER: token} if token else {}
        self._engines = engines
        self.monitor = HealthMonitor(
            self._answers_probe, min(config.first_byte_timeout_s, config.stage_timeout_s)
        )
        self._session = self._make_session(
            _Connector(limit=config.max_connections, keepalive_timeout=_KEEP_IDLE_S)
        )
        self._fresh_session = self._make_session(
            aiohttp.TCPConnector(limit=config.max_connections, force_close=True)
        )
        # Has a client of its own: no connection to an engine is ever used for media.
        self.media = MediaLoader(config)

    def _make_session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout(None),
            # All clients share this session: no cookie of one server may reach another.
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self.monitor.close()
        await self._session.close()
        await self._fresh_session.close()
        await self.media.close()

    @asynccontextmanager
    async def call(
        self,
        engine: Engine,
        path: str,
        request: Payload | None,
        headers: Mapping[str, str],
        limits: TimeLimits,
    ) -> AsyncIterator[Reply]:
        """Send one request to an engine, and yield its answer.

        Without a body it is a GET. The engine counts as busy until the block ends.

        Raises:
            EngineError: the engine fails, or a time limit ends, also inside the block.
        """
        stage = next(stage for stage, each in self._engines.items() if each.owns(engine))
        if request is None or self._observer is None:
            async with self._send(stage, engine, path, request, headers, limits) as reply:
                yield reply
            return
        with self._observer.call(stage, engine) as call:
            if call.headers:
                headers = {**headers, **call.headers}
            async with self._send(stage, engine, path, request, headers, limits) as reply:
                call.note_head(reply.status, is_stream=reply.is_stream)
                reply.call = call
                yield reply

    @asynccontextmanager
    async def _send(  # noqa: PLR0913 — the arguments of `call`, and the stage
        self,
        stage: Stage,
        engine: Engine,
        path: str,
        request: Payload | None,
        headers: Mapping[str, str],
        limits: TimeLimits,
    ) -> AsyncIterator[Reply]:
        engines = self._engines[stage]
        headers = {**headers, **self._own_headers, "Content-Type": "application/json"}
        if request is not None:
            headers["Content-Length"] = str(request.num_bytes)
        work = None if request is None else request.work
        async with self._watched(stage, engine, limits, work) as wait:
            try:
                response = await self._requested(
                    engine.url + path, request, headers, limits.total_s
                )
            except (aiohttp.ClientError, TimeoutError, ValueError) as exc:  # a host that is no name
                raise _not_sent(stage, engine, engines, exc) from exc
            if response.status in GONE_STATUSES:
                engines.mark_failed(engine)
            else:
                engines.mark_answered(engine)

            def note_good() -> None:
                if request is not None:
                    engines.mark_good(engine)

            async with response:
                yield Reply(stage, response, wait, note_good)

    async def _requested(
        self,
        url: str,
        request: Payload | None = None,
        headers: Mapping[str, str] | None = None,
        limit_s: float | None = None,
    ) -> aiohttp.ClientResponse:
        """Return the answer of an engine, of which the head has arrived.

        An engine, or a proxy before it, may close a connection at the moment when it is used again,
        which says nothing of the engine. Then the request is sent again, once, on a new connection.
        The engine may have begun with it, and so computes it twice at worst.

        Raises:
            aiohttp.ClientError: there is none.
            TimeoutError: there is none after `limit_s`, which holds for the whole answer too.
            ValueError: the url has no valid host.
        """
        began_s = asyncio.get_running_loop().time()
        try:
            return await self._request_by(self._session, url, request, headers, limit_s)
        except aiohttp.ClientConnectionError as exc:
            if isinstance(exc, TimeoutError) or not _IS_REUSED.get():
                raise
        if limit_s is not None:
            limit_s = max(_LEAST_S, limit_s - (asyncio.get_running_loop().time() - began_s))
        return await self._request_by(self._fresh_session, url, request, headers, limit_s)

    async def _request_by(
        self,
        session: aiohttp.ClientSession,
        url: str,
        request: Payload | None,
        headers: Mapping[str, str] | None,
        limit_s: float | None,
    ) -> aiohttp.ClientResponse:
        return await session.request(
            "GET" if request is None else "POST",
            url,
            data=None if request is None else request.whole() or request.chunks(),
            headers=headers,
            allow_redirects=False,
            timeout=self._timeout(limit_s),
        )

    @asynccontextmanager
    async def _watched(
        self, stage: Stage, engine: Engine, limits: TimeLimits, work: Work | None
    ) -> AsyncIterator[PendingRequest | None]:
        """Count a request that is `work` as in flight, and cancel it if the engine hangs."""
        engines = self._engines[stage]
        with nullcontext() if work is None else engines.lease(engine, work.tokens):
            if limits.first_byte_s is None:
                yield None
                return

            def is_last_resort() -> bool:
                # Decode can do the work of the other stages, so only a decode engine can be the
                # last.
                others = engines.choose([engine], work or Work())
                alone = stage is Stage.DECODE and others is None
                return alone or limits.is_last_resort()

            limit_s = limits.first_byte_s
            try:
                async with self.monitor.waiting(engine, engines, limit_s, is_last_resort) as wait:
                    yield wait
            except SilentError as exc:
                raise EngineError(stage, f"{engine.url} {exc}", reached=True) from exc

    async def ask(
        self,
        engine: Engine,
        path: str,
        request: Payload,
        headers: Mapping[str, str],
        reservation: Reservation | None = None,
    ) -> Request:
        """Return the JSON object of an encode or prefill engine, within the stage's time limit.

        Raises:
            ApiError: there is no memory for the answer in `reservation`.
            RefusalError: the engine answered 4xx.
            EngineError: there was no usable answer.
        """
        limit_s = self._config.stage_timeout_s
        limits = TimeLimits(limit_s, limit_s)
        try:
            async with self.call(engine, path, request, headers, limits) as reply:
                body = await reply.read(reservation)
        except EngineError as failure:
            timed_out = isinstance(failure.__cause__, TimeoutError | SilentError)
            if failure.reached and timed_out and not engine.is_hung:
                failure.note_overload()
            raise
        if reply.failed or lacks_model(reply, body):
            raise reply.failure()
        if reply.status >= 400:
            raise RefusalError(reply.status, bytes(body), reply.content_type)
        try:
            return msgspec.json.decode(body, type=Request)
        except (ValueError, RecursionError) as exc:  # also where it is no UTF-8
            raise EngineError(reply.stage, f"unreadable answer: {exc}", reached=True) from exc

    async def is_healthy(self, engine: Engine, limit_s: float = _HEALTH_TIMEOUT_S) -> bool:
        """Ask one engine whether it is healthy."""
        try:
            async with await self._requested(engine.url + "/health", limit_s=limit_s) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, ValueError):  # a host that is no host's name
            return False

    async def _answers_probe(self, engine: Engine) -> bool:
        return await self.is_healthy(engine, _PROBE_TIMEOUT_S)

    @staticmethod
    def _timeout(total_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_TIMEOUT_S)


def answer_bytes(answer: web.StreamResponse) -> int:
    """Return the memory that an answer takes until it is sent."""
    body = answer.body if isinstance(answer, web.Response) else None
    return len(body) * _ANSWER_COST if isinstance(body, bytes | bytearray) else 0


def lacks_model(reply: Reply, body: bytes | bytearray) -> bool:
    """Tell whether an engine says that it does not serve the model of a request.

    It may have unloaded it a moment ago, or not list its models. It has no error to tell of a path
    that it does not serve.
    """
    if reply.status != 404:
        return False
    try:
        return "error" in msgspec.json.decode(body, type=Request)
    except (ValueError, RecursionError):
        return False


def _seconds(retry_after: str | None) -> float | None:
    """Return what a Retry-After header says, None if it is no number of seconds up to an hour."""
    is_number = retry_after is not None and _WHOLE_SECONDS.fullmatch(retry_after)
    return float(retry_after) if is_number and retry_after else None


def _not_sent(stage: Stage, engine: Engine, engines: EnginePool, exc: Exception) -> EngineError:
    """Return the error of a request that could not be sent because of `exc`. Start the engine's
    cool-down unless it may just be slow.
    """
    never = isinstance(exc, _NEVER_REACHED)
    if never or not isinstance(exc, TimeoutError):  # the monitor finds engines that hang
        engines.mark_failed(engine)
    return EngineError(stage, f"{engine.url}: {exc or type(exc).__name__}", reached=not never)
