# SPDX-License-Identifier: Apache-2.0
"""S3 servers with false lengths or ranges cause a failure or a refusal, with bounded memory."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectCorrupt, StoreUnavailable
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import ObjectStore, read
from ecshare.store.open import open_store

KEY = object_key(Kind.EC, "0" * 32, "an object")
LIMIT = 1 << 20
DATES = 'Last-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\nETag: "e"\r\n'

pytestmark = pytest.mark.s3

Serve = Callable[[str, bytes, int], tuple[ObjectStore, "Liar"]]


class Liar:
    """Answers every request with `head`, then `body` again and again, then hangs up."""

    def __init__(self, head: str, body: bytes, times: int) -> None:
        self._answer = f"HTTP/1.1 {head}\r\n{DATES}\r\n".encode()
        self._body = body
        self._times = times
        self.sent_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._talk, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                if not connection.recv(1 << 16):
                    return
                connection.sendall(self._answer)
                for _ in range(self._times):
                    self.sent_bytes += connection.send(self._body)
            except OSError:
                return


@pytest.fixture(params=["obstore", "s3fs"])
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    liars = []

    def start(head: str, body: bytes, times: int) -> tuple[ObjectStore, Liar]:
        liar = Liar(head, body, times)
        liars.append(liar)
        options = {"key": "k", "secret": "s", "endpoint_url": liar.endpoint}
        if request.param == "s3fs":
            options["s3_additional_kwargs"] = {}  # type: ignore[assignment]
        config = StoreConfig(url="s3://bucket/x", storage_options=options, io_timeout_s=5)
        return open_store(config, "options"), liar

    yield start
    for liar in liars:
        liar.close()


async def test_body_shorter_than_its_length_is_a_failure(serve: Serve) -> None:
    store, _ = serve("200 OK\r\nContent-Length: 1000", b"x" * 600, 1)
    with pytest.raises(StoreUnavailable):
        await read(store, KEY, LIMIT)
    await store.close()


async def test_bytes_beyond_the_content_length_are_not_read(serve: Serve) -> None:
    store, _ = serve("200 OK\r\nContent-Length: 600", b"x" * 1000, 1)
    try:
        assert await read(store, KEY, LIMIT) == b"x" * 600
    except StoreUnavailable as exc:
        assert len(str(exc)) < 500  # noqa: PT017 - not the server's bytes, in a log
    await store.close()


@pytest.mark.parametrize("size", [LIMIT + 1, 1 << 40, (1 << 63) - 1])
async def test_absurd_size_is_refused_before_the_body(serve: Serve, size: int) -> None:
    store, liar = serve(f"200 OK\r\nContent-Length: {size}", bytes(1 << 20), 200)
    with pytest.raises(ObjectCorrupt, match=str(size)):
        await read(store, KEY, LIMIT)
    await store.close()
    liar.close()
    assert liar.sent_bytes < 64 << 20, "at most what fits into network buffers"


@pytest.mark.parametrize(
    "head",
    [
        "200 OK\r\nTransfer-Encoding: chunked",
        "200 OK",
        "200 OK\r\nContent-Length: -5",
        "200 OK\r\nContent-Length: 99999999999999999999999999",
        "200 OK\r\nContent-Length: ten",
        "206 Partial Content\r\nContent-Length: 10",
        "206 Partial Content\r\nContent-Length: 10\r\nContent-Range: bytes 5-2/3",
        "204 No Content",
        "302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0",
        "999 What\r\nContent-Length: 10",
    ],
)
async def test_malformed_response_is_a_failure_at_worst(serve: Serve, head: str) -> None:
    """The body is endless if the header gives no length."""
    store, liar = serve(head, b"0123456789" * 6000, 4000)
    try:
        found = await read(store, KEY, LIMIT)
    except (StoreUnavailable, ObjectCorrupt):
        pass
    else:
        assert len(found) <= 10
    await store.close()
    liar.close()
    assert liar.sent_bytes < 64 << 20


@pytest.mark.parametrize("part", ["5-14/3", "5-14/15", "0-9/15", "90-99/10"])
async def test_response_with_another_range_is_a_failure(serve: Serve, part: str) -> None:
    """Its bytes would be written to the wrong place, or leave a gap.

    A client may take the body for the whole object: then its content must be right.
    """
    head = f"206 Partial Content\r\nContent-Length: 10\r\nContent-Range: bytes {part}"
    store, _ = serve(head, b"0123456789", 1)
    with contextlib.suppress(StoreUnavailable, ObjectCorrupt):
        assert bytes(await read(store, KEY, LIMIT)) == b"0123456789"
    await store.close()
