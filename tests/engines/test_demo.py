# SPDX-License-Identifier: Apache-2.0
"""`make demo` (examples/one_box/demo.py) succeeds, and leaves nothing behind when it is stopped."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "examples.one_box.demo"]

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("store", ["folder", pytest.param("s3", marks=pytest.mark.models)])
def test_demo_reports_success(store: str) -> None:
    ran = subprocess.run(
        [*DEMO, f"--store={store}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    assert "All as it should be." in ran.stdout
    for name_of_round in ("cold", "warm", "known"):
        assert ran.stdout.count(f"  {name_of_round}  ") == 4
    assert "DIFFER" not in ran.stdout
    kinds = re.findall(r"^(ec|kv) +[0-9a-f]{32} +\S+ +[1-9]", ran.stdout, re.MULTILINE)
    assert sorted(kinds) == ["ec", "kv"], "what ecshare du shows of the store"


def test_ctrl_c_ends_every_process_of_the_demo() -> None:
    demo = subprocess.Popen(
        [*DEMO, "--store=s3"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with demo:
        assert demo.stdout is not None
        while not demo.stdout.readline().startswith("Starting"):
            assert demo.poll() is None
        started = processes_naming("examples/one_box/engine.sh")
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate()
    assert demo.returncode == 130
    assert said.endswith("Stopped.\n")
    assert started
    assert not [each for each in started if Path(f"/proc/{each}").exists()]


def processes_naming(text: str) -> list[int]:
    """The ids of all processes with `text` in their command line."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in command.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(command.parent.name))
        except OSError:
            continue  # it ended while we looked
    return found
