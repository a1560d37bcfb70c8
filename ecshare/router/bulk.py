# SPDX-License-Identifier: Apache-2.0
"""The long base64 texts of a request, kept out of its JSON.

A picture is a text of megabytes in the JSON of a chat completion. To decode and encode it with the
rest would copy it for each stage, and hold the event loop for each copy. So every long run of
base64 is replaced by a name before the JSON is decoded, and goes out from where it came in. Names
are made of a secret number per request: no client can write one.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_BLOCK_BYTES = 16 * 1024
"""A run is found if it covers one whole block; so all runs of twice this size are."""
_BLOCKS_AT_ONCE = 64
_LONGEST_ESCAPE = 5
"""How much of an escape such as backslash u0041 may look like base64."""
_CHUNK_BYTES = 64 * 1024
_DIGITS = 6


class Bulk:
    """The long texts of one request. `add` and `take_out` belong to the event loop's thread."""

    def __init__(self) -> None:
        self._mark = "x" + secrets.token_hex(16)
        self._texts: list[memoryview] = []

    def add(self, text: bytes | bytearray | memoryview) -> str:
        """Keep some base64 text, as it is and without a copy; returns its name."""
        name = f"{self._mark}{len(self._texts):0{_DIGITS}}"
        self._texts.append(memoryview(text))
        return name

    async def take_out(self, body: bytearray) -> bytes | bytearray:
        """Return the JSON in `body` with names instead of its long texts.

        Keeps views of `body`, which must not change any more.
        """
        pieces: list[bytes | memoryview] = []
        end = 0
        for first, last in [run async for run in _runs(body)]:
            start = _start(body, first)
            if body[start - 1 : start] == b"\\":
                start += _LONGEST_ESCAPE
            pieces.append(memoryview(body)[end:start])
            end = _end(body, last)
            pieces.append(self.add(memoryview(body)[start:end]).encode())
        return b"".join([*pieces, memoryview(body)[end:]]) if pieces else body

    def clear(self) -> None:
        """Let go of all texts."""
        self._texts.clear()

    def holds(self, text: str) -> bool:
        """Tell whether a string of the JSON stands for, or contains, a long text."""
        return self._mark in text

    def resolve(self, text: str) -> bytes | memoryview:
        """Return what a string of the JSON stands for; raises ValueError if it is not ASCII."""
        pieces = [piece for piece in self.pieces(text.encode("ascii")) if piece]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pieces(self, json: bytes) -> Iterator[bytes | memoryview]:
        """Yield encoded JSON with the texts themselves instead of their names."""
        head, *rest = json.split(self._mark.encode())
        yield head
        for part in rest:
            yield self._texts[int(part[:_DIGITS])]
            yield part[_DIGITS:]


class Payload:
    """JSON on its way out, in pieces that are not copied together.

    Has no texts of its own: `Bulk` alone holds them, so they go when it lets go of them, whoever
    still refers to the payload.
    """

    def __init__(self, bulk: Bulk, json: bytes) -> None:
        self._bulk = bulk
        self._json = json
        self.num_bytes = sum(map(len, bulk.pieces(json)))

    def whole(self) -> bytes | None:
        """Return a short one in one piece; None: it is long."""
        return b"".join(self._bulk.pieces(self._json)) if self.num_bytes <= _CHUNK_BYTES else None

    async def chunks(self) -> AsyncIterator[bytes | memoryview]:
        """Yield it in chunks that hold the event loop for a moment only."""
        for piece in self._bulk.pieces(self._json):
            for start in range(0, len(piece), _CHUNK_BYTES):
                yield piece[start : start + _CHUNK_BYTES]


async def _runs(body: bytearray) -> AsyncIterator[tuple[int, int]]:
    """Yield where the first and the last whole block of each run begin."""
    first: int | None = None
    for start in range(0, len(body), _BLOCK_BYTES):
        if start // _BLOCK_BYTES % _BLOCKS_AT_ONCE == 0:
            await asyncio.sleep(0)
        block = body[start : start + _BLOCK_BYTES]
        if len(block) == _BLOCK_BYTES and not block.translate(None, _ALPHABET):
            first = start if first is None else first
        elif first is not None:
            yield first, start - _BLOCK_BYTES
            first = None
    if first is not None:
        yield first, (len(body) // _BLOCK_BYTES - 1) * _BLOCK_BYTES


def _start(body: bytearray, block: int) -> int:
    """Return where the run that covers this block begins; it does not cover the one before."""
    before = max(block - _BLOCK_BYTES, 0)
    return before + len(body[before:block].rstrip(_ALPHABET))


def _end(body: bytearray, block: int) -> int:
    """Return where the run that covers this block ends; it does not cover the next."""
    start = block + _BLOCK_BYTES
    after = body[start : start + _BLOCK_BYTES]
    return start + len(after) - len(after.lstrip(_ALPHABET))
