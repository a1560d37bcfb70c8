# SPDX-License-Identifier: Apache-2.0
"""What killed writers have left leaves a folder store; nothing else does."""

import os
import time
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.folder import temp_files
from ecshare.store.folder.store import temporary_name
from ecshare.store.folder.temp_files import MARK, sweep
from ecshare.store.keys import Kind, namespace_digest, object_key
from ecshare.transfer.engine import TransferEngine
from tests.waiting import wait_until

DAY_S = 86_400.0
KEY = object_key(Kind.KV, "0" * 32, "object")
GIVE_UP_S = 20.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / KEY).parent.mkdir(parents=True)
    return tmp_path


def old(path: Path, age_s: float = DAY_S + 60, body: bytes = b"torn") -> Path:
    path.write_bytes(body)
    date(path, age_s)
    return path


def date(path: Path, age_s: float) -> None:
    at_s = time.time() - age_s
    os.utime(path, (at_s, at_s), follow_symlinks=False)


def beside(folder: Path, name: str = "") -> Path:
    return (folder / KEY).with_name(name or temporary_name())


def test_old_temporary_files_are_removed_and_nothing_else(folder: Path) -> None:
    gone = {old(beside(folder)), old(folder / temporary_name())}
    kept = {
        old(folder / KEY),
        old(beside(folder), DAY_S - 600),
        old(beside(folder), -DAY_S),  # of a writer whose clock is ahead
        old(beside(folder, ".0123.77.tmp")),
        old(beside(folder, "notes.tmp")),
        old(beside(folder, f"x{temporary_name()}")),
    }
    assert sweep(str(folder)) == len(gone)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)


def test_an_object_stays_where_its_writer_was_killed_before_it_could_tidy_up(folder: Path) -> None:
    left = old(beside(folder))
    os.link(left, folder / KEY)
    assert sweep(str(folder)) == 1
    assert (folder / KEY).read_bytes() == b"torn"


def test_links_are_neither_followed_nor_removed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    there = old(elsewhere / temporary_name())
    store = folder / "kv"
    (store / "link").symlink_to(elsewhere)
    (store / temporary_name()).symlink_to(there)
    pipe = store / temporary_name()
    os.mkfifo(pipe)
    date(pipe, 2 * DAY_S)
    assert sweep(str(store)) == 0
    assert there.exists()
    assert pipe.exists()


def test_it_is_done_once_a_day(folder: Path) -> None:
    assert sweep(str(folder)) == 0
    left = old(beside(folder))
    assert sweep(str(folder)) == 0, "somebody has done it"
    date(folder / MARK, DAY_S + 60)
    assert sweep(str(folder)) == 1
    assert not left.exists()
    date(folder / MARK, -3600)
    old(beside(folder))
    assert sweep(str(folder)) == 1, "the mark is of a clock that was wrong"


def test_very_many_folders_are_all_looked_at_with_rests_between_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one day; a process has other threads, and a server other clients."""
    left = [old(many_folders(folder, n)) for n in range(30)]
    clock_s, rested_s = 0.0, 0.0

    def ticking() -> float:
        nonlocal clock_s
        clock_s += 0.5
        return clock_s

    def rest(seconds: float) -> None:
        nonlocal rested_s
        rested_s += seconds

    monkeypatch.setattr(time, "perf_counter", ticking)
    monkeypatch.setattr(time, "sleep", rest)
    assert sweep(str(folder)) == len(left)
    assert rested_s >= clock_s


def test_it_does_not_go_on_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(30):
        old(many_folders(folder, n))
    monkeypatch.setattr(temp_files, "LONGEST_S", 0.0)
    assert sweep(str(folder)) == 0


def many_folders(folder: Path, n: int) -> Path:
    place = (folder / KEY).parent.with_name(f"{n:02x}")
    place.mkdir(exist_ok=True)
    return place / temporary_name()


def test_whoever_may_write_to_the_folder_may_do_it(folder: Path) -> None:
    for mode, expected in ((0o700, 0o600), (0o2770, 0o620)):
        folder.chmod(mode)
        (folder / MARK).unlink(missing_ok=True)
        mask = os.umask(0o077)
        try:
            sweep(str(folder))
        finally:
            os.umask(mask)
        assert (folder / MARK).stat().st_mode & 0o777 == expected


def test_a_folder_that_fails_costs_nothing(folder: Path) -> None:
    assert sweep(f"{folder}/not-there") == 0
    (folder / MARK).mkdir()
    assert sweep(str(folder)) == 0


def test_a_writer_does_it_at_its_start_and_a_reader_does_not(tmp_path: Path) -> None:
    config = StoreConfig(url=f"file://{tmp_path}/store", host_cache_dir=f"{tmp_path}/host")
    facts = {"model": "m"}
    (tmp_path / "store").mkdir()
    left = old(tmp_path / "store" / temporary_name())
    for writes in (False, True):
        engine = TransferEngine(config, "options")
        engine.start_up(Kind.EC, namespace_digest(facts), facts, write=writes)
        engine.close()
        assert writes or left.exists()
    wait_until(lambda: not left.exists())
