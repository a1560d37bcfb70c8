# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: read within limits of format, size, speed and memory, and sent on.

A picture is megabytes of text in the JSON of a chat completion. Decoding and encoding it with the
rest would copy it for each stage, and block the event loop for each copy. So every long run of
base64 is replaced by a placeholder before the JSON is decoded, and is sent from the buffer in which
it arrived. Placeholders contain a random number that is new for each request: no client can forge
one.
"""

import asyncio
import secrets
from codecs import BOM_UTF8
from json import detect_encoding

import msgspec
import pybase64
from aiohttp import hdrs, web

from ecshare.router.api.client_request import too_deep
from ecshare.router.api.errors import ApiError
from ecshare.router.options.config import RouterConfig
from ecshare.router.options.values import MIB
from ecshare.router.types import Work

# --- memory ---

_RETRY_AFTER_S = 2.0
_SMALL_BYTES = 1024 * 1024
_SHARE_FOR_SMALL = 8


class MemoryBudget:
    """A limit in bytes that requests share. Belongs to the event loop's thread.

    An eighth of it is for small requests alone, of up to 1 MiB: a few clients with large bodies,
    which they may send as slowly as they are allowed to, cannot keep all others out.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.large_limit_bytes = limit_bytes - limit_bytes // _SHARE_FOR_SMALL
        """The limit for requests that are not small."""
        self.used_bytes = 0


