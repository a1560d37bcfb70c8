# SPDX-License-Identifier: Apache-2.0
"""What a client is shown of D's answer: the usage of the whole request, and no transfer params.

D counts as cached what P has computed for this very request. P counts what was there before, so its
count takes the place of D's. All else is passed on byte for byte. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ecshare.router.api.client_request import TRANSFER_FIELDS
from ecshare.router.api.dialects import Dialect

_MARKS = (b"transfer_params", b"cached_tokens", b"cache_read_input_tokens")
"""A line without these is shown as it is, unread."""
_LINE_ENDS = (b"\n", b"\r")
_MAX_LINE_BYTES = 16 * 1024 * 1024
"""Of a line that is not whole. The rest of a longer one is shown as it is."""
_DATA = b"data:"

# In which object each API tells of cached tokens, and what stands there if nobody knows.
_DETAILS = {"prompt_tokens_details": None, "input_tokens_details": 0}
_OF_CACHE = ("cached_tokens", "created_cache_tokens")
# Anthropic's API counts them apart.
_APART = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


@dataclass
class PrefillUsage:
    """What P has told of the prompt of one request."""

    was_asked: bool = False
    """Whether P may have computed a part of it."""
    told: Mapping[str, Any] | None = None
    """P's usage, None while it has not answered."""


class _Answer(Struct):
    usage: Raw = Raw()
    kv_transfer_params: Raw = Raw()
    ec_transfer_params: Raw = Raw()
    response: "_Answer | None" = None
    """In events of the Responses API."""
    message: "_Answer | None" = None
    """In events of the Messages API."""


class ClientView:
    """Shows one client one answer, whole or as a stream. Belongs to the event loop's thread."""

    def __init__(self, dialect: Dialect, prefill: PrefillUsage) -> None:
        """`prefill` may change while the answer streams: P may answer after D has begun."""
        self._drops_params = dialect is Dialect.ANTHROPIC  # others say null where there are none
        self._prefill = prefill
        self._held = bytearray()

    def whole(self, body: bytes | bytearray) -> bytes | bytearray:
        """Return what is shown of a JSON answer."""
        return self._restated(body) if _is_marked(body) else body

    def chunk(self, chunk: bytes) -> bytes:
        """Return what is shown next of a stream: lines that are whole. Keeps the rest."""
        if self._held or not chunk.endswith(_LINE_ENDS):
            chunk = self._whole_lines(chunk)
        return self._lines(chunk) if _is_marked(chunk) else chunk

    def end(self) -> bytes:
        """Return what is left when the stream ends."""
        rest, self._held = bytes(self._held), bytearray()
        return self._lines(rest) if _is_marked(rest) else rest

    def _whole_lines(self, chunk: bytes) -> bytes:
        """Return the lines that end with `chunk`, and keep what follows them."""
        end = max(chunk.rfind(mark) for mark in _LINE_ENDS) + 1
        if not end and len(self._held) > _MAX_LINE_BYTES:
            end = len(chunk)
        if not end:
            self._held += chunk
            return b""
        lines = bytes(self._held) + chunk[:end]
        self._held = bytearray(chunk[end:])
        return lines

    def _lines(self, lines: bytes) -> bytes:
        return b"".join(
            _DATA + self._restated(line[len(_DATA) :])
            if line.startswith(_DATA) and _is_marked(line)
            else line
            for line in lines.splitlines(keepends=True)
        )

    def _restated(self, json: bytes | bytearray) -> bytes | bytearray:
        try:
            answer = msgspec.json.decode(json, type=_Answer)
        except (ValueError, RecursionError):
            return json  # it is of another shape, or only speaks of these fields
        told = answer.response or answer.message or answer
        for name in TRANSFER_FIELDS:
            if (params := bytes(getattr(told, name))) not in (b"", b"null"):
                json = _replaced(json, name, params, b"" if self._drops_params else b"null")
        if (usage := bytes(told.usage)) and self._prefill.was_asked:
            json = _replaced(json, "usage", usage, self._usage(usage))
        return json

    def _usage(self, of_decode: bytes) -> bytes:
        usage = msgspec.json.decode(of_decode)
        if not isinstance(usage, dict):
            return of_decode
        return msgspec.json.encode(_before_request(usage, self._prefill.told or {}))


def _is_marked(text: bytes | bytearray) -> bool:
    # Written out: for each event of each stream a generator costs more than the searches.
    transfers, cached, read = _MARKS
    return transfers in text or cached in text or read in text


def _before_request(usage: dict[str, Any], of_prefill: Mapping[str, Any]) -> dict[str, Any]:
    """Return D's usage with what P tells of the cache, and nothing of it if P does not tell."""
    restated = dict(usage)
    for name, unknown in _DETAILS.items():
        details, theirs = usage.get(name), of_prefill.get(name)
        if isinstance(details, dict):
            told = theirs if isinstance(theirs, dict) else {}
            counts = {key: told.get(key, unknown) for key in _OF_CACHE if key in details}
            restated[name] = details | counts
    if any(name in usage for name in _APART[1:]):
        told = {name: of_prefill[name] for name in _APART if name in of_prefill}
        total = sum(usage[name] for name in _APART if type(usage.get(name)) is int)
        for name in _APART:
            restated.pop(name, None)
        restated |= told or {_APART[0]: total}
    return restated


def _replaced(json: bytes | bytearray, name: str, value: bytes, new: bytes) -> bytes | bytearray:
    """Return `json` with another value of a field, or without the field if `new` is empty.

    `value` is its JSON as it stands there. Spaces around it are nobody's.
    """
    field = b'"%s":%s' % (name.encode(), value)
    start = json.rfind(field)
    if start < 0:  # spaces; the value itself is there
        start, field = json.rfind(value), value
        new = new or b"null"
    elif new:
        new = field[: -len(value)] + new
    end = start + len(field)
    if not new and json[start - 1 : start] == b",":
        start -= 1
    elif not new and json[end : end + 1] == b",":
        end += 1
    return json[:start] + new + json[end:]
