# SPDX-License-Identifier: Apache-2.0
"""obstore's specifics. The contract suite tests what every store must do."""

import asyncio
import contextlib
import inspect
import math
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from obstore import exceptions as foreign

from ecshare.store.cloud import store as cloud
from ecshare.store.cloud.errors import MEANING
from ecshare.store.cloud.store import PIECE_BYTES
from ecshare.store.cloud_accounts import S3, flat
from ecshare.store.config import StoreConfig
from ecshare.store.errors import (
    ConfigError,
    ObjectCorrupt,
    ObjectMissing,
    StoreDenied,
    StoreUnavailable,
)
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import ObjectStore, probe, read
from ecshare.store.open import open_store
from ecshare.testing import Listener
from tests.bad_s3.faults import always, in_turn, modes
from tests.bad_s3.server import DATED, BadS3, Fault, Reply, Request, Stored, bad_s3, refused
from tests.ecshare.store.conftest import Bucket

KEY = object_key(Kind.EC, "0" * 32, "an object")
LIMIT = 1 << 30
OTHER = object_key(Kind.EC, "0" * 32, "another")


def test_every_obstore_exception_is_mapped() -> None:
    """A new release of obstore may add one."""
    known = {each for _, each in inspect.getmembers(foreign, inspect.isclass)}
    assert known - {foreign.BaseError} <= set(MEANING)


Serve = Callable[[Fault], tuple[BadS3, ObjectStore]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that respond by a function, and open stores on them."""
    with contextlib.ExitStack() as servers:

        def start(answer: Fault) -> tuple[BadS3, ObjectStore]:
            server = servers.enter_context(bad_s3(answer))
            return server, store_at(server.endpoint)

        yield start


def store_at(endpoint: str, io_timeout_s: float = 20.0, **options: Any) -> ObjectStore:
    keys = {"key": "k", "secret": "hidden", "endpoint_url": endpoint, **options}
    config = StoreConfig(url="s3://bucket/x", storage_options=keys, io_timeout_s=io_timeout_s)
    return open_store(config, "options")


pytestmark = pytest.mark.s3  # all of them need sockets


@pytest.mark.parametrize("num_bytes", [0, 4, 12 << 20])
async def test_get_costs_one_request(
    serve: Serve, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no HEAD request, and no range request if the connection is fast."""
    monkeypatch.setattr(cloud, "SLOW_S", math.inf)  # on a busy machine no connection is fast
    body = os.urandom(num_bytes)
    server, store = serve(always(Reply(200, body, DATED)))
    assert await read(store, KEY, LIMIT) == body
    ((method, headers),) = server.requests
    assert method == "GET"
    assert "range" not in headers


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BadS3, ObjectStore, bytes]]:
    """A server with one object that a client takes for slow, as if each connection were limited."""
    monkeypatch.setattr(cloud, "SLOW_S", 0.0)
    body = os.urandom(2 * PIECE_BYTES + (5 << 20))
    with bad_s3() as server:
        server.objects[f"x/{KEY}"] = Stored.of(body)
        yield server, store_at(server.endpoint), body


Slow = tuple[BadS3, ObjectStore, bytes]


