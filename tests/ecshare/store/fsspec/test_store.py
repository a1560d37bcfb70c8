# SPDX-License-Identifier: Apache-2.0
"""fsspec's specifics. The contract suite tests what every store must do."""

import asyncio
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ecshare.store.config import StoreConfig
from ecshare.store.errors import (
    ObjectCorrupt,
    ObjectMissing,
    ObjectUnreadable,
    StoreBusy,
    StoreDenied,
    StoreUnavailable,
)
from ecshare.store.fsspec.errors import mapped_errors
from ecshare.store.fsspec.store import FsspecStore, modified_s, open_fsspec
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import ObjectStore, probe, read
from ecshare.store.open import open_store
from ecshare.store.statuses import Conflict
from tests.bad_s3.server import BUCKET, Stored, bad_s3
from tests.ecshare.store.conftest import Bucket

KEY = object_key(Kind.EC, "0" * 32, "an object")
LIMIT = 1 << 30


class BotoError(Exception):
    """An exception like botocore's ClientError."""

    def __init__(self, code: str, status: int = 400) -> None:
        super().__init__(code)
        metadata = {"HTTPStatusCode": status}
        self.response = {"Error": {"Code": code}, "ResponseMetadata": metadata}


def through_s3fs(code: str, kind: type[OSError] = OSError, status: int = 400) -> OSError:
    error = kind(22, "words")
    error.__cause__ = BotoError(code, status)
    return error


class HttpError(Exception):
    """An exception like gcsfs's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{code}")
        self.code = code


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        (FileNotFoundError("x"), ObjectMissing),
        (PermissionError("x"), StoreDenied),
        (through_s3fs("PreconditionFailed", status=412), Conflict),
        (through_s3fs("ConditionalRequestConflict", status=409), Conflict),
        (through_s3fs("BucketAlreadyExists", FileExistsError, 409), Conflict),
        (FileExistsError("x"), Conflict),
        (HttpError(409), Conflict),
        (HttpError(503), StoreBusy),
        (HttpError(400), StoreUnavailable),
        (through_s3fs("ExpiredToken"), StoreDenied),
        (BotoError("AccessDenied"), StoreDenied),
        (through_s3fs("SlowDown"), StoreBusy),
        (through_s3fs("InvalidObjectState", PermissionError), ObjectCorrupt),
        (through_s3fs("AccessDenied", PermissionError), StoreDenied),
        (IsADirectoryError("x"), ObjectUnreadable),
        (OSError("x"), StoreUnavailable),
        (TimeoutError("x"), StoreBusy),
        (RuntimeError("x"), StoreUnavailable),
        (KeyError("x"), StoreUnavailable),
        (type("NoCredentialsError", (Exception,), {})("x"), StoreDenied),
    ],
)
def test_exceptions_of_filesystems_are_mapped(foreign: Exception, ours: type[Exception]) -> None:
    with pytest.raises(ours) as caught, mapped_errors(KEY):
        raise foreign
    assert type(caught.value) is ours
    assert caught.value is foreign or caught.value.__cause__ is foreign


@pytest.mark.parametrize(
    ("foreign", "exists"),
    [
        (FileExistsError("x"), True),  # a filesystem's own word
        (through_s3fs("PreconditionFailed", status=412), True),
        (through_s3fs("412", status=412), False),
        (through_s3fs("BucketAlreadyExists", FileExistsError, 409), False),
        (through_s3fs("ConditionalRequestConflict", status=409), False),
    ],
)
def test_only_some_conflicts_mean_that_the_object_exists(foreign: Exception, exists: bool) -> None:
    with pytest.raises(Conflict) as caught, mapped_errors(KEY, finds=False):
        raise foreign
    assert caught.value.says_exists is exists


def test_own_errors_and_cancellation_pass_unchanged() -> None:
    with pytest.raises(StoreDenied, match="as it was"), mapped_errors(KEY):
        raise StoreDenied("as it was")
    with pytest.raises(asyncio.CancelledError), mapped_errors(KEY):
        raise asyncio.CancelledError


@pytest.mark.parametrize(
    "entry",
    [
        {"LastModified": datetime.fromtimestamp(1000, UTC)},
        {"mtime": 1000},
        {"mtime": 1000.0, "created": 5},
        {"updated": "1970-01-01T00:16:40Z"},
        {"updated": "nonsense", "created": 1000.0},
    ],
)
def test_modification_time_is_read_under_several_names(entry: dict[str, Any]) -> None:
    assert modified_s(entry) == 1000.0


def test_unknown_modification_time_is_zero() -> None:
    assert modified_s({"size": 3}) == 0.0


class Odd(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem with malformed fields in its listings."""

    protocol = "odd"
    says: dict[str, Any] = {}  # noqa: RUF012 — a test sets it

    def ls(self, path: str, **options: Any) -> list[dict[str, Any]]:
        return [each | self.says for each in super().ls(path, **options)]


