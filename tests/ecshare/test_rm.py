# SPDX-License-Identifier: Apache-2.0
"""`ecshare rm`: what it removes, keeps and prints, and how it asks."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pybase64
import pytest

from ecshare.cli import main
from ecshare.commands.rm import names_of_file
from ecshare.router.media.identity import identity, inline_url
from ecshare.store.errors import StoreDenied, StoreUnavailable
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.keys import (
    Key,
    Kind,
    gap_key,
    manifest_key,
    namespace_digest,
    object_key,
    tp_size_key,
)
from ecshare.store.objects import ObjectInfo
from lab.servers.s3 import SeaweedFS
from tests.ecshare.conftest import start
from tests.ecshare.upkeep.stores import NAMESPACE, OTHER, ec, files, kv, put, space

Rm = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Rm:
    """Run the command on the folder `tmp_path`; return its status, and what it printed."""

    def run(*arguments: str, store: str = "") -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["rm", store or str(tmp_path), *arguments])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


def test_namespace_is_removed_with_its_manifest_and_marks_only(rm: Rm, tmp_path: Path) -> None:
    own, other = space(tmp_path, Kind.KV, model="a"), space(tmp_path, Kind.KV, model="b")
    key = kv("x", namespace=own)
    for each in (key, gap_key(key), tp_size_key(Kind.KV, own, 2)):
        put(tmp_path, each, hours=0)
    left = {kv("x", namespace=other), tp_size_key(Kind.KV, other, 2), "probe/object"}
    left |= {f"kv/2/{own}/ab/readme.txt", "upkeep/1/cleaned/last", f"kv/3/{own}/ab/x"}
    for name in left:
        put(tmp_path, name, hours=0)
    status, out, err = rm("--namespace", own, "--yes")
    assert (status, err) == (0, "")
    assert files(tmp_path) == left | {manifest_key(Kind.KV, other)}
    assert "removed 2 objects" in out
    assert "host caches of engines" in out


def test_model_is_removed_from_its_namespaces_of_both_kinds(rm: Rm, tmp_path: Path) -> None:
    gone = [
        kv("x", namespace=space(tmp_path, Kind.KV, model="a/b", epoch="1")),
        kv("x", namespace=space(tmp_path, Kind.KV, model="a/b", epoch="2")),
        ec("x", namespace=space(tmp_path, Kind.EC, model="a/b")),
    ]
    stays = kv("x", namespace=space(tmp_path, Kind.KV, model="a/b2"))
    for each in (*gone, stays, kv("orphan", namespace=OTHER)):
        put(tmp_path, each, hours=0)
    status, out, _ = rm("--model", "a/b", "--yes")
    assert status == 0
    objects = {name for name in files(tmp_path) if "manifests" not in name}
    assert objects == {stays, kv("orphan", namespace=OTHER)}
    assert len(files(tmp_path)) == 3
    assert "1 objects are of namespaces without a manifest" in out


def test_only_namespaces_that_match_all_options_are_removed(rm: Rm, tmp_path: Path) -> None:
    """One tenant, one model, and embeddings only."""
    for model in ("a", "b"):
        for tenant in ("one", "two"):
            own = space(tmp_path, Kind.EC, model=model, tenant=tenant)
            put(tmp_path, ec("x", namespace=own), hours=0)
            space(tmp_path, Kind.KV, model=model, tenant=tenant)
    before = files(tmp_path)
    assert rm("--model", "a", "--tenant", "two", "--kind", "ec", "--yes")[0] == 0
    own = namespace_digest({"model": "a", "tenant": "two"})
    assert files(tmp_path) == before - {ec("x", namespace=own), manifest_key(Kind.EC, own)}


def test_media_item_is_removed_whatever_its_number_of_embeddings(rm: Rm, tmp_path: Path) -> None:
    """In all namespaces, also those without a manifest."""
    own = space(tmp_path, Kind.EC, model="a")
    gone = {ec(f"{num}::cat", name) for num in (1, 64, 131072) for name in (own, OTHER)}
    stays = {ec("64::dog", own), ec("64:" + "0" * 32 + ":cat", own), kv("64::cat")}
    for each in gone | stays:
        put(tmp_path, each, hours=0)
    status, out, _ = rm("--media", "cat", "--yes")
    assert status == 0
    assert files(tmp_path) == stays | {manifest_key(Kind.EC, own)}
    assert "KV of prompts with these items" in out


def test_media_file_gets_the_names_of_the_router(rm: Rm, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(os.urandom(3000))
    url = inline_url(pybase64.b64encode(file.read_bytes()).decode())
    router_names = [identity(modality, url) for modality in ("image", "audio", "video")]
    assert names_of_file(str(file)) == router_names
    put(tmp_path, ec(f"100::{router_names[0]}"), hours=0)
    status, _, _ = rm("--media-file", str(file), "--yes")
    assert (status, files(tmp_path)) == (0, {"picture.png"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "say what to remove"),
        (("--kind", "kv"), "say what to remove"),
        (("--model", "a*"), "nothing is stored of model a* (there: a/b\\x1b[2J)"),
        (("--model", ""), "--model: the name is empty"),
        (("--tenant", "x"), "nothing is stored of tenant x;"),
        (("--namespace", "0011*"), "'0011*' is no namespace of 32 hex digits"),
        (("--namespace", "../../etc"), "is no namespace"),
        (("--namespace", "0" * 32), "nothing is stored of namespace 000"),
        (("--media", "dog"), "no embeddings are stored of these items"),
        (("--media", "dog", "--kind", "kv"), "no names can be computed of KV"),
        (("--media-file", "/no/such/file"), "does not exist"),
        (("--media", "x") * 65, "at most 64 at once"),
        (("--namespace", NAMESPACE), "no terminal to ask on; add --yes"),
        (("--namespace", NAMESPACE, "--json"), "no terminal to ask on; add --yes"),
    ],
)
def test_wrong_usage_has_status_2_and_removes_nothing(
    rm: Rm, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    space(tmp_path, Kind.KV, model="a/b\x1b[2J")
    put(tmp_path, kv("x"), hours=0)
    before = files(tmp_path)
    status, _, err = rm(*arguments)
    assert status == 2
    assert words in err
    assert "\x1b" not in err
    assert files(tmp_path) == before


def test_dry_run_prints_a_table_and_removes_nothing(rm: Rm, tmp_path: Path) -> None:
    own = space(tmp_path, Kind.KV, model="a/b\x1b[2J", tenant="one")
    put(tmp_path, kv("x", namespace=own), hours=0, num_bytes=1000)
    before = files(tmp_path)
    status, out, _ = rm("--tenant", "one", "--dry-run")
    assert (status, files(tmp_path)) == (0, before)
    assert out.splitlines()[1].split() == (["kv", own, "a/b\\x1b[2J", "one", "1", "1,000", "B"])


def test_json_is_one_line(rm: Rm, tmp_path: Path) -> None:
    put(tmp_path, kv("x"), hours=0)
    status, out, _ = rm("--namespace", NAMESPACE, "--yes", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["num_removed"], found["num_left"], found["dry_run"]) == (1, 0, False)
    assert found["rows"][0]["namespace"] == NAMESPACE
    assert len(found["not_reached"]) == 3


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 130)])
def test_rm_asks_on_a_terminal(tmp_path: Path, answer: str, status: int) -> None:
    put(tmp_path, kv("x"), hours=0)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ecshare", "rm", str(tmp_path), "--namespace", NAMESPACE]
    ended = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True)
    os.write(ours, answer.encode())
    out, _ = ended.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert ended.returncode == status
    assert "remove 1 objects, 100 B? [y/N]" in out
    assert bool(files(tmp_path)) == bool(status)


def test_objects_stored_during_a_removal_are_removed(
    rm: Rm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, late = DirectoryStore.delete, [kv("late"), kv("later")]

    async def beside_an_engine(store: DirectoryStore, keys: list[Key]) -> None:
        await delete(store, keys)
        if late:
            put(tmp_path, late.pop(), hours=0)

    monkeypatch.setattr(DirectoryStore, "delete", beside_an_engine)
    put(tmp_path, kv("x"), hours=0)
    status, out, _ = rm("--namespace", NAMESPACE, "--yes")
    assert (status, files(tmp_path)) == (0, set())
    assert "removed 3 objects, 2 of them stored meanwhile" in out


def test_removal_gives_up_if_engines_keep_storing(
    rm: Rm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = DirectoryStore.delete

    async def beside_an_engine(store: DirectoryStore, keys: list[Key]) -> None:
        await delete(store, keys)
        put(tmp_path, kv("again"), hours=0)

    monkeypatch.setattr(DirectoryStore, "delete", beside_an_engine)
    own = space(tmp_path, Kind.KV, model="a")
    put(tmp_path, kv("x"), hours=0)
    status, _, err = rm("--namespace", NAMESPACE, "--yes")
    assert status == 1
    assert "engines go on storing there" in err
    assert manifest_key(Kind.KV, own) in files(tmp_path)


def test_refused_removal_is_reported_and_keeps_the_manifest(
    rm: Rm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = DirectoryStore.delete

    async def with_a_lock(store: DirectoryStore, keys: list[Key]) -> None:
        await delete(store, [key for key in keys if key != kv("locked", namespace=own)])
        if kv("locked", namespace=own) in keys:
            raise StoreDenied("locked\x1b[2J")

    monkeypatch.setattr(DirectoryStore, "delete", with_a_lock)
    own = space(tmp_path, Kind.KV, model="a")
    for each in ("x", "locked"):
        put(tmp_path, kv(each, namespace=own), hours=0)
    status, _, err = rm("--model", "a", "--yes")
    assert status == 1
    assert err == f"ecshare rm: {tmp_path}: locked\\x1b[2J\n"
    assert files(tmp_path) == {kv("locked", namespace=own), manifest_key(Kind.KV, own)}


def test_removal_interrupted_by_a_store_failure_is_completed_by_the_next(
    rm: Rm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = space(tmp_path, Kind.KV, model="a")
    for n in range(30):
        put(tmp_path, kv(str(n), namespace=own), hours=0)
    delete, calls = DirectoryStore.delete, 0

    async def dies(store: DirectoryStore, keys: list[Key]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise StoreUnavailable("it is down")
        await delete(store, keys)

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryStore, "delete", dies)
        patched.setattr("ecshare.upkeep.removal.PAGE", 10)
        status, _, err = rm("--model", "a", "--yes")
    assert status == 1
    assert "it is down; 20 objects were removed; run it again" in err
    assert len(files(tmp_path)) == 11
    assert rm("--model", "a", "--yes")[0] == 0
    assert files(tmp_path) == set()


@pytest.mark.s3
def test_rm_empties_a_namespace_of_a_bucket(rm: Rm, tmp_path: Path, seaweed: SeaweedFS) -> None:
    url, options = f"{seaweed.url}/rm", seaweed.storage_options
    facts = {"model": "a"}
    key = object_key(Kind.EC, namespace_digest(facts), "7::cat")
    start(tmp_path, facts, url, key, storage_options=options)
    store = json.dumps({"url": url, "storage_options": options})
    assert rm("--media", "cat", "--yes", store=store)[0] == 0
    status, out, _ = rm("--model", "a", "--yes", store=store)
    assert status == 0
    assert "removed 0 objects" in out, "only the manifest was left"
    assert rm("--model", "a", "--yes", store=store)[0] == 2


def test_server_that_ignores_listing_prefixes_loses_no_other_objects(
    rm: Rm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty server may ignore the prefix of a listing."""
    listing = DirectoryStore.list

    def all_of_it(store: DirectoryStore, prefix: str) -> AsyncIterator[ObjectInfo]:
        del prefix
        return listing(store, "")

    monkeypatch.setattr(DirectoryStore, "list", all_of_it)
    own, other = space(tmp_path, Kind.KV, model="a"), space(tmp_path, Kind.KV, model="b")
    left = {kv("x", namespace=other), ec("x", own), tp_size_key(Kind.KV, other, 2), "probe/object"}
    left |= {"router/1/ab/" + "ab" * 32, "upkeep/1/uses/kv/" + "0" * 32}
    for name in (*left, kv("x", namespace=own), tp_size_key(Kind.KV, own, 2)):
        put(tmp_path, name, hours=0)
    left.add(manifest_key(Kind.KV, other))
    assert rm("--namespace", own, "--kind", "kv", "--yes")[0] == 0
    assert files(tmp_path) == left
    assert rm("--media", "x", "--yes")[0] == 2
    assert files(tmp_path) == left
