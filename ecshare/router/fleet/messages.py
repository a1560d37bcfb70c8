# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 to engines: the heads of requests, large bodies in slices, and the parser of answers.

Does no I/O: exchange.py does.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_URL = re.compile(
    r"(https?)://"
    r"(\[[0-9A-Fa-f:.]+(?:%[0-9A-Za-z_.-]+)?\]|[^\x00-\x20\x7f/?#@:\[\]\\]+)"
    r"(?::([0-9]{1,5}))?"
    r"(/[!-\"$-~]*)?"
)
_ZONE = re.compile("%[^]]*")
"""Names an interface of this host, which is nobody else's business."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_OWN_HEADERS = {"accept-encoding", "content-length", "host", "transfer-encoding"}
_MAX_HEAD_BYTES = 64 * 1024
_MAX_HEADERS = 256
_TOO_LARGE = "the head of the answer, or what is around its body, is too large"
_SLICE_BYTES = 256 * 1024


class Body(Protocol):
    """What is sent."""

    num_bytes: int

    def pieces(self) -> Iterable[bytes | memoryview]:
        """Return it in pieces of any size. Called again if it must be sent again."""


class Origin(NamedTuple):
    """What a connection leads to."""

    scheme: str
    host: str
    port: int


@lru_cache(1024)
def _place(url: str) -> tuple[Origin, str, str]:
    """Return where a url leads, and the target and the host in the head of a request.

    Raises:
        ValueError: it is malformed.
    """
    parts = _URL.fullmatch(url)
    if parts is None or int(parts[3] or 0) > 65535:
        raise ValueError(f"{url!r} is no url of an engine")
    scheme, host, given_port, target = parts.groups()
    if not host.isascii():
        host = host.encode("idna").decode()
    default_port = _DEFAULT_PORTS[scheme]
    port = int(given_port) if given_port else default_port
    name = _ZONE.sub("", host)
    shown = name if port == default_port else f"{name}:{port}"
    return Origin(scheme, host.strip("[]"), port), target or "/", shown


class Request(NamedTuple):
    """What is asked."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: Body | None

    def head(self) -> tuple[Origin, bytes]:
        """Return where the request goes, and its head.

        Raises:
            ValueError: a part of it is malformed.
        """
        origin, target, host = _place(self.url)
        lines = [f"{self.method} {target} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
        for name, value in self.headers.items():
            if name.lower() not in _OWN_HEADERS:
                lines.append(f"{name}: {value}")
        if self.body is not None:
            lines.append(f"Content-Length: {self.body.num_bytes}")
        lines += ("", "")
        head = "\r\n".join(lines)
        if not head.count("\r") == head.count("\n") == len(lines) - 1 or "\0" in head:
            raise ValueError("a header has a line break or a NUL in it")
        return origin, head.encode()


def slices(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield pieces in slices of limited size: small ones are joined, large ones are not copied."""
    slices: list[memoryview] = []
    room = _SLICE_BYTES
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            slices.append(rest[:room])
            rest = rest[room:]
            room -= len(slices[-1])
            if not room:
                yield slices[0] if len(slices) == 1 else b"".join(slices)
                slices, room = [], _SLICE_BYTES
    if slices:
        yield b"".join(slices)


class BrokenError(OSError):
    """The connection ended, or what came is no HTTP/1.x, or its head is too large."""


class Answer:
    """The parser of a connection, and the answer that it reads now."""

    def __init__(self) -> None:
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self.unread: list[bytes] = []
        self.start("GET")

    def start(self, method: str) -> None:
        """Expect the answer of a request. The one before must be complete."""
        self.status = 0
        """0 until the whole head is there."""
        self.headers: dict[str, str] = {}
        self.num_unread = 0
        self.unread.clear()
        self.is_complete = False
        self.may_keep = False
        """Whether the connection may serve another request, once the answer is complete."""
        self._has_body = method != "HEAD"
        self._ends_with_connection = False
        self._head_bytes = 0
        self._num_headers = 0

    def feed(self, data: bytes) -> None:
        """Read what has arrived.

        Raises:
            BrokenError: it is no answer, or its head is too large.
        """
        if self._parser is None:
            return
        num_unread = self.num_unread
        failure = ""
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as exc:
            failure = str(exc.__context__ or exc) or "unknown"  # no exception: they form cycles
        if self.is_complete:
            if failure:  # there are more bytes
                self.may_keep = False
        elif failure:
            raise BrokenError(f"the answer is no HTTP/1.x: {failure}")
        elif self.num_unread == num_unread:  # these bytes are of its head, its trailers or the like
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                raise BrokenError(_TOO_LARGE)

    def end(self, failure: Exception | None) -> None:
        """Note that the connection was closed, in good order or because of `failure`.

        Raises:
            BrokenError: the answer is not complete.
        """
        if self._ends_with_connection and failure is None:
            self.is_complete = True
        if not self.is_complete:
            raise BrokenError(f"the connection ended before the answer did: {failure or 'closed'}")

    def release(self) -> None:
        """Expect nothing more. The parser refers to this object: that cycle would keep it."""
        self._parser = None

    # What the parser calls. Their names are httptools' own.

    def on_message_begin(self) -> None:
        """Refuse an answer that nobody asked for."""
        if self.is_complete:
            raise BrokenError("there is a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are only counted."""
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MAX_HEAD_BYTES or self._num_headers > _MAX_HEADERS:
            raise BrokenError(_TOO_LARGE)
        if not self.status:
            text = value.decode("utf-8", "surrogateescape").strip(" \t")
            self.headers.setdefault(name.decode("latin-1").lower(), text)

    def on_headers_complete(self) -> None:
        """Read the head. A preliminary one (1xx) is dropped."""
        parser, headers = self._parser, self.headers
        assert parser is not None
        status = parser.get_status_code()
        if parser.get_http_version() not in ("1.1", "1.0") or status < 100 or status == 101:
            raise BrokenError("its version or status is not known")
        if status < 200:
            self.headers = {}
            return
        encoding = headers.get("transfer-encoding")
        if encoding is not None and encoding.lower() != "chunked":
            raise BrokenError("its transfer encoding is not known")
        self.status = status
        if not self._has_body:
            self.is_complete = True
            raise BrokenError("the parser does not know that there is no body")
        self.may_keep = parser.should_keep_alive()
        self._ends_with_connection = encoding is None and "content-length" not in headers

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body."""
        self.unread.append(data)
        self.num_unread += len(data)

    def on_message_complete(self) -> None:
        """Note the end of the answer, unless it was a preliminary one."""
        if self.status:
            self.is_complete = True