async def test_rest_of_a_slow_object_is_fetched_in_ranges(slow: Slow) -> None:
    server, store, body = slow
    assert await read(store, KEY, LIMIT) == body
    ranges = sorted(int(h["range"][6:].split("-")[0]) for _, h in server.requests if "range" in h)
    assert len(server.requests) == 1 + len(ranges)
    assert ranges[0] >= cloud.TRIAL_BYTES
    assert len(ranges) == -(-(len(body) - ranges[0]) // PIECE_BYTES)


def in_ranges(fault: Fault) -> dict[str, Fault]:
    """Have the fault for ranges only."""
    return {"get": lambda request: fault(request) if "range" in request.headers else None}


async def test_failed_range_stops_the_others(slow: Slow) -> None:
    server, store, _ = slow
    server.objects[f"x/{KEY}"] = Stored.of(bytes(40 * PIECE_BYTES))
    server.faults = in_ranges(always(refused(403, "AccessDenied")))
    with pytest.raises(StoreDenied):
        await read(store, KEY, LIMIT)
    assert len(asyncio.all_tasks()) == 1, "no other task is left"
    assert len(server.requests) <= 1 + 2 * cloud.PIECES


@pytest.mark.parametrize("mode", ["get:wrong-range", "get:new-etags"])
async def test_object_that_changes_between_ranges_is_refused(slow: Slow, mode: str) -> None:
    server, store, _ = slow
    server.faults = in_ranges(modes(mode)["get"])
    with pytest.raises(StoreUnavailable, match="changed while it was read"):
        await read(store, KEY, LIMIT)


async def test_slow_server_without_range_support_is_read_whole(slow: Slow) -> None:
    """The first object arrives whole, too, with each byte once; later ones in one request."""
    server, store, body = slow
    server.faults = modes("get:no-range")
    sink = Listener(LIMIT)
    await store.get(KEY, sink)
    assert sink.body == body
    assert sum(stop - start for start, stop in sink.spans) == len(body)
    for _ in range(2):
        assert await read(store, KEY, LIMIT) == body
    assert sum("range" not in headers for _, headers in server.requests) == 4


async def test_object_that_changes_before_the_second_request_is_refused(slow: Slow) -> None:
    server, store, body = slow
    whole, changed = modes("get:no-range")["get"], always(Reply(200, body, DATED))
    server.faults = {"get": in_turn(whole, *[changed] * 100)}
    with pytest.raises(StoreUnavailable, match="changed while it was read"):
        await read(store, KEY, LIMIT)


@pytest.mark.parametrize(
    ("without", "kept"),
    [
        ({"x-amz-checksum-crc64nvme"}, {"if-none-match"}),
        ({"if-none-match"}, set()),
        ({"x-amz-checksum-crc64nvme", "if-none-match"}, set()),
    ],
)
@pytest.mark.parametrize("status", [400, 501])
async def test_refused_put_headers_are_left_out_from_then_on(
    serve: Serve, without: set[str], kept: set[str], status: int
) -> None:
    def answer(request: Request) -> Reply | None:
        return refused(status, "NotImplemented") if without & request.headers.keys() else None

    server, store = serve(answer)
    assert await store.put(KEY, b"body")
    del server.requests[:]
    assert await store.put(OTHER, b"body")
    ((method, headers),) = server.requests  # the refusal is remembered
    assert method == "PUT"
    assert kept <= set(headers)
    assert not without & set(headers)
    assert store.creates_once is ("if-none-match" in kept)


async def test_put_refused_in_every_form_changes_no_later_put(serve: Serve) -> None:
    server, store = serve(in_turn(*[always(refused(400, "InvalidRequest"))] * 3))
    with pytest.raises(StoreUnavailable, match="400 InvalidRequest: Words"):
        await store.put(KEY, b"body")
    assert await store.put(KEY, b"body")
    assert "x-amz-checksum-crc64nvme" in server.requests[-1][1]


@pytest.mark.parametrize("code", ["BadDigest", "IncompleteBody", "RequestTimeout"])
async def test_put_damaged_in_transit_changes_no_later_put(serve: Serve, code: str) -> None:
    """Otherwise one flipped bit in one upload would disable checksums for good."""
    server, store = serve(in_turn(always(refused(400, code))))
    with pytest.raises(StoreUnavailable, match=code):
        await store.put(KEY, b"body")
    assert await store.put(KEY, b"body")
    assert all("x-amz-checksum-crc64nvme" in headers for _, headers in server.requests)


async def test_put_to_loopback_has_an_unsigned_payload(serve: Serve) -> None:
    server, store = serve(in_turn())
    await store.put(KEY, b"body")
    assert server.requests[0][1]["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert server.requests[0][1]["if-none-match"] == "*"


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (404, "NoSuchKey", ObjectMissing),
        (404, "NoSuchBucket", StoreUnavailable),
        (403, "AccessDenied", StoreDenied),
        (401, "Unauthorized", StoreDenied),
        (403, "SignatureDoesNotMatch", StoreDenied),
        (400, "ExpiredToken", StoreDenied),
        (400, "InvalidBucketName", StoreUnavailable),
        (301, "PermanentRedirect", StoreUnavailable),
        (500, "InternalError", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
        (507, "InsufficientStorage", StoreUnavailable),
    ],
)
async def test_server_errors_are_mapped(
    serve: Serve, status: int, code: str, error: type[Exception]
) -> None:
    _, store = serve(always(refused(status, code)))
    calls: list[Awaitable[object]] = [read(store, KEY, LIMIT)]
    if error is not ObjectMissing:
        calls += [store.put(KEY, b"x"), probe(store, write=False)]
    for call in calls:
        with pytest.raises(error) as caught:
            await call
        assert isinstance(caught.value, StoreDenied) is (error is StoreDenied)
        assert "hidden" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("code", "error"), [("AccessDenied", StoreDenied), ("InternalError", StoreUnavailable)]
)
async def test_objects_that_a_server_keeps_are_named_with_its_reason(
    serve: Serve, code: str, error: type[Exception]
) -> None:
    """S3 answers 200 to a request that removes several objects, and refuses each on its own."""
    refusal = f"<Error><Key>x/{KEY}</Key><Code>{code}</Code><Message>No, no.</Message></Error>"
    _, store = serve(always(Reply(200, f"<DeleteResult>{refusal}</DeleteResult>".encode())))
    with pytest.raises(error, match=f"answered {code}: No, no.") as caught:
        await store.delete([KEY, OTHER])
    assert isinstance(caught.value, StoreDenied) is (error is StoreDenied)


async def test_a_server_that_keeps_an_object_of_another_name_is_unavailable(serve: Serve) -> None:
    """obstore panics: its assertion is no Exception in Python."""
    refusal = b"<Error><Key>no</Key><Code>AccessDenied</Code><Message>No.</Message></Error>"
    _, store = serve(always(Reply(200, b"<DeleteResult>" + refusal + b"</DeleteResult>")))
    with pytest.raises(StoreUnavailable, match="cannot read the store's answer"):
        await store.delete([KEY, OTHER])


