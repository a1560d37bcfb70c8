# SPDX-License-Identifier: Apache-2.0
"""The host cache among killed processes, foreign files, full disks and very many entries."""

import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ecshare.store.errors import ConfigError
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Kind, object_key
from tests.ecshare.store.hostcache.evictions import evicted

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 1 << 20
KEYS = [object_key(Kind.EC, "0" * 32, str(n)) for n in range(20)]
KEY = KEYS[0]
BODY = os.urandom(20 * KIB)


@pytest.fixture
def cache(tmp_path: Path) -> HostCache:
    return HostCache(tmp_path / "host", 100 * KIB)


def put(cache: HostCache, n: int, body: bytes = BODY) -> None:
    entry = cache.publish(KEYS[n], body)
    assert entry is not None
    with closing(entry):
        assert entry.body == body


def file_of(cache: HostCache, n: int = 0) -> Path:
    return cache.root / KEYS[n].replace("/", "+")


def used_bytes(cache: HostCache) -> int:
    return int.from_bytes((cache.root / ".used").read_bytes()[:8], "little", signed=True)


def names(cache: HostCache) -> set[str]:
    kept = {".used", ".evicting", ".claims"}
    return {path.name for path in cache.root.iterdir()} - kept


# A process that pauses in the middle of the operation named by its argument, and reports it.
VICTIM = """
import os, sys, time
from pathlib import Path
from ecshare.store.hostcache.cache import HostCache
root, key, verb = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
cache = HostCache(root, 100 << 10)
claim = cache.claim(key)
body = b"half" * (5 << 10)

def stop():
    print("there", flush=True)
    time.sleep(600)

if verb == "receive":
    incoming = cache.receive(key, 1 << 20)
    incoming.begin(len(body))
    incoming.write(0, body[: len(body) // 2])
    stop()
elif verb == "publish":
    pwrite = os.pwrite

    def half(fd, piece, offset):
        pwrite(fd, piece[: len(piece) // 2], offset)
        stop()

    os.pwrite = half
    cache.publish(key, body)
elif verb == "name":
    def unlink(path):
        stop()

    os.unlink = unlink
    cache.publish(key, body)
"""


@pytest.fixture(params=["receive", "publish", "name"])
def killed(request: pytest.FixtureRequest, cache: HostCache) -> str:
    """Kill a process while it receives, writes, or has just named its entry."""
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(cache.root), KEY, request.param],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdout is not None
    assert victim.stdout.readline() == "there\n"
    assert cache.claim(KEY) is None
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    verb: str = request.param
    return verb


def test_files_of_a_killed_process_are_no_entries_and_are_removed(
    cache: HostCache, killed: str
) -> None:
    entry = cache.open(KEY)
    if killed == "name":
        assert entry is not None
        assert entry.body == b"half" * (5 << 10)  # whole before it had its name
        entry.close()
        cache.discard(KEY)
    else:
        assert entry is None
    assert cache.claim(KEY) is not None
    put(cache, 0)
    assert any(name.endswith(".tmp") for name in names(cache))
    for n in range(1, 6):  # more than fits: files of dead processes are removed before entries
        put(cache, n)
    assert not any(name.endswith(".tmp") for name in names(cache))
    assert used_bytes(cache) == len(BODY) * len(names(cache)) <= 100 * KIB


WRITER = """
import random, sys
from pathlib import Path
from ecshare.store.hostcache.cache import HostCache
cache = HostCache(Path(sys.argv[1]), 100 << 10)
chance, key = random.Random(int(sys.argv[3])), sys.argv[2]
body = bytes([7]) * (20 << 10)
for turn in range(300):
    incoming = cache.receive(key, 1 << 20)
    incoming.begin(len(body))
    incoming.write(0, body)
    entry = incoming.publish() if turn % 2 else cache.publish(key, body)
    if entry is not None:
        assert entry.body == body
        entry.close()
    if chance.random() < 0.3:
        cache.discard(key)
    del incoming, entry
cache.publish(key, body)
"""


def test_many_writers_of_one_key_leave_one_valid_entry(cache: HostCache) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(cache.root), KEY, str(seed)])
        for seed in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert names(cache) == {file_of(cache).name}
    assert used_bytes(cache) == 20 * KIB
    entry = cache.open(KEY)
    assert entry is not None
    assert entry.body == bytes([7]) * (20 * KIB)


def test_foreign_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    """A user may have configured a folder that is in use."""
    root = tmp_path / "host"
    root.mkdir(mode=0o700)
    others = ["thesis.tex", ".profile", "a+b", ".tmp", ".123.tmp", KEY.replace("/", "-")]
    for name in others:
        (root / name).write_bytes(bytes(90 * KIB))
    (root / "folder").mkdir()
    cache = HostCache(root, 100 * KIB)
    for n in range(10):
        put(cache, n)
    assert {*others, "folder"} <= names(cache)
    assert names(cache) >= {file_of(cache, n).name for n in range(6, 10)}


def odd_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def odd_pipe(path: Path) -> None:
    os.mkfifo(path)


def odd_mode(path: Path) -> None:
    path.write_bytes(b"evil")
    path.chmod(0o666)


def odd_owner(path: Path) -> None:
    path.write_bytes(b"evil")
    path.chmod(0o444)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        path.write_bytes(b"")


def odd_emptiness(path: Path) -> None:
    path.touch(mode=0o444)


@pytest.mark.parametrize("odd", [odd_link, odd_pipe, odd_mode, odd_owner, odd_emptiness])
def test_foreign_file_under_an_entrys_name_is_replaced(cache: HostCache, odd: object) -> None:
    assert callable(odd)
    odd(file_of(cache))
    assert cache.open(KEY) is None
    put(cache, 0)
    assert stat.S_ISREG(file_of(cache).lstat().st_mode)


