# SPDX-License-Identifier: Apache-2.0
"""`ecshare export` and `ecshare import`: round trips, interruptions, damage, and hostile tars."""

import fcntl
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecshare.cli import main
from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreUnavailable
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import (
    Key,
    Kind,
    gap_key,
    manifest_key,
    tp_size_key,
)
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Fetch, StoredObject
from ecshare.upkeep import moving
from lab.servers.s3 import SeaweedFS
from tests.ecshare.upkeep.stores import NAMESPACE, ec, files, kv, put, space
from tests.waiting import wait_until

Run = Callable[..., tuple[int, str, str]]
KEY = "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2"
OTHER_KEY = "0b7d52a1f7e94c3c8f25c2f4d3f1a8e96b0c7d1e2f3a4b5c6d7e8f9012345678"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store's folder."""
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def body_of(key: str, num_bytes: int = 1000, secret: str = "") -> bytes:
    body = bytearray(PROLOGUE_BYTES) + random.Random(key).randbytes(num_bytes)
    integrity = Integrity(secret.encode()) if secret else None
    seal(memoryview(body), TensorSpec("U8", (num_bytes,), {}), key, integrity)
    return bytes(body)


def store(root: Path, key: str, num_bytes: int = 1000, secret: str = "") -> None:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body_of(key, num_bytes, secret))


def fill(root: Path, num: int = 6, secret: str = "", **facts: Any) -> str:
    """Store a namespace of KV; return its digest."""
    own = space(root, Kind.KV, **({"model": "a"} | facts))
    for n in range(num):
        store(root, kv(str(n), namespace=own), 100 * n + 1, secret)
    (root / tp_size_key(Kind.KV, own, 2)).parent.mkdir(parents=True)
    (root / tp_size_key(Kind.KV, own, 2)).write_bytes(b"ecshare")
    return own


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in files(root)}


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def options(root: Path, **more: Any) -> str:
    return json.dumps({"url": str(root), **more})


@pytest.mark.parametrize("by_tar", [True, False])
def test_exported_namespaces_are_imported_unchanged_and_read_by_an_engine(
    run: Run, tmp_path: Path, root: Path, target: Path, by_tar: bool
) -> None:
    own = fill(root, secret=KEY, integrity="x")
    picture = ec("cat", space(root, Kind.EC, model="a"))
    store(root, picture, 3 << 20, KEY)
    before = contents(root)
    not_copied = [gap_key(kv("0", namespace=own)), "probe/object", "upkeep/1/cleaned/last"]
    not_copied += [kv("x", "1f-0123456789ab-0123456789", own), f"kv/2/{own}/ab/readme.txt"]
    not_copied += [f"kv/3/{own}/ab/{'ab' * 32}", f"kv/1/{own}/ab/{'ab' * 32}", kv("orphan")]
    for name in not_copied:
        put(root, name, hours=0)
    if by_tar:
        status, out, err = run("export", options(root, integrity_key=KEY), tmp_path / "x.tar")
        assert (status, err) == (0, "")
        assert "copied 10 objects" in out
        assert os.stat(tmp_path / "x.tar").st_mode & 0o777 == 0o600
        assert sorted(names(tmp_path / "x.tar")) == sorted(before)
        assert files(tmp_path) & {"x.tar.part"} == set()
        status, out, err = run("import", tmp_path / "x.tar", options(target, integrity_key=KEY))
    else:
        status, out, err = run("export", options(root, integrity_key=KEY), target)
    assert (status, err) == (0, "")
    assert contents(target) == before
    config = StoreConfig(url=str(target), host_cache_dir=f"{tmp_path}/host", integrity_key=KEY)
    engine = TransferEngine(config, "options")
    engine.submit(Fetch(picture, 20))
    (done,) = engine.drain(20)
    assert isinstance(done.value, StoredObject)
    assert bytes(done.value.payload) == before[picture][PROLOGUE_BYTES:]
    done.value.release()
    engine.close()


