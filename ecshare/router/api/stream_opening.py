# SPDX-License-Identifier: Apache-2.0
"""The start of a streamed answer: whether it is one, or an error."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct

_MAX_OPENING_BYTES = 64 * 1024
_MAX_IDLE_BYTES = 64 * 1024
"""What clients get of comments before the first event. An idle stream has far fewer."""
_SERVER_ERROR = 500
_BOM = b"\xef\xbb\xbf"
# A CR at the end may be the first half of a CRLF.
_END_OF_LINE = re.compile(rb"\r\n|\n|\r(?!\Z)")
# Events of the Responses and the Messages API that precede the first token.
_PREFACES = ("response.created", "response.in_progress", "message_start", "ping")
_FAILURES = ("error", "response.failed")

Next = Callable[[], Awaitable[bytes]]
"""Returns what comes next of a stream; empty at its end."""
PassOn = Callable[[bytes], Awaitable[None]]


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
    """Without what was passed on already."""
    error_status: int | None = None
    """The status of the error with which the stream begins, None if it begins with an answer."""


async def read_opening(next_chunk: Next, pass_on: PassOn) -> Opening:
    """Read a stream up to its first event that says more than who speaks.

    vLLM sends the role first, together with the first token or the error. So an error can still be
    answered by other means, and no token is held back.

    Comments, and all else that is no event, are no part of an answer: a server sends them while its
    engine does nothing. They are given to `pass_on` as they arrive, up to 64 KiB of them.
    """
    events = _FirstEvents()
    num_passed_on = 0
    while chunk := await next_chunk():
        idle = events.feed(chunk)
        if events.telling is not None:
            return Opening(bytes(idle + events.held), _error_status(events.telling))
        if len(events.held) > _MAX_OPENING_BYTES:
            return Opening(bytes(idle + events.held))
        if idle and num_passed_on + len(idle) <= _MAX_IDLE_BYTES:
            num_passed_on += len(idle)
            await pass_on(bytes(idle))
    # A CR at the end of all is the end of a line.
    idle = events.feed(b"\n") if events.held.endswith(b"\r") else bytearray()
    status = None if events.telling is None else _error_status(events.telling)
    return Opening(bytes(idle + events.held), status)


class _FirstEvents:
    """A stream as it arrives, up to its first event that tells something."""

    def __init__(self) -> None:
        self.held = bytearray()
        """All that came, without what belongs to no event."""
        self.telling: _Event | None = None
        self._line = b""
        """The end of `held` that is no whole line yet."""
        self._begin = 0
        """Where the event begins in `held` that is not whole yet."""
        self._data: list[bytes] = []
        """Its lines of data."""
        self._is_first_line = True

    def feed(self, chunk: bytes) -> bytearray:
        """Add what has arrived. Returns what belongs to no event, as far as it is known now."""
        text = self._line + chunk
        searched = max(0, len(self._line) - 1)  # up to a CR
        if self._is_first_line:
            if text != _BOM and _BOM.startswith(text):
                self._hold_line(text)
                return bytearray()
            self._is_first_line = False
            text, searched = text.removeprefix(_BOM), 0
        self._hold_line(b"")
        idle, begin = bytearray(), 0
        for end in _END_OF_LINE.finditer(text, searched):
            idle += self._take(text[begin : end.start()], end[0])
            begin = end.end()
            if self.telling is not None:
                break
        self._hold_line(text[begin:])
        return idle

    def _hold_line(self, line: bytes) -> None:
        del self.held[len(self.held) - len(self._line) :]
        self._line = line
        self.held += line

    def _take(self, line: bytes, end: bytes) -> bytes:
        """Take a whole line. Returns what turns out to belong to no event."""
        is_within = len(self.held) > self._begin
        if not is_within and (not line or line.startswith(b":")):
            return line + end
        self.held += line + end
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value)
            return b""
        return self._end_event()

    def _end_event(self) -> bytes:
        """Read the event that has ended. Returns it if it is none, because it has no data."""
        if not self._data:
            idle = bytes(self.held[self._begin :])
            del self.held[self._begin :]
            return idle
        event = _parsed(b"\n".join(self._data))
        self._data.clear()
        self._begin = len(self.held)
        if not _is_preface(event):
            self.telling = event
        return b""


def _parsed(data: bytes) -> _Event:
    """Return what an event says, an empty one if it says something else."""
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
