# SPDX-License-Identifier: Apache-2.0
"""Reads request bodies, within limits of format, size, speed and memory."""

import asyncio

from aiohttp import hdrs, web

from ecshare.router.blobs import Blobs
from ecshare.router.config import MIB, RouterConfig
from ecshare.router.errors import ApiError
from ecshare.router.memory import Reservation
from ecshare.router.middleware import too_large

SLOWEST_BYTES_A_S = 64 * 1024
"""Clients that send a body, or take an answer, more slowly are not waited for."""
_MAX_TEXT_BYTES = 16 * MIB
"""Two million tokens, also where each character of a text is six of its JSON."""
_TEXT_COST = 8
"""Bytes of memory for each byte of JSON, decoded and encoded again. A string with one emoji takes
four bytes a character, and the copies in UTF-8 come on top."""
_MAX_SEPARATORS = 1_000_000
_SEPARATORS = (b",", b":", b"[", b"{")
_SEPARATOR_COST = 100
"""Bytes of memory for each value. A separator precedes every value of a list or an object; an empty
object takes 80 bytes."""
_COUNTED_AT_ONCE = MIB


async def read_body(
    http: web.Request, config: RouterConfig, reservation: Reservation, blobs: Blobs
) -> bytes | bytearray:
    """Return the body's JSON, with its long base64 texts moved to `blobs`.

    The memory that the body needs is taken from `reservation`.

    Raises:
        ApiError: the body is compressed, too large or too slow, or there is no memory for it.
    """
    if http.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower() not in ("", "identity"):
        # vLLM does not accept compressed bodies either, and a small one may expand to gigabytes.
        raise ApiError(415, "The body must not be packed: leave the Content-Encoding out.")
    json = await blobs.extract(await _received(http, config, reservation))
    if len(json) > _MAX_TEXT_BYTES:
        message = f"The body is larger than {_MAX_TEXT_BYTES // MIB} MiB without its base64 texts."
        raise ApiError(413, message, code="request_too_large")
    reservation.take(len(json) * _TEXT_COST + _num_separators(json) * _SEPARATOR_COST)
    return json


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
