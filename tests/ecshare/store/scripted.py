# SPDX-License-Identifier: Apache-2.0
"""An HTTP server whose responses a test defines."""

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

DATED = {"last_modified": "Wed, 21 Oct 2026 07:28:00 GMT"}


class Scripted(http.server.ThreadingHTTPServer):
    """Responds by a function of the test, and records the requests."""

    daemon_threads = True

    def __init__(self, answer: Callable[["Asked"], None]) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.answer = answer
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class Asked(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each body waits for its header's acknowledgement
    server: Scripted

    def do_any(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append((self.command, {k.lower(): v for k, v in self.headers.items()}))
        self.server.answer(self)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_any  # noqa: N815

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # a client may hang up early
                self.wfile.write(body)

    def say_error(self, status: int, code: str) -> None:
        self.say(status, f"<Error><Code>{code}</Code><Message>Words.</Message></Error>".encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(answer: Callable[[Asked], None]) -> Iterator[Scripted]:
    server = Scripted(answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
