# SPDX-License-Identifier: Apache-2.0
"""The choice of the host cache's folder, and its privacy."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError
from ecshare.store.hostcache import folder
from ecshare.store.hostcache.cache import HostCache, open_host_cache
from ecshare.store.hostcache.folder import default_root, default_roots
from ecshare.store.keys import Kind, object_key

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KEY = object_key(Kind.EC, "0" * 32, "an object")
OURS = f"ecshare-{os.geteuid()}"

Disks = Callable[..., None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disks:
    """Set the sizes of the disks below /dev/shm, /tmp and ~/.cache; 0: the disk is missing."""
    for name in ("shm", "tmp", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(folder, "SHM", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def sizes(**sizes: int) -> None:
        def statvfs(path: Path) -> SimpleNamespace:
            size = sizes[path.relative_to(tmp_path).parts[0]]
            if not size:
                raise FileNotFoundError
            return SimpleNamespace(f_blocks=size, f_bavail=size, f_frsize=1)

        monkeypatch.setattr(os, "statvfs", statvfs)

    return sizes


@pytest.mark.parametrize(
    ("shm", "tmp", "cache", "wanted", "chosen"),
    [
        (64 * GIB, 64 * GIB, 64 * GIB, 4 * GIB, "shm"),
        (2 * GIB, 64 * GIB, 64 * GIB, 4 * GIB, "shm"),  # small, but worth its speed
        (64 * MIB, 64 * GIB, 64 * GIB, 4 * GIB, "tmp"),
        (64 * MIB, 64 * GIB, 64 * GIB, 32 * MIB, "shm"),  # as much as is wanted
        (0, 64 * GIB, 64 * GIB, 4 * GIB, "tmp"),
        (64 * MIB, 32 * MIB, 64 * GIB, 4 * GIB, "cache"),
        (64 * MIB, 0, 64 * GIB, 4 * GIB, "cache"),
        (64 * MIB, 128 * MIB, 32 * MIB, 4 * GIB, "tmp"),
        (64 * MIB, 0, 0, 4 * GIB, "shm"),
    ],
)
def test_default_folder_is_on_a_disk_with_room(
    tmp_path: Path,
    disks: Disks,
    caplog: pytest.LogCaptureFixture,
    shm: int,
    tmp: int,
    cache: int,
    wanted: int,
    chosen: str,
) -> None:
    disks(shm=shm, tmp=tmp, cache=cache)
    found = default_root(wanted)
    assert found == tmp_path / chosen / OURS
    assert len(caplog.messages) == (chosen != "shm")
    for message in caplog.messages:
        assert str(found) in message
        assert "--shm-size" in message
        assert "host_cache_dir" in message


def test_unwritable_place_is_not_chosen(
    tmp_path: Path, disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks(shm=64 * GIB, tmp=64 * GIB, cache=64 * GIB)
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path / "shm")
    assert default_root(4 * GIB) == tmp_path / "tmp" / OURS


def test_folder_and_entries_are_private(root: Path) -> None:
    entry = HostCache(root, 100 * KIB).publish(KEY, b"body")
    assert entry is not None
    assert root.stat().st_mode & 0o777 == 0o700
    (file,) = (path for path in root.iterdir() if not path.name.startswith("."))
    assert file.stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o770, 0o1777])
def test_folder_that_others_may_enter_is_refused(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(
        ConfigError, match=re.escape(f"host_cache_dir: other users may enter {root}")
    ):
        HostCache(root, KIB)


def test_folder_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HostCache(root, KIB)
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    with pytest.raises(ConfigError, match="host_cache_dir: .* belongs to another user"):
        HostCache(root, KIB)


def test_symbolic_link_or_file_is_refused(root: Path, tmp_path: Path) -> None:
    HostCache(tmp_path / "real", KIB)
    root.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="host_cache_dir: .* is a symbolic link"):
        HostCache(root, KIB)
    root.unlink()
    root.write_text("")
    with pytest.raises(ConfigError, match="host_cache_dir: .* is not a folder"):
        HostCache(root, KIB)


@pytest.mark.parametrize("squats", ["a link", "a folder"])
def test_replacement_of_a_running_caches_folder_is_not_used(
    root: Path, tmp_path: Path, squats: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A clean-up has removed the folder: the replacement is neither read nor changed."""
    cache, elsewhere = HostCache(root, 1 << 20), tmp_path / "elsewhere"
    planted = HostCache(elsewhere, 1 << 20).publish(KEY, b"planted")
    assert planted is not None
    planted.close()
    shutil.rmtree(root)
    if squats == "a link":
        root.symlink_to(elsewhere)
    else:
        elsewhere = shutil.copytree(elsewhere, root)
        root.chmod(0o755)
    before = {path: path.lstat() for path in [elsewhere, *elsewhere.rglob("*")]}
    assert cache.open(KEY) is None
    assert cache.publish(KEY, b"ours") is None
    claim = cache.claim(KEY)
    assert claim is not None, "without a shared claim each process fetches on its own"
    draft = cache.receive(KEY, 100)
    draft.begin(4)
    draft.write(0, b"ours")
    assert bytes(draft.body) == b"ours", "in private memory"
    assert draft.publish() is None
    cache.discard(KEY)
    assert {path: path.lstat() for path in [elsewhere, *elsewhere.rglob("*")]} == before
    assert "host_cache_dir: " in caplog.text
    root.unlink() if squats == "a link" else shutil.rmtree(root)
    entry = cache.publish(KEY, b"ours")
    assert entry is not None, "the folder is created again once the replacement is gone"
    assert bytes(entry.body) == b"ours"


