# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ecshare.store.hostcache.usage import HostLock, unlock_and_close

SHORT_S, LONG_S = 0.05, 60.0

# Takes the lock and stops itself; after it is continued, it writes to the file and ends.
HOLDER = """
import os, signal, sys
from ecshare.store.hostcache.usage import HostLock
fd = HostLock(sys.argv[1], 60.0).take()
os.write(fd, b"first")
os.kill(os.getpid(), signal.SIGSTOP)
os.pwrite(fd, b"LATER", 0)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return f"{tmp_path}/.lock"


@pytest.fixture
def stopped(path: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that is stopped while it holds the lock."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path])
    assert os.WIFSTOPPED(os.waitpid(holder.pid, os.WUNTRACED)[1])
    yield holder
    if holder.poll() is None:
        holder.kill()
        holder.wait()


@contextmanager
def held(lock: HostLock) -> Iterator[int]:
    fd = lock.take()
    try:
        yield fd
    finally:
        unlock_and_close(fd)


def test_lock_is_held_by_one_thread_at_a_time(path: str) -> None:
    lock = HostLock(path, LONG_S)
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with held(lock):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_attempt_does_not_wait(path: str) -> None:
    lock = HostLock(path, LONG_S)
    with held(lock):
        assert lock.attempt() is None
    fd = lock.attempt()
    assert fd is not None
    unlock_and_close(fd)


def test_stopped_holder_loses_the_lock_and_its_writes(
    path: str, stopped: "subprocess.Popen[bytes]"
) -> None:
    lock = HostLock(path, SHORT_S)
    with held(lock) as fd:
        assert os.pread(fd, 10, 0) == b"first"
        os.pwrite(fd, b"second", 0)
        assert lock.attempt() is None
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait() == 0
    assert Path(path).read_bytes() == b"second"
    with held(lock):
        pass
    assert os.listdir(os.path.dirname(path)) == [".lock"]


def test_watch_ends_only_without_writes(path: str) -> None:
    patience = HostLock(path, 0.0).watch()
    assert not patience.is_over(), "the file does not exist yet"
    Path(path).touch()
    assert not patience.is_over()
    assert patience.is_over()
    os.utime(path, (1e9, 1e9))
    assert not patience.is_over()
    assert patience.is_over()
    Path(path).unlink()
    Path(path).write_bytes(b"of somebody who took over")
    assert not patience.is_over()


def test_one_of_two_concurrent_take_overs_succeeds(
    path: str, stopped: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = HostLock(path, SHORT_S)
    taken: list[int | None] = []
    pread = os.pread

    def meanwhile(*args: int) -> bytes:
        monkeypatch.setattr(os, "pread", pread)
        taken.append(lock.take_over())
        return pread(*args)

    monkeypatch.setattr(os, "pread", meanwhile)
    assert lock.take_over() is None
    assert taken[0] is not None
    assert os.listdir(os.path.dirname(path)) == [".lock"]
    unlock_and_close(taken[0])


def test_symbolic_link_in_place_of_the_lock_is_an_error(path: str) -> None:
    os.symlink("/etc/passwd", f"{path}2")
    with pytest.raises(OSError, match=r"\.lock2"):
        HostLock(f"{path}2", LONG_S).take()
