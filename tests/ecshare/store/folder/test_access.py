# SPDX-License-Identifier: Apache-2.0
"""Access of other users to a folder store."""

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectUnreadable, StoreDenied, StoreError
from ecshare.store.keys import Key, Kind, object_key
from ecshare.store.objects import ObjectStore, read
from ecshare.store.open import open_store
from tests.ecshare.store.users import (
    GROUP,
    OTHER,
    OWNER,
    STRANGER,
    as_user,
    needs_root,
    open_folder,
)

KEY = object_key(Kind.KV, "0" * 32, b"an object")
LEVELS = KEY.split("/")[:-1]
BODY = b"body" * 100
LIMIT = 1 << 20


@pytest.fixture(params=[0o000, 0o022, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    mask = os.umask(request.param)
    yield
    os.umask(mask)


@pytest.fixture
def place() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


def opened(root: Path, access: str = "user") -> ObjectStore:
    return open_store(StoreConfig(url=str(root), folder_access=access), "options")  # type: ignore[arg-type]


def put(root: Path, access: str = "user", key: Key = KEY) -> bool:
    return asyncio.run(opened(root, access).put(key, BODY))


def get(root: Path, access: str = "user") -> bytes:
    return bytes(asyncio.run(read(opened(root, access), KEY, LIMIT)))


def delete(root: Path, access: str = "user") -> None:
    asyncio.run(opened(root, access).delete([KEY]))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def folders(root: Path) -> list[Path]:
    return [root.joinpath(*LEVELS[:n]) for n in range(len(LEVELS) + 1)]


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("access", "of_folders", "of_objects"), [("user", 0o700, 0o400), ("group", 0o2770, 0o440)]
)
def test_modes_of_new_files_and_folders_ignore_the_umask(
    tmp_path: Path, access: str, of_folders: int, of_objects: int
) -> None:
    root = tmp_path / "new" / "store"
    assert put(root, access)
    assert [mode(path) for path in (root.parent, *folders(root))] == [of_folders] * (
        len(LEVELS) + 2
    )
    assert mode(root / KEY) == of_objects


@pytest.mark.parametrize(
    ("access", "given", "said"),
    [
        ("user", 0o700, ""),
        ("user", 0o2700, ""),
        ("user", 0o755, "options.url: other users may read {root} (mode 755)"),
        ("user", 0o750, "run: chmod -R go= {root}; or set folder_access to 'group'"),
        ("user", 0o1777, "options.url: other users may write to {root} (mode 1777)"),
        ("group", 0o2770, ""),
        ("group", 0o2775, "other users may read {root} (mode 2775)"),
        ("group", 0o2777, "run: chmod -R o= {root}"),
        ("group", 0o770, "run: chgrp GROUP {root} && chmod 2770 {root}"),
        ("group", 0o700, "run: chgrp GROUP {root} && chmod 2770 {root}"),
    ],
)
def test_existing_folder_keeps_its_mode_and_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, access: str, given: int, said: str
) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(given)
    assert put(root, access)
    assert mode(root) == given
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == bool(said)
    assert said.format(root=root) in "".join(warned)


def test_objects_of_earlier_releases_remain_usable(tmp_path: Path) -> None:
    root = tmp_path / "store"
    for folder in folders(root):
        folder.mkdir(mode=0o755)
    (root / KEY).write_bytes(BODY)
    (root / KEY).chmod(0o444)
    assert get(root) == BODY
    assert not put(root)
    delete(root)
    assert put(root)


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize("work", [put, delete])
def test_planted_symbolic_links_are_not_followed(
    tmp_path: Path, level: int, work: Callable[[Path], object]
) -> None:
    """Nothing is written or removed at their targets."""
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    theirs = elsewhere.joinpath(*LEVELS[level + 1 :], KEY.rpartition("/")[2])
    link = root.joinpath(*LEVELS[: level + 1])
    link.parent.mkdir(parents=True)
    theirs.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    if work is delete:
        theirs.write_bytes(b"theirs")
    with pytest.raises(StoreError) as caught:
        work(root)
    assert ("no symbolic links" in str(caught.value)) or level == len(LEVELS) - 1
    assert isinstance(caught.value, ObjectUnreadable) is (level == len(LEVELS) - 1)
    assert theirs.exists() is (work is delete)
    assert [path for path in elsewhere.rglob("*") if path.is_file()] == [theirs] * theirs.exists()


def test_root_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    assert put(tmp_path / "store")
    assert get(tmp_path / "disk") == BODY


@needs_root
def test_other_users_have_no_access(place: Path) -> None:
    root = place / "store"
    assert as_user(OWNER, lambda: put(root)) is True
    refusal = as_user(OTHER, lambda: get(root))
    assert isinstance(refusal, StoreDenied)
    assert "folder_access" in str(refusal)
    assert isinstance(as_user(OTHER, lambda: put(root, key=Key(f"{KEY}.p"))), StoreDenied)
    assert isinstance(as_user(OTHER, lambda: os.listdir(root)), PermissionError)


@needs_root
def test_group_folder_is_shared_by_its_group_only(place: Path) -> None:
    root = place / "store"
    root.mkdir()
    os.chown(root, 0, GROUP)
    root.chmod(0o2770)

    def shared(uid: int, work: Callable[[Path, str], object]) -> object:
        groups = () if uid == STRANGER else (GROUP,)
        return as_user(uid, lambda: (os.umask(0o077), work(root, "group"))[1], groups)

    assert shared(OWNER, put) is True
    assert {path.stat().st_gid for path in (*folders(root), root / KEY)} == {GROUP}
    assert shared(OTHER, get) == BODY
    assert shared(OTHER, put) is False
    assert shared(OTHER, delete) is None, "users of the group may remove damaged objects"
    assert shared(OTHER, put) is True
    assert shared(OWNER, get) == BODY
    for work in (get, put, delete):
        assert isinstance(shared(STRANGER, work), StoreDenied)
