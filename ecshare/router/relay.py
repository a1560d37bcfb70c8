# SPDX-License-Identifier: Apache-2.0
"""All outgoing traffic of the router: calls to engines and downloads of media.

Foreign exceptions end here: engines raise EngineError or RefusalError, media raise ApiError.
Cancelling a call closes its connection, and so tells the engine that nobody waits for the answer
any more.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import msgspec
import pybase64
from yarl import URL

from ecshare.router.addresses import may_connect
from ecshare.router.blobs import Blobs, Payload
from ecshare.router.chat import Media, MediaItem, Request, identity, inline_url, is_inline
from ecshare.router.concurrent import gather_all
from ecshare.router.config import RouterConfig
from ecshare.router.engines import Engine, EnginePool, Stage
from ecshare.router.errors import ApiError, EngineError, RefusalError
from ecshare.router.health import HealthMonitor, PendingRequest, SilentError, TimeLimits
from ecshare.router.memory import Reservation
from ecshare.store.integrity import TOKEN_HEADER

_CONNECT_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 2.0
_PROBE_TIMEOUT_S = 4.0  # longer: requests move to other engines if it fails
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_DOWN = (502, 503, 504)  # a proxy also answers these for an engine that is gone
_MAX_LOGGED_CHARS = 300
# uvicorn, which serves vLLM, closes idle connections after 5 s. Close them earlier, or a request
# may be written to a connection that is being closed.
_KEEP_IDLE_S = 4.0


class Reply:
    """An engine's answer. Status and headers are known; the body may still arrive."""

    def __init__(
        self, stage: Stage, response: aiohttp.ClientResponse, wait: PendingRequest | None = None
    ) -> None:
        self.stage = stage
        self._wait = wait
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")
        self.retry_after = response.headers.get("Retry-After")
        self.is_stream = self.status == 200 and self.content_type.startswith("text/event-stream")
        # Overload counts as failure: another engine or another path may succeed.
        self.failed = response.status >= 500 or response.status in (408, 429)
        # The head of a stream arrives before any token is computed.
        if not self.is_stream and response.status not in _DOWN:
            self._heard()

    def _heard(self) -> None:
        if self._wait is not None:
            self._wait.note_received()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, unchanged.

        Raises:
            EngineError: it breaks off.
        """
        with _broken_off(self.stage):
            async for chunk in self._response.content.iter_any():
                self._heard()
                yield chunk
            self._heard()

    async def read(self) -> bytes:
        """Return the whole body.

        Raises:
            EngineError: it breaks off or is far too large.
        """
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise EngineError(self.stage, "the answer is too large", reached=True)
        return bytes(body)


class _ForbiddenAddressError(OSError):
    """Media resolve to an address that is neither public nor allowed."""

    def __init__(self) -> None:
        super().__init__(errno.EACCES, "no public address; --allow-media-network allows others")


class Relay:
    """Pooled HTTP clients for engines and media. Create and close it inside the event loop."""

    def __init__(self, config: RouterConfig, engines: Mapping[Stage, EnginePool]) -> None:
        self._config = config
        token = config.router_token
        self._own_headers = {TOKEN_HEADER: token} if token else {}
        self._engines = engines
        self._watch = HealthMonitor(
            self._answers_probe, min(config.first_byte_timeout_s, config.stage_timeout_s)
        )
        self._session = self._make_session(
            aiohttp.TCPConnector(limit=config.max_connections, keepalive_timeout=_KEEP_IDLE_S)
        )
        # A separate session: no connection to an engine is ever used for media.
        self._media_session = self._make_session(
            aiohttp.TCPConnector(limit=config.max_connections, socket_factory=self._media_socket)
        )

    def _make_session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout(None),
            # All clients share this session: no cookie of one server may reach another.
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    def _media_socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket for an address that media may be fetched from.

        This is the last step before connecting. It sees the resolved addresses, after every
        redirect, and addresses that were in the url, so a second look-up cannot bypass it.

        Raises:
            _ForbiddenAddressError: the address is not allowed.
        """
        family, kind, protocol, _, address = info
        if not may_connect(str(address[0]), self._config.allow_media_networks):
            raise _ForbiddenAddressError
        return socket.socket(family, kind, protocol)

    async def close(self) -> None:
        """Close every connection."""
        await self._watch.close()
        await self._session.close()
        await self._media_session.close()

    def _engine(self, to: Stage | Engine) -> tuple[Stage, Engine]:
        if isinstance(to, Engine):
            return next(stage for stage, each in self._engines.items() if to in each), to
        engines = self._engines[to]
        engine = engines.choose()
        if engine is None and to is Stage.DECODE:
            engine = engines.soonest_available()  # there is no other way to an answer
        if engine is None:
            raise EngineError(to, "every engine is cooling down", reached=False)
        return to, engine

    @asynccontextmanager
    async def call(
        self,
        to: Stage | Engine,
        path: str,
        request: Payload | None,
        headers: Mapping[str, str],
        limits: TimeLimits,
    ) -> AsyncIterator[Reply]:
        """Send one request to an engine of a stage, or to a given engine, and yield its answer.

        Without a body it is a GET. The engine counts as busy until the block ends.

        Raises:
            EngineError: there is no engine, it fails, or a time limit ends, also inside the block.
        """
        stage, engine = self._engine(to)
        engines = self._engines[stage]
        headers = {**headers, **self._own_headers, "Content-Type": "application/json"}
        if request is not None:
            headers["Content-Length"] = str(request.num_bytes)
        async with self._watched(stage, engine, limits) as wait:
            # An engine whose model list is slow may still answer other requests quickly.
            with _unreachable(stage, engine, engines, may_be_slow=request is None):
                response = await self._session.request(
                    "GET" if request is None else "POST",
                    engine.url + path,
                    data=None if request is None else request.whole() or request.chunks(),
                    headers=headers,
                    allow_redirects=False,
                    timeout=self._timeout(limits.total_s),
                )
            if response.status in _DOWN:
                engines.mark_failed(engine)
            else:
                engines.mark_answered(engine)
            async with response:
                yield Reply(stage, response, wait)

    @asynccontextmanager
    async def _watched(
        self, stage: Stage, engine: Engine, limits: TimeLimits
    ) -> AsyncIterator[PendingRequest | None]:
        """Count a request as in flight, and cancel it if the engine hangs."""
        engines = self._engines[stage]
        with engines.lease(engine):
            if limits.first_byte_s is None:
                yield None
                return

            def is_last_resort() -> bool:
                # Decode can do the work of the other stages, so only a decode engine can be the
                # last.
                alone = stage is Stage.DECODE and engines.choose([engine]) is None
                return alone or limits.is_last_resort()

            limit_s = limits.first_byte_s
            try:
                async with self._watch.waiting(engine, engines, limit_s, is_last_resort) as wait:
                    yield wait
            except SilentError as exc:
                raise EngineError(stage, f"{engine.url} {exc}", reached=True) from exc

    async def ask(
        self, to: Stage | Engine, path: str, request: Payload, headers: Mapping[str, str]
    ) -> Request:
        """Return an engine's JSON object, within the stage's time limit.

        Raises:
            RefusalError: the engine answered 4xx.
            EngineError: there was no usable answer.
        """
        limit_s = self._config.stage_timeout_s
        limits = TimeLimits(limit_s, limit_s)
        async with self.call(to, path, request, headers, limits) as reply:
            body = await reply.read()
        if reply.failed:
            reason = f"HTTP {reply.status}"
            raise EngineError(reply.stage, reason, reached=True, status=reply.status)
        if reply.status >= 400:
            raise RefusalError(reply.status, body, reply.content_type)
        try:
            return msgspec.json.decode(body, type=Request)
        except (ValueError, RecursionError) as exc:  # also where it is no UTF-8
            raise EngineError(reply.stage, f"unreadable answer: {exc}", reached=True) from exc

    async def is_healthy(self, engine: Engine, limit_s: float = _HEALTH_TIMEOUT_S) -> bool:
        """Ask one engine whether it is healthy."""
        try:
            async with self._session.get(
                engine.url + "/health", timeout=self._timeout(limit_s)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, ValueError):  # a host that is no host's name
            return False

    async def _answers_probe(self, engine: Engine) -> bool:
        return await self.is_healthy(engine, _PROBE_TIMEOUT_S)

    @staticmethod
    def _timeout(total_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_TIMEOUT_S)

    async def load_media(
        self, items: tuple[MediaItem, ...], blobs: Blobs, reservation: Reservation
    ) -> list[Media]:
        """Return the content of each item, in order.

        Equal urls are downloaded once. All downloads share one limit, take memory from
        `reservation` and are kept in `blobs`.

        Raises:
            ApiError: an item cannot be had; names it.
        """
        distinct = {(item.modality, item.source): item for item in items}
        budget = _Budget(self._config.max_media_bytes, reservation)
        loads = [self._load(item, blobs, budget) for item in distinct.values()]
        loaded = dict(zip(distinct, await gather_all(loads), strict=True))
        return [loaded[item.modality, item.source] for item in items]

    async def _load(self, item: MediaItem, blobs: Blobs, budget: "_Budget") -> Media:
        url = item.source
        if not is_inline(url):
            if blobs.holds(url):
                raise ApiError(400, "The media's url is too long.", param=item.param)
            # Engines get the hashed bytes, not the url: its server could answer with other bytes
            # later.
            url = inline_url(blobs.add(await self._download(item, budget)))
        try:
            if blobs.holds(url):
                return Media(await asyncio.to_thread(identity, item.modality, url, blobs), url)
            return Media(identity(item.modality, url), url)
        except ValueError as exc:
            raise ApiError(400, str(exc), param=item.param, code="invalid_media") from exc

    async def _download(self, item: MediaItem, budget: "_Budget") -> bytearray:
        """Return the bytes at the item's url, as base64 text."""
        try:
            async with asyncio.timeout(self._config.media_timeout_s):
                return await self._follow(item, budget)
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            is_clear = isinstance(exc, aiohttp.ClientConnectorError)
            reason = f"{type(exc).__name__}: {exc}" if is_clear else repr(exc)
            raise _unavailable(item, reason) from exc

    async def _follow(self, item: MediaItem, budget: "_Budget") -> bytearray:
        url = URL(item.source)
        self._check_media_url(item, url)
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._media_session.get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS:
                    url = url.join(URL(response.headers.get("Location", "")))
                    if reason := self._refuses(url):
                        raise _unavailable(item, f"redirected to {url.host!r}: {reason}")
                    continue
                if response.status != 200:
                    raise _unavailable(item, f"{url.host} answers HTTP {response.status}")
                budget.expect(item, response.content_length or 0)
                return await _base64(item, response.content.iter_any(), budget)
        raise _unavailable(item, "too many redirects")

    def _check_media_url(self, item: MediaItem, url: URL) -> None:
        """Check a client's url before anything is fetched.

        Raises:
            ApiError: it is refused; says why.
        """
        if reason := self._refuses(url):
            message = f"The media's url is refused: {reason}."
            error = ApiError(400, message, param=item.param, code="invalid_media")
            raise error.with_log_reason(
                f"{item.param}: {url.host!r:.{_MAX_LOGGED_CHARS}}: {reason}"
            )

    def _refuses(self, url: URL) -> str | None:
        """Return why a url must not be fetched; None if its text shows no reason."""
        if url.scheme not in ("http", "https") or not url.host:
            return "it must be http:, https: or data:"
        allowed = self._config.allow_media_domains
        if allowed and url.host.lower() not in allowed:
            return "its host is not one that this server may fetch from"
        return None


