# SPDX-License-Identifier: Apache-2.0
"""D's answer on its way to the client: how a stream begins, what is shown, and its usage. Pure.

D counts as cached what P has computed for this very request. P counts what was there before, so its
count takes the place of D's, and no transfer params are shown. All else is passed on as it is.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ecshare.router.api.client_request import TRANSFER_FIELDS, Request
from ecshare.router.api.errors import Dialect

Next = Callable[[], Awaitable[bytes]]
"""Returns what comes next of a stream; empty at its end."""
PassOn = Callable[[bytes], Awaitable[None]]

_DATA = b"data:"
_LINE_ENDS = (b"\n", b"\r")

# --- how a stream begins ---

_MAX_OPENING_BYTES = 64 * 1024
_MAX_IDLE_BYTES = 64 * 1024
"""What clients get of comments before the first event. An idle stream has far fewer."""
_SERVER_ERROR = 500
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
        if events.telling is not None or events.num_held > _MAX_OPENING_BYTES:
            return events.opening(idle)
        if idle and num_passed_on + len(idle) <= _MAX_IDLE_BYTES:
            num_passed_on += len(idle)
            await pass_on(idle)
    return events.opening(events.end())


class _FirstEvents:
    """A stream as it arrives, up to its first event that tells something."""

    def __init__(self) -> None:
        self.telling: _Event | None = None
        self._held = bytearray()
        """Events that are whole, and what follows the telling one."""
        self._event = bytearray()
        """The lines of the event that is not whole yet."""
        self._data: list[bytes] = []
        """Its data."""
        self._line = b""
        """The line that is not whole yet."""

    @property
    def num_held(self) -> int:
        """The number of bytes that arrived, without what belongs to no event."""
        return len(self._held) + len(self._event) + len(self._line)

    def opening(self, idle: bytes) -> Opening:
        """Return all that is held, behind `idle`."""
        status = None if self.telling is None else _error_status(self.telling)
        return Opening(b"".join((idle, self._held, self._event, self._line)), status)

    def feed(self, chunk: bytes) -> bytes:
        """Add what has arrived. Returns what belongs to no event, as far as it is known now."""
        lines = (self._line + chunk).splitlines(keepends=True)
        # A CR at the end may be the first half of a CRLF.
        self._line = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        idle = []
        for at, line in enumerate(lines):
            if self.telling is not None:
                self._held += b"".join(lines[at:])
                break
            idle.append(self._take(line))
        return b"".join(idle)

    def end(self) -> bytes:
        """Take the end of the stream for that of a line that ends with CR."""
        line = self._line
        if not line.endswith(b"\r"):
            return b""
        self._line = b""
        return self._take(line)

    def _take(self, line: bytes) -> bytes:
        """Take a whole line. Returns what turns out to belong to no event."""
        text = line.rstrip(b"\r\n")
        if text and (self._event or not text.startswith(b":")):
            self._event += line
            if text.startswith(_DATA):
                self._data.append(text[len(_DATA) :])
        elif not self._data:  # a comment, or the end of what is no event: it has no data
            idle, self._event = self._event, bytearray()
            return bytes(idle + line)
        else:
            self._held += self._event + line
            event = _parsed(b"\n".join(self._data))
            self._event.clear()
            self._data.clear()
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
    """Tell whether all that an event says is who speaks."""
    if event.type in _PREFACES:
        return True
    for choice in event.choices:
        delta = choice.delta
        if delta is None or choice.finish_reason or any(map(delta.get, delta.keys() - {"role"})):
            return False
    return bool(event.choices)


# --- what the client is shown ---

# A line without these is shown as it is, unread.
_TRANSFER, _CACHED, _CACHE_READ = b"transfer_params", b"cached_tokens", b"cache_read_input_tokens"
_MAX_LINE_BYTES = 16 * 1024 * 1024
"""Of a line that is not whole. The rest of a longer one is shown as it is."""
_KEPT_CHUNKS = 4
_MAX_END_BYTES = 64 * 1024
"""Where in a stream its usage is."""
_WRAPPERS = ("response", "message")
"""The fields of events in which the Responses and the Messages API have the answer."""
_RESTATED = {*_WRAPPERS, *TRANSFER_FIELDS, "usage"}

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


class ClientView:
    """Shows one client one answer, whole or as a stream. Belongs to the event loop's thread."""

    def __init__(
        self, dialect: Dialect = Dialect.OPENAI, prefill: PrefillUsage | None = None
    ) -> None:
        """`prefill` may change while the answer streams: P may answer after D has begun."""
        self._drops_params = dialect is Dialect.ANTHROPIC  # others say null where there are none
        self._prefill = prefill or PrefillUsage()
        self._held = bytearray()
        self._is_stream = True
        self._last: deque[bytes | bytearray] = deque(maxlen=_KEPT_CHUNKS)
        self.num_bytes = 0
        """The size of what D has answered so far."""

    def whole(self, body: bytes | bytearray) -> bytes | bytearray:
        """Return what is shown of a JSON answer."""
        self._is_stream, self.num_bytes = False, len(body)
        self._last.append(body)
        return self._restated(body) if _is_marked(body) else body

    def usage(self) -> Request:
        """Return the `usage` and the `kv_transfer_params` that D told last, if it told any."""
        if not self._is_stream:
            return _told_usage(self._last[-1])
        for line in reversed(b"".join(self._last)[-_MAX_END_BYTES:].splitlines()):
            if b"usage" in line and (told := _told_usage(line.removeprefix(_DATA))):
                return told
        return {}

    def chunk(self, chunk: bytes) -> bytes:
        """Return what is shown next of a stream: lines that are whole. Keeps the rest."""
        self.num_bytes += len(chunk)
        self._last.append(chunk)
        if self._held or not chunk.endswith(_LINE_ENDS):
            chunk = self._whole_lines(chunk)
        # As in `_is_marked`: for each event of each stream a call costs more than the searches.
        if _TRANSFER in chunk or _CACHED in chunk or _CACHE_READ in chunk:
            return self._lines(chunk)
        return chunk

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
        shown = lines.splitlines(keepends=True)
        for at, line in enumerate(shown):
            if line.startswith(_DATA) and _is_marked(line):
                json = line[len(_DATA) :].strip()
                shown[at] = line.replace(json, self._restated(json))
        return b"".join(shown)

    def _restated(self, json: bytes | bytearray) -> bytes | bytearray:
        """Return the JSON of an answer with other values of what clients are not to see."""
        is_changed = False
        try:
            answer = msgspec.json.decode(json, type=dict[str, Raw])
            for name in answer.keys() & _RESTATED:
                value = bytes(answer[name])
                shown = bytes(self._field(name, value))
                is_changed |= shown != value
                answer[name] = Raw(shown)
                if not shown:
                    del answer[name]
        except (ValueError, RecursionError):
            return json  # it is of another shape, or only speaks of these fields
        return msgspec.json.encode(answer) if is_changed else json

    def _field(self, name: str, json: bytes) -> bytes | bytearray:
        """Return what is shown of a field, nothing if it is left out."""
        if name in _WRAPPERS:
            return self._restated(json)
        if name in TRANSFER_FIELDS:
            return b"" if self._drops_params and json != b"null" else b"null"
        usage = msgspec.json.decode(json)
        if not self._prefill.was_asked or not isinstance(usage, dict):
            return json
        return msgspec.json.encode(_before_request(usage, self._prefill.told or {}))


def _is_marked(text: bytes | bytearray) -> bool:
    return _TRANSFER in text or _CACHED in text or _CACHE_READ in text


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


class _Usage(Struct):
    usage: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    response: "_Usage | None" = None
    """In the last event of the Responses API."""


def _told_usage(json: bytes | bytearray) -> Request:
    try:
        found = msgspec.json.decode(json, type=_Usage)
    except (ValueError, RecursionError):
        return {}
    found = found.response or found
    fields = {"usage": found.usage, "kv_transfer_params": found.kv_transfer_params}
    return {name: value for name, value in fields.items() if value}
