# SPDX-License-Identifier: Apache-2.0
"""An S3 server that answers wrongly on purpose, in ways that no real server can be made to.

    with bad_s3() as server:
        server.faults = modes("get:half delete:403")    # half of each object; nothing is deleted
        server.faults = {}                              # works again

It keeps objects in memory and supports the part of S3 that obstore and s3fs use: create-only PUT,
GET with ranges, HEAD, DELETE of one or many, ListObjectsV2. Its ETags are MD5s, as S3's are.
"""

import hashlib
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape
from zlib import crc32

from ecshare.store.format import PROLOGUE_BYTES
from tests.ecshare.store.scripted import Asked, Scripted

BUCKET = "bucket"
DATE = "Mon, 23 Nov 2026 00:00:00 GMT"
UNREACHABLE = "http://127.0.0.1:1/"
WEB_PAGE = b"<html><body>We are back soon.</body></html>\n" * 200
ERROR = b"<Error><Code>InternalError</Code><Message>Words.</Message></Error>"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_DRIP_S = 0.05
_HANG_S = 600.0
_BROKEN_LENGTH = 10**12

Verb = Literal["get", "put", "head", "list", "delete"]
Fault = Callable[["Site"], "Reply"]


@dataclass(frozen=True)
class Stored:
    body: bytes
    etag: str

    @classmethod
    def of(cls, body: bytes) -> "Stored":
        return cls(body, etag_of(body))


