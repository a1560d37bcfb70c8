# SPDX-License-Identifier: Apache-2.0
"""deploy/slurm/epd.sh starts the stages on the nodes of its job, by stand-ins for Slurm."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, ROOT

SCRIPT = DEPLOY / "slurm" / "epd.sh"
# Slurm's commands, and engine.sh: each writes its arguments and settings, and the router ends.
SRUN = """#!/bin/bash
echo "$* | $VLLM_API_KEY" >> "$SEEN/srun"
exec sleep 60
"""
SCONTROL = """#!/bin/bash
tr , '\\n' <<< "$3"
"""
ENGINE = """#!/bin/bash
while [[ $(wc -l < "$SEEN/srun" 2>/dev/null) != 3 ]]; do :; done
echo "$* | $ENCODE_URLS $PREFILL_URLS $DECODE_URLS $HOST" > "$SEEN/router"
exit 3
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    for name, text in {
        "bin/srun": SRUN,
        "bin/scontrol": SCONTROL,
        "examples/one_box/engine.sh": ENGINE,
        "keys/router.key": "r" * 64,
        "keys/api.key": "a" * 64,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o700)
    return tmp_path


def run(box: Path, nodes: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{box}/bin:{os.environ['PATH']}",
        "SEEN": str(box),
        "KEYS": str(box / "keys"),
        "STORE": "s3://bucket/prefix",
        "SLURM_JOB_NODELIST": nodes,
    }
    return subprocess.run(
        ["bash", str(SCRIPT)],
        cwd=box,
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize(
    ("nodes", "places"), [("n1", ("n1", "n1", "n1")), ("n1,n2,n3", ("n1", "n2", "n3"))]
)
def test_stages_go_to_the_nodes_in_turn_and_end_with_the_router(
    box: Path, nodes: str, places: tuple[str, str, str]
) -> None:
    ran = run(box, nodes)
    assert ran.returncode == 3
    started = sorted((box / "srun").read_text().splitlines())
    for stage, place in zip(("encode", "prefill", "decode"), places, strict=True):
        (line,) = [each for each in started if f"engine.sh {stage} " in each]
        assert f"--nodelist={place} " in line
        assert "--middleware=ecshare.plugin.gate.RouterGate" in line
        command, _, key = line.partition(" | ")
        assert key == "a" * 64
        assert key not in command
    urls = " ".join(f"http://{place}:{8001 + i}" for i, place in enumerate(places))
    said = (box / "router").read_text().strip()
    assert said == f"router --router-key=file:{box}/keys/router.key | {urls} 0.0.0.0"


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"STORE": ""}, "STORE must be"), ({"KEYS": "/nowhere"}, "router.key is missing")],
)
def test_what_is_missing_is_named(box: Path, settings: dict[str, str], said: str) -> None:
    ran = run(box, "n1", **settings)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_the_real_engine_script_takes_these_settings() -> None:
    head = (ROOT / "examples" / "one_box" / "engine.sh").read_text()
    for name in ("STORE", "HOST", "DEVICE", "ENCODE_URLS", "PREFILL_URLS", "DECODE_URLS"):
        assert f"#   {name}" in head or f", {name}" in head
