# SPDX-License-Identifier: Apache-2.0
"""An engine runs the requested model runner, or does not start."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.servers.engines import ON_V2, EngineProcess
from lab.servers.processes import ServerFailed

ANSWERING = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print(sys.argv[2], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
V1_LOG, V2_LOG = "Starting", "INFO [cpu_worker.py:162] Using V2 Model Runner"


class Engine(EngineProcess):
    """A program that logs like an engine, and responds as a ready one."""

    def __init__(self, log: str, log_dir: Path, environment: Mapping[str, str], **own: Any) -> None:
        super().__init__("engine", "no-model", log_dir, (), environment, **own)
        self.log = log

    def command(self) -> list[str]:
        return [sys.executable, "-c", ANSWERING, str(self.port.number), self.log]


@pytest.mark.parametrize(
    ("log", "environment"), [(V1_LOG, ON_V2), (V2_LOG, {})], ids=["v1-for-v2", "v2-for-v1"]
)
def test_engine_on_another_model_runner_is_not_ready(
    tmp_path: Path, log: str, environment: dict[str, str]
) -> None:
    engine = Engine(log, tmp_path, environment)
    with pytest.raises(ServerFailed, match="another model runner"), engine:
        pass


@pytest.mark.parametrize("log", [V1_LOG, V2_LOG])
def test_engine_may_leave_the_model_runner_to_vllm(tmp_path: Path, log: str) -> None:
    with Engine(log, tmp_path, {}, runner_of_vllm=True) as engine:
        assert engine.runs_v2 is (log == V2_LOG)
        assert not ON_V2.keys() & engine.environment().keys()


def test_log_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    engine = Engine(V2_LOG, tmp_path, ON_V2)
    with engine:
        assert engine.is_ready()
    engine.log = V1_LOG
    with pytest.raises(ServerFailed, match="another model runner"), engine:
        pass


def test_triton_finds_the_cpu_back_end_only_in_v2_engines(tmp_path: Path) -> None:
    asks = "from triton.backends import backends; print(*sorted(backends))"
    for environment, has_it in ((ON_V2, True), ({}, False)):
        engine = EngineProcess("engine", "no-model", tmp_path, (), environment)
        said = subprocess.check_output(
            [sys.executable, "-c", asks], env={**os.environ, **engine.environment()}, text=True
        )
        assert ("cpu" in said.split()) == has_it