@dataclass(frozen=True)
class Reply:
    """An answer, and how it is sent."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    framing: Literal["length", "chunks", "end"] = "length"
    length: int | None = None
    """What Content-Length says instead of the truth."""
    num_sent: int | None = None
    """How many bytes of the body are sent; None: all."""
    then: Literal["go on", "close", "reset", "hang"] = "go on"
    drips: bool = False
    raw: bytes | None = None
    """Sent instead of all that."""


def etag_of(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def refused(status: int, code: str) -> Reply:
    body = f"<Error><Code>{code}</Code><Message>Words.</Message></Error>".encode()
    return Reply(status, body, {"Content-Type": "application/xml"})


SILENCE = Reply(0, then="hang")
RESET = Reply(0, then="reset")


class BadS3(Scripted):
    """See the module.

    Threads: one a connection; `faults` may be replaced at any time, and whoever hangs by then is
    let go.
    """

    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(self._answer_one)
        self.objects: dict[str, Stored] = {}
        self.deleted: set[str] = set()
        """Keys of objects that a request has deleted."""
        self.num_asked = 0
        self._lock = threading.Lock()  # guards the counter and the dice
        self._dice = random.Random(1)
        self._faults: Mapping[Verb, Fault] = {}
        self._changed = threading.Event()

    @property
    def storage_options(self) -> dict[str, object]:
        return {"key": "a", "secret": "b", "endpoint_url": self.endpoint}

    @property
    def faults(self) -> Mapping[Verb, Fault]:
        return self._faults

    @faults.setter
    def faults(self, faults: Mapping[Verb, Fault]) -> None:
        self._faults = faults
        self._changed.set()
        self._changed = threading.Event()

    def even_chance(self) -> bool:
        with self._lock:
            return self._dice.random() < 0.5

    def shutdown_request(self, request: Any) -> None:
        """Close without the orderly shutdown, which would precede a reset."""
        self.close_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""

    def _answer_one(self, asked: Asked) -> None:
        with self._lock:
            self.num_asked += 1
        changed = self._changed
        site = Site.of(self, asked)
        fault = self._faults.get(site.verb, honest)
        with suppress(ConnectionError):
            _send(asked, fault(site), changed)


@dataclass(frozen=True)
class Site:
    """One request."""

    server: BadS3
    verb: Verb
    key: str
    query: Mapping[str, str]
    asked: Asked

    @classmethod
    def of(cls, server: BadS3, asked: Asked) -> "Site":
        url = urlsplit(asked.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        key = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        verbs: dict[str, Verb] = {
            "PUT": "put",
            "HEAD": "head",
            "DELETE": "delete",
            "POST": "delete",
        }
        verb = verbs.get(asked.command, "get" if key else "list")
        return cls(server, verb, key, query, asked)

    @property
    def stored(self) -> Stored | None:
        return self.server.objects.get(self.key)

    def read(self, body: bytes, etag: str) -> Reply:
        """Answer a GET for `body`, or for the range of it that is asked for."""
        headers = {"ETag": etag, "Last-Modified": DATE, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.asked.headers.get("range", ""))
        if wanted is None:
            return Reply(200, body, headers)
        start, last = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
        if start > last:
            return refused(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{last}/{len(body)}"
        return Reply(206, body[start : last + 1], headers)


def honest(site: Site) -> Reply:
    """Act and answer as S3 would."""
    match site.verb:
        case "put":
            return _put(site, site.asked.body)
        case "delete":
            return _delete(site)
        case "list":
            return listing(site)
        case "head" if not site.key:
            return Reply(200)
    if site.stored is None:
        return refused(404, "NoSuchKey")
    if site.verb == "head":
        return Reply(200, site.stored.body, {"ETag": site.stored.etag, "Last-Modified": DATE})
    return site.read(site.stored.body, site.stored.etag)


def _put(site: Site, body: bytes) -> Reply:
    objects = site.server.objects
    if site.asked.headers.get("if-none-match") == "*" and site.key in objects:
        return refused(412, "PreconditionFailed")
    objects[site.key] = Stored.of(body)
    return Reply(200, headers={"ETag": etag_of(body)})


def _delete(site: Site) -> Reply:
    keys, answer = [site.key], Reply(204)
    if site.asked.command == "POST":
        found = re.findall("<Key>([^<]*)</Key>", site.asked.body.decode())
        keys = [unescape(key) for key in found]
        said = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        answer = Reply(200, f"<DeleteResult>{said}</DeleteResult>".encode())
    for key in keys:
        if site.server.objects.pop(key, None) is not None:
            site.server.deleted.add(key)
    return answer


def listing(
    site: Site,
    *,
    more_keys: tuple[str, ...] = (),
    repeat: int = 1,
    next_page: str | None = None,
    is_cut: bool = False,
    date: str = "2026-11-23T00:00:00.000Z",
    size: int | None = None,
) -> Reply:
    """Answer ListObjectsV2, wrongly where an argument asks for it."""
    prefix, objects = site.query.get("prefix", ""), site.server.objects
    keys = sorted(key for key in tuple(objects) if key.startswith(prefix)) * repeat + [*more_keys]
    text = (
        '<?xml version="1.0"?><ListBucketResult '
        'xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys)}</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
    )
    if next_page is not None:
        text += f"<NextContinuationToken>{next_page}</NextContinuationToken>"
    for key in keys:
        body = objects[key].body if key in objects else b""
        text += (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{date}</LastModified>"
            f"<ETag>{etag_of(b'')}</ETag><Size>{len(body) if size is None else size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
    headers = {"Content-Type": "application/xml"}
    return Reply(200, f"{text}</ListBucketResult>".encode(), headers)


# --- sending ---


def _send(asked: Asked, reply: Reply, changed: threading.Event) -> None:
    if reply.status:
        asked.wfile.write(reply.raw if reply.raw is not None else _head(asked, reply))
    if reply.status and reply.raw is None and asked.command != "HEAD":
        _send_body(asked, reply, changed)
    match reply.then:
        case "hang":
            changed.wait(_HANG_S)
        case "reset":
            asked.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    asked.close_connection = reply.then != "go on"


def _head(asked: Asked, reply: Reply) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} Words", "x-amz-request-id: 1"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    if reply.framing == "length":
        length = len(reply.body) if reply.length is None else reply.length
        lines.append(f"Content-Length: {length}")
    if reply.framing == "chunks":
        lines.append("Transfer-Encoding: chunked")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _send_body(asked: Asked, reply: Reply, changed: threading.Event) -> None:
    body = reply.body[: reply.num_sent]
    if reply.framing == "chunks":
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    if not reply.drips:
        asked.wfile.write(body)
        return
    for at in range(len(body)):
        asked.wfile.write(body[at : at + 1])
        if changed.wait(_DRIP_S):
            return


# --- faults ---


def always(reply: Reply) -> Fault:
    return lambda site: reply


def after(change: Callable[[Reply], Reply]) -> Fault:
    """Carry out the request, and change the answer if it has a body."""

    def fault(site: Site) -> Reply:
        reply = honest(site)
        return change(reply) if reply.status in (200, 206) else reply

    return fault


def reading(change: Callable[[bytes], bytes], *, fits: bool = False) -> Fault:
    """Send other bytes than the stored ones. `fits`: with their own ETag, not the stored one."""

    def fault(site: Site) -> Reply:
        if site.stored is None:
            return honest(site)
        body = change(site.stored.body)
        return site.read(body, etag_of(body) if fits else site.stored.etag)

    return fault


def _page(body: bytes, *, has_etag: bool) -> Fault:
    headers = {"Last-Modified": DATE} | ({"ETag": etag_of(body)} if has_etag else {})
    return always(Reply(200, body, headers))


def half(body: bytes) -> bytes:
    return body[: len(body) // 2]


def empty(_: bytes) -> bytes:
    return b""


def longer(body: bytes) -> bytes:
    return body + bytes(1000)


def flipped(body: bytes) -> bytes:
    at = PROLOGUE_BYTES + (len(body) - PROLOGUE_BYTES) // 2
    return body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :] if at < len(body) else body


def flipped_in_front(body: bytes) -> bytes:
    return body[:20] + bytes([body[20] ^ 4]) + body[21:]


def zeroed(body: bytes) -> bytes:
    return bytes(len(body))


def _flipped_anywhere(site: Site) -> Reply:
    """Flip another bit in each answer."""
    if site.stored is None:
        return honest(site)
    body = bytearray(site.stored.body)
    body[crc32(f"{site.key} {site.server.num_asked}".encode()) % len(body)] ^= 4
    return site.read(bytes(body), site.stored.etag)


def _another(site: Site) -> Reply:
    """Send the bytes of another stored object."""
    keys = sorted(site.server.objects)
    if site.stored is None or len(keys) < 2:
        return honest(site)
    other = site.server.objects[keys[(keys.index(site.key) + 1) % len(keys)]]
    return site.read(other.body, other.etag)


def _headers(**changed: str | None) -> Fault:
    """Answer with other headers; None removes one."""

    def change(reply: Reply) -> Reply:
        headers = dict(reply.headers)
        for name, value in changed.items():
            header = name.replace("_", "-")
            headers.pop(header, None)
            if value is not None:
                headers[header] = value
        return replace(reply, headers=headers)

    return after(change)


def _new_etag(site: Site) -> Reply:
    reply = honest(site)
    return replace(reply, headers={**reply.headers, "ETag": f'"{site.server.num_asked:032x}"'})


def _whole(site: Site) -> Reply:
    """Ignore ranges."""
    if site.stored is None:
        return honest(site)
    return Reply(200, site.stored.body, {"ETag": site.stored.etag, "Last-Modified": DATE})


def _range(change: Callable[[int, int, int], str], shift: int = 0) -> Fault:
    """Declare another range than is sent, or send another one than is declared."""

    def fault(site: Site) -> Reply:
        reply = honest(site)
        said = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", reply.headers.get("Content-Range", ""))
        if said is None or site.stored is None:
            return reply
        start, last, size = (int(number) for number in said.groups())
        body = site.stored.body[start + shift : last + 1 + shift]
        headers = {**reply.headers, "Content-Range": change(start, last, size)}
        return replace(reply, body=body, headers=headers)

    return fault


def _cut(then: Literal["close", "reset", "hang"]) -> Fault:
    return after(lambda reply: replace(reply, num_sent=len(reply.body) // 2, then=then))


def _raw(head: bytes, then: Literal["close", "hang"] = "close") -> Fault:
    return after(lambda reply: replace(reply, raw=head + reply.body, then=then))


def _moved_to_itself(site: Site) -> Reply:
    return Reply(307, headers={"Location": f"{site.server.endpoint}{site.asked.path}"})


def _now_and_then(site: Site) -> Reply:
    return refused(503, "SlowDown") if site.server.even_chance() else honest(site)


def _torn(site: Site) -> Reply:
    return _put(site, half(site.asked.body))


def _exists(reply: Reply) -> Fault:
    """As if another writer had just stored the same object: nothing is replaced, answer `reply`."""

    def fault(site: Site) -> Reply:
        if "if-none-match" in site.asked.headers:
            _put(site, site.asked.body)
        return reply

    return fault


def _conflicts_now_and_then(site: Site) -> Reply:
    is_refused = site.server.even_chance()
    return refused(409, "ConditionalRequestConflict") if is_refused else honest(site)


def _done_but_reset(site: Site) -> Reply:
    honest(site)
    return RESET


ANY: dict[str, Fault] = {
    "hang": always(SILENCE),
    "reset": always(RESET),
    "503": always(refused(503, "SlowDown")),
    "500": always(refused(500, "InternalError")),
    "403": always(refused(403, "AccessDenied")),
    "skew": always(refused(403, "RequestTimeTooSkewed")),
    "no-bucket": always(refused(404, "NoSuchBucket")),
    # These report a conflict or a redirect, whatever was requested.
    "304": always(Reply(304)),
    "409": always(refused(409, "OperationAborted")),
    "412": always(Reply(412)),
    "moved": _moved_to_itself,
    "moved-away": always(
        replace(refused(301, "PermanentRedirect"), headers={"Location": UNREACHABLE})
    ),
    "flaky": _now_and_then,
}
"""Faults of every kind of request."""

GET: dict[str, Fault] = {
    # Other bytes than the stored ones.
    "web-page": _page(WEB_PAGE, has_etag=False),
    "web-page-with-etag": _page(WEB_PAGE, has_etag=True),
    "error-with-200": _page(ERROR, has_etag=True),
    "nothing": _page(b"", has_etag=True),
    "half": reading(half),
    "half-with-its-etag": reading(half, fits=True),
    "longer": reading(longer),
    "longer-with-its-etag": reading(longer, fits=True),
    "flipped": reading(flipped),
    "flipped-with-its-etag": reading(flipped, fits=True),
    "flipped-in-front": reading(flipped_in_front),
    "flipped-anywhere": _flipped_anywhere,
    "zeroed": reading(zeroed),
    "another": _another,
    # Odd headers.
    "new-etags": _new_etag,
    "no-etag": _headers(ETag=None),
    "bad-date": _headers(Last_Modified="yesterday"),
    "no-date": _headers(Last_Modified=None),
    "no-range": _whole,
    "wrong-range": _range(lambda start, last, size: f"bytes {start}-{last}/{size + 7}"),
    "shifted-range": _range(lambda start, last, size: f"bytes {start}-{last}/{size}", shift=1),
    "says-another-range": _range(lambda start, last, size: f"bytes {start + 1}-{last + 1}/{size}"),
    # Odd bodies.
    "huge-length": after(lambda reply: replace(reply, length=_BROKEN_LENGTH, then="hang")),
    "short-length": after(lambda reply: replace(reply, length=len(reply.body) // 2, then="close")),
    "long-length": after(lambda reply: replace(reply, length=len(reply.body) + 9, then="close")),
    "long-and-hang": after(lambda reply: replace(reply, length=len(reply.body) + 9, then="hang")),
    "chunks": after(lambda reply: replace(reply, framing="chunks")),
    "no-length": after(lambda reply: replace(reply, framing="end", then="close")),
    "old-http": _raw(b"HTTP/1.0 200 OK\r\nLast-Modified: " + DATE.encode() + b"\r\n\r\n"),
    "garbage": _raw(bytes(range(256)) * 4),
    "endless-head": _raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000, "hang"),
    "cut": _cut("close"),
    "cut-by-reset": _cut("reset"),
    "stall": _cut("hang"),
    "drip": after(lambda reply: replace(reply, drips=True)),
    "missing": always(refused(404, "NoSuchKey")),
}
DAMAGING = (
    "web-page", "web-page-with-etag", "error-with-200", "nothing", "half", "half-with-its-etag",
    "longer", "longer-with-its-etag", "flipped", "flipped-with-its-etag", "flipped-in-front",
    "flipped-anywhere", "zeroed", "another",
)  # fmt: skip
"""The GET faults with well-formed answers and other bytes than the stored ones."""

PUT: dict[str, Fault] = {
    "exists": _exists(refused(412, "PreconditionFailed")),
    "exists-by-409": _exists(refused(409, "Conflict")),
    "conflict": always(refused(409, "ConditionalRequestConflict")),
    "conflict-now-and-then": _conflicts_now_and_then,
    "bad-digest": always(refused(400, "BadDigest")),
    "not-implemented": always(refused(501, "NotImplemented")),
    "full": always(refused(507, "InsufficientStorage")),
    "error-with-200": always(Reply(200, ERROR)),
    "lost": lambda site: Reply(200, headers={"ETag": etag_of(site.asked.body)}),
    "torn": _torn,
    "done-but-reset": _done_but_reset,
}
LIES = ("put:lost", "put:torn")
"""The server reports a successful upload without storing all of it: only a later read shows it."""
HEAD: dict[str, Fault] = {
    "everything": always(Reply(200, bytes(100), {"ETag": etag_of(b""), "Last-Modified": DATE})),
    "missing": always(refused(404, "NoSuchKey")),
    "no-etag": _headers(ETag=None),
}
LIST: dict[str, Fault] = {
    "junk": always(Reply(200, b"not xml <")),
    "web-page": always(Reply(200, WEB_PAGE)),
    "loop": lambda site: listing(site, is_cut=True, next_page="again"),
    "empty-loop": lambda site: listing(
        replace(site, query={"prefix": "none/"}),
        is_cut=True,
        next_page=str(site.server.num_asked),
    ),
    "no-token": lambda site: listing(site, is_cut=True),
    "twice": lambda site: listing(site, repeat=2),
    "odd-keys": lambda site: listing(site, more_keys=_odd_keys(site.query.get("prefix", ""))),
    "bad-date": lambda site: listing(site, date="yesterday"),
    "bad-size": lambda site: listing(site, size=-5),
}
DELETE: dict[str, Fault] = {
    "error-with-200": lambda site: Reply(
        200, f"<DeleteResult>{ERROR.decode()}</DeleteResult>".encode()
    ),
}


def _odd_keys(prefix: str) -> tuple[str, ...]:
    odd = ("", "/", "/x", "../x", "x/../../y", "./x", "a\tb", "\u00e9", "a" * 3000, "%2F")
    return ("../x", "/absolute", *(prefix + each for each in odd))


FAULTS: dict[Verb, dict[str, Fault]] = {
    "get": ANY | GET,
    "put": ANY | PUT,
    "head": ANY | HEAD,
    "list": ANY | LIST,
    "delete": ANY | DELETE,
}


def modes(text: str) -> dict[Verb, Fault]:
    """Read "get:half delete:403"."""
    named = dict(each.split(":") for each in text.split())
    return {verb: FAULTS[verb][named[verb]] for verb in FAULTS if verb in named}


@contextmanager
def bad_s3() -> Iterator[BadS3]:
    server = BadS3()
    serving = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    serving.start()
    try:
        yield server
    finally:
        server.faults = {}
        server.shutdown()
        server.server_close()
        serving.join()
