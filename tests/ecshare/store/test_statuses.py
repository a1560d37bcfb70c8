# SPDX-License-Identifier: Apache-2.0
"""The outcome of every HTTP status, for each kind of request and each client."""

import base64
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from itertools import product
from typing import Any

import pytest

from ecshare.store.cloud import store as cloud
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectMissing, StoreBusy, StoreError
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import ObjectStore, probe, read
from ecshare.store.open import open_store
from ecshare.store.statuses import CONFLICTS
from tests.ecshare.store.scripted import DATED, Asked, serving

pytestmark = pytest.mark.s3  # all of them need sockets

KEY = object_key(Kind.EC, "0" * 32, "an object")
BODY = b"the same bytes"
LIMIT = 1 << 20
ROADS = ("s3", "az", "gs", "s3fs")
REFUSALS = [status for status in HTTPStatus if status >= HTTPStatus.MULTIPLE_CHOICES]
EXISTS = {"s3": (412, "PreconditionFailed"), "az": (409, "BlobAlreadyExists"),
          "gs": (412, "PreconditionFailed"), "s3fs": (412, "PreconditionFailed")}  # fmt: skip
"""Each server's response to a create-only PUT of an existing object."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    have_clients_ask_once(monkeypatch)


def have_clients_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable retries, since otherwise each 5xx takes a second."""
    monkeypatch.setattr(cloud, "_RETRIES", 0)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)


def store_at(road: str, endpoint: str) -> ObjectStore:
    url, options = "s3://bucket/x", {"key": "k", "secret": "s", "endpoint_url": endpoint}
    if road == "s3fs":
        options["s3_additional_kwargs"] = {}  # type: ignore[assignment]
    if road == "az":
        key = base64.b64encode(b"k" * 32).decode()
        account = f"AccountName=account;AccountKey={key};BlobEndpoint={endpoint}/account"
        url, options = "az://container/x", {"connection_string": account}
    if road == "gs":
        url, options = "gs://bucket/x", {"token": "anon", "endpoint_url": endpoint}
    return open_store(StoreConfig(url=url, storage_options=options, io_timeout_s=10), "options")


def refuse(asked: Asked, status: int, code: str) -> None:
    if status == HTTPStatus.NOT_MODIFIED:  # has no body
        asked.say(status)
    else:
        asked.say_error(status, code)


async def listed(store: ObjectStore) -> list[Any]:
    return [each async for each in store.list("x/")]


CALLS: dict[str, Callable[[ObjectStore], Awaitable[object]]] = {
    "get": lambda store: read(store, KEY, LIMIT),
    "exists": lambda store: store.exists([KEY]),
    "stat": lambda store: store.stat(KEY),
    "put": lambda store: store.put(KEY, BODY),
    "replace": lambda store: store.put(KEY, BODY, replace=True),
    "delete": lambda store: store.delete([KEY]),
    "list": listed,
    "probe": lambda store: probe(store, write=True),
}
MISSING = {"get": ObjectMissing, "stat": ObjectMissing, "exists": [False], "delete": None}
"""The outcome of a 404 for requests of one object."""
BATCHES = [("az", "delete")]
"""Requests that go to a container although they name one object."""


async def outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except StoreError as exc:
        return exc


async def check_refusals(road: str, statuses: Sequence[int]) -> None:
    """Check that no error status counts as success, and that only StoreErrors are raised."""
    now = 0
    with serving(lambda asked: refuse(asked, now, "Odd")) as server:
        store = store_at(road, server.endpoint)
        for now, name in product(statuses, CALLS):
            found = await outcome(CALLS[name](store))
            if now == HTTPStatus.NOT_FOUND and name in MISSING and (road, name) not in BATCHES:
                assert found == MISSING[name] or type(found) is MISSING[name], (name, now, found)
                continue
            assert isinstance(found, StoreError), (name, now, found)
            assert not isinstance(found, ObjectMissing), (name, now)
            assert isinstance(found, StoreBusy) or now not in CONFLICTS, (name, now, found)
        await store.close()


@pytest.mark.parametrize("road", ROADS)
async def test_every_error_status_is_a_store_error(
    road: str,
) -> None:
    """tests/faults tries every status."""
    few = [each for each in REFUSALS if each < 500 or each in (500, 503)]
    await check_refusals(road, few if road == "s3fs" else REFUSALS)  # s3fs waits after each 5xx


