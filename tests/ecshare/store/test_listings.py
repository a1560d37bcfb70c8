# SPDX-License-Identifier: Apache-2.0
"""Listings of buckets with foreign or invalid keys, and endless listings."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from ecshare.store.cloud import store as cloud
from ecshare.store.cloud.store import offset_behind
from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreUnavailable
from ecshare.store.fsspec import store as fsspec_store
from ecshare.store.keys import (
    PROBE_KEY,
    Kind,
    is_safe_key,
    manifest_key,
    namespace_digest,
    object_key,
)
from ecshare.store.manifest import list_manifests, write_manifest
from ecshare.store.objects import ObjectInfo, ObjectStore, probe
from ecshare.store.open import open_store
from tests.bad_s3.faults import always
from tests.bad_s3.server import BUCKET, BadS3, Fault, Reply, Request, Stored, bad_s3, page_of

SPACE = "f" * 32
KEY = object_key(Kind.EC, SPACE, "an object")
ODD_ENDS = ["//x", "/../x", "/./x", "/a\tb", "/zz//x", "/ff\x7fa", "/\x1b[31m", "/é\n"]
HARMLESS_ENDS = ["/", "/é", "/a%2Fb", "/%", "/" + "k" * 900, "/ x", "/a\\b", "/.x"]


@contextmanager
def bucket(
    *names: str, page: int = 1000, answer: Fault | None = None, **options: Any
) -> Iterator[tuple[BadS3, ObjectStore]]:
    """Serve objects of these names, `page` of them in each part of a listing."""
    with bad_s3(answer) as server:
        server.page = page
        server.objects = {f"cache/{name}": Stored.of(b"body") for name in names}
        storage_options = server.storage_options | options
        config = StoreConfig(
            url=f"s3://{BUCKET}/cache", storage_options=storage_options, io_timeout_s=5
        )
        yield server, open_store(config, "options")


def page(keys: list[str], next_page: str | None = None) -> Reply:
    return page_of(dict.fromkeys(keys, Stored.of(b"body")), next_page=next_page)


async def names(store: ObjectStore, prefix: str) -> list[str]:
    return [info.key async for info in store.list(prefix)]


@pytest.mark.parametrize("end", [*ODD_ENDS, *HARMLESS_ENDS])
@pytest.mark.parametrize("write", [False, True])
async def test_start_up_tolerates_invalid_keys(end: str, *, write: bool) -> None:
    with bucket(f"probe{end}", f"ec/2/manifests{end}") as (_, store):
        await probe(store, write=write)
        await store.close()


async def test_start_up_on_a_used_store_lists_nothing() -> None:
    with bucket(PROBE_KEY) as (server, store):
        for write in (False, True):
            await probe(store, write=write)
        await store.close()
        assert [method for method, _ in server.requests] == ["GET", "GET", "PUT"]


@pytest.mark.parametrize("end", HARMLESS_ENDS)
async def test_listing_tolerates_foreign_keys(end: str) -> None:
    manifest = manifest_key(Kind.EC, SPACE)
    with bucket(manifest, f"ec/2/manifests{end}") as (_, store):
        assert [each for each in await names(store, "ec/2/manifests/") if each in manifest] == [
            *([manifest.removesuffix(f"/{SPACE}")] if end == "/" else []),
            manifest,
        ]
        await store.close()


@pytest.mark.parametrize("end", ODD_ENDS)
async def test_listing_continues_after_a_page_with_an_invalid_key(
    end: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore refuses the whole page."""
    monkeypatch.setattr(cloud, "LISTED", 1)
    before, behind = f"ec/2/manifests/{'0' * 32}", f"ec/2/manifests/{SPACE}"
    last = object_key(Kind.EC, SPACE, "x")
    with (
        bucket(before, f"ec/2/manifests{end}", behind, last, page=1) as (_, store),
        caplog.at_level(logging.WARNING),
    ):
        assert set(await names(store, "ec/2/")) == {before, behind, last}
        await store.close()
    said = f"ec/2/manifests{end}"
    assert f"{ascii(f'cache/{said}')}, because obstore cannot read" in caplog.text
    assert caplog.text.count("may lack keys") == 1
    assert not any(c in caplog.text for c in "\t\x1b\x7f")


async def test_objects_hidden_from_listings_still_exist() -> None:
    with bucket(KEY, "ec/2//x", "ec/2/zz//x") as (_, store):
        assert await names(store, "ec/2/") == []
        assert await store.exists([KEY]) == [True]
        await store.close()


async def test_listing_without_start_after_support_is_tried_twice() -> None:
    """Azure has no such parameter: obstore lists again from the start."""

    with bucket(answer=always(page(["cache/ec/2//x", f"cache/{KEY}"]))) as (server, store):
        assert await names(store, "ec/2/") == []
        assert len(server.requests) == 2
        await store.close()


async def test_too_many_invalid_keys_end_a_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "MOST_INVALID_KEYS", 3)
    odd = [f"ec/2/{n}\t" for n in range(9)]
    with bucket(*odd, page=1) as (server, store):
        assert await names(store, "ec/2/") == []
        assert len(server.requests) == 4
        await store.close()


