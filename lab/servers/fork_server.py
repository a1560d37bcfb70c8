# SPDX-License-Identifier: Apache-2.0
"""A process that has imported what a program needs, and forks one that runs it for each request.

    python -m lab.servers.fork_server CONTROL_FD MODULE...

It imports each MODULE and serves requests that come over the socket CONTROL_FD, until its end of
file. For each it forks a guard, which does for one program what `reaper.py` does: the guard forks
the program, and nothing of it outlives the guard or its starter. The program runs as
`python -m` would run it, in a session, an environment and with output of its own. What differs is
what it has inherited: modules that are imported already, and Python's seed of hashes.

Programs start further processes by multiprocessing's "spawn", vLLM its engine core and workers for
example. For these every program has spare processes, forked before it has done anything. They are
its children, as those would be that it spawned, and run what it would have those run. Once there
is none left, it spawns as usual.

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
"""Of a program: vLLM's engine core. Of each of these: as many ranks as tests have in an engine."""

_MOST_BYTES = 1 << 20  # of a message
_MOST_FDS = 16
_ABOVE_ALL = 512  # no program has so many files open when it starts a process
_SPAWNED = "--multiprocessing-fork"


class Request(NamedTuple):
    """A program to run. With it come three file descriptors, named in `ask`."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    """All that is in it."""
    grace_s: float
    """To end in an orderly way before it is killed."""


def ask(control: socket.socket, request: Request, lifeline: int, log: int, status: int) -> None:
    """Have the process at the other end of `control` fork a program. Returns at once.

    It ends at end of file on `lifeline` and writes its output to `log`. To `status` its guard
    writes its own process id and, once the program and all its descendants are gone, the status
    of the program: a line each. It then closes it, as does its death.
    """
    socket.send_fds(control, [json.dumps(request).encode()], [lifeline, log, status])


def main(arguments: Sequence[str]) -> None:
    """Import and serve. Returns in each process at its end."""
    control, *modules = arguments
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to pages that all share
    serve(socket.socket(fileno=int(control)), before)


def serve(control: socket.socket, before: Mapping[str, str]) -> None:
    """Fork for each request until end of file. `before`: the environment of the imports."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries ended guards
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
        os._exit(0)  # what the imports want done at exit is the program's
    os.close(lifeline)
    os.close(status)
    reaper.prctl(reaper.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    change_environment(before, request.environment)
    forget_random_state()
    sys.argv[1:] = request.arguments
    sys.modules.pop(request.module, None)  # it runs as `__main__`
    keep_spares(SPARES)
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def change_environment(before: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Make of an environment that was `before` the imports `wanted`; what they changed stays."""
    for name in before.keys() - wanted.keys():
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in wanted.items() if before.get(name) != value})


def forget_random_state() -> None:
    """Seed what is seeded at import and, unlike Python's `random`, not by a fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def keep_spares(numbers: Sequence[int]) -> None:
    """Fork `numbers[0]` processes, each of which becomes one that this process spawns.

    The rest of `numbers` says the same for these.
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
    """Return what is called for the program, arguments and descriptors of a process."""

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
    """Wait for a program that is spawned, and run it. Does not return."""
    reaper.prctl(reaper.PR_SET_PDEATHSIG, signal.SIGKILL)
    keep_spares(numbers)  # before there are descriptors that they must not hold
    message, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_FDS)
    if not message:
        os._exit(0)  # its parent has ended
    control.close()
    reaper.prctl(reaper.PR_SET_PDEATHSIG, 0)
    program, environment, wanted = json.loads(message)
    _renumber(fds, wanted)
    os.environ.clear()
    os.environ.update(environment)
    forget_random_state()
    sys.argv = ["-c", _SPAWNED]
    exec(program, {"__name__": "__main__"})


def _renumber(fds: Sequence[int], wanted: Sequence[int]) -> None:
    """Give open descriptors the numbers by which the program knows them."""
    aside = [os.dup2(fd, _ABOVE_ALL + place, False) for place, fd in enumerate(fds)]
    for each in fds:
        os.close(each)
    for each, number in zip(aside, wanted, strict=True):
        os.dup2(each, number)
        os.close(each)


if __name__ == "__main__":
    main(sys.argv[1:])
