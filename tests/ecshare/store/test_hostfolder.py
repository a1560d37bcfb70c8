# SPDX-License-Identifier: Apache-2.0
"""Where the host cache lies, and that it is ours alone."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ecshare.store import hostfolder
from ecshare.store.errors import ConfigError
from ecshare.store.hostcache import HostCache
from ecshare.store.hostfolder import default_root
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
    """Say how large the disks below /dev/shm, /tmp and ~/.cache are; 0: it is not there."""
    for name in ("shm", "tmp", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(hostfolder, "SHM", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def sizes(**sizes: int) -> None:
        def statvfs(path: Path) -> SimpleNamespace:
            if not sizes[path.name]:
                raise FileNotFoundError
            return SimpleNamespace(f_blocks=sizes[path.name], f_frsize=1)

        monkeypatch.setattr(os, "statvfs", statvfs)

    return sizes


@pytest.mark.parametrize(
    ("shm", "tmp", "cache", "wanted", "chosen"),
    [
        (64 * GIB, 64 * GIB, 64 * GIB, 4 * GIB, "shm"),
        (2 * GIB, 64 * GIB, 64 * GIB, 4 * GIB, "shm"),  # small, but worth its speed
        (64 * MIB, 64 * GIB, 64 * GIB, 4 * GIB, "tmp"),
        (64 * MIB, 64 * GIB, 64 * GIB, 32 * MIB, "shm"),  # all that was asked for
        (0, 64 * GIB, 64 * GIB, 4 * GIB, "tmp"),
        (64 * MIB, 32 * MIB, 64 * GIB, 4 * GIB, "cache"),
        (64 * MIB, 0, 64 * GIB, 4 * GIB, "cache"),
        (64 * MIB, 128 * MIB, 32 * MIB, 4 * GIB, "tmp"),
        (64 * MIB, 0, 0, 4 * GIB, "shm"),
    ],
)
def test_the_folder_is_where_there_is_room(
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


def test_a_place_that_cannot_be_written_is_none(
    tmp_path: Path, disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks(shm=64 * GIB, tmp=64 * GIB, cache=64 * GIB)
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path / "shm")
    assert default_root(4 * GIB) == tmp_path / "tmp" / OURS


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_folder_is_private(root: Path) -> None:
    entry = HostCache(root, 100 * KIB).publish(KEY, b"body")
    assert entry is not None
    assert root.stat().st_mode & 0o777 == 0o700
    assert Path(entry.path).stat().st_mode & 0o777 == 0o444 & ~umask()


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o770, 0o1777])
def test_a_folder_that_others_may_enter_is_refused(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match=re.escape(f"host_cache_dir: others may enter {root}")):
        HostCache(root, KIB)


def test_a_folder_of_somebody_else_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HostCache(root, KIB)
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    with pytest.raises(ConfigError, match="host_cache_dir: .* belongs to another user"):
        HostCache(root, KIB)


def test_a_link_or_a_file_is_refused(root: Path, tmp_path: Path) -> None:
    HostCache(tmp_path / "real", KIB)
    root.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="host_cache_dir: .* is a symbolic link"):
        HostCache(root, KIB)
    root.unlink()
    root.write_text("")
    with pytest.raises(ConfigError, match="host_cache_dir: .* is not a folder"):
        HostCache(root, KIB)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="host_cache_dir: .* cannot be made"):
        HostCache(tmp_path / "file" / "host", KIB)


def test_the_limit_is_not_more_than_the_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=100, f_frsize=1000))
    assert HostCache(root, 4 << 30).limit_bytes == 90_000
    assert "--shm-size" in caplog.text
    assert len(caplog.messages) == 1
