# SPDX-License-Identifier: Apache-2.0
"""The start of a streamed answer: whether it is one, or an error."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import Struct

_MAX_OPENING_BYTES = 64 * 1024
_SERVER_ERROR = 500
_BETWEEN = re.compile(rb"\r?\n\r?\n")
_NAME = re.compile(rb"event:[^\r\n]*\r?\n")
# Events of the Responses and the Messages API that precede the first token.
_PREFACES = ("response.created", "response.in_progress", "message_start", "ping")
_FAILURES = ("error", "response.failed")


class _Choice(Struct):
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None
    type: str = ""


class Opening(Struct, frozen=True):
    """The first bytes of a stream."""

    content: bytes
    error_status: int | None = None
    """The status of the error with which the stream begins, None if it begins with an answer."""


async def read_opening(chunks: AsyncIterator[bytes]) -> Opening:
    """Read a stream up to its first event that says more than who speaks.

    vLLM sends the role first, together with the first token or the error. So an error can still be
    answered by other means, and no token is held back.
    """
    content = b""
    async for chunk in chunks:
        content += chunk
        *whole, _ = _BETWEEN.split(content)
        events = map(_parsed, whole)
        telling = next((event for event in events if not _is_preface(event)), None)
        if telling is not None:
            return Opening(content, _error_status(telling))
        if len(content) > _MAX_OPENING_BYTES:
            break
    return Opening(content)


def _parsed(event: bytes) -> _Event:
    """Return what an event says, an empty one if it says something else."""
    data = _NAME.sub(b"", event, count=1).removeprefix(b"data:")
    try:
        return msgspec.json.decode(data, type=_Event)
    except (ValueError, RecursionError):
        return _Event()


def _error_status(event: _Event) -> int | None:
    if event.error is None:
        return _SERVER_ERROR if event.type in _FAILURES else None
    code = event.error.get("code")
    return code if type(code) is int else _SERVER_ERROR


def _is_preface(event: _Event) -> bool:
    if event.type in _PREFACES:
        return True
    return bool(event.choices) and all(_is_role_alone(choice) for choice in event.choices)


def _is_role_alone(choice: _Choice) -> bool:
    if choice.delta is None or choice.finish_reason:
        return False
    return not any(choice.delta[name] for name in choice.delta.keys() - {"role"})
