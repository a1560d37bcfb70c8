# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import threading
import time
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


def test_stopped_holder_is_waited_for_once_until_it_goes_on(
    path: str, stopped: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = HostLock(path, SHORT_S)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(TimeoutError, match="stopped"):
        lock.take()
    assert pauses
    pauses.clear()
    with pytest.raises(TimeoutError, match="stopped"):
        lock.take()
    assert len(pauses) <= 1, "it does not wait for the same holder again"
    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait() == 0
    with held(lock) as fd:
        assert os.pread(fd, 10, 0) == b"LATER"
    pauses.clear()
    with held(lock), pytest.raises(TimeoutError):
        lock.take()
    assert len(pauses) > 1, "another holder is waited for"


def test_symbolic_link_in_place_of_the_lock_is_an_error(path: str) -> None:
    os.symlink("/etc/passwd", f"{path}2")
    with pytest.raises(OSError, match=r"\.lock2"):
        HostLock(f"{path}2", LONG_S).take()