class Bucket:
    """Holds objects. Answers requests of `verb` with `refusals`, then works normally."""

    def __init__(self, road: str, verb: str = "PUT") -> None:
        self.road = road
        self.verb = verb
        self.objects: dict[str, bytes] = {}
        self.refusals: list[tuple[int, str]] = []

    def __call__(self, asked: Asked) -> None:
        path = asked.path.partition("?")[0]
        if asked.command == self.verb and self.refusals:
            refuse(asked, *self.refusals.pop())
        elif asked.command == "PUT":
            is_create = {"if-none-match", "x-goog-if-generation-match"} & {
                name.lower() for name in asked.headers
            }
            if is_create and path in self.objects:
                asked.say_error(*EXISTS[self.road])
                return
            self.objects[path] = asked.body
            asked.say(201 if self.road == "az" else 200, b"", etag='"e"', **DATED)
        elif path in self.objects:
            asked.say(200, self.objects[path], etag='"e"', **DATED)
        else:
            asked.say_error(404, "NoSuchKey")


CONFLICT = [(409, "ConditionalRequestConflict"), (409, "OperationAborted"), (409, "Odd"),
            (412, "LeaseIdMissing"), (304, "")]  # fmt: skip


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("road", ROADS)
async def test_successful_put_is_in_the_bucket_despite_conflicts(
    road: str, replace: bool, is_there: bool
) -> None:
    bucket = Bucket(road)
    with serving(bucket) as server:
        store = store_at(road, server.endpoint)
        for refusal, num_refusals in product(CONFLICT, (1, 2, 50)):
            case = (refusal, num_refusals)
            bucket.refusals, bucket.objects = [], {}
            if is_there:
                await store.put(KEY, b"damaged" if replace else BODY)
            bucket.refusals = [refusal] * num_refusals
            del server.asked[:]
            found = await outcome(store.put(KEY, BODY, replace=replace))
            if is_there and not replace:
                assert found is False, case  # a HEAD has decided
            elif num_refusals == 1:
                assert found is True, case  # it was sent once more
            else:
                assert isinstance(found, StoreBusy), case
            assert isinstance(found, StoreError) or [*bucket.objects.values()] == [BODY], case
            assert sum(verb == "PUT" for verb, _ in server.asked) <= 2, case
        await store.close()


@pytest.mark.parametrize("road", ROADS)
async def test_duplicate_put_costs_one_request(road: str) -> None:
    """This holds if the server's error code is specific."""
    bucket = Bucket(road)
    with serving(bucket) as server:
        store = store_at(road, server.endpoint)
        assert await store.put(KEY, BODY) is True
        del server.asked[:]
        assert await store.put(KEY, BODY) is False
        assert [verb for verb, _ in server.asked] == ["PUT"]
        await store.close()


@pytest.mark.parametrize("road", ROADS)
async def test_replacing_put_is_never_told_that_the_object_exists(road: str) -> None:
    """It sets no condition, so such a response is a refusal, whatever its code."""
    bucket = Bucket(road)
    with serving(bucket) as server:
        store = store_at(road, server.endpoint)
        bucket.refusals = [EXISTS[road]] * 2
        assert isinstance(await outcome(store.put(KEY, BODY, replace=True)), StoreBusy)
        assert not bucket.objects
        await store.close()


@pytest.mark.parametrize("verb", ["GET", "HEAD"])
@pytest.mark.parametrize("road", ROADS)
async def test_read_is_retried_once_after_a_conflict(road: str, verb: str) -> None:
    bucket = Bucket(road, verb)
    with serving(bucket) as server:
        store = store_at(road, server.endpoint)
        await store.put(KEY, BODY)
        bucket.refusals = [(409, "OperationAborted")]
        if verb == "GET":
            assert bytes(await read(store, KEY, LIMIT)) == BODY
        else:
            assert await store.exists([KEY]) == [True]
        bucket.refusals = [(409, "OperationAborted")] * 2
        failed = await outcome(read(store, KEY, LIMIT) if verb == "GET" else store.exists([KEY]))
        assert isinstance(failed, StoreBusy)
        await store.close()
