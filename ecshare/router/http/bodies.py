# SPDX-License-Identifier: Apache-2.0
"""Reads request bodies, within limits of format, size, speed and memory."""

import asyncio
from codecs import BOM_UTF8
from json import detect_encoding

from aiohttp import hdrs, web

from ecshare.router.api.errors import ApiError
from ecshare.router.http.blobs import Blobs
from ecshare.router.http.memory import Reservation
from ecshare.router.http.responses import too_large
from ecshare.router.options.config import RouterConfig
from ecshare.router.options.values import MIB

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


async def read_body(
    http: web.Request, config: RouterConfig, reservation: Reservation, blobs: Blobs
) -> bytes | bytearray:
    """Return the body's JSON as UTF-8, with its long base64 texts moved to `blobs`.

    The memory that the body needs is taken from `reservation`.

    Raises:
        ApiError: the body is not JSON by its header, compressed, too large or too slow, or there is
            no memory for it.
    """
    check_content_type(http)
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


def check_content_type(http: web.Request) -> None:
    """Check that the client says that it sends JSON, as vLLM does.

    A browser sends other types for any page without asking first (CORS), so that any page could
    have a router on this host or in this network work for it.

    Raises:
        ApiError: it does not.
    """
    given = http.headers.get(hdrs.CONTENT_TYPE, "").lower()
    if given.partition(";")[0] != "application/json":
        message = "Unsupported media type: send the header `Content-Type: application/json`."
        raise ApiError(400, message, code="wrong_content_type")


def _as_utf8(body: bytearray, reservation: Reservation) -> bytearray:
    """Return JSON of any encoding that vLLM reads: UTF-8, with a byte order mark or without,
    UTF-16 and UTF-32.

    Raises:
        ApiError: it is malformed, too large or there is no memory for it.
    """
    encoding = detect_encoding(body[:4])
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        del body[: len(BOM_UTF8)]
        return body
    if len(body) > _MAX_TEXT_BYTES:
        message = f"A body in {encoding} must not be larger than {_MAX_TEXT_BYTES // MIB} MiB."
        raise ApiError(413, message, code="request_too_large")
    reservation.take(len(body) * _DECODED_COST)
    try:
        return bytearray(body.decode(encoding).encode())
    except UnicodeError as exc:
        raise ApiError(400, f"The body is not valid {encoding}.") from exc


def _num_separators(json: bytes | bytearray) -> int:
    """Return an upper bound on the number of values in the JSON.

    Separators inside strings count too, which keeps it fast. A prompt with that many fits no model.

    Raises:
        ApiError: there are too many.
    """
    number = 0
    for start in range(0, len(json), _COUNTED_AT_ONCE):
        end = start + _COUNTED_AT_ONCE
        number += sum(json.count(mark, start, end) for mark in _SEPARATORS)
        if number > _MAX_SEPARATORS:
            message = f"The body has more than {_MAX_SEPARATORS:,} commas, colons and brackets."
            raise ApiError(400, message, code="request_too_large")
    return number


async def _received(http: web.Request, config: RouterConfig, reservation: Reservation) -> bytearray:
    length = http.content_length
    if length is not None:
        _check_length(length, config)
        reservation.expect(length)  # refuse at once rather than half-way
    body = bytearray()
    try:
        async with asyncio.timeout(config.client_timeout_s) as deadline:
            latest_s = deadline.when() or 0.0
            while chunk := await http.content.readany():
                reservation.take(len(chunk))
                body += chunk
                _check_length(len(body), config)
                if len(body) != length:
                    deadline.reschedule(latest_s + len(body) / SLOWEST_BYTES_A_S)
    except TimeoutError as exc:
        raise ApiError(408, "The body came too slowly.", code="body_timeout") from exc
    return body


def _check_length(num_bytes: int, config: RouterConfig) -> None:
    if num_bytes > config.max_body_bytes:
        raise too_large(config)