@pytest.fixture
def squatted(disks: Disks, tmp_path: Path) -> Path:
    """Return the folder that every process of this user prefers."""
    disks(shm=64 * GIB, tmp=64 * GIB, cache=64 * GIB)
    return tmp_path / "shm" / OURS


def taken_by_a_folder_of_another(path: Path) -> None:
    path.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        path.chmod(0o777)


def taken_by_a_folder_that_others_enter(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def taken_by_a_link(path: Path) -> None:
    path.symlink_to("/tmp")


def taken_by_a_file(path: Path) -> None:
    path.touch()


def taken_by_odd_files(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / ".used").symlink_to("/etc/passwd")


TAKEN = [
    taken_by_a_folder_of_another,
    taken_by_a_folder_that_others_enter,
    taken_by_a_link,
    taken_by_a_file,
    taken_by_odd_files,
]


def opened(**options: Any) -> HostCache:
    return open_host_cache(StoreConfig(url="/store", **options))


@pytest.mark.parametrize("take", TAKEN)
def test_taken_default_name_causes_a_warning_and_a_second_name(
    squatted: Path, take: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    take(squatted)
    cache = opened()
    assert cache.root == squatted.with_name(f"{OURS}-2")
    assert cache.root.stat().st_mode & 0o777 == 0o700
    assert cache.publish(KEY, b"body") is not None
    assert len(caplog.messages) == 1
    assert f"host_cache_dir: {squatted} " in caplog.text or f" {squatted}," in caplog.text
    assert opened().root == cache.root, "all engines of the user share it"


def test_taken_second_name_is_skipped(squatted: Path) -> None:
    taken_by_a_file(squatted)
    taken_by_a_link(squatted.with_name(f"{OURS}-2"))
    assert opened().root == squatted.with_name(f"{OURS}-3")


def test_users_cache_folder_is_used_if_all_names_are_taken(squatted: Path, tmp_path: Path) -> None:
    for root in default_roots(GIB)[:-1]:
        taken_by_a_file(root)
    assert opened().root == tmp_path / "cache" / OURS


def test_each_process_has_a_folder_if_all_places_are_taken(
    squatted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for root in default_roots(GIB):
        taken_by_a_file(root)
    one, two = opened(), opened()
    assert one.root != two.root
    assert one.root.parent == squatted.parent
    assert one.root.stat().st_mode & 0o777 == 0o700
    assert "each process" in caplog.text
    for cache in (one, two):
        assert cache.publish(KEY, b"body") is not None


def test_folder_of_one_process_is_removed_at_its_end(tmp_path: Path) -> None:
    program = "import sys, pathlib; from ecshare.store.hostcache.folder import temporary_root; "
    program += "root = temporary_root(pathlib.Path(sys.argv[1])); (root / 'x').touch(); print(root)"
    made = subprocess.run(
        [sys.executable, "-c", program, tmp_path], check=True, capture_output=True, text=True
    )
    assert Path(made.stdout.strip()).parent == tmp_path
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("take", TAKEN)
def test_configured_folder_is_used_or_refused(tmp_path: Path, take: Callable[[Path], None]) -> None:
    take(tmp_path / "named")
    with pytest.raises(ConfigError, match="^host_cache_dir: "):
        opened(host_cache_dir=f"{tmp_path}/named")


def test_doctor_and_engine_choose_same_cache_folder(squatted: Path) -> None:
    assert default_root(GIB) == squatted
    taken_by_a_file(squatted)
    assert default_root(GIB) == squatted.with_name(f"{OURS}-2") == opened().root


def test_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="host_cache_dir: .* cannot be made"):
        HostCache(tmp_path / "file" / "host", KIB)


def test_limit_is_at_most_half_of_the_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=100, f_frsize=1000))
    cache = HostCache(root, 4 << 30)
    assert (cache.limit_bytes, cache.floor_bytes) == (50_000, 25_000)
    assert "--shm-size" in caplog.text
    assert len(caplog.messages) == 1
