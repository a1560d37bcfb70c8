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
from ecshare.store.hostcache.usage import HostLock, Usage, unlock_and_close
from ecshare.store.keys import Key, Kind, object_key
from tests.ecshare.store.hostcache.evictions import evicted

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
    """Clocks of files tick every few milliseconds: say the time instead of waiting for it."""
    os.utime(path_of(cache, n), (1e9 + when_s, 1e9 + when_s))


def path_of(cache: HostCache, n: int) -> Path:
    return cache.root / KEYS[n].replace("/", "+")


def held(cache: HostCache) -> set[int]:
    return {n for n in range(len(KEYS)) if path_of(cache, n).exists()}


def open_entry(cache: HostCache, n: int) -> Entry:
    entry = cache.open(KEYS[n])
    assert entry is not None
    return entry


def tally(cache: HostCache) -> int:
    return int.from_bytes((cache.root / ".used").read_bytes()[:8], "little", signed=True)


def test_what_is_published_can_be_opened(cache: HostCache) -> None:
    body = os.urandom(5000)
    with publish(cache, 0, body) as published:
        assert published.key == KEYS[0]
        assert published.body == body
    with open_entry(cache, 0) as entry:
        assert entry.body == body
        assert entry.body.readonly


def test_what_is_not_there_is_none(cache: HostCache) -> None:
    assert cache.open(KEYS[0]) is None


def test_a_second_publish_opens_the_first(cache: HostCache) -> None:
    put(cache, 0)
    inode = path_of(cache, 0).stat().st_ino
    with publish(cache, 0, b"other bytes") as entry:
        assert entry.body[0] == 0
    assert path_of(cache, 0).stat().st_ino == inode
    assert tally(cache) == 10 * KIB


def test_the_least_recently_used_leave_first(cache: HostCache) -> None:
    for n in range(10):
        put(cache, n)
    open_entry(cache, 0).close()
    put(cache, 10)
    assert held(cache) == {0, *range(2, 11)}
    assert tally(cache) == 100 * KIB


def test_parts_of_objects_leave_too(cache: HostCache) -> None:
    """They have names below the object's: of the share of a rank, the rows that are read."""
    for n in range(20):
        entry = cache.publish(Key(f"{KEYS[n]}.t0of1.rows-0-{n}"), bytes(10 * KIB))
        assert entry is not None
        entry.close()
    files = [path for path in cache.root.iterdir() if ".rows-" in path.name]
    assert sum(path.stat().st_size for path in files) == tally(cache) <= 100 * KIB


def test_a_full_cache_is_emptied_a_little_further_than_needed(root: Path) -> None:
    """So that the next publishes need no scan."""
    cache = HostCache(root, 100 * KIB)
    for n in range(20):
        put(cache, n, 5 * KIB)
    put(cache, 20, KIB)
    assert tally(cache) == 90 * KIB + KIB


