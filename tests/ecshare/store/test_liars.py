# SPDX-License-Identifier: Apache-2.0
"""S3 servers with false lengths or ranges cause a failure or a refusal, with bounded memory."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectCorrupt, StoreUnavailable
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import ObjectStore, read
from ecshare.store.open import open_store
from tests.bad_s3.faults import always
from tests.bad_s3.server import BadS3, Reply, bad_s3

KEY = object_key(Kind.EC, "0" * 32, "an object")
LIMIT = 1 << 20
DATES = 'Last-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\nETag: "e"\r\n'

pytestmark = pytest.mark.s3

Serve = Callable[[str, bytes, int], tuple[ObjectStore, BadS3]]


@pytest.fixture(params=["obstore", "s3fs"])
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    with bad_s3() as server:

        def start(head: str, body: bytes, times: int) -> tuple[ObjectStore, BadS3]:
            """Answer with `head`, then `body` again and again, then hang up."""
            raw = f"HTTP/1.1 {head}\r\n{DATES}\r\n".encode()
            server.faults = {"any": always(Reply(200, body, raw=raw, times=times, then="close"))}
            options = server.storage_options
            if request.param == "s3fs":
                options["s3_additional_kwargs"] = {}
            config = StoreConfig(url="s3://bucket/x", storage_options=options, io_timeout_s=5)
            return open_store(config, "options"), server

        yield start


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
    store, server = serve(f"200 OK\r\nContent-Length: {size}", bytes(1 << 20), 200)
    with pytest.raises(ObjectCorrupt, match=str(size)):
        await read(store, KEY, LIMIT)
    await store.close()
    assert server.num_sent_bytes < 64 << 20, "at most what fits into network buffers"


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
    store, server = serve(head, b"0123456789" * 6000, 4000)
    try:
        found = await read(store, KEY, LIMIT)
    except (StoreUnavailable, ObjectCorrupt):
        pass
    else:
        assert len(found) <= 10
    await store.close()
    assert server.num_sent_bytes < 64 << 20


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
