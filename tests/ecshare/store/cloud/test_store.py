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
from tests.ecshare.store.conftest import Bucket
from tests.ecshare.store.scripted import DATED, Asked, Scripted, serving

KEY = object_key(Kind.EC, "0" * 32, "an object")
LIMIT = 1 << 30
OTHER = object_key(Kind.EC, "0" * 32, "another")


def test_every_obstore_exception_is_mapped() -> None:
    """A new release of obstore may add one."""
    known = {each for _, each in inspect.getmembers(foreign, inspect.isclass)}
    assert known - {foreign.BaseError} <= set(MEANING)


Serve = Callable[[Callable[[Asked], None]], tuple[Scripted, ObjectStore]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that respond by a function, and open stores on them."""
    with contextlib.ExitStack() as servers:

        def start(answer: Callable[[Asked], None]) -> tuple[Scripted, ObjectStore]:
            server = servers.enter_context(serving(answer))
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
    server, store = serve(lambda asked: asked.say(200, body, etag='"e"', **DATED))
    assert await read(store, KEY, LIMIT) == body
    ((method, headers),) = server.asked
    assert method == "GET"
    assert "range" not in headers


class Slow:
    """Responds like a store that limits the speed of each connection."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.total = len(body)
        self.tags = ['"e"', '"e"']
        self.takes_ranges = True

    def __call__(self, asked: Asked) -> None:
        span = asked.headers.get("range")
        if span is None or not self.takes_ranges:
            asked.say(200, self.body, etag=self.tags[0], **DATED)
            return
        start, _, stop = span.removeprefix("bytes=").partition("-")
        part = self.body[int(start) : int(stop) + 1]
        place = f"bytes {start}-{stop}/{self.total}"
        asked.say(206, part, content_range=place, etag=self.tags[1], **DATED)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    monkeypatch.setattr(cloud, "SLOW_S", 0.0)
    return Slow(os.urandom(2 * PIECE_BYTES + (5 << 20)))


async def test_rest_of_a_slow_object_is_fetched_in_ranges(serve: Serve, slow: Slow) -> None:
    server, store = serve(slow)
    assert await read(store, KEY, LIMIT) == slow.body
    ranges = sorted(int(h["range"][6:].split("-")[0]) for _, h in server.asked if "range" in h)
    assert len(server.asked) == 1 + len(ranges)
    assert ranges[0] >= cloud.TRIAL_BYTES
    assert len(ranges) == -(-(len(slow.body) - ranges[0]) // PIECE_BYTES)


async def test_failed_range_stops_the_others(serve: Serve, slow: Slow) -> None:
    slow.body = bytes(40 * PIECE_BYTES)
    slow.total = len(slow.body)

    def answer(asked: Asked) -> None:
        if "range" in asked.headers:
            asked.say_error(403, "AccessDenied")
        else:
            slow(asked)

    server, store = serve(answer)
    with pytest.raises(StoreDenied):
        await read(store, KEY, LIMIT)
    assert len(asyncio.all_tasks()) == 1, "no other task is left"
    assert len(server.asked) <= 1 + 2 * cloud.PIECES


@pytest.mark.parametrize("changed", ["size", "version"])
async def test_object_that_changes_between_ranges_is_refused(
    serve: Serve, slow: Slow, changed: str
) -> None:
    if changed == "size":
        slow.total += 1
    else:
        slow.tags[1] = '"new"'
    _, store = serve(slow)
    with pytest.raises(StoreUnavailable, match="changed while it was read"):
        await read(store, KEY, LIMIT)


async def test_slow_server_without_range_support_is_read_whole(serve: Serve, slow: Slow) -> None:
    """The first object arrives whole, too, with each byte once; later ones in one request."""
    slow.takes_ranges = False
    server, store = serve(slow)
    sink = Listener(LIMIT)
    await store.get(KEY, sink)
    assert sink.body == slow.body
    assert sum(stop - start for start, stop in sink.spans) == len(slow.body)
    for _ in range(2):
        assert await read(store, KEY, LIMIT) == slow.body
    assert sum("range" not in headers for _, headers in server.asked) == 4


async def test_object_that_changes_before_the_second_request_is_refused(
    serve: Serve, slow: Slow
) -> None:
    slow.takes_ranges = False
    tags = iter(['"e"', *["new"] * 100])

    def answer(asked: Asked) -> None:
        slow.tags[0] = next(tags)
        slow(asked)

    _, store = serve(answer)
    with pytest.raises(StoreUnavailable, match="changed while it was read"):
        await read(store, KEY, LIMIT)


@pytest.mark.parametrize(
    ("refused", "kept"),
    [
        ({"x-amz-checksum-crc64nvme"}, {"if-none-match"}),
        ({"if-none-match"}, set()),
        ({"x-amz-checksum-crc64nvme", "if-none-match"}, set()),
    ],
)
@pytest.mark.parametrize("status", [400, 501])
async def test_refused_put_headers_are_left_out_from_then_on(
    serve: Serve, refused: set[str], kept: set[str], status: int
) -> None:
    def answer(asked: Asked) -> None:
        if refused & {name.lower() for name in asked.headers}:
            asked.say_error(status, "NotImplemented")
        else:
            asked.say(200, etag='"e"')

    server, store = serve(answer)
    assert await store.put(KEY, b"body")
    del server.asked[:]
    assert await store.put(OTHER, b"body")
    ((method, headers),) = server.asked  # the refusal is remembered
    assert method == "PUT"
    assert kept <= set(headers)
    assert not refused & set(headers)
    assert store.creates_once is ("if-none-match" in kept)


async def test_put_refused_in_every_form_changes_no_later_put(serve: Serve) -> None:
    statuses = [400, 400, 400, 200]

    def answer(asked: Asked) -> None:
        status = statuses.pop(0)
        if status == 200:
            asked.say(200, etag='"e"')
        else:
            asked.say_error(status, "InvalidRequest")

    server, store = serve(answer)
    with pytest.raises(StoreUnavailable, match="400 InvalidRequest: Words"):
        await store.put(KEY, b"body")
    assert await store.put(KEY, b"body")
    assert "x-amz-checksum-crc64nvme" in server.asked[-1][1]


@pytest.mark.parametrize("code", ["BadDigest", "IncompleteBody", "RequestTimeout"])
async def test_put_damaged_in_transit_changes_no_later_put(serve: Serve, code: str) -> None:
    """Otherwise one flipped bit in one upload would disable checksums for good."""
    errors = [code]

    def answer(asked: Asked) -> None:
        if errors:
            asked.say_error(400, errors.pop())
        else:
            asked.say(200, etag='"e"')

    server, store = serve(answer)
    with pytest.raises(StoreUnavailable, match=code):
        await store.put(KEY, b"body")
    assert await store.put(KEY, b"body")
    assert all("x-amz-checksum-crc64nvme" in headers for _, headers in server.asked)


async def test_put_to_loopback_has_an_unsigned_payload(serve: Serve) -> None:
    server, store = serve(lambda asked: asked.say(200, etag='"e"'))
    await store.put(KEY, b"body")
    assert server.asked[0][1]["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert server.asked[0][1]["if-none-match"] == "*"


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
    _, store = serve(lambda asked: asked.say_error(status, code))
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


async def test_secrets_in_server_messages_are_masked(serve: Serve) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Not with sig=hidden.</Message></Error>"
    _, store = serve(lambda asked: asked.say(403, body))
    with pytest.raises(StoreDenied, match=r"sig=\*\*\*") as caught:
        await read(store, KEY, LIMIT)
    assert "hidden" not in str(caught.value)


async def test_archived_object_is_corrupt_not_a_store_failure(serve: Serve) -> None:
    """S3 has moved it to a storage class from which it cannot be read at once."""
    _, store = serve(lambda asked: asked.say_error(403, "InvalidObjectState"))
    with pytest.raises(ObjectCorrupt, match=KEY):
        await read(store, KEY, LIMIT)


async def test_only_a_missing_object_is_a_miss(serve: Serve) -> None:
    answers = {"status": 404}
    _, store = serve(lambda asked: asked.say(answers["status"]))
    assert await store.exists([KEY]) == [False]
    for answers["status"] in (403, 500):
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
    with serving(lambda asked: asked.say(200, ETag='"x"')) as server:
        options: dict[str, Any] = {
            "aws_server_side_encryption": "aws:kms",
            "sse_kms_key_id": "of-the-team",
        }
        store = store_at(server.endpoint, **options)
        await store.put(KEY, b"x")
        await store.close()
    ((_, headers),) = server.asked
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
