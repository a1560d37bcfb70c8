# SPDX-License-Identifier: Apache-2.0
"""The sweep of a folder store removes temporary files of killed writers, and nothing else."""

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
from ecshare.transfer.upkeep.renewal import Record
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


def test_sweep_removes_only_old_temporary_files(folder: Path) -> None:
    gone = {old(beside(folder)), old(folder / temporary_name())}
    kept = {
        old(folder / KEY),
        old(beside(folder), DAY_S - 600),
        old(beside(folder), -DAY_S),  # by a writer whose clock is ahead
        old(beside(folder, ".0123.77.tmp")),
        old(beside(folder, "notes.tmp")),
        old(beside(folder, f"x{temporary_name()}")),
    }
    assert sweep(str(folder)) == len(gone)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)


def test_sweep_keeps_an_object_linked_to_a_temporary_file(folder: Path) -> None:
    left = old(beside(folder))
    os.link(left, folder / KEY)
    assert sweep(str(folder)) == 1
    assert (folder / KEY).read_bytes() == b"torn"


def test_sweep_neither_follows_nor_removes_links_and_pipes(folder: Path, tmp_path: Path) -> None:
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


def test_sweep_runs_once_a_day(folder: Path) -> None:
    assert sweep(str(folder)) == 0
    left = old(beside(folder))
    assert sweep(str(folder)) == 0, "it was done today"
    date(folder / MARK, DAY_S + 60)
    assert sweep(str(folder)) == 1
    assert not left.exists()
    date(folder / MARK, -3600)
    old(beside(folder))
    assert sweep(str(folder)) == 1, "the mark's time is in the future"


def test_sweep_of_many_folders_rests_at_least_half_of_the_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rests leave time to the process's other threads and the server's other clients."""
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


def test_sweep_ends_after_a_time_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(30):
        old(many_folders(folder, n))
    monkeypatch.setattr(temp_files, "LONGEST_S", 0.0)
    assert sweep(str(folder)) == 0


def many_folders(folder: Path, n: int) -> Path:
    place = (folder / KEY).parent.with_name(f"{n:02x}")
    place.mkdir(exist_ok=True)
    return place / temporary_name()


def test_mark_is_writable_by_all_who_may_write_to_the_folder(folder: Path) -> None:
    for mode, expected in ((0o700, 0o600), (0o2770, 0o620)):
        folder.chmod(mode)
        (folder / MARK).unlink(missing_ok=True)
        mask = os.umask(0o077)
        try:
            sweep(str(folder))
        finally:
            os.umask(mask)
        assert (folder / MARK).stat().st_mode & 0o777 == expected


def test_sweep_of_a_failing_folder_raises_nothing(folder: Path) -> None:
    assert sweep(f"{folder}/not-there") == 0
    (folder / MARK).mkdir()
    assert sweep(str(folder)) == 0


def test_writer_sweeps_at_start_and_reader_does_not(tmp_path: Path) -> None:
    config = StoreConfig(url=f"file://{tmp_path}/store", host_cache_dir=f"{tmp_path}/host")
    facts = {"model": "m"}
    (tmp_path / "store").mkdir()
    left = old(tmp_path / "store" / temporary_name())
    for writes in (False, True):
        engine = TransferEngine(config, "options")
        engine.start_up(Record(Kind.EC, namespace_digest(facts), facts), write=writes)
        engine.close()
        assert writes or left.exists()
    wait_until(lambda: not left.exists())
