# SPDX-License-Identifier: Apache-2.0
"""The part of Google Cloud Storage's XML API that a store needs. No package has an emulator."""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "ecshare"
_PAGE = 1000


@dataclass(frozen=True)
class _Object:
    body: bytes
    generation: int
    written_s: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.body).hexdigest()}-{self.generation}"'


@dataclass
class GCS:
    """A running server, and its requests: method, path, and headers in lower case."""

    url: str = ""
    objects: dict[str, _Object] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    refuses: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving() -> Iterator[GCS]:
    """Serve one empty bucket on loopback while the block runs."""
    gcs = GCS()

    class Handler(_Handler):
        server_gcs = gcs

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        gcs.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield gcs
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_gcs: GCS

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the client has hung up
            self.close_connection = True

    def parse_request(self) -> bool:
        """Read and record the request with its body."""
        if not super().parse_request():
            return False
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.gcs = self.server_gcs
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        _, self.bucket, *rest = unquote(parts.path).split("/", 2)
        self.key = rest[0] if rest else ""
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.gcs.asked.append((self.command, self.path, headers))
        if self.gcs.refuses:
            self.say_error(403, "AccessDenied")
        elif self.bucket != BUCKET:
            self.say_error(404, "NoSuchBucket")
        else:
            return True
        return False

    def do_PUT(self) -> None:
        with self.gcs.lock:
            if (
                self.headers.get("x-goog-if-generation-match") == "0"
                and self.key in self.gcs.objects
            ):
                self.say_error(412, "PreconditionFailed")
                return
            stored = _Object(self.body, time.time_ns() // 1000, time.time())
            self.gcs.objects[self.key] = stored
        self.say(200, b"", stored)

    def do_GET(self) -> None:
        if not self.key:
            self._list()
            return
        stored = self.gcs.objects.get(self.key)
        if stored is None:
            self.say_error(404, "NoSuchKey")
            return
        wanted = self.headers.get("Range")
        if wanted is None:
            self.say(200, stored.body, stored)
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        start, stop = int(first), min(int(last) + 1, len(stored.body))
        if start >= stop:
            self.say_error(416, "InvalidRange")
            return
        place = f"bytes {start}-{stop - 1}/{len(stored.body)}"
        self.say(206, stored.body[start:stop], stored, place)

    do_HEAD = do_GET  # noqa: N815 — as the base class spells it

    def do_DELETE(self) -> None:
        if self.gcs.objects.pop(self.key, None) is None:
            self.say_error(404, "NoSuchKey")
        else:
            self.say(204, b"")

    def _list(self) -> None:
        prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
        objects = dict(self.gcs.objects)
        found = sorted(key for key in objects if key.startswith(prefix) and key > after)
        page, more = found[:_PAGE], found[_PAGE:]
        lines = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(objects[key].body)}</Size>"
            f"<LastModified>{_time(objects[key].written_s)}</LastModified>"
            f"<ETag>{escape(objects[key].etag)}</ETag></Contents>"
            for key in page
        ]
        if more:
            lines.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        text = f"<ListBucketResult>{''.join(lines)}</ListBucketResult>"
        self.say(200, text.encode())

    def say_error(self, status: int, code: str) -> None:
        """Respond with an error code in XML, as Google does."""
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>Words.</Message></Error>"
        self.say(status, text.encode())

    def say(self, status: int, body: bytes, stored: _Object | None = None, place: str = "") -> None:
        self.send_response(status)
        if stored:
            self.send_header("ETag", stored.etag)
            self.send_header("x-goog-generation", str(stored.generation))
            self.send_header("Last-Modified", formatdate(stored.written_s, usegmt=True))
        if place:
            self.send_header("Content-Range", place)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


def _time(since_epoch_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since_epoch_s))
