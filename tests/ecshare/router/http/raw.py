# SPDX-License-Identifier: Apache-2.0
"""HTTP as bytes, for what no client's library would send, or would send so slowly."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.ecshare.router.bodies import HEAD, chat
from tests.ecshare.router.fake_engine import Fleet

BODY = json.dumps(chat()).encode()
CLOSE = b"Connection: close"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def get(path: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join((b"GET %s HTTP/1.1" % path, b"Host: x", *headers, b"", b""))


def post(body: bytes, *headers: bytes) -> bytes:
    """A chat completion."""
    return HEAD + b"\r\n".join((*headers, b"Content-Length: %d" % len(body), b"", body))


@asynccontextmanager
async def connected(url: str, sent: bytes = b"") -> AsyncIterator[Connection]:
    """A connection on which these bytes are sent; it may last for 20 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        writer.write(sent)
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and the body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
    return int(head.split()[1]), await reader.readexactly(int(length.split()[1]))


async def raw(f: Fleet, request: bytes) -> tuple[int, bytes]:
    """Send a request that ends its connection; returns the status and what comes after it."""
    async with connected(f.url, request) as (reader, _):
        status, _, rest = (await reader.read()).partition(b" ")[2].partition(b" ")
    return int(status), rest
