# SPDX-License-Identifier: Apache-2.0
"""A request's body as its client meant it. aiohttp could do this too, but answers a body that it
cannot unpack with plain text and a traceback in the log."""

import asyncio
import zlib

from aiohttp import hdrs, web

from ecshare.router.errors import ApiError

_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_BARE_DEFLATE = -zlib.MAX_WBITS
_IN_THREAD_BYTES = 16 * 1024  # up to a thousand times as much, unpacked


async def read_body(http: web.Request, limit_bytes: int) -> bytes:
    """Return the whole body, unpacked; raises ApiError where that cannot be, or is too much.

    `limit_bytes` bounds what is unpacked; what comes in is bounded by the application.
    """
    packed = await http.read()
    coding = http.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if coding in ("", "identity"):
        return packed
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(400, "The body's Content-Encoding must be gzip or deflate, or left out.")
    try:
        if len(packed) > _IN_THREAD_BYTES:
            body = await asyncio.to_thread(_unpacked, packed, limit_bytes)
        else:
            body = _unpacked(packed, limit_bytes)
    except zlib.error as exc:
        raise ApiError(400, f"The body is not the {coding} that its header says.") from exc
    if len(body) > limit_bytes:
        raise web.HTTPRequestEntityTooLarge(limit_bytes, len(body))
    return body


def _unpacked(packed: bytes, limit_bytes: int) -> bytes:
    """Return what was packed, or the beginning of it that is larger than the limit."""
    is_bare = packed[:1] != b"\x1f" and int.from_bytes(packed[:2], "big") % 31 != 0
    unpacking = zlib.decompressobj(_BARE_DEFLATE if is_bare else _GZIP_OR_ZLIB)
    body = unpacking.decompress(packed, limit_bytes + 1)
    if len(body) <= limit_bytes and (not unpacking.eof or unpacking.unused_data):
        raise zlib.error("cut short, or more than one piece")
    return body