def test_only_chosen_namespaces_are_copied(run: Run, tmp_path: Path, root: Path) -> None:
    one, two = fill(root, model="one"), fill(root, model="two")
    store(root, kv("orphan"))
    for n, (arguments, own) in enumerate(
        [(("--model", "one"), one), (("--namespace", two, "--kind", "kv"), two)]
    ):
        assert run("export", root, tmp_path / f"{n}.tar", *arguments)[0] == 0
        copied = names(tmp_path / f"{n}.tar")
        assert copied[0] == manifest_key(Kind.KV, own)
        assert sorted(copied) == sorted(name for name in files(root) if own in name)
    assert run("export", root, tmp_path / "2.tar", "--namespace", NAMESPACE)[0] == 0
    assert names(tmp_path / "2.tar") == [kv("orphan")]


def test_second_copy_sends_nothing(
    run: Run, root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root)
    assert run("export", root, target)[0] == 0
    reads: list[str] = []
    get = DirectoryStore.get

    async def counted(store: DirectoryStore, key: Key, sink: Any) -> None:
        reads.append(key)
        await get(store, key, sink)

    monkeypatch.setattr(DirectoryStore, "get", counted)
    status, out, _ = run("export", root, target)
    assert status == 0
    assert "copied 0 objects, 0 B" in out
    assert "8 were there" in out
    assert not [key for key in reads if key.startswith("kv/2/") and "/manifests/" not in key][1:]


def test_export_to_a_tar_continues_after_a_store_failure(
    run: Run, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 40)
    get, left = DirectoryStore.get, 20

    async def dies(store: DirectoryStore, key: Key, sink: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise StoreUnavailable("it is down\x1b")
        await get(store, key, sink)

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryStore, "get", dies)
        status, _, err = run("export", root, tmp_path / "x.tar")
    assert status == 1
    assert "it is down\\x1b; " in err
    assert "x.tar.part is kept: run it again to go on" in err
    assert not (tmp_path / "x.tar").exists()
    status, out, _ = run("export", root, tmp_path / "x.tar")
    assert status == 0
    assert " 0 were there" not in out
    assert sorted(names(tmp_path / "x.tar")) == sorted(files(root))


