# SPDX-License-Identifier: Apache-2.0
"""Connections of clients: how many, how long they may wait, and what malformed HTTP gets."""

import asyncio
import logging
import resource
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from ecshare.router.errors import ApiError

logger = logging.getLogger(__name__)

_DESCRIPTORS_A_CLIENT = 4
"""Its own connection, one to an engine, one to a server of media, and one to spare: a few hundred
are accepted before the first of them can be closed."""
_MAX_SHOWN_CHARS = 200


def raise_open_files() -> int:
    """Let this process have as many open files as it may; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def fitting(max_connections: int, open_files: int) -> int:
    """Return how many connections of clients fit beside what their requests open."""
    if open_files == resource.RLIM_INFINITY:
        return max_connections
    return min(max_connections, open_files // _DESCRIPTORS_A_CLIENT)


class Runner(web.AppRunner):
    """Runs an application over connections that are bounded in number and in time.

    A connection is closed that sends no whole request head for `client_timeout_s`, since it was
    opened or since its last answer, and one that takes nothing of its answer for as long. Beyond
    `max_connections` a new one is put in the place of the oldest that has sent no request yet;
    where all have, it gets a 503 and is closed.
    """

    def __init__(
        self, app: web.Application, client_timeout_s: float, max_connections: int, **kwargs: Any
    ) -> None:
        """`kwargs`: as web.AppRunner takes them."""
        super().__init__(app, keepalive_timeout=client_timeout_s, **kwargs)
        self._client_timeout_s = client_timeout_s
        self._max_connections = max_connections

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._client_timeout_s, self._max_connections, self._kwargs)


class _Server(web.Server):
    """Makes connections; otherwise as the server that it is made after."""

    def __init__(
        self,
        like: web.Server,
        write_timeout_s: float,
        max_connections: int,
        options: dict[str, Any],
    ) -> None:
        super().__init__(
            like.request_handler,
            request_factory=self._request,
            handler_cancellation=like.handler_cancellation,
        )
        self.write_timeout_s = write_timeout_s
        self.max_connections = max_connections
        self.silent: dict[web.RequestHandler, None] = {}
        """Connections that have sent no request yet, the oldest first."""
        self._make = like.request_factory
        self._options = {
            name: value for name, value in options.items() if name != "handler_cancellation"
        }

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._options)

    def _request(
        self, message: Any, payload: Any, protocol: web.RequestHandler, *more: Any
    ) -> web.BaseRequest:
        self.silent.pop(protocol, None)
        return self._make(message, payload, protocol, *more)

    def make_room(self) -> bool:
        """Tell whether one more connection may come; may close another one for it."""
        if len(self.connections) < self.max_connections:
            return True
        oldest = next(iter(self.silent), None)
        if oldest is None:
            logger.warning("a connection is refused: there are %d", self.max_connections)
            return False
        logger.warning("a connection is closed to make room: it has sent no request")
        del self.silent[oldest]
        oldest.force_close()
        return True


class _Connection(web.RequestHandler):
    """One client's connection. Belongs to the event loop's thread."""

    def __init__(self, server: _Server, options: dict[str, Any]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._server = server
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._server.make_room():
            self._server.silent[self] = None
            super().connection_made(transport)
            return
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_REFUSAL)
        transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._writing = loop.call_later(self._server.write_timeout_s, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        self._server.silent.pop(self, None)
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _give_up(self) -> None:
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
        """Answer what is no HTTP, in one line of the log; everything else as aiohttp does."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        reason = " ".join((message or "").split())[:_MAX_SHOWN_CHARS]
        logger.warning("malformed HTTP from %s: %s", request.remote, reason)
        error = ApiError(400, "The HTTP request is malformed.", code="malformed_http")
        response = web.Response(
            status=400, body=msgspec.json.encode(error.body()), content_type="application/json"
        )
        response.force_close()
        return response


def _refusal() -> bytes:
    error = ApiError(503, "There are too many connections.", code="too_many_connections")
    body = msgspec.json.encode(error.body())
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_REFUSAL = _refusal()