class Reservation:
    """The memory that one request has reserved, and is to release."""

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self.held_bytes = 0

    def expect(self, num_bytes: int) -> None:
        """Check that so much more would fit now. Reserves nothing.

        Raises:
            ApiError: it would not fit (429).
        """
        memory = self._memory
        is_small = self.held_bytes + num_bytes <= _SMALL_BYTES
        limit_bytes = memory.limit_bytes if is_small else memory.large_limit_bytes
        # It always fits if this request holds all that is used: a limit that is too low for one
        # request serves it all the same.
        if memory.used_bytes != self.held_bytes and memory.used_bytes + num_bytes > limit_bytes:
            raise ApiError(
                429,
                "The requests in flight take all the memory there is for them.",
                code="too_many_requests",
                retry_after_s=_RETRY_AFTER_S,
            )

    def keep(self, num_bytes: int) -> None:
        """Release all but `num_bytes` of what is reserved."""
        released = max(0, self.held_bytes - num_bytes)
        self.held_bytes -= released
        self._memory.used_bytes -= released

    def release(self) -> None:
        """Release all."""
        self._memory.used_bytes -= self.held_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Reserve so much more.

        Raises:
            ApiError: it does not fit (429).
        """
        memory = self._memory
        if memory.used_bytes + num_bytes > memory.large_limit_bytes:  # else it fits in any case
            self.expect(num_bytes)
        self.held_bytes += num_bytes
        memory.used_bytes += num_bytes


# --- long base64 texts ---

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_OTHERS = bytes(byte not in _ALPHABET for byte in range(256))
"""A translation that leaves 0 of a character of base64, and 1 of any other byte."""
_OTHER = b"\1"
_QUOTE = b'"'
_BLOCK_BYTES = 16 * 1024
"""A run is found if it covers a whole block, so every run of twice this size is found."""
_MOST_BYTES = 16 * _BLOCK_BYTES
"""So much is decoded at once."""
_STEPS_AT_ONCE = 64
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

    async def extract(self, body: bytes) -> bytes:
        """Return the JSON in `body` with placeholders instead of its long texts, and keep views of
        `body`.
        """
        if len(body) < _BLOCK_BYTES:  # it has no run that would be found
            return body
        pieces: list[bytes | memoryview] = []
        end = 0
        for block, blocks_end in await _runs(body):
            start = _start(body, block)
            if body[start - 1 : start] == b"\\":
                start += _LONGEST_ESCAPE
            pieces.append(memoryview(body)[end:start])
            end = _end(body, blocks_end)
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

    def pieces(self, json: bytes) -> list[bytes | memoryview]:
        """Return pieces of encoded JSON, each placeholder replaced by its text."""
        if not self._mark:
            return [json]
        head, *rest = json.split(self._mark.encode())
        pieces: list[bytes | memoryview] = [head]
        for part in rest:
            pieces += (self._texts[int(part[:_DIGITS])], part[_DIGITS:])
        return pieces


class Payload:
    """Outgoing JSON, in pieces that are never joined.

    Owns no text: `Blobs` alone does. Clearing it frees them, whoever still refers to the payload.
    """

    def __init__(self, blobs: Blobs, content: object, work: Work = _NO_WORK) -> None:
        """`work`: what it is for an engine.

        Raises:
            ApiError: `content` is nested too deeply.
        """
        self.work = work
        self._bulk = blobs
        try:
            self._json = msgspec.json.encode(content)
        except RecursionError as exc:  # decoding just succeeded, and our fields add a level
            raise too_deep() from exc
        self.num_bytes = sum(map(len, blobs.pieces(self._json)))

    def pieces(self) -> list[bytes | memoryview]:
        """Return the payload; pieces may be large."""
        return self._bulk.pieces(self._json)


async def _runs(body: bytes) -> list[list[int]]:
    """Return where the whole blocks of each run begin and end."""
    runs: list[list[int]] = []
    start = doubted = num_steps = 0
    while start < len(body):
        num_steps += 1
        if num_steps % _STEPS_AT_ONCE == 0:
            await asyncio.sleep(0)
        end = min(start + (_BLOCK_BYTES if start < doubted else _MOST_BYTES), len(body))
        quote = body.find(_QUOTE, start, end)
        size = ((end if quote < 0 else quote) - start) // _BLOCK_BYTES * _BLOCK_BYTES
        if size and not _is_base64(body, start, size):
            if size > _BLOCK_BYTES:
                doubted = start + size  # up to there it is looked at block by block
                continue
            size = 0
        if size and runs and runs[-1][1] == start:
            runs[-1][1] += size
        elif size:
            runs.append([start, start + size])
        start += size or _BLOCK_BYTES
    return runs


def _is_base64(body: bytes, start: int, size: int) -> bool:
    """Tell whether whole blocks have no other character. To decode them takes a tenth of the time
    that a look at each character takes, which decides where one has padding in the middle.
    """
    end = start + size
    try:
        pybase64.b64decode(memoryview(body)[start:end], validate=True)
    except ValueError:
        return size == _BLOCK_BYTES and _OTHER not in _marked(body, start, end)
    return True


def _start(body: bytes, block: int) -> int:
    """Return where the run begins whose first whole block is at `block`."""
    before = max(block - _BLOCK_BYTES, 0)
    return before + 1 + _marked(body, before, block).rfind(_OTHER)


def _end(body: bytes, start: int) -> int:
    """Return where the run ends whose last whole block ends at `start`."""
    after = _marked(body, start, start + _BLOCK_BYTES)
    end = after.find(_OTHER)
    return start + (len(after) if end < 0 else end)


def _marked(body: bytes, start: int, end: int) -> bytearray:
    """Return a part with all characters marked that are no base64."""
    return bytearray(memoryview(body)[start:end]).translate(_OTHERS)  # bytes' own takes longer


# --- what clients send ---

SLOWEST_BYTES_A_S = 64 * 1024
"""Clients that send a body, or take an answer, more slowly are not waited for."""
_MAX_TEXT_BYTES = 16 * MIB
"""Two million tokens, also where each character of a text is six of its JSON."""
_TEXT_COST = 8
"""Bytes of memory for each byte of JSON, decoded and encoded again. A string with one emoji takes
four bytes a character, and the copies in UTF-8 come on top."""
_DECODED_COST = 4
"""Bytes of memory for each byte of UTF-16: as Python's text, and as UTF-8."""
_MAX_SEPARATORS = 1_000_000
_SEPARATORS = (b",", b":", b"[", b"{")
_SEPARATOR_COST = 100
"""Bytes of memory for each value. A separator precedes every value of a list or an object; an empty
object takes 80 bytes."""
_COUNTED_AT_ONCE = MIB
_CHUNK_COST = 64
"""Bytes of memory for each part in which a body arrives, besides its own."""


