# SPDX-License-Identifier: Apache-2.0
"""Engines that are forked from processes that have imported vLLM: for tests, which start many.

An engine imports vLLM twice, in its API server and in its core: three quarters of the CPU time of
its start. Forked engines are still real processes, which listen, log and end like those that users
start; see `fork_server` for the differences.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from lab.servers.fork_server import Request, ask
from lab.servers.processes import Guard, Reaper, Server

IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "lab.model_inspection",
)
LATE = frozenset(
    {
        "CPU_VISIBLE_MEMORY_NODES",
        "ECSHARE_ROUTER_KEY",
        "OTEL_BSP_SCHEDULE_DELAY",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "PYTEST_CURRENT_TEST",
        "UCX_NET_DEVICES",
        "UCX_TLS",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_RPC_BASE_PATH",
        # While vLLM is imported, read only for the default of `--log-error-stack`.
        "VLLM_SERVER_DEV_MODE",
    }
)
"""The variables that nothing reads while vLLM is imported: engines of one fork server may differ
in them."""


class Forked:
    """The guard of a program that a fork server runs, as a `Guard`."""

    def __init__(self, server: "ForkServer", lifeline: int, report: int) -> None:
        """`lifeline`, `report`: our ends of the pipes that `fork_server.ask` describes."""
        self._server = server
        self._lifeline: int | None = lifeline
        self._from_guard: int | None = report
        self._received = b""

    @property
    def pid(self) -> int:
        """Return the process id; wait until the fork server has forked the guard.

        Raises:
            ServerFailed: the fork server has ended.
        """
        while not self._received and self._from_guard is not None:
            self._receive()
        if not self._received:
            raise self._server.failure("ended")
        return int(self._received.split()[0])

    def poll(self) -> int | None:
        """Return the status of the program; see `Guard.poll`."""
        self._wait(0)
        if self._from_guard is not None:
            return None
        if not self._received:
            raise self._server.failure("ended")
        status = self._received.split()[1:]
        return int(status[0]) if status else 128 + signal.SIGKILL  # the guard itself was killed

    def end(self, within_s: float) -> None:
        """End the program and all its descendants; see `Guard.end`."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        self._wait(within_s)
        if self._from_guard is not None:
            raise TimeoutError(f"a forked program still runs after {within_s:.0f} s")

    def _wait(self, within_s: float) -> None:
        """Wait until the guard has closed its end, but no longer than `within_s`."""
        deadline_s = time.monotonic() + within_s
        while self._from_guard is not None:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._from_guard], [], [], left_s)[0]:
                return
            self._receive()

    def _receive(self) -> None:
        assert self._from_guard is not None
        data = os.read(self._from_guard, 64)
        self._received += data
        if not data:
            os.close(self._from_guard)
            self._from_guard = None


class ForkServer(Server):
    """`fork_server.py`, with the modules to import and its complete environment.

    When it ends, all programs that it has forked end too.
    """

    def __init__(
        self, name: str, log_dir: str | Path, imported: Sequence[str], whole: Mapping[str, str]
    ) -> None:
        super().__init__(name, log_dir)
        self.whole_environment = dict(whole)
        self._imported = tuple(imported)
        self._control: socket.socket | None = None

    def run(self, request: Request, log: BinaryIO) -> Forked:
        """Have a program forked once the server has imported all modules. Returns at once.

        The first program starts the server.

        Raises:
            ServerFailed: the server was started and has ended.
        """
        if self._control is None:
            self.start()
        assert self._control is not None
        lifeline, ours = os.pipe()
        report, status = os.pipe()
        try:
            ask(self._control, request, lifeline, log.fileno(), status)
        except BrokenPipeError:
            os.close(ours)
            os.close(report)
            raise self.failure("ended") from None
        finally:
            os.close(lifeline)
            os.close(status)
        return Forked(self, ours, report)

    def _launch(self, log: BinaryIO) -> Guard:
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            program = (sys.executable, "-m", "lab.servers.fork_server", str(its.fileno()))
            command = (*program, *self._imported)
            return Reaper(command, self.whole_environment, log, self.grace_s, [its.fileno()])

    def _end(self) -> None:
        super()._end()
        if self._control is not None:
            self._control.close()
            self._control = None


class EngineForks:
    """Fork servers of engines. The owner closes them."""

    def __init__(self, log_dir: str | Path, environments: Mapping[str, Mapping[str, str]]) -> None:
        """`environments`: by name of a server, the variables that it has in addition to ours."""
        self._servers = [
            ForkServer(f"forks-{name}", log_dir, IMPORTED, {**os.environ, **own})
            for name, own in environments.items()
        ]

    def start(self, engine: Request, log: BinaryIO) -> Forked | None:
        """Start an engine and return at once. None: no server has the environment that it needs.

        Raises:
            ServerFailed: the fork server was started and has ended.
        """
        for server in self._servers:
            if _alike(server.whole_environment, engine.environment):
                return server.run(engine, log)
        return None

    def close(self) -> None:
        """End the servers, and with them all engines that they have forked."""
        for server in self._servers:
            server.stop()


def _alike(some: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two environments agree in all that is read while vLLM is imported."""
    names = (some.keys() | other.keys()) - LATE
    return all(some.get(name) == other.get(name) for name in names)
