# SPDX-License-Identifier: Apache-2.0
"""A folder fails as a store or as a host cache, or holds damaged and foreign objects."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.servers.engines import ec_argument
from tests.conftest import StartEngine
from tests.engines.chat import ask, picture, text, wait_until
from tests.faults.damage import DAMAGE, GIB, UNFIT, peak_memory_bytes, replace, unfit
from tests.faults.disks import SmallDisk
from tests.faults.failing import Folder
from tests.faults.fleet import QUESTION, SHORT_WAITS, Decoding, Fleet, Item

pytestmark = pytest.mark.faults

PAST_S, FUTURE_S = 0.0, 4e9
NUM_FOREIGN = 100_000


@dataclass(kw_only=True)
class FolderFleet(Folder, Fleet):
    """The consumer has `ec_both` and `durable` saves: it decodes, loads, and waits for saves."""

    def objects(self) -> set[Path]:
        return {path for path in (self.folder / "ec").rglob("*") if len(path.name) == 64}

    def store(self) -> Item:
        return self.encode_stored()[0]

    def encode_stored(self) -> tuple[Item, Path]:
        """A new picture, and the object with its embedding."""
        known = self.objects()
        item = self.encode()
        wait_until(lambda: len(self.objects()) > len(known), "it was not stored")
        (path,) = self.objects() - known
        return item, path


@pytest.fixture(scope="module")
def fleet(engine: StartEngine, disks: tuple[SmallDisk, ...]) -> FolderFleet:
    store, *hosts = (disk.folder for disk in disks)
    (store / "store").mkdir()

    def argument(role: str, host: Path, save: str) -> str:
        options = {"host_cache_dir": str(host / "host"), "save": save, **SHORT_WAITS}
        return ec_argument(role, str(store / "store"), **options)

    fleet = FolderFleet(
        engine("plain"),
        engine("encoder", argument("producer", hosts[0], "announced")),
        engine("consumer", argument("both", hosts[1], "durable"), "--enable-mm-embeds"),
        disks=disks,
    )
    fleet.wait_ready()
    return fleet


# --- failing folders ---


@contextlib.contextmanager
def files_of_the_past(fleet: FolderFleet) -> Iterator[None]:
    fleet.date(PAST_S)
    yield


@contextlib.contextmanager
def files_of_the_future(fleet: FolderFleet) -> Iterator[None]:
    fleet.date(FUTURE_S)
    yield


@contextlib.contextmanager
def foreign_names(fleet: FolderFleet) -> Iterator[None]:
    """Add far more foreign files than objects, in a folder of objects."""
    beside = next(iter(fleet.objects())).parent
    foreign = [beside / f"not-ours-{number}" for number in range(NUM_FOREIGN)]
    for path in foreign:
        path.touch()
    yield
    for path in foreign:
        path.unlink()


FailingFolder = Callable[[FolderFleet], contextlib.AbstractContextManager[None]]
READABLE: list[FailingFolder] = [
    Folder.disk_full, Folder.disk_read_only, files_of_the_past, files_of_the_future, foreign_names,
    Folder.host_caches_deleted,
]  # fmt: skip
"""The faults during which stored objects can be loaded."""
UNREADABLE: list[FailingFolder] = [
    Folder.folder_deleted,
    Folder.host_caches_full,
    Folder.host_caches_read_only,
]


@pytest.mark.parametrize("failing", READABLE + UNREADABLE)
def test_failing_folder_costs_only_hits(fleet: FolderFleet, failing: FailingFolder) -> None:
    kept, unread = fleet.store(), fleet.store()
    with Decoding(fleet):
        with failing(fleet):
            lost = fleet.encode()
            fleet.check_with_pixels()
            is_right = fleet.is_right(kept, fleet.without_pixels(kept))
            assert is_right is (failing in READABLE)
            fleet.check_announced(lost)
            fleet.check_with_pixels(unread.uuid, unread.seed)
            fleet.check_with_pixels(lost.uuid, lost.seed)
        fleet.check_with_pixels()
    fleet.check_recovers(lost)


def test_consumer_stores_a_lost_object_again(fleet: FolderFleet) -> None:
    item, path = fleet.encode_stored()
    whole = path.read_bytes()
    assert fleet.is_right(item, fleet.without_pixels(item))
    path.unlink()
    # Another prefix, so that the prefix cache does not hold the picture's KV.
    before = text("Once more:")
    expected = ask(fleet.plain, fleet.plain.model, [before, picture(item.seed), QUESTION])
    with Decoding(fleet):
        answer = ask(fleet.consumer, fleet.consumer.model, [before, item.content, QUESTION])
        assert answer.tokens == expected.tokens
        wait_until(lambda: path.exists() and path.read_bytes() == whole, "it is still lost")


# --- damaged and unfit objects ---


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_object_is_a_miss_and_is_replaced(
    fleet: FolderFleet, damage: Callable[[bytes], bytes]
) -> None:
    item, path = fleet.encode_stored()
    whole = path.read_bytes()
    replace(path, damage(whole))
    check_miss_then_replaced(fleet, item, path, whole)


def test_bytes_of_another_object_are_a_miss_and_are_replaced(fleet: FolderFleet) -> None:
    """Well-formed bytes, of another picture."""
    item, path = fleet.encode_stored()
    whole = path.read_bytes()
    replace(path, fleet.encode_stored()[1].read_bytes())
    check_miss_then_replaced(fleet, item, path, whole)


@pytest.mark.parametrize("name", UNFIT)
def test_object_of_wrong_dtype_or_shape_is_a_miss_and_is_replaced(
    fleet: FolderFleet, name: str
) -> None:
    item, path = fleet.encode_stored()
    whole = path.read_bytes()
    replace(path, unfit(name, whole, path.relative_to(fleet.folder).as_posix()))
    check_miss_then_replaced(fleet, item, path, whole)


def test_huge_object_is_a_miss_and_is_not_read_into_memory(fleet: FolderFleet) -> None:
    item, path = fleet.encode_stored()
    whole = path.read_bytes()
    replace(path, b"")
    os.truncate(path, GIB)  # sparse: it takes no space
    before = peak_memory_bytes(fleet.consumer)
    check_miss_then_replaced(fleet, item, path, whole)
    assert peak_memory_bytes(fleet.consumer) - before < GIB // 2


def check_miss_then_replaced(fleet: FolderFleet, item: Item, path: Path, whole: bytes) -> None:
    """`path` holds a wrong object: its load fails, and encoding again replaces it."""
    with Decoding(fleet):
        assert not fleet.is_right(item, fleet.without_pixels(item)), "it was taken"
        fleet.encode(item.uuid, item.seed)
        wait_until(lambda: path.exists() and path.read_bytes() == whole, "it was not replaced")
        assert fleet.is_right(item, fleet.without_pixels(item))
