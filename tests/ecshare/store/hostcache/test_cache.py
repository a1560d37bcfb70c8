# SPDX-License-Identifier: Apache-2.0
import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.hostcache import eviction, usage
from ecshare.store.hostcache.cache import Entry, HostCache
from ecshare.store.hostcache.usage import HostLock, Usage
from ecshare.store.keys import Key, Kind, object_key
from tests.ecshare.store.hostcache.evictions import evicted
from tests.waiting import wait_until

KIB = 1 << 10
KEYS = [object_key(Kind.EC, "0" * 32, str(n)) for n in range(40)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture
def cache(root: Path) -> HostCache:
    return HostCache(root, 100 * KIB)


def publish(cache: HostCache, n: int, body: bytes) -> Entry:
    entry = cache.publish(KEYS[n], memoryview(body))
    assert entry is not None
    return entry


def put(cache: HostCache, n: int, size: int = 10 * KIB) -> None:
    publish(cache, n, bytes([n]) * size).close()
    used_at(cache, n, n)


def used_at(cache: HostCache, n: int, when_s: int) -> None:
    """Set the file time instead of waiting: it advances only every few milliseconds."""
    os.utime(path_of(cache, n), (1e9 + when_s, 1e9 + when_s))


def path_of(cache: HostCache, n: int) -> Path:
    return cache.root / KEYS[n].replace("/", "+")


def held(cache: HostCache) -> set[int]:
    return {n for n in range(len(KEYS)) if path_of(cache, n).exists()}


def open_entry(cache: HostCache, n: int) -> Entry:
    entry = cache.open(KEYS[n])
    assert entry is not None
    return entry


def used_bytes(cache: HostCache) -> int:
    return int.from_bytes((cache.root / ".used").read_bytes()[:8], "little", signed=True)


def test_published_entry_can_be_opened(cache: HostCache) -> None:
    body = os.urandom(5000)
    with contextlib.closing(publish(cache, 0, body)) as published:
        assert published.key == KEYS[0]
        assert published.body == body
    with contextlib.closing(open_entry(cache, 0)) as entry:
        assert entry.body == body
        assert entry.body.readonly


def test_bytes_of_an_entry_are_read_without_its_mapping(cache: HostCache) -> None:
    body = bytes(range(256)) * 64
    entry = publish(cache, 0, body)
    out = bytearray(1000)
    entry.read(300, memoryview(out))
    assert bytes(out) == body[300:1300]
    with pytest.raises(OSError, match="shorter"):
        entry.read(len(body) - 10, memoryview(out))
    entry.close()


def test_open_of_a_missing_entry_is_none(cache: HostCache) -> None:
    assert cache.open(KEYS[0]) is None


def test_second_publish_opens_the_first_entry(cache: HostCache) -> None:
    put(cache, 0)
    inode = path_of(cache, 0).stat().st_ino
    with contextlib.closing(publish(cache, 0, b"other bytes")) as entry:
        assert entry.body[0] == 0
    assert path_of(cache, 0).stat().st_ino == inode
    assert used_bytes(cache) == 10 * KIB


def test_least_recently_used_entries_are_evicted_first(cache: HostCache) -> None:
    for n in range(10):
        put(cache, n)
    open_entry(cache, 0).close()
    put(cache, 10)
    assert held(cache) == {0, *range(2, 11)}
    assert used_bytes(cache) == 100 * KIB


def test_parts_of_objects_are_evicted_too(cache: HostCache) -> None:
    """Their names extend the object's, for example by the rows of a shard."""
    for n in range(20):
        entry = cache.publish(Key(f"{KEYS[n]}.t0of1.rows-0-{n}"), bytes(10 * KIB))
        assert entry is not None
        entry.close()
    files = [path for path in cache.root.iterdir() if ".rows-" in path.name]
    assert sum(path.stat().st_size for path in files) == used_bytes(cache) <= 100 * KIB


def test_eviction_frees_a_little_more_than_needed(root: Path) -> None:
    """So the next publishes need no scan."""
    cache = HostCache(root, 100 * KIB)
    for n in range(20):
        put(cache, n, 5 * KIB)
    put(cache, 20, KIB)
    assert used_bytes(cache) == 90 * KIB + KIB


def test_pinned_entry_is_never_evicted(cache: HostCache, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(10):
        put(cache, n)
    pins = [open_entry(cache, n) for n in range(10)]
    for n in range(10):
        used_at(cache, n, n)
    assert cache.publish(KEYS[10], bytes(10 * KIB)) is None
    assert cache.publish(KEYS[11], bytes(10 * KIB)) is None
    assert held(cache) == set(range(10))
    assert len(caplog.messages) == 1
    pins[4].close()
    put(cache, 10)
    assert held(cache) == {*range(11)} - {4}
    for pin in pins:
        pin.close()


def test_entry_is_pinned_when_published(cache: HostCache) -> None:
    with contextlib.closing(publish(cache, 0, bytes(90 * KIB))):
        used_at(cache, 0, 0)
        assert cache.publish(KEYS[1], bytes(20 * KIB)) is None
    put(cache, 1, 20 * KIB)
    assert held(cache) == {1}


def test_entry_opened_twice_stays_pinned_until_both_are_closed(cache: HostCache) -> None:
    put(cache, 0, 90 * KIB)
    first, second = open_entry(cache, 0), open_entry(cache, 0)
    first.close()
    first.close()
    assert cache.publish(KEYS[1], bytes(20 * KIB)) is None
    second.close()
    put(cache, 1, 20 * KIB)


def test_garbage_collected_entry_is_unpinned(cache: HostCache) -> None:
    put(cache, 0, 90 * KIB)
    entry = open_entry(cache, 0)
    del entry
    put(cache, 1, 20 * KIB)


def test_view_outlives_its_evicted_entry(cache: HostCache) -> None:
    """The memory is released with the last view."""
    put(cache, 7, 90 * KIB)
    entry = open_entry(cache, 7)
    view = entry.body[10:20]
    entry.close()
    put(cache, 8, 20 * KIB)
    assert held(cache) == {8}
    assert view == b"\7" * 10


def test_empty_or_oversized_entry_is_refused(cache: HostCache) -> None:
    put(cache, 0)
    assert cache.publish(KEYS[1], bytes(100 * KIB + 1)) is None
    assert cache.publish(KEYS[1], b"") is None
    assert held(cache) == {0}


def test_caches_of_one_folder_share_a_budget(root: Path) -> None:
    one, two = HostCache(root, 100 * KIB), HostCache(root, 100 * KIB)
    for n in range(20):
        put((one, two)[n % 2], n)
    assert held(one) == set(range(10, 20))
    assert used_bytes(two) == 100 * KIB


def test_smaller_limit_holds_from_the_first_publish(root: Path) -> None:
    large = HostCache(root, 100 * KIB)
    for n in range(10):
        put(large, n)
    put(HostCache(root, 30 * KIB), 10)
    assert held(large) == {8, 9, 10}


def test_wrong_usage_count_is_corrected_by_eviction(cache: HostCache) -> None:
    for n in range(10):
        put(cache, n)
    for n in range(5):
        path_of(cache, n).unlink()
    put(cache, 10)
    assert held(cache) == set(range(5, 11))
    assert used_bytes(cache) == 60 * KIB


@pytest.mark.parametrize("left", [None, b"", b"xx", b"\xff" * 8, b"\xff" * 7 + b"\x7f"])
def test_lost_usage_count_is_counted_again(cache: HostCache, left: bytes | None) -> None:
    for n in range(10):
        put(cache, n)
    (cache.root / ".used").unlink()
    if left is not None:
        (cache.root / ".used").write_bytes(left)
    put(cache, 10)
    assert held(cache) == set(range(1, 11))


def test_new_cache_counts_existing_entries(root: Path) -> None:
    put(HostCache(root, 100 * KIB), 0)
    (root / ".used").write_bytes(bytes(8))
    assert used_bytes(HostCache(root, 100 * KIB)) == 10 * KIB


def test_discarded_entry_stays_readable_for_its_readers(cache: HostCache) -> None:
    put(cache, 0)
    with contextlib.closing(open_entry(cache, 0)) as entry:
        cache.discard(KEYS[0])
        assert cache.open(KEYS[0]) is None
        assert entry.body[0] == 0
    assert used_bytes(cache) == 0
    cache.discard(KEYS[0])
    cache.discard(KEYS[1])
    assert used_bytes(cache) == 0
    put(cache, 0)


def test_temporary_file_of_a_dead_writer_is_removed(cache: HostCache) -> None:
    left = cache.root / ".0123456789abcdef.tmp"
    left.write_bytes(bytes(95 * KIB))
    put(cache, 0)
    with left.open("rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_SH)
        assert used_bytes(HostCache(cache.root, 100 * KIB)) == 105 * KIB
        assert left.exists()
    HostCache(cache.root, 100 * KIB)
    assert not left.exists()
    assert used_bytes(cache) == 10 * KIB


def disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_publish_on_a_full_disk_returns_none(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(cache, 0)
    with contextlib.closing(open_entry(cache, 0)), monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", disk_full)
        assert cache.publish(KEYS[1], bytes(10 * KIB)) is None
        assert cache.publish(KEYS[2], bytes(10 * KIB)) is None
    assert "No space left" in caplog.text
    assert len(caplog.messages) == 1
    assert held(cache) == {0}
    assert not [*cache.root.glob(".*.tmp")]
    assert used_bytes(cache) == 10 * KIB
    put(cache, 1)


def test_full_disk_below_the_limit_causes_eviction(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(5):
        put(cache, n)

    def small_disk(*_: object) -> None:
        if len(held(cache)) > 3:
            disk_full()

    monkeypatch.setattr(os, "posix_fallocate", small_disk)
    publish(cache, 5, bytes(20 * KIB)).close()
    assert held(cache) == {2, 3, 4, 5}


def test_removed_cache_folder_is_created_again(cache: HostCache) -> None:
    put(cache, 0)
    shutil.rmtree(cache.root)
    assert cache.open(KEYS[0]) is None
    cache.discard(KEYS[0])
    put(cache, 1)
    assert held(cache) == {1}


def test_usage_file_locked_by_another_does_not_block(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "COUNTER_WAIT_S", 0.01)
    cache = HostCache(cache.root, 100 * KIB)
    put(cache, 0)
    with (cache.root / ".used").open("rb") as held_by_another:
        fcntl.flock(held_by_another, fcntl.LOCK_EX)
        assert cache.publish(KEYS[1], memoryview(bytes(KIB))) is None
        open_entry(cache, 0).close()
    assert used_bytes(cache) == 10 * KIB
    put(cache, 3)
    assert used_bytes(cache) == 20 * KIB


@pytest.mark.parametrize("name", [".used", ".evicting"])
def test_stopped_process_with_a_lock_does_not_block_others(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Meanwhile three times the cache's size is published, and afterwards once."""
    monkeypatch.setattr(usage, "COUNTER_WAIT_S", 0.05)
    monkeypatch.setattr(eviction, "ROOM_WAIT_S", 0.05)
    held_up = "import fcntl, os, signal, sys; f = open(sys.argv[1], 'rb+'); "
    held_up += "fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), signal.SIGSTOP)"
    stopped = subprocess.Popen([sys.executable, "-c", held_up, str(cache.root / name)])
    try:
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
        others = [HostCache(cache.root, 100 * KIB) for _ in range(2)]
        for n in range(30):
            entry = others[n % 2].publish(KEYS[n], memoryview(bytes(10 * KIB)))
            assert (entry is None) == (name == ".used")
            if entry is not None:
                entry.close()
    finally:
        stopped.kill()
        stopped.wait()
    for n in range(30, 40):
        put(others[n % 2], n)
    assert len(held(cache)) >= 8
    assert used_bytes(cache) == 10 * KIB * len(held(cache)) <= 100 * KIB


def test_usage_file_of_an_older_release_is_read(cache: HostCache) -> None:
    """It writes one number instead of two."""
    put(cache, 0)
    (cache.root / ".used").write_bytes((10 * KIB).to_bytes(8, "little"))
    for n in range(1, 12):
        put(cache, n)
    assert held(cache) == set(range(2, 12))


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the removals under each hold of the usage lock; fail if a folder is read under it."""
    holds: list[int] = []
    counter, unlink, scandir = usage.Usage.counter, os.unlink, os.scandir
    is_held = False

    @contextlib.contextmanager
    def counted(room: usage.Usage) -> Iterator[Any]:
        nonlocal is_held
        with counter(room) as held:
            is_held = True
            holds.append(0)
            yield held
            is_held = False

    def counting(path: str) -> None:
        if is_held and not path.endswith(".tmp"):
            holds[-1] += 1
        unlink(path)

    def beside(path: Path) -> Any:
        assert not is_held
        return scandir(path)

    monkeypatch.setattr(usage.Usage, "counter", counted)
    monkeypatch.setattr(os, "unlink", counting)
    monkeypatch.setattr(os, "scandir", beside)
    return holds


def test_entries_are_evicted_a_few_per_lock(
    root: Path, monkeypatch: pytest.MonkeyPatch, holds: list[int]
) -> None:
    monkeypatch.setattr(eviction, "STEP_ENTRIES", 3)
    monkeypatch.setattr(eviction, "RUN_ENTRIES", 30)
    cache = HostCache(root, 100 * KIB)
    for n in random.Random(0).sample(range(20), 20):
        put(cache, n, 5 * KIB)
    holds.clear()
    put(cache, 30, 50 * KIB)
    assert held(cache) == {*range(10, 20), 30}, "the oldest of all runs"
    assert [step for step in holds if step] == [3, 3, 3, 1]
    assert used_bytes(cache) == 100 * KIB


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let a scan list four entries, and the others only once this event is set."""
    monkeypatch.setattr(eviction, "RUN_ENTRIES", 4)
    files, goes_on = eviction.Evictor.files, threading.Event()

    def patched(room: eviction.Evictor) -> Iterator[Any]:
        found = sorted(files(room), key=lambda each: -each.used_ns)  # as tmpfs lists them
        yield from found[:4]
        goes_on.wait()
        yield from found[4:]

    monkeypatch.setattr(eviction.Evictor, "files", patched)
    yield goes_on
    goes_on.set()
    evicted()


def test_eviction_among_many_entries_does_not_wait_for_a_scan(
    cache: HostCache, scans: threading.Event
) -> None:
    """First the oldest of the listed entries are evicted, then the oldest of all."""
    for n in range(20):
        put(cache, n, 5 * KIB)
    put(cache, 20, 10 * KIB)
    assert held(cache) == {*range(16), 18, 19, 20}, "without the oldest of those listed first"
    put(cache, 21, 10 * KIB)
    assert held(cache) == {*range(15), 19, 20, 21}
    assert used_bytes(cache) == 100 * KIB
    scans.set()
    evicted()
    assert held(cache) == {*range(2, 15), 19, 20, 21}, "without the oldest of all"
    assert used_bytes(cache) == 90 * KIB


def test_start_among_many_entries_does_not_wait_for_the_count(
    cache: HostCache, scans: threading.Event
) -> None:
    for n in range(10):
        put(cache, n, 5 * KIB)
    (cache.root / ".used").write_bytes((1).to_bytes(8, "little"))
    put(HostCache(cache.root, 100 * KIB), 10, 5 * KIB)
    scans.set()
    evicted()
    assert 40 * KIB <= used_bytes(cache) <= 55 * KIB
    HostCache(cache.root, 100 * KIB)
    evicted()
    assert used_bytes(cache) == 55 * KIB


def test_publish_evicts_itself_if_another_evictor_takes_too_long(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "ROOM_WAIT_S", 0.0)
    for n in range(10):
        put(cache, n)
    with HostLock(f"{cache.root}/.evicting", 60.0).held():
        put(cache, 10)
    assert held(cache) == set(range(1, 11))
    assert used_bytes(cache) == 100 * KIB


def during_scan(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Call `happens` when the next scan has seen half of the entries."""
    scan = eviction.Evictor.files
    waiting = [happens]

    def patched(room: eviction.Evictor) -> Iterator[Any]:
        found = list(scan(room))
        yield from found[: len(found) // 2]
        if waiting:
            waiting.pop()()
        yield from found[len(found) // 2 :]

    monkeypatch.setattr(eviction.Evictor, "files", patched)


def test_concurrent_changes_during_an_eviction_are_accounted_for(
    cache: HostCache, peers: list["Peer"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan has not seen what other processes publish and remove meanwhile."""
    for n in range(9):
        put(cache, n)

    def work() -> None:
        for n in range(20, 29):
            assert peers[0].ask(f"publish {n} {KIB}")
        assert peers[1].ask("pin 3 0")
        cache.discard(KEYS[8])

    during_scan(monkeypatch, work)
    put(cache, 9, 20 * KIB)
    assert {3, 9, *range(20, 29)} <= held(cache)
    assert (
        used_bytes(cache) == sum(path_of(cache, n).stat().st_size for n in held(cache)) <= 100 * KIB
    )


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_scan_counts_each_entry_once_during_removals() -> None:
    """The listing of a folder in memory starts again after removals."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o700)
        keys = [object_key(Kind.EC, "0" * 32, str(n)).replace("/", "+") for n in range(2000)]
        for name in keys:
            Path(folder, name).touch()
        files = eviction.Evictor(Usage(Path(folder), KIB)).files()
        found = [next(files).name for _ in range(10)]
        for name in keys[:1800]:
            Path(folder, name).unlink()
        found += [each.name for each in files]
        assert set(found) >= set(keys[1800:])
        assert len(found) == len(set(found))


def test_wrong_usage_count_is_corrected_by_a_scan(
    cache: HostCache, peers: list["Peer"], monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(9):
        put(cache, n)
    (cache.root / ".used").write_bytes(bytes(8))

    def work() -> None:
        assert peers[0].ask(f"publish 20 {5 * KIB}")

    during_scan(monkeypatch, work)
    HostCache(cache.root, 100 * KIB)
    assert 80 * KIB <= used_bytes(cache) <= 95 * KIB

    def is_corrected() -> bool:
        HostCache(cache.root, 100 * KIB)  # scans, unless a peer that still starts does so
        return used_bytes(cache) == 95 * KIB

    wait_until(is_corrected)


def test_publish_waits_for_a_running_eviction(
    cache: HostCache, peers: list["Peer"], monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(10):
        put(cache, n)
    during_scan(monkeypatch, lambda: peers[0].tell(f"publish 20 {10 * KIB}"))
    put(cache, 11, 30 * KIB)
    assert peers[0].hear()
    assert {11, 20} <= held(cache)


def test_entry_locked_by_another_process_is_replaced(cache: HostCache) -> None:
    put(cache, 0)
    with path_of(cache, 0).open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert cache.open(KEYS[0]) is None
        with contextlib.closing(publish(cache, 0, b"again")) as entry:
            assert bytes(entry.body) == b"again"
    assert used_bytes(cache) == len(b"again")


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Fork a living process as soon as the given file is locked exclusively."""
    flock = fcntl.flock
    reading, writing = os.pipe()
    waiting: list[Path] = []
    children: list[int] = []

    def patched(fd: int, asked: int) -> None:
        flock(fd, asked)
        is_next = waiting and os.path.samestat(os.fstat(fd), waiting[0].stat())
        if asked == fcntl.LOCK_EX | fcntl.LOCK_NB and is_next:
            waiting.clear()
            children.append(os.fork())
            if children[-1] == 0:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)

    monkeypatch.setattr(fcntl, "flock", patched)
    yield waiting.append
    os.close(reading)
    os.close(writing)
    assert [os.waitpid(child, 0)[1] for child in children] == [0]


def test_usage_lock_is_released_despite_a_living_fork(
    cache: HostCache, inherited: Callable[[Path], None]
) -> None:
    inherited(cache.root / ".used")
    put(cache, 0)
    put(cache, 1)


def test_entry_lock_is_released_despite_a_living_fork(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch, inherited: Callable[[Path], None]
) -> None:
    for n in range(10):
        put(cache, n)
    inherited(path_of(cache, 0))
    before_lock(monkeypatch, fcntl.LOCK_EX, lambda: used_at(cache, 0, 100))
    put(cache, 10)
    assert held(cache) == {0, *range(2, 11)}
    open_entry(cache, 0).close()


def before_lock(
    monkeypatch: pytest.MonkeyPatch, operation: int, happens: Callable[[], object]
) -> None:
    """Call `happens` just before the next lock of that kind is taken on an entry."""
    flock = fcntl.flock
    waiting = [happens]

    def patched(fd: int, asked: int) -> None:
        if asked == operation | fcntl.LOCK_NB and os.fstat(fd).st_size >= KIB and waiting:
            waiting.pop()()
        flock(fd, asked)

    monkeypatch.setattr(fcntl, "flock", patched)


def test_entry_evicted_during_open_is_a_miss(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, 0)
    before_lock(monkeypatch, fcntl.LOCK_SH, path_of(cache, 0).unlink)
    assert cache.open(KEYS[0]) is None


def test_entry_used_since_the_scan_is_not_evicted(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(10):
        put(cache, n)
    before_lock(monkeypatch, fcntl.LOCK_EX, lambda: used_at(cache, 0, 100))
    put(cache, 10)
    assert held(cache) == {0, *range(2, 11)}


def test_entry_replaced_since_the_scan_is_not_evicted(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(10):
        put(cache, n)

    def replace() -> None:
        path_of(cache, 0).rename(cache.root / "gone")
        path_of(cache, 0).write_bytes(b"new")

    before_lock(monkeypatch, fcntl.LOCK_EX, replace)
    put(cache, 10)
    assert path_of(cache, 0).read_bytes() == b"new"


def test_symbolic_link_in_the_cache_is_not_followed(cache: HostCache, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    path_of(cache, 0).symlink_to(tmp_path / "secret")
    assert cache.open(KEYS[0]) is None


def test_threads_can_publish_and_discard_concurrently(root: Path) -> None:
    cache = HostCache(root, 100 * KIB)
    failures: list[object] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            n = chance.randrange(len(KEYS))
            entry = cache.publish(KEYS[n], bytes([n]) * 10 * KIB)
            if entry is not None:
                with contextlib.closing(entry):
                    if bytes(entry.body) != bytes([n]) * 10 * KIB:
                        failures.append(n)
            if chance.random() < 0.1:
                cache.discard(KEYS[n])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert used_bytes(cache) == 10 * KIB * len(held(cache)) <= 100 * KIB


# Further processes, which read commands from stdin and print the results.
PEER = """
import sys
from pathlib import Path
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Kind, object_key
key = lambda n: object_key(Kind.EC, "0" * 32, str(n))
cache = HostCache(Path(sys.argv[1]), int(sys.argv[2]))
kept = []
for line in sys.stdin:
    verb, n, size = line.split()
    if verb == "pin":
        kept.append(cache.open(key(n)))
        answer = kept[-1] is not None
    elif verb == "unpin":
        kept.pop().close()
        answer = True
    else:
        body = bytes([int(n)]) * int(size)
        entry = cache.publish(key(n), body)
        answer = entry is not None and bytes(entry.body) == body
        if entry is not None:
            entry.close()
    print(answer, flush=True)
"""


class Peer:
    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(root), str(limit_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> bool:
        assert self.process.stdout
        answer = self.process.stdout.readline().strip()
        assert answer in ("True", "False")
        return answer == "True"

    def ask(self, line: str) -> bool:
        self.tell(line)
        return self.hear()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def peers(root: Path) -> Iterator[list[Peer]]:
    peers = [Peer(root, 100 * KIB) for _ in range(3)]
    yield peers
    for peer in peers:
        peer.kill()


def test_pin_of_another_process_holds_until_it_dies(cache: HostCache, peers: list[Peer]) -> None:
    put(cache, 0, 90 * KIB)
    assert peers[0].ask("pin 0 0")
    used_at(cache, 0, 0)
    assert cache.publish(KEYS[1], bytes(20 * KIB)) is None
    assert not peers[1].ask(f"publish 1 {20 * KIB}")
    peers[0].kill()
    used_at(cache, 0, 0)
    assert peers[1].ask(f"publish 1 {20 * KIB}")
    assert held(cache) == {1}


def test_entry_of_another_process_can_be_opened(cache: HostCache, peers: list[Peer]) -> None:
    assert peers[0].ask("publish 3 1000")
    with contextlib.closing(open_entry(cache, 3)) as entry:
        assert bytes(entry.body) == b"\3" * 1000
    assert peers[1].ask("pin 3 0")
    assert peers[1].ask("unpin 3 0")


def test_concurrent_processes_stay_within_one_budget(cache: HostCache, peers: list[Peer]) -> None:
    chance = random.Random(0)
    for _ in range(150):
        for peer in peers:
            peer.tell(f"publish {chance.randrange(40)} {10 * KIB}")
    assert all(peer.hear() for peer in peers for _ in range(150))
    assert used_bytes(cache) == 10 * KIB * len(held(cache)) <= 100 * KIB
    assert not [*cache.root.glob(".*.tmp")]


def test_killed_writers_leave_a_sound_cache(cache: HostCache, peers: list[Peer]) -> None:
    chance = random.Random(0)
    for round_ in range(4):
        victim = Peer(cache.root, 100 * KIB)
        for n in range(round_ * 7 + 1):
            victim.tell(f"publish {n} {10 * KIB}")
        victim.hear()
        victim.kill()
        for _ in range(20):
            n = chance.randrange(40)
            assert peers[0].ask(f"publish {n} {10 * KIB}")
    for n in held(cache):
        with contextlib.closing(open_entry(cache, n)) as entry:
            assert bytes(entry.body) == bytes([n]) * 10 * KIB
    assert 10 * KIB * len(held(cache)) <= 100 * KIB
