# SPDX-License-Identifier: Apache-2.0
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecshare.store.hostcache import usage
from ecshare.store.hostcache.usage import Usage

# Takes the lock, counts, and stops; when it is let go on, it counts again and ends.
HOLDER = """
import os, signal, sys
from pathlib import Path
from ecshare.store.hostcache.usage import Usage
with Usage(Path(sys.argv[1]), 1000).counter() as counter:
    counter.add(7)
    os.kill(os.getpid(), signal.SIGSTOP)
    counter.add(7)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def stopped(root: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that was stopped while it holds the lock."""
    with Usage(root, 1000).counter() as counter:
        counter.correct(10, 0)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(root)])
    assert os.WIFSTOPPED(os.waitpid(holder.pid, os.WUNTRACED)[1])
    yield holder
    if holder.poll() is None:
        holder.kill()
        holder.wait()


def test_one_at_a_time(root: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with Usage(root, 1000).counter():
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_who_was_stopped_loses_the_lock_and_can_change_nothing_any_more(
    root: Path, stopped: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "COUNTER_WAIT_S", 0.05)
    ours = Usage(root, 1000)
    with ours.counter() as counter:
        assert counter.read().used is None, "a scan is needed"
        counter.correct(20, 0)
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait() == 0
        assert counter.read().used == 20
    with ours.counter() as counter:
        assert counter.read().used == 20
    assert os.listdir(root) == [".used"]


def test_all_who_wait_for_a_stopped_one_go_on_one_at_a_time(
    root: Path, stopped: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """They see the same holder for too long at the same moment; none removes another's file."""
    monkeypatch.setattr(usage, "COUNTER_WAIT_S", 0.5)
    ours = Usage(root, 1000)

    def work() -> None:
        for _ in range(20):
            with ours.counter() as counter:
                if counter.read().used is None:
                    counter.correct(0, 0)
                counter.add(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with ours.counter() as counter:
        assert counter.read().used == 160


def test_the_lock_of_a_file_that_was_replaced_meanwhile_does_not_count(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def replaced_before(fd: int, asked: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (root / ".used").unlink()
        flock(fd, asked)

    ours = Usage(root, 1000)
    with ours.counter() as counter:
        counter.correct(10, 0)
    monkeypatch.setattr(fcntl, "flock", replaced_before)
    with ours.counter() as counter:
        counter.correct(20, 0)
    with ours.counter() as counter:
        assert counter.read().used == 20


def test_who_counts_is_alive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long one waits for those who do."""
    monkeypatch.setattr(usage, "COUNTER_WAIT_S", 0.0)
    ours, pauses = Usage(root, 1000), 0

    def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses < 50:
            os.utime(root / ".used", ns=(0, pauses))
        else:
            monkeypatch.setattr(time, "sleep", lambda _: None)

    with ours.counter() as counter:
        counter.correct(20, 0)
        inode = (root / ".used").stat().st_ino
        monkeypatch.setattr(time, "sleep", pause)
        with ours.counter() as second:
            assert second.read().used is None, "at last it was taken for stopped"
        assert pauses == 50
    assert (root / ".used").stat().st_ino != inode


def test_what_is_no_file_is_an_error(root: Path) -> None:
    (root / ".used").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match=r"\.used"), Usage(root, 1000).counter():
        pass