class _Budget:
    """The bytes that one request may still download, and the memory that they take."""

    def __init__(self, limit_bytes: int, reservation: Reservation) -> None:
        self._left_bytes = limit_bytes
        self._share = reservation

    def expect(self, item: MediaItem, num_bytes: int) -> None:
        """Check that so much more may be downloaded.

        Raises:
            ApiError: it would be too much.
        """
        if num_bytes > self._left_bytes:
            message = "The media is too large."
            raise ApiError(413, message, param=item.param, code="media_too_large")
        self._share.expect(_as_base64(num_bytes))

    def take(self, item: MediaItem, num_bytes: int) -> None:
        """Take so much more from the budget.

        Raises:
            ApiError: it is too much.
        """
        self.expect(item, num_bytes)
        self._share.take(_as_base64(num_bytes))
        self._left_bytes -= num_bytes


def _as_base64(num_bytes: int) -> int:
    return num_bytes * 4 // 3


async def _base64(item: MediaItem, chunks: AsyncIterator[bytes], budget: _Budget) -> bytearray:
    """Return the incoming bytes as base64, without a copy of the whole."""
    text = bytearray()
    rest = b""
    try:
        async for chunk in chunks:
            budget.take(item, len(chunk))
            rest += chunk
            whole = len(rest) - len(rest) % 3
            text += pybase64.b64encode(rest[:whole])
            rest = rest[whole:]
        text += pybase64.b64encode(rest)
    except BaseException:
        text.clear()  # aiohttp keeps some errors, with this frame, in reference cycles
        raise
    return text


# One answer for every failure: the client must not be able to explore our network.
def _unavailable(item: MediaItem, reason: str) -> ApiError:
    message = "The media cannot be fetched."
    error = ApiError(400, message, param=item.param, code="media_unavailable")
    return error.with_log_reason(f"{item.param}: {reason[:_MAX_LOGGED_CHARS]}")


@contextmanager
def _unreachable(
    stage: Stage, engine: Engine, engines: EnginePool, *, may_be_slow: bool
) -> Iterator[None]:
    """Map errors of sending a request, and start the engine's cool-down unless it `may_be_slow`."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as exc:
        never = isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        if never or not (may_be_slow and isinstance(exc, TimeoutError)):
            engines.mark_failed(engine)
        reason = f"{engine.url}: {exc or type(exc).__name__}"
        raise EngineError(stage, reason, reached=not never) from exc


@contextmanager
def _broken_off(stage: Stage) -> Iterator[None]:
    """Map the errors of reading an answer."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise EngineError(stage, f"the answer broke off: {exc}", reached=True) from exc
