# SPDX-License-Identifier: Apache-2.0
"""Listings of buckets with foreign or invalid keys, and endless listings."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

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
from tests.ecshare.store.scripted import DATED, Asked, Scripted, serving

SPACE = "f" * 32
KEY = object_key(Kind.EC, SPACE, "an object")
ODD_ENDS = ["//x", "/../x", "/./x", "/a\tb", "/zz//x", "/ff\x7fa", "/\x1b[31m", "/é\n"]
HARMLESS_ENDS = ["/", "/é", "/a%2Fb", "/%", "/" + "k" * 900, "/ x", "/a\\b", "/.x"]


class Bucket:
    """The objects of an S3 server, which lists `page` of them per request."""

    def __init__(self, *names: str, page: int = 1000) -> None:
        self.objects = dict.fromkeys((f"cache/{name}" for name in names), b"body")
        self.page = page

    def __call__(self, asked: Asked) -> None:
        parts = urlsplit(asked.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        key = parts.path.removeprefix("/bucket").lstrip("/")
        if asked.command == "GET" and "list-type" in query:
            self.list(asked, query)
        elif asked.command == "PUT":
            self.objects[key] = asked.body
            asked.say(200, etag='"e"')
        elif key in self.objects:
            asked.say(200, self.objects[key], etag='"e"', **DATED)
        else:
            asked.say_error(404, "NoSuchKey")

    def list(self, asked: Asked, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = sorted(
            key for key in self.objects if key.startswith(query.get("prefix", "")) and key > after
        )
        more = keys[self.page :]
        asked.say(200, page(keys[: self.page], keys[self.page - 1] if more else ""))


def page(keys: list[str], token: str) -> bytes:
    """`token`: "" ends the listing."""
    lines = "".join(
        f"<Contents><Key>{_escaped(key)}</Key><LastModified>2026-11-22T00:00:00.000Z"
        "</LastModified><ETag>1</ETag><Size>4</Size></Contents>"
        for key in keys
    )
    more = f"<NextContinuationToken>{_escaped(token)}</NextContinuationToken>" if token else ""
    return (
        "<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Name>bucket</Name>"
        f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>{more}{lines}</ListBucketResult>"
    ).encode()


def _escaped(key: str) -> str:
    return "".join(f"&#{ord(c)};" if ord(c) < 32 else c for c in escape(key))


@contextmanager
def bucket(
    answer: Callable[[Asked], None], **options: Any
) -> Iterator[tuple[Scripted, ObjectStore]]:
    with serving(answer) as server:
        storage_options = {"key": "k", "secret": "s", "endpoint_url": server.endpoint, **options}
        config = StoreConfig(
            url="s3://bucket/cache", storage_options=storage_options, io_timeout_s=5
        )
        yield server, open_store(config, "options")


async def names(store: ObjectStore, prefix: str) -> list[str]:
    return [info.key async for info in store.list(prefix)]


@pytest.mark.parametrize("end", [*ODD_ENDS, *HARMLESS_ENDS])
@pytest.mark.parametrize("write", [False, True])
async def test_start_up_tolerates_invalid_keys(end: str, *, write: bool) -> None:
    with bucket(Bucket(f"probe{end}", f"ec/2/manifests{end}")) as (_, store):
        await probe(store, write=write)
        await store.close()


async def test_start_up_on_a_used_store_lists_nothing() -> None:
    with bucket(Bucket(PROBE_KEY)) as (server, store):
        for write in (False, True):
            await probe(store, write=write)
        await store.close()
        assert [method for method, _ in server.asked] == ["GET", "GET", "PUT"]


@pytest.mark.parametrize("end", HARMLESS_ENDS)
async def test_listing_tolerates_foreign_keys(end: str) -> None:
    manifest = manifest_key(Kind.EC, SPACE)
    with bucket(Bucket(manifest, f"ec/2/manifests{end}")) as (_, store):
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
        bucket(Bucket(before, f"ec/2/manifests{end}", behind, last, page=1)) as (_, store),
        caplog.at_level(logging.WARNING),
    ):
        assert set(await names(store, "ec/2/")) == {before, behind, last}
        await store.close()
    said = f"ec/2/manifests{end}"
    assert f"{ascii(f'cache/{said}')}, because obstore cannot read" in caplog.text
    assert caplog.text.count("may lack keys") == 1
    assert not any(c in caplog.text for c in "\t\x1b\x7f")


async def test_objects_hidden_from_listings_still_exist() -> None:
    with bucket(Bucket(KEY, "ec/2//x", "ec/2/zz//x")) as (_, store):
        assert await names(store, "ec/2/") == []
        assert await store.exists([KEY]) == [True]
        await store.close()


async def test_listing_without_start_after_support_is_tried_twice() -> None:
    """Azure has no such parameter: obstore lists again from the start."""

    def stubborn(asked: Asked) -> None:
        asked.say(200, page(["cache/ec/2//x", f"cache/{KEY}"], ""))

    with bucket(stubborn) as (server, store):
        assert await names(store, "ec/2/") == []
        assert len(server.asked) == 2
        await store.close()


async def test_too_many_invalid_keys_end_a_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "MOST_INVALID_KEYS", 3)
    odd = [f"ec/2/{n}\t" for n in range(9)]
    with bucket(Bucket(*odd, page=1)) as (server, store):
        assert await names(store, "ec/2/") == []
        assert len(server.asked) == 4
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

    def endless(asked: Asked) -> None:
        nonlocal num
        num += 1
        if num == 20:
            loop.call_soon_threadsafe(some.set)
        asked.say(200, page(keys, str(num)))

    async def is_asked() -> bool:
        before = num
        await asyncio.sleep(0.5)
        return num > before

    general: dict[str, Any] = {"s3_additional_kwargs": {}} if road == "s3fs" else {}
    with bucket(endless, **general) as (_, store):
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
    with bucket(lambda asked: asked.say(200, page(foreign, "same")), **general) as (server, store):
        with pytest.raises(StoreUnavailable, match="more than 5 pages, or does not end"):
            await names(store, "ec/2/")
        assert len(server.asked) <= 6
        await store.close()


async def test_s3fs_listing_fetches_only_the_pages_that_are_read() -> None:
    """Only some of a million objects are counted, since all would take minutes."""
    there = [object_key(Kind.EC, SPACE, str(n)) for n in range(9)]
    with bucket(Bucket(*there, page=2), s3_additional_kwargs={}) as (server, store):
        async with aclosing(store.list("ec/2/")) as listing:  # type: ignore[type-var]
            assert (await anext(aiter(listing))).key in there
        assert len(server.asked) == 1
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
    with bucket(Bucket("ec/2/manifests//x", "ec/2/manifests/../x")) as (_, store):
        await write_manifest(store, Kind.EC, namespace_digest(facts), facts)
        (found,) = await list_manifests(store, Kind.EC)
        assert found.facts == facts
        await store.close()
