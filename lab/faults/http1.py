# SPDX-License-Identifier: Apache-2.0
"""The parts of HTTP/1.1 that a proxy needs: where a message begins, and where its body ends."""

from asyncio import IncompleteReadError, StreamReader
from collections.abc import AsyncIterator
from dataclasses import dataclass

HEAD_LIMIT_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10
_NO_BODY = {"204", "304"}


@dataclass(frozen=True)
class Head:
    """The first line and the fields of a request or an answer, unchanged."""

    raw: bytes
    line: tuple[str, str, str]
    """A request's method, target and version; an answer's version, status and reason."""
    fields: dict[str, str]
    """Names in lower case."""

    @property
    def is_interim(self) -> bool:
        """Return whether it is an interim answer, such as 100 Continue."""
        return self.line[1].startswith("1")

    @property
    def ends_connection(self) -> bool:
        """Return whether the sender closes the connection after this message."""
        return self.fields.get("connection", "").lower() == "close"


async def read_head(reader: StreamReader) -> Head | None:
    """Return the head of the next message. None: the connection ended before it."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except IncompleteReadError as exc:
        if exc.partial:
            raise
        return None
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    one, two, three = (*first.split(" ", 2), "", "")[:3]
    pairs = (line.partition(":") for line in lines)
    return Head(raw, (one, two, three), {name.lower(): value.strip() for name, _, value in pairs})


async def request_body(reader: StreamReader, head: Head) -> AsyncIterator[bytes]:
    """Yield the body of the request `head`, piece by piece.

    Raises:
        EOFError: the connection ended within the body.
    """
    if "transfer-encoding" in head.fields:
        pieces = _chunked(reader)
    else:
        pieces = _counted(reader, int(head.fields.get("content-length", "0")))
    async for piece in pieces:
        yield piece


async def answer_body(reader: StreamReader, head: Head, method: str) -> AsyncIterator[bytes]:
    """Yield the body of the answer `head` to a `method` request.

    Raises:
        EOFError: the connection ended within the body.
    """
    if method == "HEAD" or head.line[1] in _NO_BODY:
        return
    if "transfer-encoding" in head.fields:
        pieces = _chunked(reader)
    elif "content-length" in head.fields:
        pieces = _counted(reader, int(head.fields["content-length"]))
    else:
        pieces = _to_the_end(reader)
    async for piece in pieces:
        yield piece


async def _counted(reader: StreamReader, num_bytes: int) -> AsyncIterator[bytes]:
    while num_bytes:
        piece = await reader.read(min(num_bytes, _PIECE_BYTES))
        if not piece:
            raise EOFError("the body broke off")
        num_bytes -= len(piece)
        yield piece


async def _chunked(reader: StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks with their framing, then the trailer."""
    num_bytes = -1
    while num_bytes:
        line = await reader.readuntil(b"\r\n")
        yield line
        num_bytes = int(line.split(b";")[0], 16)
        if num_bytes:
            async for piece in _counted(reader, num_bytes + 2):
                yield piece
    while line != b"\r\n":
        line = await reader.readuntil(b"\r\n")
        yield line


async def _to_the_end(reader: StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(_PIECE_BYTES):
        yield piece