async def read_body(
    http: web.BaseRequest, config: RouterConfig, reservation: Reservation, blobs: Blobs
) -> bytes:
    """Return the body's JSON as UTF-8, with its long base64 texts moved to `blobs`.

    The memory that the body needs is taken from `reservation`.

    Raises:
        ApiError: the body is not JSON by its header, compressed, too large or too slow, or there is
            no memory for it.
    """
    # A browser sends other types for any page without asking first (CORS), so that any page could
    # have a router on this host or in this network work for it.
    if http.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].lower() != "application/json":
        message = "Unsupported media type: send the header `Content-Type: application/json`."
        raise ApiError(400, message, code="wrong_content_type")
    if http.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower() not in ("", "identity"):
        # vLLM does not accept compressed bodies either, and a small one may expand to gigabytes.
        raise ApiError(415, "The body must not be packed: leave the Content-Encoding out.")
    received = _as_utf8(await _received(http, config, reservation), reservation)
    json = await blobs.extract(received)
    if len(json) > _MAX_TEXT_BYTES:
        message = f"The body is larger than {_MAX_TEXT_BYTES // MIB} MiB without its base64 texts."
        raise ApiError(413, message, code="request_too_large")
    reservation.take(len(json) * _TEXT_COST + _num_separators(json) * _SEPARATOR_COST)
    return json


def _as_utf8(body: bytes, reservation: Reservation) -> bytes:
    """Return JSON of any encoding that vLLM reads: UTF-8, with a byte order mark or without,
    UTF-16 and UTF-32.

    Raises:
        ApiError: it is malformed, too large or there is no memory for it.
    """
    encoding = detect_encoding(body[:4])
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[len(BOM_UTF8) :]
    if len(body) > _MAX_TEXT_BYTES:
        message = f"A body in {encoding} must not be larger than {_MAX_TEXT_BYTES // MIB} MiB."
        raise ApiError(413, message, code="request_too_large")
    reservation.take(len(body) * _DECODED_COST)
    try:
        return body.decode(encoding).encode()
    except UnicodeError as exc:
        raise ApiError(400, f"The body is not valid {encoding}.") from exc


def _num_separators(json: bytes) -> int:
    """Return an upper bound on the number of values in the JSON.

    Separators inside strings count too, which keeps it fast. A prompt with that many fits no model.

    Raises:
        ApiError: there are too many.
    """
    number = 0
    for start in range(0, len(json), _COUNTED_AT_ONCE):
        end = start + _COUNTED_AT_ONCE
        number += sum([json.count(mark, start, end) for mark in _SEPARATORS])
        if number > _MAX_SEPARATORS:
            message = f"The body has more than {_MAX_SEPARATORS:,} commas, colons and brackets."
            raise ApiError(400, message, code="request_too_large")
    return number


async def _received(http: web.BaseRequest, config: RouterConfig, reservation: Reservation) -> bytes:
    length = http.content_length
    if length is not None:
        if length > config.max_body_bytes:
            raise too_large(config)
        reservation.expect(length)  # refuse at once rather than half-way
    chunks: list[bytes] = []
    num_bytes = 0

    def add(chunk: bytes) -> None:
        nonlocal num_bytes
        reservation.take(len(chunk) + _CHUNK_COST)
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > config.max_body_bytes:
            raise too_large(config)

    if http.content.is_eof():  # it has come with its head: no time limit is needed
        add(http.content.read_nowait())
        return chunks[0]
    try:
        async with asyncio.timeout(config.client_timeout_s) as deadline:
            latest_s = deadline.when() or 0.0
            while chunk := await http.content.readany():
                add(chunk)
                if num_bytes != length:
                    deadline.reschedule(latest_s + num_bytes / SLOWEST_BYTES_A_S)
    except TimeoutError as exc:
        raise ApiError(408, "The body came too slowly.", code="body_timeout") from exc
    # A buffer that grows would be copied several times. No two bodies are joined at once, so all
    # bodies together take at most the size of one more.
    return b"".join(chunks)


def too_large(config: RouterConfig) -> ApiError:
    """Return the error for a body that exceeds the limit."""
    message = f"The body is larger than {config.max_body_bytes / MIB:g} MiB."
    return ApiError(413, message, code="request_too_large")
