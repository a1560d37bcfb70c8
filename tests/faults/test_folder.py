# SPDX-License-Identifier: Apache-2.0
"""A folder fails as a store or as a host cache, or holds what no engine put there."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ecshare.store.format import PROLOGUE_BYTES, TensorFacts, seal, unseal
from ecshare.testing.engines import ec_argument
from tests.conftest import StartEngine
from tests.engines.chat import ask, picture, text
from tests.faults.disks import SmallDisk
from tests.faults.fleet import QUESTION, SHORT_WAITS, Decoding, Fleet, Item

pytestmark = pytest.mark.faults

GIB = 1 << 30
PAST_S, FUTURE_S = 0.0, 4e9
NUM_FOREIGN = 100_000
STORES_WITHIN_S = 20.0


@dataclass(kw_only=True)
class FolderFleet(Fleet):
    """The consumer is an `ec_both`, and `durable`: it decodes, loads, and waits for its saves."""

    disks: tuple[SmallDisk, ...]

    @property
    def folder(self) -> Path:
        return self.disks[0].folder / "store"

    @property
    def hosts(self) -> tuple[Path, ...]:
        return tuple(disk.folder / "host" for disk in self.disks[1:])

    def objects(self) -> set[Path]:
        return {path for path in (self.folder / "ec").rglob("*") if len(path.name) == 64}

    def store(self) -> Item:
        return self.encode_stored()[0]

    def encode_stored(self) -> tuple[Item, Path]:
        """A new picture, and the object that came of it."""
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


# --- places that fail ---


@contextlib.contextmanager
def disk_full(fleet: FolderFleet) -> Iterator[None]:
    with fleet.disks[0].full():
        yield


@contextlib.contextmanager
def disk_read_only(fleet: FolderFleet) -> Iterator[None]:
    with fleet.disks[0].read_only():
        yield


@contextlib.contextmanager
def folder_deleted(fleet: FolderFleet) -> Iterator[None]:
    shutil.rmtree(fleet.folder)
    yield
    fleet.folder.mkdir()


@contextlib.contextmanager
def host_caches_full(fleet: FolderFleet) -> Iterator[None]:
    """Not of entries, which would make room, but of somebody else's bytes."""
    for host in fleet.hosts:
        for path in host.glob("*+*"):
            path.unlink()
    with fleet.disks[1].full(), fleet.disks[2].full():
        yield


@contextlib.contextmanager
def host_caches_read_only(fleet: FolderFleet) -> Iterator[None]:
    with fleet.disks[1].read_only(), fleet.disks[2].read_only():
        yield


@contextlib.contextmanager
def host_caches_deleted(fleet: FolderFleet) -> Iterator[None]:
    for host in fleet.hosts:
        shutil.rmtree(host)
    yield


@contextlib.contextmanager
def files_of_the_past(fleet: FolderFleet) -> Iterator[None]:
    _date(fleet, PAST_S)
    yield


@contextlib.contextmanager
def files_of_the_future(fleet: FolderFleet) -> Iterator[None]:
    _date(fleet, FUTURE_S)
    yield


def _date(fleet: FolderFleet, at_s: float) -> None:
    """As if the clock had been moved since everything was written."""
    for folder in (fleet.folder, *fleet.hosts):
        for path in folder.rglob("*"):
            os.utime(path, (at_s, at_s))


@contextlib.contextmanager
def foreign_names(fleet: FolderFleet) -> Iterator[None]:
    """Far more files than objects, beside the objects and under names like theirs."""
    beside = next(iter(fleet.objects())).parent
    foreign = [beside / f"not-ours-{number}" for number in range(NUM_FOREIGN)]
    for path in foreign:
        path.touch()
    yield
    for path in foreign:
        path.unlink()


Failing = Callable[[FolderFleet], contextlib.AbstractContextManager[None]]
READABLE: list[Failing] = [
    disk_full, disk_read_only, files_of_the_past, files_of_the_future, foreign_names,
    host_caches_deleted,
]  # fmt: skip
"""While these last, what is stored can be loaded."""
UNREADABLE: list[Failing] = [folder_deleted, host_caches_full, host_caches_read_only]


@pytest.mark.parametrize("failing", READABLE + UNREADABLE)
def test_a_failing_folder_costs_hits_and_no_more(fleet: FolderFleet, failing: Failing) -> None:
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


