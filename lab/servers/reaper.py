# SPDX-License-Identifier: Apache-2.0
"""A small process between us and a server, which ensures that no process of it outlives us.

    python reaper.py GRACE_S COMMAND [ARGUMENT...]

It runs COMMAND in a session of its own. It ends COMMAND and all its descendants at end of file on
standard input, on SIGTERM, or when COMMAND itself ends. The starter holds the other end of that
pipe, so this works even if the starter is killed with SIGKILL: the kernel closes the pipe. (A
parent-death signal would not do: it is tied to the *thread* that started the child, and
grandchildren do not inherit it.)

As a child subreaper it adopts orphans, whatever session they created. It uses only the standard
library and runs as a file, so that it takes 10 MB and starts in 30 ms.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERM_GRACE_S = 1.0  # between SIGTERM and SIGKILL for processes that the command left running


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(ancestor: int) -> list[int]:
    """Return the ids of all descendants of a process, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "ID (NAME) STATE PARENT ..."; NAME may contain spaces and brackets.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(ancestor, []))
    for process in found:
        found.extend(children.get(process, []))
    return found


def reap() -> None:
    """Collect ended children, so that they no longer count as running."""
    with contextlib.suppress(ChildProcessError):  # no children at all
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_descendants(sent: signal.Signals, within_s: float) -> bool:
    """Signal every descendant until none is left. False: some outlived `within_s`."""
    deadline_s = time.monotonic() + within_s
    signalled: set[int] = set()
    while running := descendants(os.getpid()):
        for process in set(running) - signalled:
            signalled.add(process)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, sent)
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
        reap()
    return True


def guard(child: int, lifeline: int, grace_s: float) -> int:
    """Wait for `child`, for end of file on `lifeline` or for a signal to end this process.

    Then end `child`, which has `grace_s` after SIGTERM, and all other descendants. Returns the
    status of `child`, or 128 + its signal.
    """
    wake_reader, wake_writer = os.pipe()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(wake_writer, b"."))
    ended = os.pidfd_open(child)
    select.select([lifeline, wake_reader, ended], [], [])
    if not select.select([ended], [], [], 0)[0]:
        os.kill(child, signal.SIGTERM)
        if not select.select([ended], [], [], grace_s)[0]:
            os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not end_descendants(signal.SIGTERM, TERM_GRACE_S):
        end_descendants(signal.SIGKILL, float("inf"))
    return status if status >= 0 else 128 - status


def main(arguments: list[str]) -> int:
    """Run the command until it or this process ends. Returns its status, or 128 + its signal."""
    grace_s, *command = arguments
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=False,  # ours are not inherited; those that the starter passes on are
        # If this process is killed, at least the command itself ends too.
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    child.returncode = guard(child.pid, sys.stdin.fileno(), float(grace_s))
    return child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