@pytest.mark.parametrize(
    "says",
    [{"size": "many"}, {"size": float("inf")}, {"mtime": 10**400}],
)
async def test_malformed_listing_entry_is_a_store_failure(
    says: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "says", says)
    store = FsspecStore(Odd(), f"/{uuid.uuid4().hex}", atomic_writes=True)
    await store.put(KEY, b"body")
    with pytest.raises(StoreUnavailable):
        _ = [each async for each in store.list("")]
    await store.close()


class Unwell(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem whose store is down."""

    protocol = "unwell"

    def info(self, path: str, **_: Any) -> None:
        raise ConnectionError("down")

    def mv(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("down")


async def test_store_failure_is_not_a_miss() -> None:
    store = FsspecStore(Unwell(), f"/{uuid.uuid4().hex}", atomic_writes=True)
    with pytest.raises(StoreUnavailable, match="ConnectionError: down"):
        await store.exists([KEY])
    await store.close()


async def test_folder_in_place_of_an_object_blocks_only_its_key() -> None:
    filesystem, root = MemoryFileSystem(), f"/{uuid.uuid4().hex}"
    store = FsspecStore(filesystem, root, atomic_writes=True)
    filesystem.makedirs(f"{root}/{KEY}")
    assert await store.exists([KEY]) == [False]
    with pytest.raises(ObjectUnreadable, match="not a file"):
        await read(store, KEY, LIMIT)
    await store.close()


async def test_write_that_fails_half_way_leaves_no_file() -> None:
    filesystem = Unwell()
    root = f"/{uuid.uuid4().hex}"
    store = FsspecStore(filesystem, root, atomic_writes=False)
    with pytest.raises(StoreUnavailable, match="down"):
        await store.put(KEY, b"body")
    assert filesystem.find(root) == []
    await store.close()


def test_secrets_in_client_messages_are_masked() -> None:
    """They quote requests with their signatures."""
    with pytest.raises(StoreUnavailable) as caught, mapped_errors(KEY):
        raise RuntimeError("GET http://me:hidden@host/c/x?sig=hidden%3D failed")
    assert "hidden" not in str(caught.value)
    assert "host/c/x" in str(caught.value)


async def test_two_memory_stores_of_one_url_share_objects() -> None:
    config = StoreConfig(url=f"memory://{uuid.uuid4().hex}/x")
    one, two = open_store(config, "options"), open_store(config, "options")
    await one.put(KEY, b"body")
    assert await read(two, KEY, LIMIT) == memoryview(b"body")
    assert await two.put(KEY, b"body") is False


@pytest.mark.s3
async def test_seaweedfs_errors_name_the_problem(seaweedfs: Bucket) -> None:
    def store(url: str = "", **options: Any) -> FsspecStore:
        found = open_store(seaweedfs.config(url, s3_additional_kwargs={}, **options), "options")
        assert isinstance(found, FsspecStore)
        return found

    good, wrong = store(), store(secret="wrong")
    no_bucket, nobody = store("s3://nobucket/x"), store(endpoint_url="http://127.0.0.1:9")
    await probe(good, write=True)
    with pytest.raises(StoreDenied, match="signature"):
        await probe(wrong, write=False)
    with pytest.raises(StoreUnavailable, match="bucket does not exist"):
        await probe(no_bucket, write=True)
    with pytest.raises(StoreUnavailable, match="127.0.0.1:9"):
        await probe(nobody, write=False)
    for each in (good, wrong, no_bucket, nobody):
        await each.close()


@pytest.mark.s3
def test_store_runs_on_the_event_loop_that_uses_it(seaweedfs: Bucket) -> None:
    """The transfer engine opens a store in the main thread and uses it in its own."""
    config = seaweedfs.config(s3_additional_kwargs={})

    async def use(store: ObjectStore) -> bytes:
        await store.put(KEY, b"body")
        found = bytes(await read(store, KEY, LIMIT))
        await store.close()
        return found

    for _ in range(2):
        assert asyncio.run(use(open_store(config, "options"))) == b"body"


@pytest.mark.s3
async def test_objects_of_other_writers_are_listed_at_once(seaweedfs: Bucket) -> None:
    """Listings are not cached."""
    config = seaweedfs.config(s3_additional_kwargs={})
    one, two = open_store(config, "options"), open_store(config, "options")
    assert [info async for info in one.list("")] == []
    await two.put(KEY, b"body")
    assert [info.key async for info in one.list("")] == [KEY]
    await two.delete([KEY])
    assert await one.exists([KEY]) == [False]
    assert [info async for info in one.list("")] == []
    await one.close()
    await two.close()


@pytest.mark.s3
async def test_get_through_s3fs_costs_one_request() -> None:
    with bad_s3() as server:
        server.objects[f"x/{KEY}"] = Stored.of(b"body")
        config = StoreConfig(url=f"s3://{BUCKET}/x", storage_options=server.storage_options)
        store = open_fsspec(config, "options")
        assert await read(store, KEY, LIMIT) == memoryview(b"body")
        await store.close()
        assert [method for method, _ in server.requests] == ["GET"]
