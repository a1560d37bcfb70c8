# SPDX-License-Identifier: Apache-2.0
"""The outcome of every HTTP status, for each kind of request and each client."""

import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
from tests.bad_s3.faults import always, in_turn
from tests.bad_s3.server import BadS3, bad_s3, refused

pytestmark = pytest.mark.s3  # all of them need sockets

KEY = object_key(Kind.EC, "0" * 32, "an object")
BODY = b"the same bytes"
LIMIT = 1 << 20
ROADS = ("s3", "az", "gs", "s3fs")
REFUSALS = [status for status in HTTPStatus if status >= HTTPStatus.MULTIPLE_CHOICES]
EXISTS = dict.fromkeys(ROADS, (412, "PreconditionFailed")) | {"az": (409, "BlobAlreadyExists")}
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
    with bad_s3() as server:
        store = store_at(road, server.endpoint)
        for now, name in product(statuses, CALLS):
            server.faults = {"any": always(refused(now, "Odd"))}
            found = await outcome(CALLS[name](store))
            if now == HTTPStatus.NOT_FOUND and name in MISSING and (road, name) not in BATCHES:
                assert found == MISSING[name] or type(found) is MISSING[name], (name, now, found)
                continue
            assert isinstance(found, StoreError), (name, now, found)
            assert not isinstance(found, ObjectMissing), (name, now)
            assert isinstance(found, StoreBusy) or now not in CONFLICTS, (name, now, found)
        await store.close()


# s3fs takes ten times as long as the others; `make test-faults` tries it.
@pytest.mark.parametrize("road", [road for road in ROADS if road != "s3fs"])
async def test_every_error_status_is_a_store_error(
    road: str,
) -> None:
    """tests/faults tries every status."""
    few = [each for each in REFUSALS if each < 500 or each in (500, 503)]
    await check_refusals(road, few if road == "s3fs" else REFUSALS)  # s3fs waits after each 5xx


At = tuple[BadS3, ObjectStore]


@pytest.fixture(params=ROADS)
async def at(request: pytest.FixtureRequest) -> AsyncIterator[At]:
    """A server, and a store on it."""
    with bad_s3() as server:
        server.exists = refused(*EXISTS[request.param])
        store = store_at(request.param, server.endpoint)
        yield server, store
        await store.close()


def refuse(server: BadS3, verb: str, *refusals: tuple[int, str]) -> None:
    """Refuse the next requests."""
    server.faults = {verb: in_turn(*(always(refused(*each)) for each in refusals))}


def bodies(server: BadS3) -> list[bytes]:
    return [stored.body for stored in server.objects.values()]


CONFLICT = [(409, "ConditionalRequestConflict"), (409, "OperationAborted"), (409, "Odd"),
            (412, "LeaseIdMissing"), (304, "")]  # fmt: skip


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("replace", [False, True])
async def test_successful_put_is_in_the_bucket_despite_conflicts(
    at: At, replace: bool, is_there: bool
) -> None:
    server, store = at
    for refusal, num_refusals in product(CONFLICT, (1, 2, 50)):
        case = (refusal, num_refusals)
        server.faults, server.objects = {}, {}
        if is_there:
            await store.put(KEY, b"damaged" if replace else BODY)
        refuse(server, "put", *[refusal] * num_refusals)
        server.requests.clear()
        found = await outcome(store.put(KEY, BODY, replace=replace))
        if is_there and not replace:
            assert found is False, case  # a HEAD has decided
        elif num_refusals == 1:
            assert found is True, case  # it was sent once more
        else:
            assert isinstance(found, StoreBusy), case
        assert isinstance(found, StoreError) or bodies(server) == [BODY], case
        assert sum(verb == "PUT" for verb, _ in server.requests) <= 2, case


async def test_duplicate_put_costs_one_request(at: At) -> None:
    """This holds if the server's error code is specific."""
    server, store = at
    assert await store.put(KEY, BODY) is True
    server.requests.clear()
    assert await store.put(KEY, BODY) is False
    assert [verb for verb, _ in server.requests] == ["PUT"]


async def test_replacing_put_is_never_told_that_the_object_exists(at: At) -> None:
    """It sets no condition, so such a response is a refusal, whatever its code."""
    server, store = at
    server.faults = {"put": always(server.exists)}
    assert isinstance(await outcome(store.put(KEY, BODY, replace=True)), StoreBusy)
    assert not server.objects


@pytest.mark.parametrize("verb", ["get", "head"])
async def test_read_is_retried_once_after_a_conflict(at: At, verb: str) -> None:
    server, store = at
    await store.put(KEY, BODY)
    refuse(server, verb, (409, "OperationAborted"))
    if verb == "get":
        assert bytes(await read(store, KEY, LIMIT)) == BODY
    else:
        assert await store.exists([KEY]) == [True]
    refuse(server, verb, *[(409, "OperationAborted")] * 2)
    failed = await outcome(read(store, KEY, LIMIT) if verb == "get" else store.exists([KEY]))
    assert isinstance(failed, StoreBusy)


FULL = [(403, "QuotaExceeded"), (400, "XMinioAdminBucketQuotaExceeded"), (507, "Odd")]


@pytest.mark.parametrize("refusal", FULL)
async def test_full_quota_may_pass_whatever_its_status(at: At, refusal: tuple[int, str]) -> None:
    """It is no denial, and does not mean that the server lacks create-only requests."""
    server, store = at
    server.faults = {"put": always(refused(*refusal))}
    assert isinstance(await outcome(store.put(KEY, BODY)), StoreBusy)
    server.faults = {}
    assert await store.put(KEY, BODY) is True
    assert await store.put(KEY, b"other") is False
