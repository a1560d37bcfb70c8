# SPDX-License-Identifier: Apache-2.0
"""A client that costs little: it sends ready bytes, and parses no more than necessary."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

_LAST_CHUNK = b"\r\n0\r\n\r\n"

Message = Sequence[bytes]
"""A request, its head included, in pieces."""


class Reply(NamedTuple):
    """An answer, and its times of arrival, in seconds since the request was sent."""

    status: int
    """0: the connection broke off, or could not be made."""
    first_byte_s: float
    end_s: float
    body: bytes
    """The body, including the framing of chunks."""


LOST = Reply(0, 0.0, 0.0, b"")


class Connection(asyncio.Protocol):
    """One connection, for one request after the other. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.is_open = False
        self._received = bytearray()
        self._body_from = 0
        self._end: int | None = None
        self._began_s = self._first_byte_s = 0.0
        self._transport: asyncio.Transport
        self._reply: asyncio.Future[Reply] | None = None
        self._begun: asyncio.Event | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(1 << 30)
        self._transport, self.is_open = transport, True

    async def ask(self, message: Message, begun: asyncio.Event | None = None) -> Reply:
        """Send a request and return its answer. `begun` is set with the answer's first byte."""
        self._reply = asyncio.get_running_loop().create_future()
        self._begun = begun
        self._received, self._body_from = bytearray(), 0
        self._began_s, self._first_byte_s = time.perf_counter(), 0.0
        self._transport.writelines(message)
        return await self._reply

    def data_received(self, data: bytes) -> None:
        """Take a piece of an answer."""
        if not self._first_byte_s:
            self._first_byte_s = time.perf_counter()
            if self._begun is not None:
                self._begun.set()
        self._received += data
        if not self._body_from:
            head, end, _ = bytes(self._received).partition(b"\r\n\r\n")
            if not end:
                return
            self._body_from = len(head) + len(end)
            self._end = _end(head, self._body_from)
        if self._is_whole():
            self._finish(int(self._received[9:12]))

    def _is_whole(self) -> bool:
        if self._end is None:
            return self._received.endswith(_LAST_CHUNK)
        return len(self._received) >= self._end

    def connection_lost(self, exc: Exception | None) -> None:
        """Report to the waiting caller that there is no answer."""
        self.is_open = False
        self._finish(0)

    def _finish(self, status: int) -> None:
        if self._reply is not None and not self._reply.done():
            first_byte_s = self._first_byte_s - self._began_s
            took_s = time.perf_counter() - self._began_s
            body = bytes(self._received[self._body_from :])
            self._reply.set_result(Reply(status, first_byte_s, took_s, body))
            if self._begun is not None:
                self._begun.set()

    def close(self) -> None:
        """Close the connection at once, and drop unsent bytes."""
        self._transport.abort()


def _end(head: bytes, body_from: int) -> int | None:
    """Return the length of an answer, None if its body is in chunks."""
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return body_from + int(value)
    return None


class Client:
    """Connections to one server, as many as are needed at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def ask(self, message: Message, begun: asyncio.Event | None = None) -> Reply:
        """Send a request, on a connection that is idle or new."""
        connection = await self._connection()
        if connection is None:
            if begun is not None:
                begun.set()
            return LOST
        reply = await connection.ask(message, begun)
        if connection.is_open:
            self._idle.append(connection)
        return reply

    async def _connection(self) -> Connection | None:
        while self._idle:
            if (idle := self._idle.pop()).is_open:
                return idle
        try:
            loop = asyncio.get_running_loop()
            _, made = await loop.create_connection(Connection, "127.0.0.1", self._port)
        except OSError:
            return None
        return made

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


Ask = Callable[[Message], Awaitable[Reply]]


async def at_rate(ask: Ask, messages: Iterable[Message], per_s: float) -> list[Reply]:
    """Send `per_s` messages a second without waiting for answers; return all answers, in order."""
    loop = asyncio.get_running_loop()
    began_s, asked = loop.time(), []
    for number, message in enumerate(messages):
        await asyncio.sleep(began_s + number / per_s - loop.time())
        asked.append(asyncio.ensure_future(ask(message)))
    return await asyncio.gather(*asked)


async def by_clients(ask: Ask, messages: Iterable[Message], num_clients: int) -> list[Reply]:
    """Have `num_clients` clients send one message after the other; return all answers."""
    left = iter(messages)

    async def client() -> list[Reply]:
        return [await ask(message) for message in left]

    shares = await asyncio.gather(*(client() for _ in range(num_clients)))
    return [reply for share in shares for reply in share]


def post(path: str, *body: bytes) -> list[bytes]:
    """Return a POST request of JSON, whose body is in pieces."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {sum(map(len, body))}\r\n\r\n"
    )
    return [head.encode(), *body]
