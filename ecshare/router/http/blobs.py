# SPDX-License-Identifier: Apache-2.0
"""The long base64 texts of a request, kept out of its JSON.

A picture is megabytes of text in the JSON of a chat completion. Decoding and encoding it with the
rest would copy it for each stage, and block the event loop for each copy. So every long run of
base64 is replaced by a placeholder before the JSON is decoded, and is sent from the buffer in which
it arrived. Placeholders contain a random number that is new for each request: no client can forge
one.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

from ecshare.router.types import Work

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_OTHERS = bytes(byte not in _ALPHABET for byte in range(256))
"""A translation that leaves 0 of a character of base64, and 1 of any other byte."""
_OTHER = b"\1"
_BLOCK_BYTES = 16 * 1024
"""A run is found if it covers a whole block, so every run of twice this size is found."""
_BLOCKS_AT_ONCE = 64
_LONGEST_ESCAPE = 5
"""How many characters of an escape such as backslash u0041 may look like base64."""
_DIGITS = 6
_NO_WORK = Work()


class Blobs:
    """The long texts of one request. `add` and `extract` are for the event loop's thread."""

    def __init__(self) -> None:
        self._mark = ""  # until there is a text
        self._texts: list[memoryview] = []

    def add(self, text: bytes | bytearray | memoryview) -> str:
        """Keep a base64 text without copying it, and return its placeholder."""
        self._mark = self._mark or "x" + secrets.token_hex(16)
        name = f"{self._mark}{len(self._texts):0{_DIGITS}}"
        self._texts.append(memoryview(text))
        return name

    async def extract(self, body: bytearray) -> bytes | bytearray:
        """Return the JSON in `body` with placeholders instead of its long texts.

        Keeps views of `body`, which must not change any more.
        """
        if len(body) < _BLOCK_BYTES:  # it has no run that would be found
            return body
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
        """Release all texts."""
        self._texts.clear()

    def holds(self, text: str) -> bool:
        """Tell whether a string of the JSON contains a placeholder."""
        return bool(self._mark) and self._mark in text

    def length(self, text: str) -> int:
        """Return how long the text is that a string of the JSON stands for, about."""
        return sum(map(len, self.pieces(text.encode("utf-8", "replace"))))

    def resolve(self, text: str) -> bytes | memoryview:
        """Return the text that a string of the JSON stands for.

        Raises:
            ValueError: the string is not ASCII.
        """
        pieces = [piece for piece in self.pieces(text.encode("ascii")) if piece]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pieces(self, json: bytes) -> Iterator[bytes | memoryview]:
        """Yield pieces of encoded JSON, each placeholder replaced by its text."""
        if not self._mark:
            yield json
            return
        head, *rest = json.split(self._mark.encode())
        yield head
        for part in rest:
            yield self._texts[int(part[:_DIGITS])]
            yield part[_DIGITS:]


class Payload:
    """Outgoing JSON, in pieces that are never joined.

    Owns no text: `Blobs` alone does. Clearing it frees them, whoever still refers to the payload.
    """

    def __init__(self, blobs: Blobs, json: bytes, work: Work = _NO_WORK) -> None:
        """`work`: what it is for an engine."""
        self.work = work
        self._bulk = blobs
        self._json = json
        self.num_bytes = sum(map(len, blobs.pieces(json)))

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the payload; pieces may be large."""
        return self._bulk.pieces(self._json)


async def _runs(body: bytearray) -> AsyncIterator[tuple[int, int]]:
    """Yield the offsets of the first and the last whole block of each run."""
    first: int | None = None
    for start in range(0, len(body), _BLOCK_BYTES):
        if start // _BLOCK_BYTES % _BLOCKS_AT_ONCE == 0:
            await asyncio.sleep(0)
        block = body[start : start + _BLOCK_BYTES]
        if len(block) == _BLOCK_BYTES and _OTHER not in block.translate(_OTHERS):
            first = start if first is None else first
        elif first is not None:
            yield first, start - _BLOCK_BYTES
            first = None
    if first is not None:
        yield first, (len(body) // _BLOCK_BYTES - 1) * _BLOCK_BYTES


def _start(body: bytearray, block: int) -> int:
    """Return where the run that covers `block` begins. It does not cover the block before."""
    before = max(block - _BLOCK_BYTES, 0)
    return before + 1 + body[before:block].translate(_OTHERS).rfind(_OTHER)


def _end(body: bytearray, block: int) -> int:
    """Return where the run that covers `block` ends. It does not cover the block after."""
    start = block + _BLOCK_BYTES
    after = body[start : start + _BLOCK_BYTES].translate(_OTHERS)
    end = after.find(_OTHER)
    return start + (len(after) if end < 0 else end)
