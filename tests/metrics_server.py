# SPDX-License-Identifier: Apache-2.0
"""A server that answers every request with given bytes, as /metrics of engines or of worse."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

Write = Callable[[bytes], None]


class MetricsServer:
    """Gives each further request the next of `pages`, and the last one again and again."""

    def __init__(self, pages: Sequence[str | bytes | Callable[[Write], None]]) -> None:
        """A text is the body of a 200; bytes are a whole answer; a function writes it."""
        self.requests: list[str] = []
        self._pages = list(pages)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.name = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"http://{self.name}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client, suppress(OSError):
                self.requests.append(client.recv(65536).decode())
                page = self._pages[min(len(self.requests), len(self._pages)) - 1]
                if callable(page):
                    page(client.sendall)
                elif isinstance(page, str):
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
                    client.sendall(page.encode())
                else:
                    client.sendall(page)


@contextmanager
def metrics_server(
    *pages: str | bytes | Callable[[Write], None],
) -> Iterator[MetricsServer]:
    """Serve `pages` in the body."""
    server = MetricsServer(pages)
    try:
        yield server
    finally:
        server.close()
