# SPDX-License-Identifier: Apache-2.0
"""All of the router's outgoing traffic: calls to the engines and downloads of media.

Foreign errors end here: engines raise EngineError or RefusalError, media raise ApiError. Whoever
cancels a call closes its connection, which is how an engine learns that nobody waits any more.
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
from ecshare.router.bulk import Bulk, Payload
from ecshare.router.chat import Item, Media, Request, identity, inline_url, is_inline
from ecshare.router.concurrent import gather_all
from ecshare.router.config import RouterConfig
from ecshare.router.errors import ApiError, EngineError, RefusalError
from ecshare.router.health import HealthWatch, Patience, SilentError, Wait
from ecshare.router.memory import Share
from ecshare.router.workers import Stage, Worker, Workers
from ecshare.store.integrity import TOKEN_HEADER

_CONNECT_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 2.0
_PROBE_TIMEOUT_S = 4.0  # longer: requests are moved on what it says
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_DOWN = (502, 503, 504)  # what also a proxy says of an engine that is not there
_MAX_LOGGED_CHARS = 300
# uvicorn, which serves vLLM, drops idle connections after 5 s: be first, or a request can be
# written to a connection that is being closed.
_KEEP_IDLE_S = 4.0


class Reply:
    """An engine's answer: status and headers are in, the body still comes."""

    def __init__(
        self, stage: Stage, response: aiohttp.ClientResponse, wait: Wait | None = None
    ) -> None:
        self.stage = stage
        self._wait = wait
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")
        self.retry_after = response.headers.get("Retry-After")
        self.is_stream = self.status == 200 and self.content_type.startswith("text/event-stream")
        # Overload is like failure: another engine, or another way, may do.
        self.failed = response.status >= 500 or response.status in (408, 429)
        # The head of a stream comes before there is anything to stream.
        if not self.is_stream and response.status not in _DOWN:
            self._heard()

    def _heard(self) -> None:
        if self._wait is not None:
            self._wait.heard()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, unchanged; raises EngineError when it breaks off."""
        with _broken_off(self.stage):
            async for chunk in self._response.content.iter_any():
                self._heard()
                yield chunk
            self._heard()

    async def read(self) -> bytes:
        """Return the whole body; raises EngineError when it breaks off or is far too large."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise EngineError(self.stage, "the answer is too large", reached=True)
        return bytes(body)


class _ForbiddenAddressError(OSError):
    """Media would be fetched from an address that is neither public nor allowed."""

    def __init__(self) -> None:
        super().__init__(errno.EACCES, "no public address; --allow-media-network allows others")


