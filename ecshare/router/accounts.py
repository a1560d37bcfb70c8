# SPDX-License-Identifier: Apache-2.0
"""What D's answer tells of the tokens of its prompt. Pure."""

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from ecshare.router.client_request import Request

_KEPT_CHUNKS = 4
_MAX_END_BYTES = 64 * 1024
_BETWEEN = re.compile(rb"\r?\n")
_FIELD = b"data:"


@dataclass
class Passed:
    """An answer as it was passed on: its size, and the last of it. Empty: none was."""

    num_bytes: int = 0
    is_stream: bool = False
    _last: deque[bytes | bytearray] = field(default_factory=lambda: deque(maxlen=_KEPT_CHUNKS))

    def add(self, chunk: bytes | bytearray) -> None:
        """Note the next chunk."""
        self.num_bytes += len(chunk)
        self._last.append(chunk)

    def told(self) -> Request:
        """Return the `usage` and the `kv_transfer_params` that it told, as far as it did."""
        if not self.is_stream:
            return _read(self._last[-1]) if self._last else {}
        lines = _BETWEEN.split(b"".join(self._last)[-_MAX_END_BYTES:])
        events = (_read(line.removeprefix(_FIELD)) for line in reversed(lines) if b"usage" in line)
        return next((event for event in events if event), {})


class _Told(Struct):
    usage: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    response: "_Told | None" = None
    """In the last event of the Responses API."""


def _read(json: bytes | bytearray) -> Request:
    try:
        told = msgspec.json.decode(json, type=_Told)
    except (ValueError, RecursionError):
        return {}
    told = told.response or told
    fields = {"usage": told.usage, "kv_transfer_params": told.kv_transfer_params}
    return {name: value for name, value in fields.items() if value}
