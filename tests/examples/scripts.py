# SPDX-License-Identifier: Apache-2.0
"""Runs the scripts of examples/one_box with a stand-in for vLLM and the router."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from tests.docs.pages import ROOT

ONE_BOX = ROOT / "examples" / "one_box"
BASH = shutil.which("bash") or "bash"
STAND_IN = Path(__file__).with_name("stand_in.py")
VLLM = "vllm.entrypoints.openai.api_server"
ROUTER = "ecshare.router"
PATIENCE_S = 60.0  # ends a test that cannot succeed


class Started(NamedTuple):
    """A program that a script has started: its arguments, and part of its environment."""

    arguments: list[str]
    environment: dict[str, str]

    @property
    def module(self) -> str:
        """Return the module of `-m`."""
        return self.arguments[1]

    def all(self, option: str) -> list[str]:
        """Return all values of `option`."""
        start = f"{option}="
        return [each.removeprefix(start) for each in self.arguments if each.startswith(start)]

    def one(self, option: str) -> str | None:
        """Return the value of `option`, None where it is not given; once at most."""
        found = self.all(option)
        assert len(found) < 2, found
        return found[0] if found else None

    def connector(self, kind: str) -> dict[str, Any] | None:
        """Return the configuration of the connector for `kind`: ec or kv."""
        text = self.one(f"--{kind}-transfer-config")
        return None if text is None else cast(dict[str, Any], json.loads(text))


@dataclass
class Box:
    """A machine with the stand-in as `python`, and nothing of our environment but the path."""

    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir()
        python = self.folder / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {STAND_IN} "$@"\n')
        python.chmod(0o755)

    def environment(self, settings: dict[str, str]) -> dict[str, str]:
        """Return the environment of a script."""
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", **settings}

    def engine_sh(self, *arguments: str, **settings: str) -> Started:
        """Run the script and return the program that it started."""
        ended = self._run("engine.sh", arguments, settings)
        assert ended.returncode == 0, ended.stderr
        return Started(*json.loads(ended.stdout))

    def refused(self, script: str, *arguments: str, **settings: str) -> str:
        """Run a script that starts nothing; return the one sentence that it prints."""
        ended = self._run(script, arguments, settings)
        assert ended.returncode == 2, ended
        assert not ended.stdout
        (sentence,) = ended.stderr.splitlines()
        return sentence

    def _run(
        self, script: str, arguments: tuple[str, ...], settings: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, str(ONE_BOX / script), *arguments],
            env=self.environment(settings),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    @contextmanager
    def run_sh(self, num_programs: int, *arguments: str, **settings: str) -> Iterator["Running"]:
        """Run run.sh, and yield the programs that it started once there are `num_programs`."""
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            path = self.folder / "socket"
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(PATIENCE_S)
            script = stack.enter_context(
                subprocess.Popen(
                    [BASH, str(ONE_BOX / "run.sh"), *arguments],
                    env=self.environment({**settings, "SOCKET": str(path)}),
                    cwd=self.folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(script.terminate)
            running = Running(script, {}, {})
            for _ in range(num_programs):
                connection = stack.enter_context(listener.accept()[0])
                running.add(connection)
            yield running


@dataclass
class Running:
    """run.sh, and the programs that it started, by port."""

    script: "subprocess.Popen[str]"
    started: dict[int, Started]
    _connections: dict[int, socket.socket]

    def add(self, connection: socket.socket) -> None:
        """Record a program that reports its arguments."""
        with connection.makefile() as lines:
            started = Started(*json.loads(lines.readline()))
        port = int(started.one("--port") or 0)
        self.started[port] = started
        self._connections[port] = connection

    def end(self, port: int) -> None:
        """Let the program at `port` end, as a failure."""
        self._connections[port].close()

    def has_ended(self, port: int) -> bool:
        """Wait until the program at `port` has ended; its connection then closes."""
        return self._connections[port].recv(1) == b""

    def devices(self) -> dict[int, str | None]:
        """Return CUDA_VISIBLE_DEVICES of each program."""
        found = self.started.items()
        return {port: each.environment.get("CUDA_VISIBLE_DEVICES") for port, each in found}
