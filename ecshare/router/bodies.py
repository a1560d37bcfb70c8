# SPDX-License-Identifier: Apache-2.0
"""A request's body: how it may come, how long it may take, and what it may cost."""

import asyncio

from aiohttp import hdrs, web

from ecshare.router.bulk import Bulk
from ecshare.router.config import MIB, RouterConfig
from ecshare.router.errors import ApiError
from ecshare.router.memory import Share
from ecshare.router.middleware import too_large

_SLOWEST_BYTES_A_S = 64 * 1024
_MAX_TEXT_BYTES = 32 * MIB
_TEXT_COST = 8
"""What a byte of JSON takes once it is decoded and on its way to an engine: four bytes where it is
beside an emoji, and copies in UTF-8."""
_MAX_MARKS = 1_000_000
_MARKS = (b",", b":", b"[", b"{")
_MARK_COST = 100
"""Every value of a list or an object comes after a mark; an empty object takes 80 bytes."""
_COUNTED_AT_ONCE = MIB


async def read_body(
    http: web.Request, config: RouterConfig, share: Share, bulk: Bulk
) -> bytes | bytearray:
    """Return the body's JSON, its long base64 texts put into `bulk`.

    What it costs is taken from `share`. Raises ApiError where the body is packed, too large, too
    slow, or more than there is memory for.
    """
    if http.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower() not in ("", "identity"):
        # As vLLM does not take it either; and a small one may hold gigabytes.
        raise ApiError(415, "The body must not be packed: leave the Content-Encoding out.")
    json = await bulk.take_out(await _received(http, config, share))
    if len(json) > _MAX_TEXT_BYTES:
        message = f"The body is larger than {_MAX_TEXT_BYTES // MIB} MiB without its base64 texts."
        raise ApiError(413, message, code="request_too_large")
    share.take(len(json) * _TEXT_COST + _num_marks(json) * _MARK_COST)
    return json


def _num_marks(json: bytes | bytearray) -> int:
    """Return an upper bound on the JSON's values; raises ApiError where they are too many.

    Marks inside strings count too, which is quick: a prompt that has so many fits no model.
    """
    number = 0
    for start in range(0, len(json), _COUNTED_AT_ONCE):
        end = start + _COUNTED_AT_ONCE
        number += sum(json.count(mark, start, end) for mark in _MARKS)
        if number > _MAX_MARKS:
            message = f"The body has more than {_MAX_MARKS:,} commas, colons and brackets."
            raise ApiError(400, message, code="request_too_large")
    return number


async def _received(http: web.Request, config: RouterConfig, share: Share) -> bytearray:
    length = http.content_length
    if length is not None:
        _check_length(length, config)
        share.take(length)  # now: better refused at once than in the middle
    body = bytearray()
    try:
        async with asyncio.timeout(config.client_timeout_s) as deadline:
            latest_s = deadline.when() or 0.0
            while chunk := await http.content.readany():
                if length is None:
                    share.take(len(chunk))
                body += chunk
                _check_length(len(body), config)
                deadline.reschedule(latest_s + len(body) / _SLOWEST_BYTES_A_S)
    except TimeoutError as exc:
        raise ApiError(408, "The body came too slowly.", code="body_timeout") from exc
    return body


def _check_length(num_bytes: int, config: RouterConfig) -> None:
    if num_bytes > config.max_body_bytes:
        raise too_large(config)
