# SPDX-License-Identifier: Apache-2.0
"""`make test` shows the parts that run beside the unit tests, and fails if one of them does."""

import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

# Replaces each program: it prints and records its arguments, and fails on request.
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" | tr -s ' ' | tee -a {folder}/ran
case "$(basename "$0") $*" in *"{fails}"*) exit 3;; esac
"""
UNIT = "and not nightly -n 2"
EVERY = [
    "ruff check",
    "mypy",
    "shellcheck",
    "-m packaging",
    UNIT,
    "engine and not",
]


def make_test(folder: Path, fails: str) -> subprocess.CompletedProcess[str]:
    """Run `make test` with programs that do nothing in a folder that has only the Makefile."""
    (folder / "bin").mkdir()
    (folder / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("python", "ruff", "mypy", "shellcheck"):
        path = folder / "bin" / name
        path.write_text(PROGRAM.format(folder=folder, fails=fails))
        path.chmod(0o700)
    make = ["make", "-C", str(folder), "test", "PYTHON=true", f"BIN={folder}/bin"]
    return subprocess.run(make, capture_output=True, text=True, check=False)


def test_gate_runs_and_shows_every_part(tmp_path: Path) -> None:
    ran = make_test(tmp_path, "nothing fails")
    assert ran.returncode == 0, ran.stderr
    for part in EVERY:
        assert part in ran.stdout


@pytest.mark.parametrize("fails", ["ruff check", "mypy", "-m packaging", UNIT, "not models"])
def test_failed_part_fails_the_gate(tmp_path: Path, fails: str) -> None:
    ran = make_test(tmp_path, fails)
    assert ran.returncode != 0
    assert UNIT in ran.stdout, "the other parts run all the same"
    assert "engine and not models" in ran.stdout