@pytest.mark.parametrize(
    ("odd", "offset"),
    [
        ("ec/2//x", "ec/2/0"),
        ("ec/2/../x", "ec/2/..0"),
        ("ec/2/./x", "ec/2/.0"),
        ("ec/2/a\tb", "ec/2/a-"),
        ("ec/2/a\x7fb", "ec/2/b"),
        ("ec/2/z\x7fb", "ec/20"),
        ("ec/2/..", "ec/2/..0"),
        ("\x7f", ""),
        ("z\x7f", ""),
    ],
)
def test_offset_behind_an_invalid_key(odd: str, offset: str) -> None:
    assert offset_behind(odd) == offset


def test_offset_behind_an_invalid_key_skips_no_own_key() -> None:
    ours = sorted([KEY, manifest_key(Kind.EC, SPACE), PROBE_KEY, "ec/2/sizes/a/2", "a.b", "a-b"])
    for end in ODD_ENDS:
        for at in ("a", "ec", "ec/2", "ec/2/manifests", KEY, KEY[:-1], "zz"):
            odd = at + end
            offset = offset_behind(odd)
            assert offset > odd or not offset
            behind = [key for key in ours if key > odd]
            assert behind == ([key for key in ours if key > offset] if offset else [])
            assert all(map(is_safe_key, behind))


FOR_EVER = {"empty": [], "of the same key": [f"cache/{KEY}"], "of foreign keys": ["cache/Other"]}


@pytest.mark.parametrize("keys", FOR_EVER.values(), ids=FOR_EVER)
@pytest.mark.parametrize("road", ["obstore", "s3fs"])
async def test_endless_listing_stops_when_its_reader_is_cancelled(
    road: str, keys: list[str]
) -> None:
    """Also if all pages are empty, which obstore reads in one call."""
    loop = asyncio.get_running_loop()
    some = asyncio.Event()
    num = 0

    def endless(_: Request) -> Reply:
        nonlocal num
        num += 1
        if num == 20:
            loop.call_soon_threadsafe(some.set)
        return page(keys, str(num))

    async def is_asked() -> bool:
        before = num
        await asyncio.sleep(0.5)
        return num > before

    general: dict[str, Any] = {"s3_additional_kwargs": {}} if road == "s3fs" else {}
    with bucket(answer=endless, **general) as (_, store):
        listing = asyncio.create_task(drained(store.list("ec/2/")))
        await some.wait()
        listing.cancel()
        await asyncio.wait([listing])
        await store.close()
        async with asyncio.timeout(20):  # some requests may still be in flight
            while await is_asked():
                pass


async def drained(listing: AsyncIterator[ObjectInfo]) -> None:
    async for _ in listing:
        pass


@pytest.mark.parametrize("module", [cloud, fsspec_store])
async def test_endless_listing_fails_after_most_pages(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_PAGES", 5)
    general: dict[str, Any] = {"s3_additional_kwargs": {}} if module is fsspec_store else {}
    foreign = [f"cache/Other-{n}" for n in range(1000)]
    with bucket(answer=always(page(foreign, "same")), **general) as (server, store):
        with pytest.raises(StoreUnavailable, match="more than 5 pages, or does not end"):
            await names(store, "ec/2/")
        assert len(server.requests) <= 6
        await store.close()


async def test_s3fs_listing_fetches_only_the_pages_that_are_read() -> None:
    """Only some of a million objects are counted, since all would take minutes."""
    there = [object_key(Kind.EC, SPACE, str(n)) for n in range(9)]
    with bucket(*there, page=2, s3_additional_kwargs={}) as (server, store):
        async with aclosing(store.list("ec/2/")) as listing:  # type: ignore[type-var]
            assert (await anext(aiter(listing))).key in there
        assert len(server.requests) == 1
        assert sorted(await names(store, "ec/2/")) == sorted(there)
        await store.close()


async def test_other_filesystems_are_listed_folder_by_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ls = LocalFileSystem.ls

    def noted(self: Any, path: str, **options: Any) -> Any:
        asked.append(path)
        return ls(self, path, **options)

    monkeypatch.setattr(LocalFileSystem, "ls", noted)
    monkeypatch.setattr(LocalFileSystem, "find", None)
    filesystem = LocalFileSystem(auto_mkdir=True)
    store = fsspec_store.FsspecStore(filesystem, str(tmp_path), atomic_writes=False)
    there = [object_key(Kind.EC, SPACE, str(n)) for n in range(9)]
    for key in there:
        await store.put(key, b"body")
    (tmp_path / "ec" / "2" / "loop").symlink_to(tmp_path / "ec")
    (tmp_path / "ec" / "2" / "Odd name").touch()
    async with aclosing(store.list("ec/2/")) as listing:  # type: ignore[type-var]
        await anext(aiter(listing))
    assert len(asked) < 6
    found = [info async for info in store.list("ec/2/") if "loop" not in info.key]
    assert sorted(info.key for info in found) == sorted(there)
    assert {info.num_bytes for info in found} == {4}
    assert [info async for info in store.list("kv/2/")] == []
    await store.close()


async def test_manifests_after_invalid_keys_are_found() -> None:
    facts = {"model": "m"}
    with bucket("ec/2/manifests//x", "ec/2/manifests/../x") as (_, store):
        await write_manifest(store, Kind.EC, namespace_digest(facts), facts)
        (found,) = await list_manifests(store, Kind.EC)
        assert found.facts == facts
        await store.close()
