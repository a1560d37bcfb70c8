# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that a script writes the bytes of, and what a client sends to it."""

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ecshare.router.fleet.exchange import Connections, Exchange

Script = Callable[["Visit"], Awaitable[None]]
Step = Callable[["Visit"], Awaitable[object]]


class Body:
    """A request's body, and how much of it was taken."""

    def __init__(self, *pieces: bytes | memoryview) -> None:
        self._pieces = pieces
        self.num_bytes = sum(map(len, pieces))
        self.num_taken = 0

    def pieces(self) -> Iterator[bytes | memoryview]:
        for piece in self._pieces:
            self.num_taken += 1
            yield piece


@dataclass
class Visit:
    """One connection of a client."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: list[bytes] = field(default_factory=list)
    has_ended: bool = False

    async def request(self) -> bytes:
        """Read a request."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        name, _, rest = head.partition(b"Content-Length: ")
        length = int(rest.partition(b"\r\n")[0]) if rest else 0
        self.requests.append(head + await self.reader.readexactly(length))
        return self.requests[-1]

    async def head(self) -> None:
        """Read only the head of a request."""
        await self.reader.readuntil(b"\r\n\r\n")

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reset(self) -> None:
        """Close the connection with a reset."""
        descriptor = self.writer.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(descriptor)) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def end_of_client(self) -> None:
        """Wait until the client closes the connection."""
        while await self.reader.read(1 << 16):
            pass


class Server:
    """Connections that a client has made to it, and this client."""

    def __init__(self, script: Script, client: Connections) -> None:
        self._script = script
        self.client = client
        self.url = ""
        self.visits: list[Visit] = []

    @property
    def requests(self) -> list[bytes]:
        return [request for visit in self.visits for request in visit.requests]

    @property
    def num_open(self) -> int:
        return sum(not visit.has_ended for visit in self.visits)

    @asynccontextmanager
    async def begun(
        self,
        body: Body | None = None,
        *,
        url: str | None = None,
        method: str = "POST",
        limit_s: float | None = 30.0,
        headers: Mapping[str, str] = MappingProxyType({"X-Name": "value"}),
    ) -> AsyncIterator[Exchange]:
        """An exchange that has the head of its answer; `url`: unless it is the server's own."""
        exchange = self.client.exchange(
            method, self.url if url is None else url, headers, body, limit_s
        )
        with closing(exchange):
            await exchange.begin()
            yield exchange

    async def fetch(
        self, body: Body | None = None, **options: Any
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request, as `begun`; return the status, the headers and the body of its answer."""
        async with self.begun(body, **options) as exchange:
            read = b""
            while chunk := await exchange.chunk():
                read += chunk
            return exchange.status, dict(exchange.headers), read

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = Visit(len(self.visits), reader, writer)
        self.visits.append(visit)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._script(visit)
        writer.close()
        with suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()
        visit.has_ended = True


@asynccontextmanager
async def serving(
    script: Script,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    most: int = 8,
    connect_timeout_s: float = 20.0,
    keep_idle_s: float = 20.0,
) -> AsyncIterator[Server]:
    """A server on loopback that runs `script` for each connection, and closes it then; a client."""
    client = Connections(most, connect_timeout_s=connect_timeout_s, keep_idle_s=keep_idle_s)
    server = Server(script, client)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(server.accept(reader, writer)))

    listening = await asyncio.start_server(accept, host, 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    scheme = "http" if tls is None else "https"
    server.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        yield server
    finally:
        await client.close()
        listening.close()
        for visit in [each for each in server.visits if not each.has_ended]:
            visit.writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer(body: bytes = b"ok", *headers: bytes) -> bytes:
    """Return an answer of known length."""
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers, b"", body]
    return b"\r\n".join(lines)


def answering(data: bytes, *, at_once: bool = True) -> Script:
    """Answer each request with `data`, byte by byte unless `at_once`."""

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            for piece in [data] if at_once else [bytes([byte]) for byte in data]:
                await visit.send(piece)
                await asyncio.sleep(0)

    return script


def steps(*each: bytes | Step) -> Script:
    """Take these steps in order, of which bytes are sent, and close the connection."""

    async def script(visit: Visit) -> None:
        for step in each:
            await (visit.send(step) if isinstance(step, bytes) else step(visit))

    return script


def pause(seconds: float) -> Step:
    return lambda visit: asyncio.sleep(seconds)
