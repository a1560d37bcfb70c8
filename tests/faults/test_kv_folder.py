# SPDX-License-Identifier: Apache-2.0
"""A folder of KV fails as a store or as a host cache, or holds damaged and foreign objects."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from ecshare.store.errors import ObjectCorrupt
from ecshare.store.format import unseal
from tests.conftest import StartEngine
from tests.engines.chat import counting, counts, wait_until
from tests.faults.damage import DAMAGE, GIB, UNFIT, peak_memory_bytes, replace, unfit
from tests.faults.disks import SmallDisk
from tests.faults.failing import Folder
from tests.faults.fleet import Decoding
from tests.faults.kv_fleet import DROPPED, FAILED, NUM_OBJECTS, Handed, KVFleet, sharing

pytestmark = pytest.mark.faults

HOST_BYTES = 16 << 20


@dataclass(kw_only=True)
class FolderFleet(Folder, KVFleet):
    """Each of the engines that share KV runs as on a host of its own."""

    def objects(self) -> set[Path]:
        return {path for path in (self.folder / "kv").rglob("*.t0of1") if path.is_file()}

    def num_stored(self) -> int:
        return len(self.objects())

    def store_in(self) -> tuple[Handed, Path]:
        """A new prompt, and the object of one of its whole chunks."""
        known = self.objects()
        handed = self.store()
        return handed, max(self.objects() - known, key=lambda path: path.stat().st_size)

    def is_sound(self, path: Path) -> bool:
        """Whether the file is an intact object of its key."""
        try:
            unseal(memoryview(path.read_bytes()), path.relative_to(self.folder).as_posix())
        except (FileNotFoundError, ObjectCorrupt):
            return False
        return True


@pytest.fixture(scope="module")
def fleet(engine: StartEngine, disks: tuple[SmallDisk, ...]) -> FolderFleet:
    store, *hosts = (disk.folder for disk in disks)
    (store / "store").mkdir()

    def start(host: Path) -> tuple[str, ...]:
        return sharing(str(store / "store"), str(host / "host"), host_cache_bytes=HOST_BYTES)

    return FolderFleet(
        plain=engine("plain"),
        first=engine("first", *start(hosts[0])),
        consumer=engine("consumer", *start(hosts[1])),
        disks=disks,
    ).wait_ready()


@pytest.fixture(autouse=True)
def emptied(fleet: FolderFleet) -> Iterator[None]:
    """Delete all objects after each test: the disk is small."""
    yield
    for path in fleet.objects():
        path.unlink()


# During READABLE faults, stored KV can be loaded; during UNTOUCHED ones, KV is stored, too.
READABLE = [Folder.disk_full, Folder.disk_read_only]
UNTOUCHED = [Folder.host_caches_deleted, Folder.host_caches_full, Folder.host_caches_read_only]


@pytest.mark.parametrize("failing", [*READABLE, *UNTOUCHED, Folder.folder_deleted])
def test_failing_folder_costs_only_hits(
    fleet: FolderFleet, failing: Callable[[FolderFleet], contextlib.AbstractContextManager[None]]
) -> None:
    writes = failing in UNTOUCHED
    fleet.survive(partial(failing, fleet), reads=writes or failing in READABLE, writes=writes)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ecshare", *arguments]


def kept_bytes(fleet: FolderFleet) -> int:
    return sum(path.stat().st_size for path in fleet.objects())


def test_cleaner_makes_room_on_a_full_disk_while_engines_answer(fleet: FolderFleet) -> None:
    handed = [fleet.store() for _ in range(3)]
    limit = kept_bytes(fleet) // 3
    with Decoding(fleet), fleet.disk_full():
        assert fleet.is_loaded(handed[0]), "reads go on"
        dropped = counts(fleet.first).get(DROPPED, 0)
        fleet.prefill()
        wait_until(lambda: fleet._num_dropped() > dropped, "the disk is not full")
        subprocess.run(command("gc", str(fleet.folder), "--max-bytes", str(limit)), check=True)
        assert kept_bytes(fleet) <= limit
        fleet.check_recovers()
    left = [path for path in fleet.folder.rglob(".*") if path.is_file()]
    assert not left, "nothing half-written is left"


def test_engines_answer_rightly_while_a_cleaner_removes_what_they_read(fleet: FolderFleet) -> None:
    fleet.store()
    limit = kept_bytes(fleet)
    clean = command("gc", str(fleet.folder), "--max-bytes", str(limit), "--every", "0.001")
    cleaner = subprocess.Popen(clean, stdout=subprocess.PIPE, text=True)
    asked = []
    for _ in range(12):
        asked.append(fleet.prefill())
        for handed in asked[-3:]:
            fleet.decode(handed)
        fleet.prefill(asked[0].prompt)
    cleaner.terminate()
    out, _ = cleaner.communicate()
    assert cleaner.returncode == 0
    removed = [int(each.replace(",", "")) for each in re.findall(r"removed ([\d,]+) objects", out)]
    assert sum(removed) > 4 * NUM_OBJECTS
    assert sum(map(bool, removed)) > 4, "in many runs"
    fleet.check_recovers(asked[0])


@pytest.mark.parametrize("how", ["gc --max-bytes 0", "rm --yes --namespace"])
def test_removal_of_all_kv_costs_only_hits(fleet: FolderFleet, how: str) -> None:
    handed = [fleet.store() for _ in range(2)]
    name, *options = how.split()
    # Not by its model: a test before has removed the manifest, which is written again in hours.
    more = [next(iter(fleet.objects())).parents[1].name] if name == "rm" else []
    with Decoding(fleet):
        subprocess.run(command(name, str(fleet.folder), *options, *more), check=True)
        assert not fleet.objects()
        for each in handed:
            fleet.decode(each)
        fleet.check_recovers(handed[0])


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_object_is_a_miss_and_is_replaced(
    fleet: FolderFleet, damage: Callable[[bytes], bytes]
) -> None:
    handed, path = fleet.store_in()
    check_miss_then_replaced(fleet, handed, path, damage(path.read_bytes()))


@pytest.mark.parametrize("name", UNFIT)
def test_object_of_wrong_dtype_or_shape_is_a_miss_and_is_replaced(
    fleet: FolderFleet, name: str
) -> None:
    handed, path = fleet.store_in()
    body = unfit(name, path.read_bytes(), path.relative_to(fleet.folder).as_posix())
    check_miss_then_replaced(fleet, handed, path, body)


def test_bytes_of_another_object_are_a_miss_and_are_replaced(fleet: FolderFleet) -> None:
    """Well-formed bytes, of another prompt."""
    (handed, path), (_, other) = fleet.store_in(), fleet.store_in()
    check_miss_then_replaced(fleet, handed, path, other.read_bytes())


def test_huge_object_is_a_miss_and_is_not_read_into_memory(fleet: FolderFleet) -> None:
    handed, path = fleet.store_in()
    before = peak_memory_bytes(fleet.consumer)
    check_miss_then_replaced(fleet, handed, path, b"", num_bytes=GIB)
    assert peak_memory_bytes(fleet.consumer) - before < GIB // 2


def check_miss_then_replaced(
    fleet: FolderFleet, handed: Handed, path: Path, body: bytes, num_bytes: int = 0
) -> None:
    """KV before the damaged chunk is loaded; the rest is computed and stored again."""
    replace(path, body)
    if num_bytes:
        os.truncate(path, num_bytes)  # sparse: it takes no space
    with Decoding(fleet):
        with counting(fleet.consumer) as gained:
            fleet.decode(handed)
            fleet.decode(fleet.prefill())  # one more step publishes the counters of loads and saves
        assert gained[FAILED] > 0, "it was taken"
        wait_until(lambda: fleet.is_sound(path), "it was not replaced")
