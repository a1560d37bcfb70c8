# SPDX-License-Identifier: Apache-2.0
"""The identity of a media item: a digest of its bytes. Pure."""

from collections.abc import Iterator

import pybase64
from blake3 import blake3

from ecshare.router.http.bodies import Blobs
from ecshare.store.keys import MEDIA_DIGESTS

_HASHED_AT_ONCE = 256 * 1024  # base64; whole groups of four


def is_inline(url: str) -> bool:
    """Tell whether the url contains the media itself."""
    return url[:5].lower() == "data:"


def inline_url(base64: str) -> str:
    """Return a data: url for downloaded bytes."""
    # vLLM ignores the type but for video/jpeg, which a foreign server could send.
    return f"data:application/octet-stream;base64,{base64}"


def identity(modality: str, url: str, blobs: Blobs | None = None) -> str:
    """Return an item's uuid, which `MEDIA_DIGESTS` describes, by the bytes in its data: url.

    `blobs` holds the long texts of the url. Any thread may call. The url is read as vLLM reads it.

    Raises:
        ValueError: the url holds no valid base64.
    """
    blobs = blobs or Blobs()
    head, comma, text = url[5:].partition(",")
    media_type, semicolon, encoding = head.rpartition(";")
    if not comma or not semicolon or encoding != "base64":
        raise ValueError("A data: url must read data:TYPE;base64,DATA.")
    digest = MEDIA_DIGESTS[modality].copy()
    if modality == "video" and media_type.partition(";")[0].lower() == "video/jpeg":
        # Pictures joined by commas: the boundaries between them are part of the content.
        digest.update(b"video/jpeg\0")
        for frame in text.split(","):
            digest.update(_hashed(frame, blake3(), blobs).digest())
        return digest.hexdigest()
    return _hashed(text, digest, blobs).hexdigest()


def _hashed(text: str, digest: blake3, blobs: Blobs) -> blake3:
    """Add the decoded base64 to `digest`, and return it.

    Raises:
        ValueError: the text is empty or malformed.
    """
    try:
        base64 = blobs.resolve(text)
        for decoded in _decoded(base64):
            digest.update(decoded)
    except ValueError as exc:
        raise ValueError("The base64 text is malformed.") from exc
    if not base64:
        raise ValueError("The media item is empty.")
    return digest


def _decoded(base64: bytes | memoryview) -> Iterator[bytes]:
    """Yield the decoded bytes piece by piece, so that other threads can run in between.

    Raises:
        ValueError: the text is malformed.
    """
    for start in range(0, len(base64), _HASHED_AT_ONCE):
        # vLLM's own decoder with its strictness: both get the same bytes, or both fail.
        decoded = pybase64.b64decode(base64[start : start + _HASHED_AT_ONCE], validate=True)
        is_last_resort = start + _HASHED_AT_ONCE >= len(base64)
        if not is_last_resort and len(decoded) < _HASHED_AT_ONCE // 4 * 3:
            raise ValueError("padding in the middle")  # the piece alone is well-formed
        yield decoded
