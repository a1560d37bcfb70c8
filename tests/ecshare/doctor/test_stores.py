# SPDX-License-Identifier: Apache-2.0
"""The doctor with faulty stores: missing, refusing, not S3, or with expired manifests."""

import asyncio
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from ecshare.doctor import contents, store_check
from ecshare.store import manifest
from ecshare.store.config import StoreConfig
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.keys import (
    Key,
    Kind,
    manifest_key,
    manifests_prefix,
    namespace_digest,
    object_key,
)
from ecshare.store.objects import Sink
from ecshare.store.open import open_store
from lab.servers.processes import Port
from lab.servers.s3 import SeaweedFS
from tests.bad_s3.faults import always, modes
from tests.bad_s3.server import Reply, bad_s3, refused
from tests.ecshare.conftest import Doctor, start
from tests.waiting import until

FACTS = {"model": "qwen", "weights": "aa", "dtype": "bfloat16", "epoch": "", "integrity": ""}
NAMESPACE = namespace_digest(FACTS)


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return all paths in a folder with size, mode and modification time."""
    status = {path: path.lstat() for path in [folder, *folder.rglob("*")]}
    return {str(p): (s.st_size, s.st_mode, s.st_mtime_ns) for p, s in status.items()}


def test_layers_of_a_kv_namespace_are_shown(doctor: Doctor, tmp_path: Path) -> None:
    sets = [["full", 8, 2], ["window 1024", 40, 2], ["state GDN: 3x8 bfloat16", 24, 1]]
    facts = {**FACTS, "layer_sets": sets}
    start(tmp_path, facts, "", object_key(Kind.KV, namespace_digest(facts), "chunk"), kind=Kind.KV)
    status, text = doctor()
    assert status == 0, text
    assert "layers: 8 of 'full', 40 of 'window 1024', 24 of 'state GDN: 3x8 bfloat16'" in text


@pytest.mark.parametrize("sets", ["x", 7, [], [7], [[]], [["full"]], {"full": 8}])
def test_layers_that_no_engine_wrote_are_left_out(
    doctor: Doctor, tmp_path: Path, sets: object
) -> None:
    facts = {**FACTS, "layer_sets": sets}
    start(tmp_path, facts, "", object_key(Kind.KV, namespace_digest(facts), "chunk"), kind=Kind.KV)
    status, text = doctor()
    assert status == 0, text
    assert "layers:" not in text


# --- folders ---


@pytest.mark.parametrize("arguments", [(), ("--read-only",)])
def test_missing_folder_is_reported_and_not_created(
    doctor: Doctor, tmp_path: Path, arguments: Sequence[str]
) -> None:
    before = tree(tmp_path)
    for url in (f"{tmp_path}/stroe", f"file://{tmp_path}/stroe/deep"):
        status, text = doctor(*arguments, url=url)
        assert status == 1
        folder = url.removeprefix("file://")
        assert f"PROBLEM store: there is no folder {folder}, or this user may not see it" in text
        assert "host cache" not in text, "later checks need the store"
    assert tree(tmp_path) == before


# A filesystem that fsspec reaches, as those of servers (SFTP, SMB, ...).
OnServer = type("OnServer", (LocalFileSystem,), {"protocol": "onserver"})


@pytest.mark.parametrize("arguments", [(), ("--read-only",)])
def test_missing_fsspec_folder_is_reported_and_not_created(
    doctor: Doctor, tmp_path: Path, arguments: Sequence[str]
) -> None:
    fsspec.register_implementation("onserver", OnServer, clobber=True)
    before = tree(tmp_path)
    status, text = doctor(*arguments, url=f"onserver://{tmp_path}/stroe")
    assert status == 1
    assert f"PROBLEM store: there is no folder onserver://{tmp_path}/stroe, or" in text
    assert tree(tmp_path) == before
    status, text = doctor(*arguments, url=f"onserver://{tmp_path}/store")
    assert status == 0, text
    assert tree(tmp_path).keys() == before.keys()


@pytest.mark.parametrize("has_host_cache", [False, True])
def test_read_only_check_writes_nothing(
    doctor: Doctor,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    has_host_cache: bool,
) -> None:
    shm = tmp_path_factory.mktemp("shm")
    monkeypatch.setattr("ecshare.store.hostcache.folder.SHM", shm)
    start(tmp_path, FACTS, "", object_key(Kind.EC, NAMESPACE, "picture"))
    if has_host_cache:
        (tmp_path / "host").mkdir(mode=0o700)
    before = tree(tmp_path), tree(shm)
    for options in ({}, {"host_cache_dir": None}):
        status, text = doctor("--read-only", **options)
        assert status == 0, text
        assert "stores, returns" not in text
        assert f"{NAMESPACE}: 0 of 1 objects that were read are damaged" in text
    assert (tree(tmp_path), tree(shm)) == before
    assert f"{shm}/ecshare-" in text
    assert "the first engine makes it" in text


def test_check_creates_no_host_cache_and_leaves_the_store_unchanged(
    doctor: Doctor, tmp_path: Path
) -> None:
    start(tmp_path, FACTS, "", object_key(Kind.EC, NAMESPACE, "picture"))
    before = sorted(tree(tmp_path))
    status, text = doctor()
    assert status == 0, text
    assert "stores, returns" in text
    assert sorted(tree(tmp_path)) == before
    assert f"host cache: {tmp_path}/host does not exist yet" in text


def test_size_of_the_host_cache_is_shown(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir(mode=0o700)
    (tmp_path / "host" / "entry").write_bytes(bytes(3_000_000))
    assert f"{tmp_path}/host holds 3.0 MB of at most" in doctor()[1]


def test_host_cache_below_a_file_is_a_problem(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    status, text = doctor(host_cache_dir=f"{tmp_path}/file/host")
    assert status == 1
    assert f"host_cache_dir: {tmp_path}/file/host cannot be made" in text


# --- figures ---


async def test_measurement_leaves_nothing(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    found = await store_check.measure(store)
    assert (found.is_same, found.creates_once, found.left) == (True, True, "")
    assert min(found.put_s, found.get_s) > 0
    assert not list(tmp_path.iterdir())
    await store.close()


GIVE_UP_S = 20.0


class Hung(DirectoryStore):
    """A folder whose reads and removals hang."""

    async def get(self, key: Key, sink: Sink) -> None:
        await asyncio.Event().wait()

    async def delete(self, keys: Sequence[Key]) -> None:
        await asyncio.Event().wait()


async def test_hanging_store_is_reported_after_io_timeout_s(tmp_path: Path) -> None:
    store = Hung(str(tmp_path))
    config = StoreConfig(url=str(tmp_path), io_timeout_s=0.1)
    async with asyncio.timeout(GIVE_UP_S):
        findings = [each async for each in store_check.check_store(store, config, write=True)]
    assert [each.text for each in findings] == [
        "no answer within 0.1 s; check the url and storage_options"
    ]
    await store.close()


async def test_cancelled_measurement_ends_although_removal_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_check, "_MAX_REMOVAL_S", 0.1)
    store = Hung(str(tmp_path))
    measuring = asyncio.create_task(store_check.measure(store))
    await until(lambda: [*tmp_path.iterdir()])
    measuring.cancel()
    await asyncio.wait([measuring], timeout=GIVE_UP_S)
    assert measuring.cancelled()
    await store.close()


def test_throughput_is_shown(doctor: Doctor) -> None:
    assert re.search(r"put [\d,]+, get [\d,]+ MB/s\n", doctor()[1])


# --- buckets ---


def page(status: int, content_type: str, body: bytes = b"", *headers: tuple[str, str]) -> Reply:
    return Reply(status, body, {"Content-Type": content_type, **dict(headers)})


PLAIN = {
    "nothing": page(404, "text/html", b"<html>not found</html>"),
    "page": page(200, "text/html", b"<!doctype html><html>hello</html>"),
    "json": page(404, "application/json", b'{"detail": "Not Found"}'),
    "login": page(401, "text/plain", b"who are you?"),
}
DENIED = b"<Error><Code>AccessDenied</Code><Message>%b</Message></Error>"


@pytest.fixture
def answered(doctor: Doctor) -> Callable[..., tuple[int, str, str]]:
    """Ask the doctor about a server that gives the same answer to all requests."""

    def check(reply: Reply, *arguments: str, **storage: Any) -> tuple[int, str, str]:
        """Return the doctor's status and text, and the server's url."""
        with bad_s3(always(reply)) as server:
            options = server.storage_options | storage
            found = doctor(*arguments, url="s3://bucket/x", storage_options=options, io_timeout_s=5)
        return *found, server.endpoint

    return check


Answered = Callable[..., tuple[int, str, str]]


def problems(text: str) -> list[str]:
    return re.findall("^PROBLEM *(.*)", text, re.MULTILINE)


CLIENTS = {"obstore": {}, "s3fs": {"config_kwargs": {"max_pool_connections": 7}}}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("arguments", [(), ("--read-only",)])
@pytest.mark.parametrize("name", PLAIN)
def test_http_server_that_is_not_s3_is_a_problem(
    answered: Answered, name: str, arguments: Sequence[str], client: str
) -> None:
    status, text, _ = answered(PLAIN[name], *arguments, **CLIENTS[client])
    assert status == 1
    assert len(problems(text)) == 1
    assert "ok      store" not in text, "this is the first finding"


def test_page_at_every_address_is_no_store(answered: Answered) -> None:
    _, text, _ = answered(PLAIN["page"])
    assert "an object exists which no process has stored; is this a store" in problems(text)[0]


@pytest.mark.parametrize("answer", [(409, "OperationAborted"), (412, "PreconditionFailed")])
def test_conflict_response_is_one_sentence(answered: Answered, answer: tuple[int, str]) -> None:
    found, text, url = answered(refused(*answer))
    assert found == 1
    (problem,) = problems(text)
    assert f"the store at {url} answered {answer[0]} {answer[1]}: Words." in problem


def test_region_of_the_bucket_is_named(answered: Answered) -> None:
    reply = page(301, "text/plain", b"", ("x-amz-bucket-region", "eu-north-1"))
    status, text, _ = answered(reply)
    assert status == 1
    (problem,) = problems(text)
    assert "the bucket is in the region eu-north-1, and us-east-1 was asked" in problem


def test_text_of_a_hostile_server_is_escaped(answered: Answered) -> None:
    body = DENIED % (b"\x1b[2Jok      store: fine" + b"x" * 5000)
    status, text, _ = answered(page(403, "application/xml", body))
    assert status == 1
    assert "AccessDenied" in text
    assert "check key and secret" in text
    assert "\x1b" not in text
    assert len(text) < 2000


@pytest.mark.parametrize(
    ("body", "headers"), [(b"<Error></Error>", []), (b"", [("x-amz-id-2", "1")])]
)
def test_denial_without_a_message_shows_no_client_internals(
    answered: Answered, body: bytes, headers: list[tuple[str, str]]
) -> None:
    class_names = re.compile("lacked|Generic S3 error|Error performing|: ;")
    status, text, url = answered(page(403, "application/xml", body, *headers))
    assert status == 1
    (problem,) = problems(text)
    assert problem.startswith(f"store: the store at {url} answered 403 Forbidden; check key and")
    assert not class_names.search(text)


@pytest.mark.s3
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("bucket", "wrong", "words"),
    [
        ("no-such-bucket", {}, "the bucket does not exist; .*it is the first part of the url"),
        ("", {"secret": "wrong"}, "signature we calculated does not match.*check key and secret"),
        ("", {"key": "wrong"}, "does not exist in our records.*check key and secret"),
    ],
)
def test_wrong_bucket_or_credentials_are_reported_once(
    doctor: Doctor,
    seaweed: SeaweedFS,
    bucket: str,
    wrong: dict[str, str],
    words: str,
    client: str,
) -> None:
    url = f"s3://{bucket}/x" if bucket else f"{seaweed.url}/wrong"
    storage = seaweed.storage_options | wrong | CLIENTS[client]
    for arguments in ((), ("--read-only",)):
        status, text = doctor(*arguments, url=url, storage_options=storage)
        assert status == 1
        (problem,) = problems(text)
        assert re.search(words, problem)
        assert "ok      store" not in text


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("put:403", r"can be read, but not written: the store at \S+ answered 403 AccessDenied"),
        ("delete:403", r"but does not remove them; .* Left: doctor-[0-9a-f]{16} \("),
    ],
)
def test_denied_operation_is_named(doctor: Doctor, mode: str, words: str) -> None:
    with bad_s3() as server:
        server.faults = modes(mode)
        status, text = doctor(url="s3://bucket/x", storage_options=server.storage_options)
    assert status == 1
    (problem,) = problems(text)
    assert re.search(words, problem)


def test_refused_connection_names_the_endpoint(doctor: Doctor) -> None:
    port = Port()
    storage = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{port.number}"}
    status, text = doctor(url="s3://bucket/x", storage_options=storage, io_timeout_s=0.5)
    port.release()
    assert status == 1
    (problem,) = problems(text)
    assert storage["endpoint_url"] in problem


# --- missing manifests ---


def line(namespace: str, num_objects: int, more: str = "") -> str:
    return (
        f"namespace {namespace}: {num_objects}{more} objects without a manifest: it expired or was "
        "removed; engines that run now write it again within hours (look-up buffers have none)"
    )


@pytest.mark.parametrize("kind", Kind)
def test_objects_without_a_manifest_are_counted(doctor: Doctor, tmp_path: Path, kind: Kind) -> None:
    keys = [object_key(kind, NAMESPACE, name) for name in ("one", "two")]
    start(tmp_path, FACTS, "", *keys, kind=kind)
    what = {Kind.EC: "embeddings", Kind.KV: "KV blocks"}[kind]
    unused = re.compile(f"^note +{what}: no engine that stores any has used", re.MULTILINE)
    text = doctor()[1]
    assert "without a manifest" not in text
    (tmp_path / "store" / manifest_key(kind, NAMESPACE)).unlink()
    # Folders that are not namespaces, and files that are not objects, do not count.
    junk = tmp_path / "store" / kind / "2"
    (junk / "not-a-namespace").mkdir()
    (junk / "not-a-namespace" / "x").write_text("x")
    (junk / ("a" * 32)).mkdir()
    (junk / ("a" * 32) / "readme.txt").write_text("x")
    status, text = doctor()
    assert status == 0, text
    assert f"note    {what}: {line(NAMESPACE, 2)}\n" in text
    assert text.count("without a manifest") == 1
    assert not unused.search(text)


@pytest.mark.s3
def test_expired_manifest_in_a_bucket_is_noted(
    doctor: Doctor, tmp_path: Path, seaweed: SeaweedFS
) -> None:
    url, options = f"{seaweed.url}/expired", seaweed.storage_options
    start(
        tmp_path,
        FACTS,
        url,
        object_key(Kind.EC, NAMESPACE, "picture"),
        storage_options=options,
    )
    remove(url, options, manifest_key(Kind.EC, NAMESPACE))
    status, text = doctor("--read-only", url=url, storage_options=options)
    assert status == 0, text
    assert f"note    embeddings: {line(NAMESPACE, 1)}\n" in text


def test_damaged_manifest_does_not_count_as_missing(doctor: Doctor, tmp_path: Path) -> None:
    start(tmp_path, FACTS, "", object_key(Kind.EC, NAMESPACE, "picture"))
    (tmp_path / "store" / manifest_key(Kind.EC, NAMESPACE)).write_text("{")
    status, text = doctor()
    assert status == 0
    assert "without a manifest" not in text
    assert f"note    embeddings: namespace {NAMESPACE}: its manifest is damaged;" in text
    assert text.count("no engine that stores any has used") == 1, "only for the other kind"


def test_manifests_beyond_the_read_limit_do_not_count_as_missing(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (manifest, contents):
        monkeypatch.setattr(module, "MOST_READ", 1)
    for n in range(3):
        facts = FACTS | {"epoch": f"{n}"}
        start(tmp_path, facts, "", object_key(Kind.EC, namespace_digest(facts), "picture"))
    text = doctor()[1]
    assert text.count(": 1 objects, ") == 1
    assert "without a manifest" not in text
    assert "damaged;" not in text


def test_number_of_checked_namespaces_is_bounded(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAX_CHECKED", 2)
    asked: list[str] = []
    exists = DirectoryStore.exists

    async def counted(store: DirectoryStore, keys: Sequence[Key]) -> list[bool]:
        asked.extend(keys)
        return await exists(store, keys)

    monkeypatch.setattr(DirectoryStore, "exists", counted)
    for n in range(5):
        path = tmp_path / "store" / object_key(Kind.EC, f"{n}" * 32, "x")
        path.parent.mkdir(parents=True)
        path.write_text("x")
    assert doctor("--read-only")[1].count("without a manifest") == 2
    assert len([key for key in asked if "manifests" in key]) == 2


def test_search_for_objects_without_a_manifest_is_bounded(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_objects = 3
    start(
        tmp_path, FACTS, "", *(object_key(Kind.EC, NAMESPACE, f"{n}") for n in range(num_objects))
    )
    shutil.rmtree(tmp_path / "store" / manifests_prefix(Kind.EC))
    monkeypatch.setattr(contents, "MAX_COUNTED", 2)
    status, text = doctor()
    assert status == 0
    assert line(NAMESPACE, 2, " or more") in text
    assert "only the first 2 keys were searched for objects without a manifest" in text


def test_namespaces_are_counted_one_by_one_beyond_the_limit(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [FACTS | {"epoch": f"{n}"} for n in range(3)]
    for facts in many:
        start(tmp_path, facts, "", object_key(Kind.EC, namespace_digest(facts), "picture"))
    monkeypatch.setattr(contents, "MAX_COUNTED", 2)
    text = doctor()[1]
    for facts in many:
        assert f"{namespace_digest(facts)}: 1 objects, 5,096 B; its manifest is of 20" in text


def test_number_of_named_namespaces_without_a_manifest_is_bounded(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAX_SHOWN", 1)
    for n, num_objects in enumerate((1, 2)):
        facts = FACTS | {"epoch": f"{n}"}
        names = [f"{n}" for n in range(num_objects)]
        start(
            tmp_path,
            facts,
            "",
            *(object_key(Kind.EC, namespace_digest(facts), name) for name in names),
        )
    shutil.rmtree(tmp_path / "store" / manifests_prefix(Kind.EC))
    text = doctor()[1]
    assert line(namespace_digest(FACTS | {"epoch": "1"}), 2) in text, "the largest comes first"
    assert "1 more namespaces have objects without a manifest" in text
    assert text.count("it expired or was removed") == 1


def remove(url: str, options: dict[str, Any], key: Key) -> None:
    """Remove one object from a bucket, as an expiry rule does."""

    async def run() -> None:
        store = open_store(StoreConfig(url=url, storage_options=options), "options")
        await store.delete([key])
        assert await store.exists([key]) == [False]
        await store.close()

    asyncio.run(run())
