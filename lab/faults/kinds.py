# SPDX-License-Identifier: Apache-2.0
"""The faults that a FaultProxy applies to requests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, Self
from xml.sax.saxutils import escape

from lab.faults.http1 import Head

Side = Literal["answer", "upload"]

_CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


class FaultKind(Enum):
    """The kind of a fault; see the constructors of `Fault`."""

    REFUSE = auto()
    ANSWER = auto()
    SLOW = auto()
    CUT = auto()
    RESET = auto()
    STALL = auto()
    FLIP = auto()


@dataclass(frozen=True)
class Fault:
    """One fault. The class methods below create it.

    For faults within a body, `at_byte` counts the bytes of the body on the wire from 0, and `side`
    selects the body. A body that is too short to contain that byte is not affected.
    """

    kind: FaultKind
    status: int = 0
    code: str = ""
    seconds: float = 0.0
    at_byte: int = 0
    side: Side = "answer"

    @classmethod
    def refuse(cls) -> Self:
        """Refuse new connections and reset open ones. For all requests or none."""
        return cls(FaultKind.REFUSE)

    @classmethod
    def answer(cls, status: int, code: str = "") -> Self:
        """Answer with S3's error `code` (default: the usual one) without forwarding the request."""
        return cls(FaultKind.ANSWER, status=status, code=code or _CODES[status])

    @classmethod
    def slow(cls, seconds: float) -> Self:
        """Forward the request, and delay the server's answer by `seconds`."""
        return cls(FaultKind.SLOW, seconds=seconds)

    @classmethod
    def cut(cls, at_byte: int, side: Side = "answer") -> Self:
        """Close both connections in an orderly way in the middle of the body."""
        return cls(FaultKind.CUT, at_byte=at_byte, side=side)

    @classmethod
    def reset(cls, at_byte: int, side: Side = "answer") -> Self:
        """Reset both connections in the middle of the body."""
        return cls(FaultKind.RESET, at_byte=at_byte, side=side)

    @classmethod
    def stall(cls, at_byte: int, side: Side = "answer") -> Self:
        """Stop sending in the middle of the body, with both connections open, until `heal`."""
        return cls(FaultKind.STALL, at_byte=at_byte, side=side)

    @classmethod
    def flip(cls, at_byte: int, side: Side = "answer") -> Self:
        """Flip the lowest bit of one byte."""
        return cls(FaultKind.FLIP, at_byte=at_byte, side=side)


async def with_fault(
    body: AsyncIterator[bytes],
    fault: Fault,
    count_hit: Callable[[], None],
    healed: asyncio.Event,
) -> AsyncIterator[bytes]:
    """Yield `body` with `fault` applied. `count_hit` is called when the fault's byte arrives.

    Raises:
        EOFError: the connection must be closed.
        ConnectionResetError: the connection must be reset.
    """
    begin = 0
    async for piece in body:
        at = fault.at_byte - begin
        begin += len(piece)
        if not 0 <= at < len(piece):
            yield piece
            continue
        count_hit()
        yield piece[:at]
        match fault.kind:
            case FaultKind.CUT:
                raise EOFError("cut, as asked for")
            case FaultKind.RESET:
                raise ConnectionResetError("reset, as asked for")
            case FaultKind.STALL:
                await healed.wait()
                yield piece[at:]
            case _:
                yield bytes([piece[at] ^ 1]) + piece[at + 1 :]


def error_answer(fault: Fault, request: Head, *, keep_alive: bool) -> bytes:
    """Return S3's complete answer to `request` for the fault."""
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
