# SPDX-License-Identifier: Apache-2.0
"""Host caches with unexpected files in their folder: they work, or are refused at start."""

import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecshare.plugin.ledger import Ledger, grown
from ecshare.store.errors import ConfigError
from ecshare.store.hostcache.cache import Entry, HostCache
from ecshare.store.keys import Key, Kind, object_key
from tests.fuzz.running import fuzzed

pytestmark = pytest.mark.fuzz

KEYS = [object_key(Kind.EC, "0" * 32, str(number)) for number in range(4)]
STORE = "ab"
LIMITS = [5000, 20_000]
OPS = ["publish", "open", "discard", "claim", "receive", "close", "ledger"]


def body_of(key: str) -> bytes:
    return Random(key).randbytes(2000)


def entry_name(key: str) -> str:
    return f"{STORE}+{key.replace('/', '+')}"


NAMES = [
    *(
        ".used",
        ".used",
        ".used",
        ".claims",
        ".ledgers",
        ".ledgers/x.0",
        "random",
        "." + "0" * 16 + ".tmp",
    ),
    *map(entry_name, KEYS),
    entry_name(KEYS[0]) + ".rows-0-1",
]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # noqa: S108
        yield Path(folder)


def put_odd(root: Path, name: str, kind: str, number: int) -> None:
    path = root / name
    if path.parent.is_symlink() or (path.parent.exists() and not path.parent.is_dir()):
        return  # another unexpected file has the name of its folder
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    ODD[kind](path, number)


def some_bytes(path: Path, number: int) -> None:
    path.write_bytes(Random(number).randbytes(abs(number) % 200))


def a_number(path: Path, number: int) -> None:
    path.write_bytes(struct.pack("<q", number))


def a_folder(path: Path, number: int) -> None:
    path.mkdir()
    if number % 2:
        (path / "in it").write_bytes(b"1")


def a_pipe(path: Path, number: int) -> None:
    os.mkfifo(path)


def a_link(path: Path, number: int) -> None:
    targets = ["/dev/null", "/dev/zero", str(path), "/nowhere", "/etc/passwd"]
    path.symlink_to(targets[number % len(targets)])


def a_hole(path: Path, number: int) -> None:
    with path.open("wb") as file:
        file.truncate(abs(number) % (1 << 22))


def of_odd_mode(path: Path, number: int) -> None:
    path.write_bytes(bytes(100))
    path.chmod(abs(number) % 0o1000)


def another_name(path: Path, number: int) -> None:
    """Make a second name of another file: locks belong to a file, not to a name."""
    other = path.with_name(f"another name of {path.name[-8:]}")
    other.write_bytes(bytes(2000))
    os.link(other, path)


def a_socket(path: Path, number: int) -> None:
    """Make a socket under a short path, which sockets need, and move it."""
    with socket.socket(socket.AF_UNIX) as end, tempfile.TemporaryDirectory(dir="/dev/shm") as short:  # noqa: S108
        end.bind(f"{short}/s")
        os.rename(f"{short}/s", path)


ODD: dict[str, Callable[[Path, int], None]] = {
    each.__name__: each
    for each in (
        *(some_bytes, a_number, a_folder, a_pipe, a_link, a_hole, of_odd_mode, another_name),
        a_socket,
    )
}


@st.composite
def oddities(draw: st.DrawFn) -> tuple[str, str, int]:
    """A name, the kind of file under it, and a number that it is made from."""
    numbers = st.sampled_from([0, -1, 1, 9, 100, -(2**63), 2**63 - 1, 2**40, 0o222, 0o444, 0o666])
    numbers |= st.integers(0, 9)
    return draw(st.sampled_from(NAMES)), draw(st.sampled_from(sorted(ODD))), draw(numbers)


class User:
    """A process that uses the cache, and checks the bytes of its entries."""

    def __init__(self, cache: HostCache, planted: set[str]) -> None:
        self._cache = cache
        self._planted = planted
        self.entries: list[Entry] = []

    def do(self, op: str, key: Key) -> None:
        match op:
            case "publish":
                self._keep(self._cache.publish(key, body_of(key)))
            case "open":
                self._keep(self._cache.open(key))
            case "discard":
                self._cache.discard(key)
                if not os.path.lexists(self._cache.root / entry_name(key)):
                    self._planted.discard(entry_name(key))
            case "claim":
                if (claim := self._cache.claim(key)) is not None:
                    claim.release()
            case "receive":
                incoming = self._cache.receive(key, 3000)
                incoming.begin(2000)
                incoming.write(0, body_of(key))
                assert incoming.body == body_of(key)
                self._keep(incoming.publish())
            case "close" if self.entries:
                self.entries.pop().close()
            case "ledger":
                ledger = Ledger(self._cache.root, "id")
                ledger.write(0, {"a": 1.0})
                grown({}, ledger.read())
                ledger.close()

    def _keep(self, entry: Entry | None) -> None:
        if entry is None:
            return
        self.entries.append(entry)
        if entry_name(entry.key) not in self._planted:
            assert entry.body == body_of(entry.key), "wrong bytes"
        else:
            status = os.lstat(self._cache.root / entry_name(entry.key))
            assert stat.S_ISREG(status.st_mode)
            assert status.st_size
            assert not status.st_mode & 0o022, "others may write to it"


@fuzzed(300)
@given(
    st.booleans(),
    st.sampled_from(LIMITS),
    st.lists(oddities(), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(OPS), st.sampled_from(KEYS)), min_size=4, max_size=16),
)
def test_unexpected_files_cost_at_most_entries(
    memory: Path,
    is_early: bool,
    limit_bytes: int,
    odd: list[tuple[str, str, int]],
    ops: list[tuple[str, Key]],
) -> None:
    """`is_early`: the cache is opened before the unexpected files are made."""
    root = Path(tempfile.mkdtemp(dir=memory))
    try:
        cache = HostCache(root, limit_bytes, STORE) if is_early else None
        for each in odd:
            put_odd(root, *each)
        try:
            cache = cache or HostCache(root, limit_bytes, STORE)
        except ConfigError:
            return
        user = User(cache, {name for name, _, _ in odd})
        for op, key in ops:
            user.do(op, key)
        for entry in user.entries:
            entry.close()
    finally:
        shutil.rmtree(root)
