# SPDX-License-Identifier: Apache-2.0
"""A small HTTP/1.1 client for engines: it exists for the time that larger ones take.

It follows no redirects, keeps no cookies and decompresses nothing. All of it belongs to the event
loop's thread, and runs on any loop of asyncio's kind.
"""

import asyncio
import select
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import cast

from ecshare.router.fleet.messages import Answer, Body, BrokenError, Origin, Request, slices

__all__ = ["Body", "BrokenError", "ConnectError", "Connections", "Exchange"]

_SMALL_BYTES = 64 * 1024
"""A body up to this size is sent in one piece with the head."""
_MAX_UNREAD_BYTES = 256 * 1024


class ConnectError(OSError):
    """No connection was made: nothing was sent."""


class Connections:
    """The connections that are kept, by scheme, host and port. No more than `max_connections` are
    in use at once; who wants another one waits.
    """

    def __init__(
        self, max_connections: int, *, connect_timeout_s: float = 5.0, keep_idle_s: float = 4.0
    ) -> None:
        """`connect_timeout_s` is for the look-up of the host, the connection and TLS together."""
        self.connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._keep_idle_s = keep_idle_s
        self._using: set[Exchange] = set()
        self._queue: dict[Exchange, None] = {}
        # Since when each has been idle, the longest first.
        self._idle: dict[Origin, dict[_Connection, float]] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | None = None,
        limit_s: float | None = None,
    ) -> "Exchange":
        """Return a request that can be sent. Does no I/O yet.

        `limit_s` is for all of it, from `begin` to the end of the answer.
        """
        return Exchange(self, Request(method, url, headers, body), limit_s)

    async def close(self) -> None:
        """Close every connection. Exchanges that go on fail."""
        self._is_closed = True
        for exchange in [*self._using, *self._queue]:
            exchange.abort(BrokenError("the client is closed"))
        for idle in self._idle.values():
            for connection in list(idle):
                connection.close()
        self._idle.clear()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        await asyncio.sleep(0)  # the transports close their sockets

    # For exchanges

    def enter(self, exchange: "Exchange") -> bool:
        """Tell whether an exchange may use a connection now. Otherwise it is woken later."""
        if exchange in self._using:
            return True
        if exchange in self._queue:
            return False
        if self._is_closed:
            raise ConnectError("the client is closed")
        if len(self._using) < self._max_connections:
            self._using.add(exchange)
            return True
        self._queue[exchange] = None
        return False

    def leave(self, exchange: "Exchange") -> None:
        """Note that an exchange needs no connection any more."""
        self._queue.pop(exchange, None)
        if exchange in self._using:
            self._using.remove(exchange)
            if self._queue:
                longest = next(iter(self._queue))
                del self._queue[longest]
                self._using.add(longest)
                longest.wake()

    def take(self, origin: Origin) -> "_Connection | None":
        """Return a kept connection, None if there is none."""
        idle = self._idle.get(origin)
        while idle:
            connection, since_s = idle.popitem()
            is_fresh = asyncio.get_running_loop().time() - since_s < self._keep_idle_s
            if is_fresh and connection.is_quiet():
                return connection
            connection.close()
        return None

    def keep(self, connection: "_Connection") -> None:
        """Keep a connection for other requests."""
        if self._is_closed:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        self._idle.setdefault(connection.origin, {})[connection] = loop.time()
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(self._keep_idle_s, self._sweep)

    def forget(self, connection: "_Connection") -> None:
        """Note that a connection has ended."""
        self._idle.get(connection.origin, {}).pop(connection, None)

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """The settings of all https connections."""
        return ssl.create_default_context()

    def _sweep(self) -> None:
        """Close what has been idle for too long."""
        loop = asyncio.get_running_loop()
        latest_s = loop.time() - self._keep_idle_s
        for origin, idle in list(self._idle.items()):
            for connection in [each for each, since_s in idle.items() if since_s <= latest_s]:
                del idle[connection]
                connection.close()
            if not idle:
                del self._idle[origin]
        self._sweep_timer = None
        if self._idle:
            oldest_s = min(next(iter(idle.values())) for idle in self._idle.values())
            self._sweep_timer = loop.call_at(oldest_s + self._keep_idle_s, self._sweep)


