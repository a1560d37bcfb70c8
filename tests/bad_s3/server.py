# SPDX-License-Identifier: Apache-2.0
"""The tests' S3 server: it answers as S3 does, or wrongly in any way that a test asks for.

    with bad_s3() as server:
        server.faults = modes("get:half delete:403")    # half of each object; nothing is deleted
        server.faults = {}                              # works again
    with bad_s3(lambda request: Reply(200, b"words")) as server:    # answers nothing else

It keeps objects in memory and supports the part of S3 that obstore and s3fs use: create-only PUT,
GET with ranges, HEAD, DELETE of one or many, ListObjectsV2 in pages. Its ETags are MD5s, as S3's
are. It checks the time of a signature, but no signature. `faults` has faults by name.
"""

import hashlib
import http.client
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from lab.servers.processes import LOOPBACK, Port

BUCKET = "bucket"
DATE = "Mon, 23 Nov 2026 00:00:00 GMT"
DATED = {"ETag": '"e"', "Last-Modified": DATE}
ID = {"x-amz-request-id": "1"}
"""Which only S3 sends."""
XML = {"Content-Type": "application/xml", **ID}
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_DRIP_S = 0.05
_HANG_S = 3600.0
_MAX_SKEW = timedelta(minutes=15)

Verb = Literal["get", "put", "head", "list", "delete"]
Then = Literal["go on", "close", "reset", "hang"]


@dataclass(frozen=True)
class Stored:
    body: bytes
    etag: str
    written_s: float = field(default_factory=time.time)

    @property
    def headers(self) -> dict[str, str]:
        return {"ETag": self.etag, "Last-Modified": formatdate(self.written_s, usegmt=True), **ID}

    @classmethod
    def of(cls, body: bytes) -> "Stored":
        return cls(body, etag_of(body))


@dataclass(frozen=True)
class Reply:
    """An answer, and how it is sent."""

    status: int
    """0: nothing is sent."""
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    framing: Literal["length", "chunks", "end"] = "length"
    length: int | None = None
    """What Content-Length says instead of the truth."""
    num_sent: int | None = None
    """How many bytes of the body are sent; None: all."""
    then: Then = "go on"
    drips: bool = False
    raw: bytes | None = None
    """Sent instead of the head."""
    times: int = 1
    """How often the body is sent."""
    delay_s: float = 0.0
    num_received: int | None = None
    """How many bytes of the request's body are read before; None: all."""


Fault = Callable[["Request"], Reply | None]
"""Answers a request. None: the server answers as if there were no fault."""


