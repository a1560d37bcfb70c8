# SPDX-License-Identifier: Apache-2.0
"""The IAM policies of examples/s3 suffice, and allow no more: on a server that enforces them."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from ecshare.cli import main
from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreDenied, StoreError
from ecshare.store.fsspec.store import FsspecStore
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import ObjectStore, probe, read
from ecshare.store.open import open_store
from ecshare.testing import KEY, NAMESPACE, OTHER, StoreContract
from lab.servers.s3 import BUCKET, SeaweedFS
from tests.docs.pages import ROOT, fences

pytestmark = [pytest.mark.nightly, pytest.mark.s3]

SAVES, LOADS = (
    text.replace("my-bucket", BUCKET)
    for text in fences(ROOT / "examples" / "s3" / "README.md", "json")
    if "Statement" in text
)
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A server with one user for each policy."""
    policies = {"saves": SAVES, "loads": LOADS}
    with SeaweedFS(tmp_path_factory.mktemp("policies"), policies=policies) as started:
        yield started


def config_of(server: SeaweedFS, user: str, folder: str, **options: Any) -> StoreConfig:
    """Return options of a store below `folder`, as `user`; "": who may do all."""
    own = {"key": user, "secret": user} if user else {}
    return StoreConfig(
        url=f"s3://{BUCKET}/{folder}", storage_options={**server.storage_options, **own, **options}
    )


def json_of(config: StoreConfig) -> str:
    return json.dumps({"url": config.url, "storage_options": config.storage_options})


class TestContractOfWhoSaves(StoreContract):
    @pytest.fixture
    async def store(self, server: SeaweedFS) -> AsyncIterator[ObjectStore]:
        config = config_of(server, "saves", f"ecshare/{uuid.uuid4().hex}")
        store = open_store(config, "options")
        assert not isinstance(store, FsspecStore)
        yield store
        await store.close()


class TestContractOfWhoSavesThroughS3fs(StoreContract):
    @pytest.fixture
    async def store(self, server: SeaweedFS) -> AsyncIterator[ObjectStore]:
        folder = f"ecshare/{uuid.uuid4().hex}"
        config = config_of(server, "saves", folder, s3_additional_kwargs={})
        store = open_store(config, "options")
        assert isinstance(store, FsspecStore)
        yield store
        await store.close()


@pytest.fixture
def folder(server: SeaweedFS) -> str:
    """A folder below the prefix with something in it."""
    folder = f"ecshare/{uuid.uuid4().hex}"
    with pytest.raises(SystemExit) as ended:
        main(["doctor", json_of(config_of(server, "", folder))])
    assert ended.value.code == 0
    return folder


async def test_who_loads_may_read_and_list(server: SeaweedFS, folder: str) -> None:
    owner = open_store(config_of(server, "", folder), "options")
    store = open_store(config_of(server, "loads", folder), "options")
    await probe(store, write=False)
    await owner.put(KEY, b"x")
    assert bytes(await read(store, KEY, LIMIT)) == b"x"
    assert await store.exists([KEY, OTHER]) == [True, False]
    assert (await store.stat(KEY)).num_bytes == 1
    assert [info.key async for info in store.list("")] == [KEY]


async def test_who_loads_may_not_write_or_remove(server: SeaweedFS, folder: str) -> None:
    owner = open_store(config_of(server, "", folder), "options")
    store = open_store(config_of(server, "loads", folder), "options")
    await owner.put(KEY, b"x")
    for call in (store.put(OTHER, b"y"), store.put(KEY, b"y", replace=True)):
        with pytest.raises(StoreDenied):
            await call
    for keys in ([KEY], [KEY, OTHER]):
        with pytest.raises(StoreDenied):
            await store.delete(keys)
    assert bytes(await read(owner, KEY, LIMIT)) == b"x"


@pytest.mark.parametrize("user", ["saves", "loads"])
async def test_nothing_is_allowed_beside_the_prefix(server: SeaweedFS, user: str) -> None:
    owner = open_store(config_of(server, "", "others"), "options")
    await owner.put(KEY, b"x")
    store = open_store(config_of(server, user, "others"), "options")
    for call in (read(store, KEY, LIMIT), store.put(OTHER, b"y"), store.delete([KEY])):
        with pytest.raises(StoreDenied):
            await call
    with pytest.raises(StoreError):
        _ = [info async for info in store.list("")]


@pytest.mark.parametrize(
    ("user", "words", "status"),
    [
        ("saves", ["doctor", "STORE"], 0),
        ("saves", ["bench", "STORE", "--seconds", "0.1"], 0),
        ("saves", ["gc", "STORE", "--max-bytes", "1GB"], 0),
        ("loads", ["doctor", "STORE", "--read-only"], 0),
        ("loads", ["du", "STORE"], 0),
        ("loads", ["ls", "STORE"], 0),
        ("loads", ["verify", "STORE", "--all"], 0),
        ("loads", ["bench", "STORE", "--seconds", "0.1"], 1),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else None,
)
def test_commands_need_these_rights(
    server: SeaweedFS, folder: str, user: str, words: list[str], status: int
) -> None:
    store = json_of(config_of(server, user, folder))
    with pytest.raises(SystemExit) as ended:
        main([store if word == "STORE" else word for word in words])
    assert (ended.value.code or 0) == status


async def put_some(config: StoreConfig) -> None:
    owner = open_store(config, "options")
    for name in "abc":
        await owner.put(object_key(Kind.KV, NAMESPACE, name), b"x" * 100)


def test_gc_without_the_right_to_remove_says_so(
    server: SeaweedFS, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """S3 answers 200 to the request as a whole, and refuses each object."""
    asyncio.run(put_some(config_of(server, "", folder)))
    with pytest.raises(SystemExit) as ended:
        main(["gc", json_of(config_of(server, "loads", folder)), "--max-bytes", "1"])
    assert ended.value.code == 1
    assert "AccessDenied" in capsys.readouterr().err
