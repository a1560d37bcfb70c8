# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from ecshare.store.hostcache.usage import HostLock, unlock_and_close

SHORT_S, LONG_S = 0.05, 60.0

# Takes the lock and stops itself; after it is continued, it writes to the file and ends.
HOLDER = """
import os, signal, sys
from ecshare.store.hostcache.usage import HostLock
with HostLock(sys.argv[1], 60.0).held() as fd:
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


def together(calls: Iterable[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(16) as pool:
        for each in [pool.submit(call) for call in calls]:
            each.result()


def test_lock_is_held_by_one_thread_of_one_process_at_a_time(path: str) -> None:
    inside, most = 0, 0

    def work(lock: HostLock) -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock.held():
                inside += 1
                most = max(most, inside)
                inside -= 1

    processes = HostLock(path, LONG_S), HostLock(path, LONG_S)
    together(partial(work, lock) for lock in processes * 2)
    assert most == 1


def test_threads_wait_while_others_have_their_turns(path: str) -> None:
    lock = HostLock(path, 1.0)

    def hold() -> None:
        with lock.held():
            time.sleep(0.1)

    together([hold] * 16)


def test_process_that_goes_on_is_waited_for(path: str) -> None:
    def ask() -> None:
        with HostLock(path, 1.0).held():
            pass

    with ThreadPoolExecutor(1) as pool:
        with HostLock(path, LONG_S).held() as fd:
            asking = pool.submit(ask)
            for _ in range(16):
                time.sleep(0.1)
                os.pwrite(fd, b"x", 0)
        asking.result()


def test_thread_of_this_process_that_hangs_is_waited_for_once(path: str) -> None:
    lock = HostLock(path, SHORT_S)

    def ask() -> None:
        with pytest.raises(TimeoutError, match="stopped"), lock.held():
            pass

    with lock.held():
        ask()
        begun_s = time.monotonic()
        for _ in range(40):
            ask()
        assert time.monotonic() - begun_s < 20 * SHORT_S
    with lock.held():
        pass


def test_attempt_does_not_wait(path: str) -> None:
    lock = HostLock(path, LONG_S)
    with lock.held():
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
    with pytest.raises(TimeoutError, match="stopped"), lock.held():
        pass
    assert pauses
    pauses.clear()
    with pytest.raises(TimeoutError, match="stopped"), lock.held():
        pass
    assert len(pauses) <= 1, "it does not wait for the same holder again"
    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait() == 0
    with lock.held() as fd:
        assert os.pread(fd, 10, 0) == b"LATER"
    pauses.clear()
    with HostLock(path, LONG_S).held(), pytest.raises(TimeoutError), lock.held():
        pass
    assert len(pauses) > 1, "another holder is waited for"


def test_symbolic_link_in_place_of_the_lock_is_an_error(path: str) -> None:
    os.symlink("/etc/passwd", f"{path}2")
    with pytest.raises(OSError, match=r"\.lock2"), HostLock(f"{path}2", LONG_S).held():
        pass