def etag_of(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def refused(status: int, code: str) -> Reply:
    if status == 304:  # has no body
        return Reply(status)
    body = f"<Error><Code>{code}</Code><Message>Words.</Message></Error>".encode()
    return Reply(status, body, XML)


class BadS3(ThreadingHTTPServer):
    """See the module.

    Threads: one a connection; `faults` may be replaced at any time, and whoever hangs by then is
    let go.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        self._port = Port()  # reserved also while the server refuses connections
        super().__init__((LOOPBACK, self._port.number), _Connection)
        self.endpoint = f"http://{LOOPBACK}:{self._port.number}"
        self.objects: dict[str, Stored] = {}
        self.deleted: set[str] = set()
        """Keys of objects that a request has deleted."""
        self.page = 1000
        """How many keys a listing has."""
        self.exists = refused(412, "PreconditionFailed")
        """The answer to a create-only PUT of an object that exists."""
        self.requests: list[tuple[str, dict[str, str]]] = []
        """The method and the headers, with lower-case names, of each request."""
        self.num_sent_bytes = 0
        """How many bytes of bodies the network has accepted."""
        self.num_hits = 0
        """How many requests have met a fault since `faults` was set."""
        self._counted = threading.Condition()  # guards `num_hits`
        self.open: set[socket.socket] = set()
        self.dice = random.Random(1)
        self._faults: Mapping[str, Fault] = {}
        self.changed = threading.Event()

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"key": "a", "secret": "hidden", "endpoint_url": self.endpoint}

    @property
    def faults(self) -> Mapping[str, Fault]:
        """The fault of each verb; "any" is for the verbs that are not named."""
        return self._faults

    @faults.setter
    def faults(self, faults: Mapping[str, Fault]) -> None:
        with self._counted:
            self._faults, self.num_hits = faults, 0
        self.changed.set()
        self.changed = threading.Event()

    def wait_hit(self, timeout_s: float = 60.0) -> None:
        """Block until a request has met a fault that was set last."""
        with self._counted:
            assert self._counted.wait_for(lambda: self.num_hits, timeout_s), "no fault was met"

    def answer(self, request: "Request") -> Reply:
        self.requests.append((request.method, request.headers))
        fault = self._faults.get(request.verb) or self._faults.get("any")
        reply = fault(request) if fault else None
        if reply is None:
            return honest(request)
        request.receive(reply.num_received)
        with self._counted:
            self.num_hits += 1
            self._counted.notify_all()
        return reply

    def disconnect(self) -> None:
        """End all connections, and all faults."""
        for connection in tuple(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.faults = {}

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse connections, and end those that are open, and all faults."""
        self.stop()
        self.disconnect()
        yield
        self.socket = socket.socket()
        self.server_bind()
        self.server_activate()
        self.start()

    def start(self) -> None:
        self._serving = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._serving.start()

    def stop(self) -> None:
        self.shutdown()
        self._serving.join()
        self.server_close()

    def shutdown_request(self, request: Any) -> None:
        """Close without the orderly shutdown, which would precede a reset."""
        self.close_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class Request:
    """One request."""

    def __init__(self, server: BadS3, connection: "_Connection") -> None:
        self.server = server
        self.method: str = connection.command
        self.path: str = connection.path
        self.headers = {name.lower(): value for name, value in connection.headers.items()}
        self.num_bytes = int(self.headers.get("content-length", 0))
        """The size of the body."""
        self._file = connection.rfile
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.key = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")

    @property
    def verb(self) -> Verb:
        match self.method:
            case "PUT":
                return "put"
            case "HEAD":
                return "head"
            case "DELETE" | "POST":
                return "delete"
        return "get" if self.key and "list-type" not in self.query else "list"

    @cached_property
    def body(self) -> bytes:
        return self._file.read(self.num_bytes)

    def receive(self, num_bytes: int | None) -> None:
        """Read so many bytes of the body; None: all."""
        if num_bytes is None:
            _ = self.body
        else:
            self._file.read(num_bytes)

    @property
    def stored(self) -> Stored | None:
        return self.server.objects.get(self.key)

    def found(self) -> dict[str, Stored]:
        """Return the objects that a listing finds, in order."""
        objects, prefix = dict(self.server.objects), self.query.get("prefix", "")
        return {key: objects[key] for key in sorted(objects) if key.startswith(prefix)}

    def read(self, stored: Stored) -> Reply:
        """Answer a GET for an object, or for the range of it that is requested."""
        body, headers = stored.body, {**stored.headers, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if wanted is None:
            return Reply(200, body, headers)
        start, last = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
        if start > last:
            return refused(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{last}/{len(body)}"
        return Reply(206, body[start : last + 1], headers)


def honest(request: Request) -> Reply:
    """Act and answer as S3 would."""
    request.receive(None)
    if _is_skewed(request):
        return refused(403, "RequestTimeTooSkewed")
    match request.verb:
        case "put":
            return put(request, request.body)
        case "delete":
            return _delete(request)
        case "list":
            return _list(request)
        case "head" if not request.key:
            return Reply(200)
    if request.stored is None:
        return refused(404, "NoSuchKey")
    if request.verb == "head":
        return Reply(200, request.stored.body, {"ETag": request.stored.etag, "Last-Modified": DATE})
    return request.read(request.stored)


def _is_skewed(request: Request) -> bool:
    try:
        signed = datetime.strptime(request.headers.get("x-amz-date", ""), "%Y%m%dT%H%M%SZ")
    except ValueError:
        return False
    return abs(signed.replace(tzinfo=UTC) - datetime.now(UTC)) > _MAX_SKEW


def put(request: Request, body: bytes) -> Reply:
    """Store `body`, unless a create-only request finds an object."""
    objects = request.server.objects
    is_create = {"if-none-match", "x-goog-if-generation-match"} & request.headers.keys()
    stored = Stored.of(body)
    if not is_create:
        objects[request.key] = stored
    elif objects.setdefault(request.key, stored) is not stored:  # in one step: puts may race
        return request.server.exists
    return Reply(200, headers=stored.headers)


def _delete(request: Request) -> Reply:
    keys, answer = [request.key], Reply(204)
    if request.method == "POST":
        found = re.findall("<Key>([^<]*)</Key>", request.body.decode())
        keys = [unescape(key) for key in found]
        said = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        answer = Reply(200, f"<DeleteResult>{said}</DeleteResult>".encode(), XML)
    for key in keys:
        if request.server.objects.pop(key, None) is not None:
            request.server.deleted.add(key)
    return answer


def _list(request: Request) -> Reply:
    """Answer ListObjectsV2 with the next page of keys."""
    page, after = request.server.page, request.query.get("continuation-token")
    behind = after or request.query.get("start-after", "")
    found = {key: stored for key, stored in request.found().items() if key > behind}
    keys = list(found)[:page]
    is_last = len(keys) == len(found)
    return page_of({key: found[key] for key in keys}, next_page=None if is_last else keys[-1])


def page_of(
    found: Mapping[str, Stored],
    *,
    next_page: str | None = None,
    repeat: int = 1,
    is_cut: bool | None = None,
    date: str = "",
    size: int | None = None,
) -> Reply:
    """Answer ListObjectsV2 with these objects, wrongly where an argument asks for it.

    `next_page`: the continuation token; None: the listing ends.
    """
    is_cut = next_page is not None if is_cut is None else is_cut
    text = (
        '<?xml version="1.0"?><ListBucketResult '
        'xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><KeyCount>{len(found) * repeat}</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
    )
    if next_page is not None:
        text += f"<NextContinuationToken>{_escaped(next_page)}</NextContinuationToken>"
    for key, stored in [*found.items()] * repeat:
        written = datetime.fromtimestamp(stored.written_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        text += (
            f"<Contents><Key>{_escaped(key)}</Key><LastModified>{date or written}</LastModified>"
            f"<ETag>{stored.etag}</ETag>"
            f"<Size>{len(stored.body) if size is None else size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
    return Reply(200, f"{text}</ListBucketResult>".encode(), XML)


def _escaped(key: str) -> str:
    return "".join(f"&#{ord(c)};" if ord(c) < 32 else c for c in escape(key))


# --- sending ---


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each body waits for its header's acknowledgement
    server: BadS3

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        super().finish()

    def do_any(self) -> None:
        changed = self.server.changed
        with suppress(ConnectionError):  # a client may disconnect
            reply = self.server.answer(Request(self.server, self))
            if reply.delay_s:
                changed.wait(reply.delay_s)
            self._send(reply, changed)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_any  # noqa: N815

    def _send(self, reply: Reply, changed: threading.Event) -> None:
        if reply.status:
            self.wfile.write(reply.raw if reply.raw is not None else _head(reply))
            if self.command != "HEAD":
                self._send_body(reply, changed)
        match reply.then:
            case "hang":
                changed.wait(_HANG_S)
            case "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.close_connection |= reply.then != "go on"

    def _send_body(self, reply: Reply, changed: threading.Event) -> None:
        body = reply.body[: reply.num_sent]
        if reply.framing == "chunks":
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        if not reply.drips:
            for _ in range(reply.times):
                self.wfile.write(body)
                self.server.num_sent_bytes += len(body)
            return
        for at in range(len(body)):
            self.wfile.write(body[at : at + 1])
            if changed.wait(_DRIP_S):
                return

    def log_message(self, *_: Any) -> None:
        pass


def _head(reply: Reply) -> bytes:
    reason = http.client.responses.get(reply.status, "Words")
    lines = [f"HTTP/1.1 {reply.status} {reason}"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    if reply.framing == "length":
        length = len(reply.body) if reply.length is None else reply.length
        lines.append(f"Content-Length: {length}")
    if reply.framing == "chunks":
        lines.append("Transfer-Encoding: chunked")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@contextmanager
def bad_s3(answer: Fault | None = None) -> Iterator[BadS3]:
    """Serve on loopback while the block runs. `answer`: of every request, if there is one."""
    server = BadS3()
    server.faults = {"any": answer} if answer else {}
    server.start()
    try:
        yield server
    finally:
        server.faults = {}
        server.stop()