def test_what_the_store_has_lost_is_stored_again_by_who_loads_it(fleet: FolderFleet) -> None:
    item, path = fleet.encode_stored()
    whole = path.read_bytes()
    assert fleet.is_right(item, fleet.without_pixels(item))
    path.unlink()
    # Another beginning, or the KV of the first request would do.
    before = text("Once more:")
    expected = ask(fleet.plain, fleet.plain.model, [before, picture(item.seed), QUESTION])
    with Decoding(fleet):
        answer = ask(fleet.consumer, fleet.consumer.model, [before, item.content, QUESTION])
        assert answer.tokens == expected.tokens
        wait_until(lambda: path.exists() and path.read_bytes() == whole, "it is still lost")


# --- objects that no engine put there ---


def truncated(whole: bytes, _: FolderFleet) -> bytes:
    return whole[:-1]


def cut_in_the_header(whole: bytes, _: FolderFleet) -> bytes:
    return whole[:100]


def empty(_: bytes, __: FolderFleet) -> bytes:
    return b""


def flipped_in_the_payload(whole: bytes, _: FolderFleet) -> bytes:
    return whole[:-1] + bytes([whole[-1] ^ 1])


def flipped_in_the_header(whole: bytes, _: FolderFleet) -> bytes:
    at = whole.index(b"xxh3_128:") + 12
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


def another_objects(_: bytes, fleet: FolderFleet) -> bytes:
    """Valid in all that it says; of another picture, as of another namespace."""
    return fleet.encode_stored()[1].read_bytes()


DAMAGE: list[Callable[[bytes, FolderFleet], bytes]] = [
    truncated, cut_in_the_header, empty, flipped_in_the_payload, flipped_in_the_header,
    another_objects,
]  # fmt: skip
# What a well-made object says of itself, in place of F32 and [count, width].
UNFIT: dict[str, Callable[[int, int], tuple[str, tuple[int, ...]]]] = {
    "wrong dtype": lambda count, width: ("F16", (count, width)),
    "wrong count": lambda count, width: ("F32", (count - 1, width)),
    "wrong width": lambda count, width: ("F32", (count, width // 2)),
    "turned": lambda count, width: ("F32", (width, count)),
    "flat": lambda count, width: ("F32", (count * width,)),
    "three dimensions": lambda count, width: ("F32", (1, count, width)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_a_miss_and_replaced(
    fleet: FolderFleet, damage: Callable[[bytes, FolderFleet], bytes]
) -> None:
    item, path = fleet.encode_stored()
    whole = path.read_bytes()
    replace(path, damage(whole, fleet))
    check_miss_then_replaced(fleet, item, path, whole)


@pytest.mark.parametrize("name", UNFIT)
def test_an_object_that_does_not_fit_is_a_miss_and_replaced(fleet: FolderFleet, name: str) -> None:
    item, path = fleet.encode_stored()
    whole = path.read_bytes()
    key = path.relative_to(fleet.folder).as_posix()
    right = unseal(memoryview(whole), key).facts
    dtype, shape = UNFIT[name](*right.shape)
    facts = TensorFacts(dtype, shape, right.attributes)
    made = memoryview(bytearray(PROLOGUE_BYTES + facts.num_bytes))
    seal(made, facts, key)
    replace(path, bytes(made))
    check_miss_then_replaced(fleet, item, path, whole)


def test_a_gigabyte_of_zeros_is_a_miss_within_little_memory(fleet: FolderFleet) -> None:
    item, path = fleet.encode_stored()
    whole = path.read_bytes()
    replace(path, b"")
    os.truncate(path, GIB)  # sparse: it takes no room
    before = most_memory_bytes(fleet)
    check_miss_then_replaced(fleet, item, path, whole)
    assert most_memory_bytes(fleet) - before < GIB // 2


def check_miss_then_replaced(fleet: FolderFleet, item: Item, path: Path, whole: bytes) -> None:
    """`path` holds what it should not; asking and encoding again heals it."""
    with Decoding(fleet):
        assert not fleet.is_right(item, fleet.without_pixels(item)), "it was taken"
        fleet.encode(item.uuid, item.seed)
        wait_until(lambda: path.exists() and path.read_bytes() == whole, "it was not replaced")
        assert fleet.is_right(item, fleet.without_pixels(item))


def replace(path: Path, body: bytes) -> None:
    """Put `body` in an object's place, as a new file: engines may have linked the old one."""
    path.unlink()
    path.write_bytes(body)


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    """Encoders answer before they have stored."""
    deadline_s = time.monotonic() + STORES_WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.05)


def most_memory_bytes(fleet: FolderFleet) -> int:
    """The most that the consumer's processes have had so far, each for itself, added up."""
    total = 0
    for process in fleet.consumer.processes():
        status = Path(f"/proc/{process}/status").read_text()
        total += sum(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
    return total * 1024