async def test_secrets_in_server_messages_are_masked(serve: Serve) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Not with sig=hidden.</Message></Error>"
    _, store = serve(always(Reply(403, body)))
    with pytest.raises(StoreDenied, match=r"sig=\*\*\*") as caught:
        await read(store, KEY, LIMIT)
    assert "hidden" not in str(caught.value)


async def test_archived_object_is_corrupt_not_a_store_failure(serve: Serve) -> None:
    """S3 has moved it to a storage class from which it cannot be read at once."""
    _, store = serve(always(refused(403, "InvalidObjectState")))
    with pytest.raises(ObjectCorrupt, match=KEY):
        await read(store, KEY, LIMIT)


async def test_only_a_missing_object_is_a_miss(serve: Serve) -> None:
    server, store = serve(always(Reply(404)))
    assert await store.exists([KEY]) == [False]
    for status in (403, 500):
        server.faults = {"any": always(Reply(status))}
        with pytest.raises(StoreUnavailable):
            await store.exists([KEY])


async def test_refused_connection_is_store_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = store_at(f"http://127.0.0.1:{port}")
    with pytest.raises(StoreUnavailable, match="error sending request"):
        await read(store, KEY, LIMIT)


async def test_hanging_server_is_store_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = store_at(f"http://127.0.0.1:{server.getsockname()[1]}", io_timeout_s=0.3)
        with pytest.raises(StoreUnavailable):
            await read(store, KEY, LIMIT)
        with pytest.raises(StoreUnavailable):
            await store.put(KEY, b"x")
        # The client closes its connection, so no thread is left.
        connection, _ = server.accept()
        connection.settimeout(10)
        with connection:
            while connection.recv(1 << 16):
                pass


async def test_encryption_options_are_sent_as_headers() -> None:
    with bad_s3() as server:
        options: dict[str, Any] = {
            "aws_server_side_encryption": "aws:kms",
            "sse_kms_key_id": "of-the-team",
        }
        store = store_at(server.endpoint, **options)
        await store.put(KEY, b"x")
        await store.close()
    ((_, headers),) = server.requests
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "of-the-team"


async def test_option_refused_by_obstore_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="storage_options: obstore cannot use them") as caught:
        store_at("http://127.0.0.1:9", server_side_encryption="nonsense")
    assert "hidden" not in str(caught.value)


async def test_seaweedfs_errors_name_the_problem(seaweedfs: Bucket) -> None:
    good = open_store(seaweedfs.config(), "options")
    await probe(good, write=True)
    wrong_secret = open_store(seaweedfs.config(secret="wrong"), "options")
    with pytest.raises(StoreDenied, match="SignatureDoesNotMatch"):
        await probe(wrong_secret, write=False)
    wrong_key = open_store(seaweedfs.config(key="wrong"), "options")
    with pytest.raises(StoreDenied, match="InvalidAccessKeyId"):
        await probe(wrong_key, write=False)
    no_bucket = open_store(seaweedfs.config("s3://nobucket/x"), "options")
    with pytest.raises(StoreUnavailable, match="bucket does not exist"):
        await probe(no_bucket, write=True)
    for store in (good, wrong_secret, wrong_key, no_bucket):
        await store.close()


async def test_credentials_from_the_environment_open_a_real_server(
    seaweedfs: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = seaweedfs.storage_options
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", given["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", given["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", given["endpoint_url"])
    config = StoreConfig(url=seaweedfs.config().url)
    store = open_store(config, "options")
    await probe(store, write=True)
    await store.close()


async def test_obstore_and_s3fs_option_names_open_the_same_store(seaweedfs: Bucket) -> None:
    config = seaweedfs.config()
    own = {str(S3.read_as(name)): value for name, value in flat(config.storage_options).items()}
    assert own.keys() >= {"access_key_id", "secret_access_key", "endpoint"}
    renamed = StoreConfig(url=config.url, storage_options=own)
    assert renamed.store_id() == config.store_id()
    one, other = open_store(config, "options"), open_store(renamed, "options")
    await one.put(KEY, b"x")
    assert await read(other, KEY, LIMIT) == memoryview(b"x")
    await one.close()
    await other.close()


async def test_obstore_and_s3fs_read_each_others_objects(seaweedfs: Bucket) -> None:
    config = seaweedfs.config()
    general = {**config.storage_options, "s3_additional_kwargs": {}}
    fast = open_store(config, "options")
    slow = open_store(StoreConfig(url=config.url, storage_options=general), "options")
    await fast.put(KEY, b"by obstore")
    await slow.put(OTHER, b"by s3fs")
    assert await read(slow, KEY, LIMIT) == memoryview(b"by obstore")
    assert await read(fast, OTHER, LIMIT) == memoryview(b"by s3fs")
    assert await fast.exists([KEY, OTHER]) == await slow.exists([KEY, OTHER]) == [True, True]
    await fast.close()
    await slow.close()
