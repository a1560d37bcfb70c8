# SPDX-License-Identifier: Apache-2.0
"""Limits the number and the waiting time of clients' connections; answers malformed HTTP."""

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from http import HTTPStatus
from typing import Any, cast

import msgspec
from aiohttp import HttpVersion11, StreamReader, hdrs, web
from aiohttp.http_exceptions import LineTooLong

from ecshare.router.api.errors import ApiError
from ecshare.router.http.bodies import SLOWEST_BYTES_A_S
from ecshare.router.options.config import RouterConfig

logger = logging.getLogger(__name__)

Answerer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_SHUTDOWN_S = 5.0
_DESCRIPTORS_A_CLIENT = 4
"""Its own connection, one to an engine, one to a media server, and one in reserve: hundreds may be
accepted before the first can be closed."""
_MAX_SHOWN_CHARS = 200
# vLLM takes more, but tokens and cookies do not get longer, and each connection may send as much.
_KIB = 1024
_MAX_TARGET_BYTES = 16 * _KIB
_MAX_HEADER_BYTES = 64 * _KIB
_MAX_HEADERS = 256
_MAX_HEAD_BYTES = 256 * _KIB


def raise_open_files() -> int:
    """Raise the limit on open files as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def fitting_connections(max_connections: int, open_files: int) -> int:
    """Return how many client connections fit, given the files that their requests open."""
    if open_files == resource.RLIM_INFINITY:
        return max_connections
    return min(max_connections, open_files // _DESCRIPTORS_A_CLIENT)


class Runner(web.BaseRunner):
    """Serves over connections that are limited in number and in time.

    A connection is closed if it sends no complete request head within `client_timeout_s`, counted
    from its opening or its last answer, or if it takes nothing of its answer for that long, or
    takes it more slowly than 64 KiB/s. Beyond `max_connections`, a new connection replaces the
    oldest that has sent no request yet. If all have, the new one gets a 503 and is closed.
    """

    def __init__(
        self, running: Callable[[], AbstractAsyncContextManager[Answerer]], config: RouterConfig
    ) -> None:
        """`running` is entered by `setup`, and left by `cleanup`."""
        super().__init__(shutdown_timeout=_SHUTDOWN_S)
        self._running = running
        self._config = config
        self._stack = AsyncExitStack()

    async def _make_server(self) -> web.Server:
        answer = await self._stack.enter_async_context(self._running())
        return _Server(answer, self._config.client_timeout_s, self._config.max_connections)

    async def shutdown(self) -> None:
        """See the base class."""

    async def _cleanup_server(self) -> None:
        await self._stack.aclose()


class _Server(web.Server):
    """Creates connections."""

    def __init__(self, answer: Answerer, client_timeout_s: float, max_connections: int) -> None:
        # A client that disconnects cancels its request, and with it all calls to engines.
        super().__init__(answer, request_factory=self._request, handler_cancellation=True)
        self.client_timeout_s = client_timeout_s
        self.max_connections = max_connections
        self.unused: dict[web.RequestHandler, None] = {}
        """Connections that have sent no request yet, the oldest first."""

    def __call__(self) -> web.RequestHandler:
        return _Connection(self)

    def _request(
        self, message: Any, payload: Any, protocol: web.RequestHandler, *more: Any
    ) -> web.BaseRequest:
        self.unused.pop(protocol, None)
        if hdrs.EXPECT in message.headers:
            _expect(message, protocol.transport)
        return self._make_request(message, payload, protocol, *more)

    def admit(self) -> bool:
        """Tell whether one more connection is admitted. May close an unused one to make room."""
        if len(self.connections) < self.max_connections:
            return True
        oldest = next(iter(self.unused), None)
        if oldest is None:
            logger.warning("a connection is refused: there are %d", self.max_connections)
            return False
        logger.warning("a connection is closed to make room: it has sent no request")
        del self.unused[oldest]
        oldest.force_close()
        return True


class _Connection(web.RequestHandler):
    """One client's connection. Belongs to the event loop's thread."""

    def __init__(self, server: _Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=server.client_timeout_s,
            max_line_size=_MAX_TARGET_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            max_headers=_MAX_HEADERS,
            auto_decompress=False,  # see bodies.py
            access_log=cast(Any, None),  # its type does not tell that there may be none
        )
        self._server = server
        self._body: StreamReader | None = None
        """Of the last request whose head is whole."""
        self._head_bytes = 0
        """Received of a request whose head is not whole yet."""
        self._writing: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        """Of the answer, when it was last looked whether the client takes it."""
        self._latest_s = 0.0
        """When all of them must be sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._server.admit():
            self._server.unused[self] = None
            super().connection_made(transport)
            return
        refused = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        refused.write(_REFUSAL)
        refused.close()

    def data_received(self, data: bytes) -> None:
        """Refuse a head that is too large as a whole. aiohttp limits only its parts."""
        num_heads, is_of_body = self._request_count, self._body and not self._body.is_eof()
        super().data_received(data)
        if self._request_count > num_heads:
            self._body = self._messages[-1][1]
            self._head_bytes = 0
        elif not is_of_body:
            self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD_BYTES and self.transport is not None:
            if self._current_request is None and not self._messages:
                self.transport.write(_HEAD_REFUSAL)
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent_bytes = self._count_unsent()
        most_s = self._server.client_timeout_s + self._unsent_bytes / SLOWEST_BYTES_A_S
        self._latest_s = asyncio.get_running_loop().time() + most_s
        self._look_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        self._server.unused.pop(self, None)
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._writing = loop.call_later(self._server.client_timeout_s, self._look)

    def _look(self) -> None:
        """Close the connection unless the client has taken a part of the answer since last time."""
        before, self._unsent_bytes = self._unsent_bytes, self._count_unsent()
        is_late = asyncio.get_running_loop().time() >= self._latest_s
        if self._unsent_bytes < before and not is_late:
            self._look_later()
        else:
            self._abort()

    def _count_unsent(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def _abort(self) -> None:
        self._writing = None
        if self.transport is not None:
            logger.warning("a connection is closed: its client does not take the answer")
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP with JSON and one log line; leave other errors to aiohttp."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        reason = " ".join((message or "").split())[:_MAX_SHOWN_CHARS]
        logger.warning("malformed HTTP from %s: %s", request.remote, reason)
        error = _of_head(exc)
        response = web.Response(
            status=error.status,
            body=msgspec.json.encode(error.body()),
            content_type="application/json",
        )
        response.force_close()
        return response


def _expect(message: Any, transport: asyncio.Transport | None) -> None:
    """Tell a client that waits for 100 Continue to send its body. Other expectations count for
    nothing, as with vLLM.
    """
    waits = message.headers[hdrs.EXPECT].lower() == "100-continue"
    if waits and message.version >= HttpVersion11 and transport is not None:
        transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _of_head(exc: BaseException | None) -> ApiError:
    """Return the error for the head of a request that aiohttp's parser has refused."""
    if isinstance(exc, LineTooLong):
        if exc.args[1] == _MAX_TARGET_BYTES:
            message = f"The path with its query is longer than {_MAX_TARGET_BYTES // _KIB} KiB."
            return ApiError(414, message, code="uri_too_long")
        return _headers_too_large(f"A header is larger than {_MAX_HEADER_BYTES // _KIB} KiB.")
    if "Too many headers" in str(exc):
        return _headers_too_large(f"There are more than {_MAX_HEADERS} headers.")
    return ApiError(400, "The HTTP request is malformed.", code="malformed_http")


def _headers_too_large(message: str) -> ApiError:
    return ApiError(431, message, code="headers_too_large")


def _refusal(error: ApiError, more: str = "") -> bytes:
    """Return a whole answer, for a connection that ends with it."""
    body = msgspec.json.encode(error.body())
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{more}Connection: close\r\n\r\n"
    )
    return head.encode() + body


_REFUSAL = _refusal(
    ApiError(503, "There are too many connections.", code="too_many_connections"),
    "Retry-After: 1\r\n",
)
_HEAD_REFUSAL = _refusal(
    _headers_too_large(f"All headers together are larger than {_MAX_HEAD_BYTES // _KIB} KiB.")
)
