# SPDX-License-Identifier: Apache-2.0
"""The token usage in D's answer, read from its last bytes. Pure."""

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from ecshare.router.api.client_request import Request

_KEPT_CHUNKS = 4
_MAX_END_BYTES = 64 * 1024
_BETWEEN = re.compile(rb"\r?\n")
_FIELD = b"data:"


@dataclass
class AnswerTail:
    """The size of an answer that was passed on, and the last of it. Empty: none was."""

    num_bytes: int = 0
    is_stream: bool = False
    _last: deque[bytes | bytearray] = field(default_factory=lambda: deque(maxlen=_KEPT_CHUNKS))

    def add(self, chunk: bytes | bytearray) -> None:
        """Note the next chunk."""
        self.num_bytes += len(chunk)
        self._last.append(chunk)

    def usage(self) -> Request:
        """Return the `usage` and the `kv_transfer_params` in it, as far as there are any."""
        if not self.is_stream:
            return _read(self._last[-1]) if self._last else {}
        lines = _BETWEEN.split(b"".join(self._last)[-_MAX_END_BYTES:])
        events = (_read(line.removeprefix(_FIELD)) for line in reversed(lines) if b"usage" in line)
        return next((event for event in events if event), {})


class _Usage(Struct):
    usage: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    response: "_Usage | None" = None
    """In the last event of the Responses API."""


def _read(json: bytes | bytearray) -> Request:
    try:
        found = msgspec.json.decode(json, type=_Usage)
    except (ValueError, RecursionError):
        return {}
    found = found.response or found
    fields = {"usage": found.usage, "kv_transfer_params": found.kv_transfer_params}
    return {name: value for name, value in fields.items() if value}
