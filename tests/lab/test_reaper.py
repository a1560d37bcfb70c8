# SPDX-License-Identifier: Apache-2.0
"""No process outlives the guard, not even a daemon or one that ignores signals."""

import signal
import subprocess
import sys

import pytest

from lab.servers.proc import is_there
from lab.servers.processes import REAPER

# A command that starts a grandchild in its own session, as daemons do, prints both process ids, and
# waits. Both ignore the named signals.
STUBBORN = """
import os, signal, subprocess, sys, time
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
grandchild = subprocess.Popen(sleep, start_new_session=True)
print(os.getpid(), grandchild.pid, flush=True)
time.sleep(600)
"""


def guarded(*command: str, grace_s: float = 0.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(REAPER), str(grace_s), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def start_stubborn(*ignored: str, grace_s: float = 0.0) -> tuple[subprocess.Popen[str], list[int]]:
    guard = guarded(sys.executable, "-c", STUBBORN, *ignored, grace_s=grace_s)
    assert guard.stdout is not None
    return guard, [int(process) for process in guard.stdout.readline().split()]


def finish(guard: subprocess.Popen[str]) -> int:
    """Return its exit status; end of file on its output means that all its processes are gone."""
    assert guard.stdin is not None
    assert guard.stdout is not None
    with guard.stdin, guard.stdout:
        guard.stdin.close()
        assert guard.stdout.read() == ""
        return guard.wait()


@pytest.mark.parametrize("ignored", [(), ("SIGTERM",)], ids=["docile", "deaf to SIGTERM"])
def test_end_of_stdin_ends_the_command_and_its_grandchild(ignored: tuple[str, ...]) -> None:
    guard, processes = start_stubborn(*ignored)
    assert len([each for each in processes if is_there(each)]) == 2
    assert finish(guard) == 128 + (signal.SIGKILL if ignored else signal.SIGTERM)
    assert not any(map(is_there, processes))


def test_sigterm_ends_command_and_grandchild() -> None:
    guard, processes = start_stubborn()
    guard.send_signal(signal.SIGTERM)
    assert guard.wait() == 128 + signal.SIGTERM
    assert not any(map(is_there, processes))
    finish(guard)


def test_killed_starter_ends_command_and_grandchild() -> None:
    """The starter cannot react: the kernel closes its end of the pipe."""
    program = (
        "import subprocess, sys, time; "
        "subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); time.sleep(600)"
    )
    command = [sys.executable, str(REAPER), "0", sys.executable, "-c", STUBBORN]
    starter = subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, text=True
    )
    with starter:
        assert starter.stdout is not None
        processes = [int(process) for process in starter.stdout.readline().split()]
        starter.kill()
        assert starter.stdout.read() == ""  # end of file: the last of them is gone
    assert not any(map(is_there, processes))


def test_killed_guard_ends_its_command() -> None:
    guard = guarded(sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
    assert guard.stdout is not None
    assert guard.stdout.readline() == "up\n"
    guard.kill()
    assert finish(guard) == -signal.SIGKILL


@pytest.mark.parametrize("status", [0, 3])
def test_guard_returns_the_status_of_its_command(status: int) -> None:
    assert finish_alone(guarded(sys.executable, "-c", f"raise SystemExit({status})")) == status


def finish_alone(guard: subprocess.Popen[str]) -> int:
    """Wait for its exit without ending it; return its status."""
    assert guard.stdin is not None
    assert guard.stdout is not None
    with guard.stdin, guard.stdout:
        return guard.wait()


def test_command_with_a_grace_period_exits_by_itself() -> None:
    # Blocked before: a Python handler may miss a signal that comes just before a sleep begins.
    program = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('up', flush=True)\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "sys.exit(7)"
    )
    guard = guarded(sys.executable, "-c", program, grace_s=60)
    assert guard.stdout is not None
    assert guard.stdout.readline() == "up\n"
    assert finish(guard) == 7