def test_part_truncated_anywhere_is_completed(run: Run, tmp_path: Path, root: Path) -> None:
    fill(root, 3)
    assert run("export", root, tmp_path / "x.tar")[0] == 0
    whole = (tmp_path / "x.tar").read_bytes()
    dice = random.Random(36)
    for cut in [0, 1, 511, 512, 513, 1024, len(whole) - 1024, len(whole) - 1, len(whole)] + [
        dice.randrange(len(whole)) for _ in range(10)
    ]:
        (tmp_path / "x.tar").unlink()
        (tmp_path / "x.tar.part").write_bytes(whole[:cut])
        assert run("export", root, tmp_path / "x.tar")[0] == 0
        with tarfile.open(tmp_path / "x.tar") as tar:
            found = {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore
            assert len(tar.getmembers()) == len(found), cut
        assert found == contents(root), cut
        assert (tmp_path / "x.tar").stat().st_size == len(whole), "nothing is left behind its end"


def test_continued_tar_has_no_bytes_of_an_object_removed_meanwhile(
    run: Run, tmp_path: Path, root: Path
) -> None:
    """A user may have removed it on purpose."""
    own = fill(root, 1)
    gone = kv("gone", namespace=own)
    store(root, gone, 20_000)
    member_of, body = member(gone, (root / gone).read_bytes())
    (tmp_path / "x.tar.part").write_bytes(member_of.tobuf(tarfile.USTAR_FORMAT) + body[:9000])
    (root / gone).unlink()
    assert run("export", root, tmp_path / "x.tar")[0] == 0
    assert sorted(names(tmp_path / "x.tar")) == sorted(files(root))
    assert body[8000:8100] not in (tmp_path / "x.tar").read_bytes()


def test_interrupted_export_names_its_part_and_continues(
    run: Run, tmp_path: Path, root: Path
) -> None:
    own = fill(root, 0)
    for n in range(3000):
        store(root, kv(str(n), namespace=own))
    command = [sys.executable, "-m", "ecshare", "export", str(root), f"{tmp_path}/x.tar"]
    ended = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    part = tmp_path / "x.tar.part"
    wait_until(lambda: part.exists() and part.stat().st_size > 100_000)
    ended.send_signal(signal.SIGINT)
    _, err = ended.communicate(timeout=60)
    assert ended.returncode == 130, err
    assert "x.tar.part is kept" in err
    assert "Traceback" not in err
    status, out, _ = run("export", root, tmp_path / "x.tar")
    assert status == 0
    assert sorted(names(tmp_path / "x.tar")) == sorted(files(root))


def test_damaged_objects_are_named_and_not_copied(
    run: Run, tmp_path: Path, root: Path, target: Path
) -> None:
    own = fill(root)
    bad = [kv("0", namespace=own), kv("1", namespace=own), manifest_key(Kind.KV, own)]
    bad.append(tp_size_key(Kind.KV, own, 2))
    good = set(files(root)) - set(bad)
    for name in bad:
        (root / name).write_bytes(b"damaged" if "sizes" in name else (root / name).read_bytes()[1:])
    status, _, err = run("export", root, target, "--namespace", own)
    assert status == 1
    for name in bad[:2]:
        assert f"not copied: {name}: " in err
    assert files(target) == good


@pytest.mark.parametrize(("given", "status"), [(KEY, 0), (OTHER_KEY, 1), ("", 0)])
def test_macs_are_verified_with_an_integrity_key(
    run: Run, tmp_path: Path, root: Path, target: Path, given: str, status: int
) -> None:
    fill(root, secret=KEY)
    ended, out, err = run("export", options(root, integrity_key=given), target)
    assert ended == status
    assert ("MACs were not checked" in out) == (not given)
    assert err.count("the MAC is not made with our integrity_key") == 6 * status
    assert len(files(target)) == 8 - 6 * status


def test_existing_object_is_not_replaced(run: Run, root: Path, target: Path) -> None:
    own = fill(root)
    there = kv("0", namespace=own)
    store(target, there, 7)
    before = (target / there).read_bytes()
    status, out, _ = run("export", root, target)
    assert status == 0
    assert "1 were there" in out
    assert (target / there).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "{root}", "{tmp}/there.tar"), "there.tar: it exists"),
        (("export", "{root}", "{tmp}/notes.tar"), "notes.tar.part: no tar header at byte 0"),
        (("export", "{root}", "{tmp}/locked.tar"), "locked.tar.part: another process writes it"),
        (("export", "{root}", "{tmp}/link.tar"), "link.tar.part: "),
        (("export", "{root}", "{tmp}/none/x.tar"), "No such file"),
        (("export", "{root}", "{root}"), "are the same store"),
        (("export", "{root}", "{tmp}/none"), "there is no folder"),
        (("export", "{tmp}/none", "{tmp}/x.tar"), "there is no folder"),
        (("export", "{root}", "x.tgz"), "absolute folder"),
        (
            ("export", "{root}", "{tmp}/x.tar", "--model", "b*"),
            "nothing is stored of model b* (the",
        ),
        (("import", "{tmp}/none.tar", "{root}"), "does not exist"),
        (("import", "{tmp}", "{root}"), "is a directory"),
        (("import", "{tmp}/pipe", "{root}"), "it is not a file"),
        (("import", "{tmp}/there.tar", "{tmp}/none"), "there is no folder"),
    ],
)
def test_wrong_usage_is_named_with_status_2_and_changes_nothing(
    run: Run, tmp_path: Path, root: Path, arguments: tuple[str, ...], words: str
) -> None:
    fill(root)
    (tmp_path / "there.tar").write_text("x")
    (tmp_path / "notes.tar.part").write_bytes(b"my notes" * 100)
    (tmp_path / "link.tar.part").symlink_to(tmp_path / "notes.tar.part")
    os.mkfifo(tmp_path / "pipe")
    before = contents(tmp_path)
    with (tmp_path / "locked.tar.part").open("wb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        status, _, err = run(*(each.format(root=root, tmp=tmp_path) for each in arguments))
    assert status == 2, err
    assert words in err
    assert contents(tmp_path) == before | {"locked.tar.part": b""}


def member(name: str, body: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(body)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, body


GOOD = kv("good")
DATA = body_of(GOOD)
HOSTILE = [
    member("/etc/passwd", b"x"),
    member("../../x", b"x"),
    member(f"kv/2/../{GOOD}", DATA),
    member(f"./{GOOD}", DATA),
    member(f"{GOOD}/", DATA),
    member(GOOD.upper(), DATA),
    member(kv("other"), DATA),
    member(kv("link"), type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    member(kv("hard"), type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    member(kv("device"), type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    member(kv("block"), type=tarfile.BLKTYPE),
    member(kv("pipe"), type=tarfile.FIFOTYPE),
    member(kv("folder"), type=tarfile.DIRTYPE),
    member(kv("unknown"), DATA, type=b"Z"),
    member(kv("sparse"), DATA, type=tarfile.GNUTYPE_SPARSE),
    member(kv("empty")),
    member(gap_key(GOOD), DATA),
    member(kv("x", "1f-0123456789ab-0123456789"), DATA),
    member(f"kv/3/{NAMESPACE}/ab/{'ab' * 32}", DATA),
    member(f"kv/1/{NAMESPACE}/ab/{'ab' * 32}", DATA),
    member("upkeep/1/uses/kv/" + "0" * 32, DATA),
    member("router/1/ab/" + "ab" * 32, b"{}"),
    member("probe/object", b"ecshare"),
    member(manifest_key(Kind.KV, NAMESPACE), b"{}"),
    member(manifest_key(Kind.KV, NAMESPACE), b"[" * 60_000),
    member(manifest_key(Kind.KV, NAMESPACE), b" " * 70_000),
    member(tp_size_key(Kind.KV, NAMESPACE, 2), b"another"),
    member(tp_size_key(Kind.KV, NAMESPACE, 2), b"much longer"),
    member(f"kv/2/sizes/{NAMESPACE}/0", b"ecshare"),
    member("\x1b[2J", b"x"),
]


def tar_of(path: Path, *members_of: tuple[tarfile.TarInfo, bytes], **terms: Any) -> None:
    with tarfile.open(path, "w", **({"format": tarfile.USTAR_FORMAT} | terms)) as tar:
        for info, body in members_of:
            tar.addfile(info, io.BytesIO(body))


@pytest.mark.parametrize("hostile", HOSTILE, ids=[repr(info.name[:40]) for info, _ in HOSTILE])
def test_foreign_member_is_refused_and_the_rest_is_imported(
    run: Run, tmp_path: Path, target: Path, hostile: tuple[tarfile.TarInfo, bytes]
) -> None:
    last = kv("last")
    tar_of(tmp_path / "x.tar", member(GOOD, DATA), hostile, member(last, body_of(last)))
    before = files(tmp_path)
    status, _, err = run("import", tmp_path / "x.tar", target)
    assert status == 1
    assert err.count("not copied: ") == err.count("\n") == 1
    assert "\x1b" not in err
    assert files(tmp_path) - before == {f"target/{GOOD}", f"target/{last}"}


def test_extension_headers_of_a_tar_are_ignored(run: Run, tmp_path: Path, target: Path) -> None:
    """Other formats of tar put long names into headers of their own."""
    about = member("x", b"x" * 100_000, type=tarfile.XHDTYPE)
    tar_of(tmp_path / "x.tar", member("x", b"y", type=tarfile.XGLTYPE), about, member(GOOD, DATA))
    assert run("import", tmp_path / "x.tar", target)[0] == 0
    assert contents(target) == {GOOD: DATA}
    tar_of(tmp_path / "y.tar", member(kv("x"), body_of(kv("x"))), format=tarfile.GNU_FORMAT)
    status, _, err = run("import", tmp_path / "y.tar", target)
    assert (status, files(target)) == (1, {GOOD})
    assert "this is no name of an object of this format" in err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[: 512 + 5120], "the tar is cut off at byte"),
        (lambda whole: whole[: 512 * 3], "the tar is cut off at byte"),
        (lambda whole: whole[: 512 + 5120] + b"x" * 512, "no tar header at byte"),
        (lambda _: b"", "the tar is cut off at byte 0"),
        (lambda _: b"not a tar" * 1000, "no tar header at byte 0"),
        (lambda whole: whole[:124] + b"\xff" * 12 + whole[136:], "no tar header at byte 0"),
    ],
)
def test_broken_tar_is_reported_in_one_sentence_with_status_1(
    run: Run, tmp_path: Path, target: Path, damage: Callable[[bytes], bytes], words: str
) -> None:
    tar_of(tmp_path / "x.tar", member(GOOD, DATA))
    (tmp_path / "x.tar").write_bytes(damage((tmp_path / "x.tar").read_bytes()))
    status, _, err = run("import", tmp_path / "x.tar", target)
    assert status == 1
    assert words in err
    assert err.count("\n") == 1
    assert set(contents(target).values()) <= {DATA}


def test_size_declared_by_a_tar_allocates_no_memory(run: Run, tmp_path: Path, target: Path) -> None:
    info, _ = member(GOOD)
    info.size = 3 << 30
    (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + bytes(2048))
    status, _, err = run("import", tmp_path / "x.tar", target)
    assert (status, files(target)) == (1, set())
    assert "cut off" in err


def test_damaged_tar_imports_only_exported_objects(run: Run, tmp_path: Path, root: Path) -> None:
    fill(root, 3)
    assert run("export", root, tmp_path / "x.tar")[0] == 0
    whole, good = (tmp_path / "x.tar").read_bytes(), contents(root)
    dice = random.Random(36)
    for n in range(30):
        damaged = bytearray(whole)
        for _ in range(dice.choice([1, 3, 20])):
            block = dice.randrange(0, len(whole), 512)
            damaged[block + dice.randrange(dice.choice([160, 512]))] = dice.randrange(256)
        (tmp_path / "y.tar").write_bytes(damaged)
        target = tmp_path / f"target{n}"
        target.mkdir()
        assert run("import", tmp_path / "y.tar", target)[0] in (0, 1)
        assert contents(target).items() <= good.items()


def test_bytes_in_flight_are_bounded(
    run: Run, root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 30)
    monkeypatch.setattr(moving, "_BYTES_IN_FLIGHT", 12_000)
    put_one, sizes, most = DirectoryStore.put, [0], 0

    async def watched(store: DirectoryStore, key: Key, body: Any, **terms: Any) -> bool:
        nonlocal most
        sizes.append(len(body))
        most = max(most, sum(sizes))
        try:
            return await put_one(store, key, body, **terms)
        finally:
            sizes.remove(len(body))

    monkeypatch.setattr(DirectoryStore, "put", watched)
    assert run("export", root, target)[0] == 0
    assert contents(target) == contents(root)
    assert 0 < most <= 12_000


def test_rekeyed_objects_are_read_with_the_new_key_alone(
    run: Run, tmp_path: Path, root: Path, target: Path
) -> None:
    """Namespaces with another integrity_name and foreign objects are left alone."""
    own = fill(root, 20, KEY, integrity="fleet-1")
    others = fill(root, secret=KEY, integrity="fleet-2")
    store(root, kv("0", namespace=own), 1, OTHER_KEY)
    put(root, kv("damaged", namespace=own), hours=0)
    put(root, f"kv/2/{own}/ab/readme.txt", hours=0)
    before = contents(root)
    step = {"integrity_key": OTHER_KEY, "integrity_name": "fleet-1"}
    both = options(root, **step, accepted_integrity_key=KEY)
    status, out, err = run("rekey", both)
    assert status == 1
    assert "gave new MACs to 19 objects" in out
    assert err.startswith(f"not copied: {kv('damaged', namespace=own)}: ")
    after = contents(root)
    assert after.keys() == before.keys()
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {kv(str(n), namespace=own) for n in range(1, 20)}
    for name in changed:
        assert after[name] == body_of(name, len(before[name]) - PROLOGUE_BYTES, OTHER_KEY)
    assert others not in "".join(changed)
    assert "gave new MACs to 0 objects" in run("rekey", both)[1]
    (root / kv("damaged", namespace=own)).unlink()
    assert run("export", options(root, **step), target, "--namespace", own)[0] == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give STORE as JSON with integrity_key"),
        ({"integrity_key": KEY}, "give STORE as JSON with integrity_key"),
        ({"integrity_key": KEY, "accepted_integrity_key": OTHER_KEY}, "no namespace has the"),
    ],
)
def test_rekey_needs_both_keys_and_the_right_name(
    run: Run, root: Path, given: dict[str, str], words: str
) -> None:
    fill(root, integrity="fleet-1")
    status, _, err = run("rekey", options(root, **given))
    assert status == 2
    assert words in err
    assert KEY not in err


@pytest.mark.s3
def test_namespace_is_moved_between_buckets_by_a_tar(
    run: Run, tmp_path: Path, root: Path, target: Path, seaweed: SeaweedFS
) -> None:
    fill(root)
    there = json.dumps({"url": f"{seaweed.url}/moved", "storage_options": seaweed.storage_options})
    assert run("export", root, there)[0] == 0
    assert run("export", there, tmp_path / "x.tar")[0] == 0
    assert run("import", tmp_path / "x.tar", target)[0] == 0
    assert contents(target) == contents(root)