class Relay:
    """Pooled HTTP clients for engines and media. Make and close it inside the event loop."""

    def __init__(self, config: RouterConfig, workers: Mapping[Stage, Workers]) -> None:
        self._config = config
        token = config.router_token
        self._own_headers = {TOKEN_HEADER: token} if token else {}
        self._workers = workers
        self._watch = HealthWatch(
            self._answers_probe, min(config.first_byte_timeout_s, config.stage_timeout_s)
        )
        self._session = self._make_session(
            aiohttp.TCPConnector(limit=config.max_connections, keepalive_timeout=_KEEP_IDLE_S)
        )
        # Apart: no connection that was made for an engine is ever used for media.
        self._media_session = self._make_session(
            aiohttp.TCPConnector(limit=config.max_connections, socket_factory=self._media_socket)
        )

    def _make_session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout(None),
            # Clients share this session: nothing that one server sets may reach another.
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    def _media_socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket for the address that is to be connected to, if it may be.

        The last step before connecting: it sees what a name has been resolved to, after each
        redirect, and addresses that were in the url. No second look-up can tell otherwise.
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

    def _engine(self, to: Stage | Worker) -> tuple[Stage, Worker]:
        if isinstance(to, Worker):
            return next(stage for stage, each in self._workers.items() if to in each), to
        workers = self._workers[to]
        worker = workers.choose()
        if worker is None and to is Stage.DECODE:
            worker = workers.soonest()  # there is no other way to an answer
        if worker is None:
            raise EngineError(to, "every engine is cooling down", reached=False)
        return to, worker

    @asynccontextmanager
    async def call(
        self,
        to: Stage | Worker,
        path: str,
        request: Payload | None,
        headers: Mapping[str, str],
        patience: Patience,
    ) -> AsyncIterator[Reply]:
        """Send one request (a GET without a body) to an engine, any one of a stage or this one;
        yields its answer.

        The engine counts as busy until the block is left. Raises EngineError when the patience
        ends, also in the block.
        """
        stage, worker = self._engine(to)
        workers = self._workers[stage]
        headers = {**headers, **self._own_headers, "Content-Type": "application/json"}
        if request is not None:
            headers["Content-Length"] = str(request.num_bytes)
        async with self._watched(stage, worker, patience) as wait:
            # An engine whose list of models is slow may be quick with everything else.
            with _unreachable(stage, worker, workers, may_be_slow=request is None):
                response = await self._session.request(
                    "GET" if request is None else "POST",
                    worker.url + path,
                    data=None if request is None else request.whole() or request.chunks(),
                    headers=headers,
                    allow_redirects=False,
                    timeout=self._timeout(patience.total_s),
                )
            if response.status in _DOWN:
                workers.mark_failed(worker)
            else:
                workers.mark_answered(worker)
            async with response:
                yield Reply(stage, response, wait)

    @asynccontextmanager
    async def _watched(
        self, stage: Stage, worker: Worker, patience: Patience
    ) -> AsyncIterator[Wait | None]:
        """Count a request as in flight, and give it up where the engine hangs."""
        workers = self._workers[stage]
        with workers.lease(worker):
            if patience.first_byte_s is None:
                yield None
                return

            def is_last() -> bool:
                # Without encode and prefill engines decode does it all.
                alone = stage is Stage.DECODE and workers.choose([worker]) is None
                return alone or patience.is_last()

            limit_s = patience.first_byte_s
            try:
                async with self._watch.waiting(worker, workers, limit_s, is_last) as wait:
                    yield wait
            except SilentError as exc:
                raise EngineError(stage, f"{worker.url} {exc}", reached=True) from exc

    async def ask(
        self, to: Stage | Worker, path: str, request: Payload, headers: Mapping[str, str]
    ) -> Request:
        """Return an engine's JSON object, within the stage's time limit.

        Raises RefusalError for 4xx, EngineError for everything else that is not an answer.
        """
        limit_s = self._config.stage_timeout_s
        patience = Patience(limit_s, limit_s)
        async with self.call(to, path, request, headers, patience) as reply:
            body = await reply.read()
        if reply.failed:
            raise EngineError(reply.stage, f"HTTP {reply.status}", reached=True)
        if reply.status >= 400:
            raise RefusalError(reply.status, body, reply.content_type)
        try:
            return msgspec.json.decode(body, type=Request)
        except (ValueError, RecursionError) as exc:  # also where it is no UTF-8
            raise EngineError(reply.stage, f"unreadable answer: {exc}", reached=True) from exc

    async def is_healthy(self, worker: Worker, limit_s: float = _HEALTH_TIMEOUT_S) -> bool:
        """Ask one engine whether it serves."""
        try:
            async with self._session.get(
                worker.url + "/health", timeout=self._timeout(limit_s)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, ValueError):  # a host that is no host's name
            return False

    async def _answers_probe(self, worker: Worker) -> bool:
        return await self.is_healthy(worker, _PROBE_TIMEOUT_S)

    @staticmethod
    def _timeout(total_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_TIMEOUT_S)

    async def load_media(self, items: tuple[Item, ...], bulk: Bulk, share: Share) -> list[Media]:
        """Return the content of each item, in order; raises ApiError naming the item at fault.

        Equal urls are downloaded once, and the downloads together stay within one limit; they take
        from `share` and are kept in `bulk`.
        """
        distinct = {(item.modality, item.source): item for item in items}
        budget = _Budget(self._config.max_media_bytes, share)
        loads = [self._load(item, bulk, budget) for item in distinct.values()]
        loaded = dict(zip(distinct, await gather_all(loads), strict=True))
        return [loaded[item.modality, item.source] for item in items]

    async def _load(self, item: Item, bulk: Bulk, budget: "_Budget") -> Media:
        url = item.source
        if not is_inline(url):
            if bulk.holds(url):
                raise ApiError(400, "The media's url is too long.", param=item.param)
            # Engines get the bytes that were hashed, not the url: its server could serve others.
            url = inline_url(bulk.add(await self._download(item, budget)))
        try:
            if bulk.holds(url):
                return Media(await asyncio.to_thread(identity, item.modality, url, bulk), url)
            return Media(identity(item.modality, url), url)
        except ValueError as exc:
            raise ApiError(400, str(exc), param=item.param, code="invalid_media") from exc

    async def _download(self, item: Item, budget: "_Budget") -> bytearray:
        """Return what is at the item's url, as base64 text."""
        try:
            async with asyncio.timeout(self._config.media_timeout_s):
                return await self._follow(item, budget)
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            is_clear = isinstance(exc, aiohttp.ClientConnectorError)
            reason = f"{type(exc).__name__}: {exc}" if is_clear else repr(exc)
            raise _unavailable(item, reason) from exc

    async def _follow(self, item: Item, budget: "_Budget") -> bytearray:
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

    def _check_media_url(self, item: Item, url: URL) -> None:
        """Refuse a client's url for what it says; raises ApiError with the reason."""
        if reason := self._refuses(url):
            message = f"The media's url is refused: {reason}."
            error = ApiError(400, message, param=item.param, code="invalid_media")
            raise error.because(f"{item.param}: {url.host!r:.{_MAX_LOGGED_CHARS}}: {reason}")

    def _refuses(self, url: URL) -> str | None:
        """Return why a url must not be fetched; None: it may be, as far as its text tells."""
        if url.scheme not in ("http", "https") or not url.host:
            return "it must be http:, https: or data:"
        allowed = self._config.allow_media_domains
        if allowed and url.host.lower() not in allowed:
            return "its host is not one that this server may fetch from"
        return None


