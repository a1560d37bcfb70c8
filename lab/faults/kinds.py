# SPDX-License-Identifier: Apache-2.0
"""What a FaultProxy does to a request: one value for each way to fail."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, Self
from xml.sax.saxutils import escape

from lab.faults.http1 import Head

Side = Literal["answer", "upload"]

_CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


class Kind(Enum):
    """What a fault does; see the function of `Fault` that makes it."""

    REFUSE = auto()
    ANSWER = auto()
    SLOW = auto()
    CUT = auto()
    RESET = auto()
    STALL = auto()
    FLIP = auto()


@dataclass(frozen=True)
class Fault:
    """One way to fail. Made by the functions below.

    Where a fault is in a body, `at_byte` counts that body's bytes on the wire from 0, `side` says
    which body, and a body too short to reach that byte is left alone.
    """

    kind: Kind
    status: int = 0
    code: str = ""
    seconds: float = 0.0
    at_byte: int = 0
    side: Side = "answer"

    @classmethod
    def refuse(cls) -> Self:
        """Nobody listens, and open connections are reset. For all requests or none."""
        return cls(Kind.REFUSE)

    @classmethod
    def answer(cls, status: int, code: str = "") -> Self:
        """Answer with S3's error `code` (by default the usual one) without asking the server."""
        return cls(Kind.ANSWER, status=status, code=code or _CODES[status])

    @classmethod
    def slow(cls, seconds: float) -> Self:
        """Let the server do its work, and hold its answer back for so long."""
        return cls(Kind.SLOW, seconds=seconds)

    @classmethod
    def cut(cls, at_byte: int, side: Side = "answer") -> Self:
        """Close both connections in good order before the whole body is through."""
        return cls(Kind.CUT, at_byte=at_byte, side=side)

    @classmethod
    def reset(cls, at_byte: int, side: Side = "answer") -> Self:
        """Reset both connections before the whole body is through."""
        return cls(Kind.RESET, at_byte=at_byte, side=side)

    @classmethod
    def stall(cls, at_byte: int, side: Side = "answer") -> Self:
        """Fall silent in the body, with both connections open. `heal` lets the rest through."""
        return cls(Kind.STALL, at_byte=at_byte, side=side)

    @classmethod
    def flip(cls, at_byte: int, side: Side = "answer") -> Self:
        """Turn the lowest bit of one byte over."""
        return cls(Kind.FLIP, at_byte=at_byte, side=side)


async def spoiled(
    body: AsyncIterator[bytes],
    fault: Fault,
    hit: Callable[[], None],
    healed: asyncio.Event,
) -> AsyncIterator[bytes]:
    """Yield `body` as `fault` leaves it; `hit` is called when the fault's byte has come.

    Raises EOFError where the connection shall end, ConnectionResetError where it shall be reset.
    """
    begin = 0
    async for piece in body:
        at = fault.at_byte - begin
        begin += len(piece)
        if not 0 <= at < len(piece):
            yield piece
            continue
        hit()
        yield piece[:at]
        match fault.kind:
            case Kind.CUT:
                raise EOFError("cut, as asked for")
            case Kind.RESET:
                raise ConnectionResetError("reset, as asked for")
            case Kind.STALL:
                await healed.wait()
                yield piece[at:]
            case _:
                yield bytes([piece[at] ^ 1]) + piece[at + 1 :]


def error_answer(fault: Fault, request: Head, *, keep_alive: bool) -> bytes:
    """S3's whole answer to `request` when it fails as `fault` says."""
    target = escape(request.line[1].partition("?")[0])
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{fault.code}</Code><Message>a fault was asked for</Message>"
        f"<Resource>{target}</Resource><RequestId>0</RequestId></Error>"
    ).encode()
    head = (
        f"HTTP/1.1 {fault.status} {fault.code}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    )
    return head.encode() + (b"" if request.line[0] == "HEAD" else body)