@dataclass(eq=False, slots=True)
class Exchange:
    """One request and its answer. Close it in any case."""

    _connections: Connections
    _request: Request | None
    _limit_s: float | None
    status: int = 0
    """0 until the head of the answer is there."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By lower-case names. The first one counts where a name is repeated."""
    is_over: bool = False
    """Whether the body has been read to its end."""
    _timer: asyncio.TimerHandle | None = None
    _connection: "_Connection | None" = None
    _waiter: asyncio.Future[None] | None = None
    _reason: BaseException | None = None

    async def begin(self) -> None:
        """Send the request, and return when the head of the answer is there.

        An engine, or a proxy before it, may close a connection at the moment when it is used again,
        which says nothing of the engine. Then the request is sent again, once, on a new connection.
        The engine may have begun with it, and so computes it twice at worst.

        Raises:
            ConnectError: there is no connection, or the request is malformed.
            BrokenError: the connection ends, or brings something else than an answer.
            TimeoutError: the time limit is over.
        """
        if self._reason is not None:
            raise self._reason
        request = self._request
        if request is None:
            raise BrokenError("the exchange is closed")
        if self._limit_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_s, lambda: self.abort(TimeoutError()))
        try:
            origin, head = request.head()
        except ValueError as exc:
            raise ConnectError(str(exc)) from None
        while not self._connections.enter(self):
            await self._wait()
        kept = self._connections.take(origin)
        if kept is not None and await self._is_answered(kept, request, head):
            return
        await self._is_answered(await self._connected(origin), request, head)

    async def chunk(self) -> bytes:
        """Return what has arrived of the body, at least one byte; nothing at its end.

        Raises:
            BrokenError, TimeoutError: as for `begin`.
        """
        while True:
            if self._reason is not None:
                raise self._reason
            connection = self._connection
            if connection is None:
                raise BrokenError("the exchange is closed")
            answer = connection.answer
            if answer.num_unread:
                chunk = connection.read()
                self.is_over = answer.is_complete
                return chunk
            if answer.is_complete:
                self.is_over = True
                return b""
            await self._wait()

    def abort(self, reason: BaseException) -> None:
        """Close the connection. `begin` and `chunk` raise `reason`, also where they wait now.

        Without effect once the body has been read to its end.
        """
        if self.is_over or self._reason is not None:
            return
        self._reason = reason
        if self._connection is not None:
            self._connection.close()
        self.wake()

    def close(self) -> None:
        """Keep the connection if the whole answer has arrived and it may be kept. Close it
        otherwise.
        """
        self.is_over = True
        # The reason's traceback refers to frames, and they to this: that cycle would keep memory.
        self._reason = self._request = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection, self._connection = self._connection, None
        if connection is not None and not connection.try_release():
            connection.close()
        self._connections.leave(self)

    def wake(self) -> None:
        """Have `begin` or `chunk` look again at what they wait for."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if self._reason is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._reason is not None:
            raise self._reason

    async def _is_answered(self, connection: "_Connection", request: Request, head: bytes) -> bool:
        """Send the request. Return True with the head of the answer, False if the connection had
        been kept and ended before any byte.
        """
        self._connection = connection
        connection.send(self, request, head)
        answer = connection.answer
        while not answer.status:
            if connection.went_stale:
                self._connection = None
                return False
            await self._wait()
        self.status, self.headers = answer.status, answer.headers
        return True

    async def _connected(self, origin: Origin) -> "_Connection":
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(self._connect(origin))
        connecting.add_done_callback(lambda _: self.wake())
        timer = loop.call_later(self._connections.connect_timeout_s, connecting.cancel)
        try:
            while not connecting.done():
                await self._wait()
        except BaseException:
            connecting.cancel()
            connecting.add_done_callback(_discard)
            raise
        finally:
            timer.cancel()
        if connecting.cancelled():
            raise ConnectError("there is no connection in time")
        failure = connecting.exception()
        if failure is not None:
            raise ConnectError(str(failure) or type(failure).__name__)
        return connecting.result()

    async def _connect(self, origin: Origin) -> "_Connection":
        connections = self._connections
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(connections, origin),
            origin.host,
            origin.port,
            ssl=connections.tls if origin.scheme == "https" else None,
        )
        return connection


@dataclass(eq=False, slots=True)
class _Connection(asyncio.Protocol):
    """A connection. Serves one exchange at a time, or none while it is kept."""

    _connections: Connections
    origin: Origin
    went_stale: bool = False
    """Whether it had been kept, and ended before any byte."""
    answer: Answer = field(init=False)
    _transport: asyncio.Transport = field(init=False)
    _exchange: Exchange | None = None
    _unsent: Iterator[bytes | memoryview] | None = None
    _num_unsent: int = 0
    _is_paused: bool = False
    _may_be_stale: bool = False
    """Whether it had been kept, and has brought no byte since."""
    _poll: select.poll = field(default_factory=select.poll)

    def send(self, exchange: Exchange, request: Request, head: bytes) -> None:
        """Send a request, as much of it as the connection takes now."""
        self.answer.start(request.method)
        self._exchange = exchange
        transport, body = self._transport, request.body
        if transport.is_closing():
            self.connection_lost(None)
        elif body is None:
            transport.write(head)
        elif body.num_bytes <= _SMALL_BYTES:
            transport.write(b"".join([head, *body.pieces()]))
        else:
            self._num_unsent = len(head) + body.num_bytes
            self._unsent = slices(chain([head], body.pieces()))
            self._send_more()

    def read(self) -> bytes:
        """Return the part of the body that nobody has read yet, and let more arrive."""
        answer = self.answer
        if answer.num_unread > _MAX_UNREAD_BYTES:
            self._transport.resume_reading()
        unread, answer.num_unread = answer.unread, 0
        data = unread[0] if len(unread) == 1 else b"".join(unread)
        unread.clear()
        return data

    def is_quiet(self) -> bool:
        """Tell whether it is open, and nothing has arrived that nobody asked for."""
        return not self._transport.is_closing() and not self._poll.poll(0)

    def try_release(self) -> bool:
        """Keep the connection for other exchanges, if it is fit for them."""
        answer = self.answer
        if not answer.is_complete or not answer.may_keep or self._transport.is_closing():
            return False
        if self._transport.get_write_buffer_size():  # it has answered without the whole request
            return False
        if answer.num_unread:
            self.read()
        self._exchange = None
        self._may_be_stale = True
        self._connections.keep(self)
        return True

    def close(self) -> None:
        """End the connection at once."""
        self._exchange = self._unsent = None
        self.answer.release()
        self._transport.abort()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.answer = Answer()  # not before: uvloop drops protocols that it cannot connect
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Pass on a part of the answer."""
        exchange, answer = self._exchange, self.answer
        if exchange is None:  # nobody asked
            self.close()
            return
        self._may_be_stale = False
        try:
            answer.feed(data)
        except BrokenError as exc:
            exchange.abort(exc)
            return
        if self._unsent is not None and answer.status:  # it does not want the rest
            self._unsent = None
            answer.may_keep = False
        if answer.num_unread > _MAX_UNREAD_BYTES:
            self._transport.pause_reading()
        exchange.wake()

    def eof_received(self) -> None:
        """Close: no more of the answer comes, so what is not sent yet would be for nothing."""
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange, or leave the kept connections."""
        exchange, self._exchange = self._exchange, None
        self._unsent = None
        self.answer.release()
        if exchange is None:
            self._connections.forget(self)
        elif self._may_be_stale:
            self.went_stale = True
            exchange.wake()
        elif not self.answer.is_complete:
            try:
                self.answer.end(exc)
            except BrokenError as broken:
                exchange.abort(broken)
            exchange.wake()

    def pause_writing(self) -> None:
        """Send no more."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Send more."""
        self._is_paused = False
        self._send_more()

    def _send_more(self) -> None:
        """Send the next part of a large body. Other requests have their turn after each."""
        if self._unsent is None or self._is_paused:
            return
        try:
            data = next(self._unsent, None)
        except Exception as exc:  # noqa: BLE001 — of the body; the exchange raises it
            if self._exchange is not None:
                self._exchange.abort(exc)
            return
        if data is None:
            self._unsent = None
            return
        self._transport.write(data)
        self._num_unsent -= len(data)
        if self._num_unsent <= 0:  # the answer may arrive before another turn of this
            self._unsent = None
        else:
            asyncio.get_running_loop().call_soon(self._send_more)


def _discard(connecting: "asyncio.Task[_Connection]") -> None:
    """Close a connection that nobody waits for any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