def test_a_pinned_entry_is_never_evicted(
    cache: HostCache, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_an_entry_is_pinned_from_its_publication(cache: HostCache) -> None:
    with publish(cache, 0, bytes(90 * KIB)):
        used_at(cache, 0, 0)
        assert cache.publish(KEYS[1], bytes(20 * KIB)) is None
    put(cache, 1, 20 * KIB)
    assert held(cache) == {1}


def test_two_pins_are_two(cache: HostCache) -> None:
    put(cache, 0, 90 * KIB)
    first, second = open_entry(cache, 0), open_entry(cache, 0)
    first.close()
    first.close()
    assert cache.publish(KEYS[1], bytes(20 * KIB)) is None
    second.close()
    put(cache, 1, 20 * KIB)


def test_a_forgotten_entry_unpins_itself(cache: HostCache) -> None:
    put(cache, 0, 90 * KIB)
    entry = open_entry(cache, 0)
    del entry
    put(cache, 1, 20 * KIB)


def test_a_view_outlives_its_entry(cache: HostCache) -> None:
    """Unpinned, evicted, and still whole: the memory goes with the last view."""
    put(cache, 7, 90 * KIB)
    entry = open_entry(cache, 7)
    view = entry.body[10:20]
    entry.close()
    put(cache, 8, 20 * KIB)
    assert held(cache) == {8}
    assert view == b"\7" * 10


def test_what_does_not_fit_at_all_is_refused(cache: HostCache) -> None:
    put(cache, 0)
    assert cache.publish(KEYS[1], bytes(100 * KIB + 1)) is None
    assert cache.publish(KEYS[1], b"") is None
    assert held(cache) == {0}


def test_caches_on_one_folder_share_one_budget(root: Path) -> None:
    one, two = HostCache(root, 100 * KIB), HostCache(root, 100 * KIB)
    for n in range(20):
        put((one, two)[n % 2], n)
    assert held(one) == set(range(10, 20))
    assert tally(two) == 100 * KIB


def test_a_smaller_limit_is_kept_from_its_first_publish(root: Path) -> None:
    large = HostCache(root, 100 * KIB)
    for n in range(10):
        put(large, n)
    put(HostCache(root, 30 * KIB), 10)
    assert held(large) == {8, 9, 10}


def test_a_wrong_tally_mends_itself(cache: HostCache) -> None:
    for n in range(10):
        put(cache, n)
    for n in range(5):
        path_of(cache, n).unlink()
    put(cache, 10)
    assert held(cache) == set(range(5, 11))
    assert tally(cache) == 60 * KIB


@pytest.mark.parametrize("left", [None, b"", b"xx", b"\xff" * 8, b"\xff" * 7 + b"\x7f"])
def test_a_lost_tally_is_counted_anew(cache: HostCache, left: bytes | None) -> None:
    for n in range(10):
        put(cache, n)
    (cache.root / ".used").unlink()
    if left is not None:
        (cache.root / ".used").write_bytes(left)
    put(cache, 10)
    assert held(cache) == set(range(1, 11))


def test_a_new_cache_counts_what_is_there(root: Path) -> None:
    put(HostCache(root, 100 * KIB), 0)
    (root / ".used").write_bytes(bytes(8))
    assert tally(HostCache(root, 100 * KIB)) == 10 * KIB


def test_a_discarded_entry_is_gone_and_its_readers_keep_it(cache: HostCache) -> None:
    put(cache, 0)
    with open_entry(cache, 0) as entry:
        cache.discard(KEYS[0])
        assert cache.open(KEYS[0]) is None
        assert entry.body[0] == 0
    assert tally(cache) == 0
    cache.discard(KEYS[0])
    cache.discard(KEYS[1])
    assert tally(cache) == 0
    put(cache, 0)


def test_what_a_dead_writer_left_is_removed(cache: HostCache) -> None:
    left = cache.root / ".0123456789abcdef.tmp"
    left.write_bytes(bytes(95 * KIB))
    put(cache, 0)
    with left.open("rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_SH)
        assert tally(HostCache(cache.root, 100 * KIB)) == 105 * KIB
        assert left.exists()
    HostCache(cache.root, 100 * KIB)
    assert not left.exists()
    assert tally(cache) == 10 * KIB


def disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_no_room(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(cache, 0)
    with open_entry(cache, 0), monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", disk_full)
        assert cache.publish(KEYS[1], bytes(10 * KIB)) is None
        assert cache.publish(KEYS[2], bytes(10 * KIB)) is None
    assert "No space left" in caplog.text
    assert len(caplog.messages) == 1
    assert held(cache) == {0}
    assert not [*cache.root.glob(".*.tmp")]
    assert tally(cache) == 10 * KIB
    put(cache, 1)


def test_a_disk_that_is_smaller_than_the_limit_is_made_room_on(
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


def test_a_folder_that_was_cleaned_away_is_made_again(cache: HostCache) -> None:
    put(cache, 0)
    shutil.rmtree(cache.root)
    assert cache.open(KEYS[0]) is None
    cache.discard(KEYS[0])
    put(cache, 1)
    assert held(cache) == {1}


def test_a_tally_that_is_not_let_go_of_holds_nobody_up(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "COUNTER_WAIT_S", 0.01)
    cache = HostCache(cache.root, 100 * KIB)
    put(cache, 0)
    with (cache.root / ".used").open("rb") as held_by_another:
        fcntl.flock(held_by_another, fcntl.LOCK_EX)
        put(cache, 1)
        put(cache, 2)
        open_entry(cache, 0).close()
    assert tally(cache) == 30 * KIB
    put(cache, 3)


@pytest.mark.parametrize("name", [".used", ".evicting"])
def test_whoever_was_stopped_with_a_lock_holds_nobody_up(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Three times as much as there is room for goes through the cache beside the stopped one."""
    monkeypatch.setattr(usage, "COUNTER_WAIT_S", 0.05)
    monkeypatch.setattr(eviction, "TURN_WAIT_S", 0.05)
    held_up = "import fcntl, os, signal, sys; f = open(sys.argv[1], 'rb+'); "
    held_up += "fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), signal.SIGSTOP)"
    stopped = subprocess.Popen([sys.executable, "-c", held_up, str(cache.root / name)])
    try:
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
        others = [HostCache(cache.root, 100 * KIB) for _ in range(2)]
        for n in range(30):
            put(others[n % 2], n)
    finally:
        stopped.kill()
        stopped.wait()
    assert tally(cache) == 10 * KIB * len(held(cache)) <= 100 * KIB


def test_an_older_release_counts_in_the_same_file(cache: HostCache) -> None:
    """It writes one number, where we write two."""
    put(cache, 0)
    (cache.root / ".used").write_bytes((10 * KIB).to_bytes(8, "little"))
    for n in range(1, 12):
        put(cache, n)
    assert held(cache) == set(range(2, 12))


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries were removed under each hold of the tally. No folder is read under one."""
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


def test_entries_leave_a_few_at_a_time(
    root: Path, monkeypatch: pytest.MonkeyPatch, holds: list[int]
) -> None:
    monkeypatch.setattr(eviction, "STEP_ENTRIES", 3)
    monkeypatch.setattr(eviction, "RUN_ENTRIES", 30)
    cache = HostCache(root, 100 * KIB)
    for n in random.Random(0).sample(range(20), 20):
        put(cache, n, 5 * KIB)
    holds.clear()
    put(cache, 30, 50 * KIB)
    assert held(cache) == {*range(10, 20), 30}, "the oldest, across all that was sorted apart"
    assert [step for step in holds if step] == [3, 3, 3, 1]
    assert tally(cache) == 100 * KIB


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Four entries are many: what comes behind is seen once this is set."""
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


def test_among_very_many_entries_nobody_waits_for_a_scan(
    cache: HostCache, scans: threading.Event
) -> None:
    """What is needed now leaves at once, if only the oldest of a part; then the oldest of all."""
    for n in range(20):
        put(cache, n, 5 * KIB)
    put(cache, 20, 10 * KIB)
    assert held(cache) == {*range(16), 18, 19, 20}, "less the oldest of those that came first"
    put(cache, 21, 10 * KIB)
    assert held(cache) == {*range(15), 19, 20, 21}
    assert tally(cache) == 100 * KIB
    scans.set()
    evicted()
    assert held(cache) == {*range(2, 15), 19, 20, 21}, "less the oldest of all"
    assert tally(cache) == 90 * KIB


def test_a_start_among_very_many_entries_does_not_wait_for_the_count(
    cache: HostCache, scans: threading.Event
) -> None:
    for n in range(10):
        put(cache, n, 5 * KIB)
    (cache.root / ".used").write_bytes((1).to_bytes(8, "little"))
    put(HostCache(cache.root, 100 * KIB), 10, 5 * KIB)
    scans.set()
    evicted()
    assert 40 * KIB <= tally(cache) <= 55 * KIB
    HostCache(cache.root, 100 * KIB)
    evicted()
    assert tally(cache) == 55 * KIB


def test_whoever_waits_too_long_for_another_helps_himself(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "ROOM_WAIT_S", 0.0)
    for n in range(10):
        put(cache, n)
    turn = HostLock(f"{cache.root}/.evicting", 60.0).take()
    try:
        put(cache, 10)
    finally:
        unlock_and_close(turn)
    assert held(cache) == set(range(1, 11))
    assert tally(cache) == 100 * KIB


def during_scan(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Let something happen when the next scan of ours has seen half of what is there."""
    scan = eviction.Evictor.files
    waiting = [happens]

    def patched(room: eviction.Evictor) -> Iterator[Any]:
        found = list(scan(room))
        yield from found[: len(found) // 2]
        if waiting:
            waiting.pop()()
        yield from found[len(found) // 2 :]

    monkeypatch.setattr(eviction.Evictor, "files", patched)


def test_others_go_on_while_one_makes_room(
    cache: HostCache, peers: list["Peer"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they bring and remove meanwhile is accounted for, though the scan did not see it."""
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
    assert tally(cache) == sum(path_of(cache, n).stat().st_size for n in held(cache)) <= 100 * KIB


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_scan_counts_each_entry_once_though_others_are_removed_meanwhile() -> None:
    """The listing of a folder in memory then begins again."""
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


def test_a_tally_that_was_wrong_is_corrected_as_far_as_a_scan_can_know(
    cache: HostCache, peers: list["Peer"], monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(9):
        put(cache, n)
    (cache.root / ".used").write_bytes(bytes(8))

    def work() -> None:
        assert peers[0].ask(f"publish 20 {5 * KIB}")

    during_scan(monkeypatch, work)
    HostCache(cache.root, 100 * KIB)
    assert 80 * KIB <= tally(cache) <= 95 * KIB
    HostCache(cache.root, 100 * KIB)
    assert tally(cache) == 95 * KIB


def test_who_needs_room_waits_for_whoever_is_making_it(
    cache: HostCache, peers: list["Peer"], monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(10):
        put(cache, n)
    during_scan(monkeypatch, lambda: peers[0].tell(f"publish 20 {10 * KIB}"))
    put(cache, 11, 30 * KIB)
    assert peers[0].hear()
    assert {11, 20} <= held(cache)


def test_an_entry_that_somebody_locks_for_good_is_replaced(cache: HostCache) -> None:
    put(cache, 0)
    with path_of(cache, 0).open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert cache.open(KEYS[0]) is None
        with publish(cache, 0, b"again") as entry:
            assert bytes(entry.body) == b"again"
    assert tally(cache) == len(b"again")


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Let a process that lives on be forked as soon as a file is locked exclusively."""
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


def test_a_tally_is_free_though_a_fork_lives(
    cache: HostCache, inherited: Callable[[Path], None]
) -> None:
    inherited(cache.root / ".used")
    put(cache, 0)
    put(cache, 1)


def test_an_entry_that_was_not_evicted_is_free_though_a_fork_lives(
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
    """Let something happen just before the next lock of that kind on an entry is taken."""
    flock = fcntl.flock
    waiting = [happens]

    def patched(fd: int, asked: int) -> None:
        if asked == operation | fcntl.LOCK_NB and os.fstat(fd).st_size >= KIB and waiting:
            waiting.pop()()
        flock(fd, asked)

    monkeypatch.setattr(fcntl, "flock", patched)


def test_an_entry_evicted_while_it_is_opened_is_a_miss(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, 0)
    before_lock(monkeypatch, fcntl.LOCK_SH, path_of(cache, 0).unlink)
    assert cache.open(KEYS[0]) is None


def test_an_entry_used_since_the_scan_is_not_evicted(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(10):
        put(cache, n)
    before_lock(monkeypatch, fcntl.LOCK_EX, lambda: used_at(cache, 0, 100))
    put(cache, 10)
    assert held(cache) == {0, *range(2, 11)}


def test_an_entry_replaced_since_the_scan_is_not_evicted(
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


def test_links_inside_are_not_followed(cache: HostCache, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    path_of(cache, 0).symlink_to(tmp_path / "secret")
    assert cache.open(KEYS[0]) is None


def test_threads_do_not_get_into_each_others_way(root: Path) -> None:
    cache = HostCache(root, 100 * KIB)
    failures: list[object] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            n = chance.randrange(len(KEYS))
            entry = cache.publish(KEYS[n], bytes([n]) * 10 * KIB)
            if entry is not None:
                with entry:
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
    assert tally(cache) == 10 * KIB * len(held(cache)) <= 100 * KIB


# Second processes: what they do is written to them, what they say is read from them.
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


def test_the_pin_of_another_process_holds_until_it_dies(
    cache: HostCache, peers: list[Peer]
) -> None:
    put(cache, 0, 90 * KIB)
    assert peers[0].ask("pin 0 0")
    used_at(cache, 0, 0)
    assert cache.publish(KEYS[1], bytes(20 * KIB)) is None
    assert not peers[1].ask(f"publish 1 {20 * KIB}")
    peers[0].kill()
    used_at(cache, 0, 0)
    assert peers[1].ask(f"publish 1 {20 * KIB}")
    assert held(cache) == {1}


def test_an_entry_of_another_process_is_ours_too(cache: HostCache, peers: list[Peer]) -> None:
    assert peers[0].ask("publish 3 1000")
    with open_entry(cache, 3) as entry:
        assert bytes(entry.body) == b"\3" * 1000
    assert peers[1].ask("pin 3 0")
    assert peers[1].ask("unpin 3 0")


def test_processes_that_publish_at_once_keep_one_budget(
    cache: HostCache, peers: list[Peer]
) -> None:
    chance = random.Random(0)
    for _ in range(150):
        for peer in peers:
            peer.tell(f"publish {chance.randrange(40)} {10 * KIB}")
    assert all(peer.hear() for peer in peers for _ in range(150))
    assert tally(cache) == 10 * KIB * len(held(cache)) <= 100 * KIB
    assert not [*cache.root.glob(".*.tmp")]


def test_writers_killed_at_any_moment_leave_a_sound_cache(
    cache: HostCache, peers: list[Peer]
) -> None:
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
        with open_entry(cache, n) as entry:
            assert bytes(entry.body) == bytes([n]) * 10 * KIB
    assert 10 * KIB * len(held(cache)) <= 100 * KIB
