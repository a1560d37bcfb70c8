# SPDX-License-Identifier: Apache-2.0
"""Who else may read and write what a store keeps in a folder."""

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
def test_what_is_made_has_its_mode_whatever_the_umask(
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
def test_a_folder_that_is_there_keeps_its_mode_and_is_spoken_of(
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


def test_objects_of_earlier_releases_are_as_good_as_others(tmp_path: Path) -> None:
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
def test_links_that_somebody_has_laid_lead_nowhere(
    tmp_path: Path, level: int, work: Callable[[Path], object]
) -> None:
    """Nothing is written, nor removed, where they lead to."""
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


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    assert put(tmp_path / "store")
    assert get(tmp_path / "disk") == BODY


@needs_root
def test_other_users_find_nothing(place: Path) -> None:
    root = place / "store"
    assert as_user(OWNER, lambda: put(root)) is True
    refusal = as_user(OTHER, lambda: get(root))
    assert isinstance(refusal, StoreDenied)
    assert "folder_access" in str(refusal)
    assert isinstance(as_user(OTHER, lambda: put(root, key=Key(f"{KEY}.p"))), StoreDenied)
    assert isinstance(as_user(OTHER, lambda: os.listdir(root)), PermissionError)


@needs_root
def test_users_of_a_group_share_a_folder_and_strangers_do_not(place: Path) -> None:
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
    assert shared(OTHER, delete) is None, "a damaged one makes room for a good one"
    assert shared(OTHER, put) is True
    assert shared(OWNER, get) == BODY
    for work in (get, put, delete):
        assert isinstance(shared(STRANGER, work), StoreDenied)
