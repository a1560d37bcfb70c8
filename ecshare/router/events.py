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


class _Choice(Struct):
    delta: dict[str, Any] = {}
    finish_reason: str | None = None


class _Error(Struct):
    code: int = _SERVER_ERROR


class _Event(Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


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
        telling = next((event for event in events if not _is_role_alone(event)), None)
        if telling is not None:
            error = telling.error
            return Opening(content, None if error is None else error.code)
        if len(content) > _MAX_OPENING_BYTES:
            break
    return Opening(content)


def _parsed(event: bytes) -> _Event:
    """Return what an event says, an empty one if it says something else."""
    try:
        return msgspec.json.decode(event.removeprefix(b"data:"), type=_Event)
    except (ValueError, RecursionError):
        return _Event()


def _is_role_alone(event: _Event) -> bool:
    return bool(event.choices) and not any(
        choice.finish_reason or any(choice.delta[name] for name in choice.delta.keys() - {"role"})
        for choice in event.choices
    )