def test_folder_under_an_entrys_name_blocks_only_that_entry(cache: HostCache) -> None:
    file_of(cache).mkdir()
    assert cache.open(KEY) is None
    assert cache.publish(KEY, BODY) is None
    put(cache, 1)


@pytest.mark.parametrize("odd", [odd_link, odd_pipe])
def test_usage_file_that_is_no_file_is_refused_at_start(tmp_path: Path, odd: object) -> None:
    assert callable(odd)
    (tmp_path / "host").mkdir(mode=0o700)
    odd(tmp_path / "host" / ".used")
    with pytest.raises(ConfigError, match="host_cache_dir: .*host cannot be used"):
        HostCache(tmp_path / "host", LIMIT)


@pytest.fixture
def crowded() -> Iterator[Path]:
    """Make a folder of 100,000 entries of one byte: hard links, which tmpfs makes fast."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # noqa: S108
        root = Path(folder) / "host"
        root.mkdir(mode=0o700)
        (root / "one").write_bytes(b"x")
        (root / "one").chmod(0o444)
        for n in range(100_000):
            name = f"kv+2+{'0' * 32}+00+{n:064x}"
            os.link(f"{root}/one", f"{root}/{name}")
        yield root
        evicted()


def test_publish_among_very_many_entries_does_not_scan(
    crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = crowded
    cache = HostCache(root, 100_000 + 5 * len(BODY))
    evicted()
    scandir = os.scandir

    def no_scan(*_: object) -> None:
        raise AssertionError("scanned")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", no_scan)
        for n in range(5):
            put(cache, n)
            cache.discard(KEYS[n])
            put(cache, n)
    scans = []

    def counted(path: Path) -> Iterator[os.DirEntry[str]]:
        scans.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    put(cache, 5)
    assert len(scans) == 1
    assert file_of(cache, 5).exists()


def test_object_beyond_the_file_size_limit_is_kept_in_memory(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses it by RLIMIT_FSIZE, when the size is set."""
    put(cache, 1, bytes(KIB))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * KIB, hard))
    try:
        incoming = cache.receive(KEY, LIMIT)
        incoming.begin(len(BODY))
        incoming.write(0, BODY)
        assert incoming.body == BODY
        assert incoming.publish() is None
        assert cache.publish(KEY, BODY) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(cache) == {file_of(cache, 1).name}
    assert used_bytes(cache) == KIB


SMALL_DISK = """
import sys
from contextlib import closing
from pathlib import Path
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Kind, object_key
cache = HostCache(Path(sys.argv[1]) / "host", 1 << 40)
cache._usage.limit_bytes = 1 << 40  # as if the disk had looked larger
cache.floor_bytes = 0
keys = [object_key(Kind.EC, "0" * 32, str(n)) for n in range(40)]
for n, key in enumerate(keys):
    incoming = cache.receive(key, 1 << 30)
    incoming.begin(1 << 20)
    incoming.write(0, bytes([n]) * (1 << 20))
    with closing(incoming.publish()) as entry:
        assert entry.body[-1] == n
pins = [cache.open(key) for key in keys]
assert sum(pin is not None for pin in pins) in (6, 7)
incoming = cache.receive(keys[0], 1 << 30)
incoming.begin(4 << 20)
incoming.write(0, bytes(4 << 20))
assert incoming.body == bytes(4 << 20)
assert incoming.publish() is None
print("sound")
"""


SHARED_DISK = """
import mmap
import sys
from pathlib import Path
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Kind, object_key
disk = Path(sys.argv[1])
cache = HostCache(disk / "host", 1 << 40)

def fill(first):
    for n in range(first, first + 60):
        entry = cache.publish(object_key(Kind.EC, "0" * 32, str(n)), bytes(1 << 20))
        if entry is not None:
            entry.close()
    return sum(path.stat().st_size for path in (disk / "host").iterdir()) >> 20

def touch(name, mib):
    # As vLLM makes its queues: a size, and memory when it is written to.
    with open(disk / name, "w+b") as file:
        file.truncate(mib << 20)
        with mmap.mmap(file.fileno(), mib << 20) as queue:
            for at in range(0, mib << 20, 4096):
                queue[at] = 1

print(28 <= fill(0) <= 32, flush=True)
touch("queues", 30)  # of the other half
print(14 <= fill(100) <= 18, flush=True)
touch("more", 14)  # of what the cache leaves free
(disk / "queues").unlink()
print(28 <= fill(200) <= 32)
"""


def test_cache_leaves_room_on_the_disk_for_others(tmp_path: Path) -> None:
    """Memory that others map in /dev/shm is not reserved: without room SIGBUS kills them."""
    assert run_on_a_disk(tmp_path, SHARED_DISK, "64m") == "True\nTrue\nTrue\n"


def test_full_real_disk_causes_eviction_and_no_crash(tmp_path: Path) -> None:
    assert run_on_a_disk(tmp_path, SMALL_DISK, "8m") == "sound\n"


def run_on_a_disk(tmp_path: Path, program: str, size: str) -> str:
    """Run `program` on a tmpfs in its own mount namespace, if this user may create one."""
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size={size} small {tmp_path}/disk"
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*inside, mount], capture_output=True, check=False).returncode:
        inside = ["unshare", "--mount", "sh", "-c"]
        if subprocess.run([*inside, mount], capture_output=True, check=False).returncode:
            pytest.skip("this user may mount nothing here")
    run = f"{mount} && exec {sys.executable} {tmp_path}/program.py {tmp_path}/disk"
    ran = subprocess.run([*inside, run], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
