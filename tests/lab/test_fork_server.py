# SPDX-License-Identifier: Apache-2.0
"""Programs forked from a process with their imports, compared with `python -m`."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lab.servers.engine_forks import IMPORTED as IMPORTED_FOR_ENGINES
from lab.servers.engine_forks import LATE, EngineForks, Forked, ForkServer
from lab.servers.fork_server import Request, fork
from lab.servers.proc import is_there
from lab.servers.processes import ServerFailed
from lab.servers.reaper import descendants
from tests.waiting import wait_until

PROGRAM = "tests.lab.forked_program"
IMPORTED = (PROGRAM, "xml.dom.minidom")
WITHIN_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    """Make a fork server with an environment variable that its programs lack."""
    server = ForkServer("forks", tmp_path, IMPORTED, {**os.environ, "ONLY_OF_THE_SERVER": "1"})
    yield server
    server.stop()


def run(server: ForkServer, log: Path, what: str, grace_s: float = 0.0, **own: str) -> Forked:
    request = Request(PROGRAM, [what], {**os.environ, **own}, grace_s)
    with log.open("ab") as file:
        return server.run(request, file)


def status_of(program: Forked) -> int:
    wait_until(lambda: program.poll() is not None)
    status = program.poll()
    assert status is not None
    return status


def facts(log: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(log.read_text())
    return said


def test_program_has_its_own_environment_session_and_arguments(
    server: ForkServer, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    assert status_of(run(server, first, "facts", ONE="1")) == 0
    assert status_of(run(server, second, "facts", TWO="2")) == 0
    assert facts(first)["environment"] == {**os.environ, "ONE": "1"}
    assert facts(second)["environment"] == {**os.environ, "TWO": "2"}
    for each in facts(first), facts(second):
        assert each["is_imported"]
        assert each["arguments"] == ["facts"]
        assert each["session"] == each["pid"]


def test_spawned_child_is_forked_with_its_parents_environment(
    server: ForkServer, tmp_path: Path
) -> None:
    log = tmp_path / "program.log"
    assert status_of(run(server, log, "spawn", ONE="1")) == 0
    said = facts(log)
    assert said["is_imported"]
    assert said["environment"] == {**os.environ, "SET_BY_PARENT": "yes"}


def test_failed_program_has_its_status_and_a_traceback(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "program.log"
    assert status_of(run(server, log, "fail")) == 1
    assert "ValueError: as it was told to" in log.read_text()


@pytest.mark.parametrize("how", ["ended", "killed", "server killed", "server stopped"])
def test_all_processes_of_a_program_end_with_it(
    server: ForkServer, tmp_path: Path, how: str
) -> None:
    log = tmp_path / "program.log"
    program = run(server, log, "hang")
    wait_until(lambda: log.exists() and "hangs" in log.read_text())
    guard = program.pid
    processes = [guard, *descendants(guard)]
    assert len(processes) >= 3, "guard, program and its child"
    if how == "ended":
        program.end(WITHIN_S)
    elif how == "killed":
        os.kill(processes[1], signal.SIGKILL)
        assert status_of(program) == 128 + signal.SIGKILL
    elif how == "server killed":
        (forking, *_) = server.processes()
        os.kill(forking, signal.SIGKILL)
    else:
        server.stop()
    wait_until(lambda: not any(map(is_there, processes)))


def test_server_with_a_failed_import_is_reported_with_its_log(tmp_path: Path) -> None:
    server = ForkServer("forks", tmp_path, ["no_such_module"], os.environ)
    program = run(server, tmp_path / "program.log", "facts")
    wait_until(lambda: not server.is_running())
    with pytest.raises(ServerFailed, match="no_such_module"):
        program.poll()
    server.stop()


def test_engine_with_another_import_environment_is_not_forked(tmp_path: Path) -> None:
    with (
        closing(EngineForks(tmp_path, {"v1": {"MODE": "1"}})) as forks,
        (tmp_path / "log").open("ab") as log,
    ):
        other = {**os.environ, "MODE": "2"}
        assert forks.start(Request(PROGRAM, [], other, 0.0), log) is None


READS = """
import importlib, json, os, sys
late, modules = json.loads(sys.argv[1])
found, get = set(), type(os.environ).__getitem__
def note(environment, name):
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in {"os", "collections.abc", "vllm.envs"}:
        frame = frame.f_back
    if name in late:
        found.add((name, frame.f_globals["__name__"]))
    return get(environment, name)
type(os.environ).__getitem__ = note
for module in modules:
    importlib.import_module(module)
print("found", json.dumps(sorted(found)))
"""


@pytest.mark.engine
def test_late_environment_variables_are_not_read_at_import() -> None:
    unset = {name: value for name, value in os.environ.items() if name not in LATE}
    asked = json.dumps([sorted(LATE), IMPORTED_FOR_ENGINES])
    said = subprocess.check_output([sys.executable, "-c", READS, asked], env=unset, text=True)
    found = json.loads(said.rpartition("found ")[2])
    known = [["VLLM_SERVER_DEV_MODE", "vllm.entrypoints.launchers.cli_args"]]
    assert [each for each in found if each not in known] == []


def test_process_with_threads_is_never_forked() -> None:
    ends = threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    try:
        with pytest.raises(RuntimeError, match="threads must not fork"):
            fork()
    finally:
        ends.set()
        other.join()
