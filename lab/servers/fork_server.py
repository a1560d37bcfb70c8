# SPDX-License-Identifier: Apache-2.0
"""A process that has imported what programs need, and forks a process to run each program.

    python -m lab.servers.fork_server CONTROL_FD MODULE...

It imports each MODULE and serves requests from the socket CONTROL_FD until end of file. For each
request it forks a guard, which does for one program what `reaper.py` does: the guard forks the
program, and no process of the program outlives the guard or its starter. The program runs as
`python -m` would run it, with its own session, environment and output. It differs in what it
inherits: imported modules, and Python's hash seed.

Programs start further processes by multiprocessing's "spawn": vLLM, for example, its engine core
and workers. For these every program has spare processes, forked before it does anything else. A
spare is a child of the program, as a spawned process would be, and runs what the program spawns.
Once no spare is left, the program spawns as usual.

Nothing is ever forked from a process with more than one thread.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

from lab.servers import reaper

SPARES = (1, 2)
"""The numbers of spares: of a program, for vLLM's engine core; of each of these, for its ranks."""

_MOST_BYTES = 1 << 20  # of a message
_MOST_FDS = 16
_ABOVE_ALL = 512  # no program has so many files open when it starts a process
_SPAWNED = "--multiprocessing-fork"


class Request(NamedTuple):
    """A program to run. Three file descriptors are sent with it; see `ask`."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    """The complete environment."""
    grace_s: float
    """The time to end in an orderly way before it is killed."""


def ask(control: socket.socket, request: Request, lifeline: int, log: int, status: int) -> None:
    """Have the process at the other end of `control` fork a program. Returns at once.

    The program ends at end of file on `lifeline` and writes its output to `log`. Its guard writes
    two lines to `status`: the guard's process id and, once the program and all its descendants
    are gone, the status of the program. Then `status` is closed, also if the guard dies.
    """
    socket.send_fds(control, [json.dumps(request).encode()], [lifeline, log, status])


def main(arguments: Sequence[str]) -> None:
    """Import modules and serve requests. Returns in each process at its end."""
    control, *modules = arguments
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to pages that all share
    serve(socket.socket(fileno=int(control)), before)


def serve(control: socket.socket, before: Mapping[str, str]) -> None:
    """Fork for each request until end of file. `before`: the environment of the imports."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended guards
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_FDS)
        if not message:
            return
        if fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_guarded(Request(*json.loads(message)), before, *fds)
            return
        for each in fds:
            os.close(each)


def fork() -> int:
    """Fork, as `os.fork` does.

    Raises:
        RuntimeError: this process has other threads, whose locks the child would never get.
    """
    threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    if len(threads) != 1:
        raise RuntimeError(f"a process with {len(threads)} threads must not fork: {threads}")
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


def run_guarded(
    request: Request, before: Mapping[str, str], lifeline: int, log: int, status: int
) -> None:
    """Be the guard of a program, and end; or, in the child of the guard, run the program."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.write(status, b"%d\n" % os.getpid())
    reaper.prctl(reaper.PR_SET_CHILD_SUBREAPER, 1)
    program = fork()
    if program != 0:
        ended = reaper.guard(program, lifeline, request.grace_s)
        os.write(status, b"%d\n" % ended)
        os._exit(0)  # exit handlers of the imports belong to the program
    os.close(lifeline)
    os.close(status)
    reaper.prctl(reaper.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    change_environment(before, request.environment)
    reseed_random_state()
    sys.argv[1:] = request.arguments
    sys.modules.pop(request.module, None)  # it runs as `__main__`
    keep_spares(SPARES)
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def change_environment(before: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Turn the environment `before` the imports into `wanted`; keep what the imports changed."""
    for name in before.keys() - wanted.keys():
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in wanted.items() if before.get(name) != value})


def reseed_random_state() -> None:
    """Seed again what is seeded at import and, unlike Python's `random`, not by a fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def keep_spares(numbers: Sequence[int]) -> None:
    """Fork `numbers[0]` spare processes; each becomes a process that this one spawns.

    The rest of `numbers` is for the spares of these.
    """
    if not numbers:
        return
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(numbers[0]):
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = fork()
        if process == 0:
            ours.close()
            for _, other in spares:
                other.close()
            _be_spare(its, numbers[1:])
        its.close()
        spares.append((process, ours))
    util.spawnv_passfds = _spawn_by(spares, util.spawnv_passfds)


def _spawn_by(spares: list[tuple[int, socket.socket]], usual: Callable[..., int]) -> Any:
    """Return a replacement of multiprocessing's `spawnv_passfds` that uses `spares` first."""

    def spawn(path: Any, arguments: Sequence[str], passed: Sequence[int]) -> int:
        if not spares or arguments[-1] != _SPAWNED:
            return usual(path, arguments, passed)
        process, spare = spares.pop(0)
        with spare:
            program = [arguments[-2], dict(os.environ), list(passed)]
            socket.send_fds(spare, [json.dumps(program).encode()], list(passed))
        return process

    return spawn


def _be_spare(control: socket.socket, numbers: Sequence[int]) -> None:
    """Wait for a program to be spawned, and run it. Does not return."""
    reaper.prctl(reaper.PR_SET_PDEATHSIG, signal.SIGKILL)
    keep_spares(numbers)  # before there are descriptors that they must not inherit
    message, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_FDS)
    if not message:
        os._exit(0)  # its parent has ended
    control.close()
    reaper.prctl(reaper.PR_SET_PDEATHSIG, 0)
    program, environment, wanted = json.loads(message)
    _renumber(fds, wanted)
    os.environ.clear()
    os.environ.update(environment)
    reseed_random_state()
    sys.argv = ["-c", _SPAWNED]
    exec(program, {"__name__": "__main__"})


def _renumber(fds: Sequence[int], wanted: Sequence[int]) -> None:
    """Give open descriptors the numbers that the program expects."""
    aside = [os.dup2(fd, _ABOVE_ALL + place, False) for place, fd in enumerate(fds)]
    for each in fds:
        os.close(each)
    for each, number in zip(aside, wanted, strict=True):
        os.dup2(each, number)
        os.close(each)


if __name__ == "__main__":
    main(sys.argv[1:])