class _Budget:
    """Bytes that one request may still download, and their part of the router's memory."""

    def __init__(self, limit_bytes: int, share: Share) -> None:
        self._left_bytes = limit_bytes
        self._share = share

    def expect(self, item: Item, num_bytes: int) -> None:
        """Raise ApiError if so much more would be too much."""
        if num_bytes > self._left_bytes:
            message = "The media is too large."
            raise ApiError(413, message, param=item.param, code="media_too_large")
        self._share.expect(_as_base64(num_bytes))

    def take(self, item: Item, num_bytes: int) -> None:
        """Take so much more; raises ApiError where that is too much."""
        self.expect(item, num_bytes)
        self._share.take(_as_base64(num_bytes))
        self._left_bytes -= num_bytes


def _as_base64(num_bytes: int) -> int:
    return num_bytes * 4 // 3


async def _base64(item: Item, chunks: AsyncIterator[bytes], budget: _Budget) -> bytearray:
    """Return as base64 what comes, without a copy of the whole."""
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


# One answer for whatever happens on the way to a url's content: it must not map our network.
def _unavailable(item: Item, reason: str) -> ApiError:
    message = "The media cannot be fetched."
    error = ApiError(400, message, param=item.param, code="media_unavailable")
    return error.because(f"{item.param}: {reason[:_MAX_LOGGED_CHARS]}")


@contextmanager
def _unreachable(
    stage: Stage, worker: Worker, workers: Workers, *, may_be_slow: bool
) -> Iterator[None]:
    """Map the errors of sending a request, and let the engine rest, unless it `may_be_slow`."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as exc:
        never = isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        if never or not (may_be_slow and isinstance(exc, TimeoutError)):
            workers.mark_failed(worker)
        reason = f"{worker.url}: {exc or type(exc).__name__}"
        raise EngineError(stage, reason, reached=not never) from exc


@contextmanager
def _broken_off(stage: Stage) -> Iterator[None]:
    """Map the errors of reading an answer."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise EngineError(stage, f"the answer broke off: {exc}", reached=True) from exc
