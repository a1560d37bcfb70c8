# SPDX-License-Identifier: Apache-2.0
"""The examples that the demo does not run, run as their README says."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.servers.engines import ENVIRONMENT
from tests.docs.pages import ROOT

pytestmark = pytest.mark.engine


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves vLLM room for its sockets, of 107 characters at most."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_shared_cache_example_runs(vlm: Path, short_path: Path) -> None:
    store = short_path / "store"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "examples.shared_cache.two_engines"),
            *(f"--model={vlm}", f"--url={store}"),
        ],
        cwd=ROOT,
        # One process and one thread for each engine: more spin while other tests need the cores.
        env={**os.environ, **ENVIRONMENT, "TMPDIR": str(short_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = ended.stdout
    assert ended.returncode == 0, said
    rows = [line.split()[-4:] for line in said.splitlines() if line.startswith(("first", "second"))]
    (encoded, _, computed, reused), again, new = ([int(cell) for cell in row] for row in rows)
    assert (encoded, reused) == (1, 0)
    assert again == [0, 0, 1, computed - 1]
    assert new[:2] == [0, 1]
    assert "same answer: yes" in said
    assert len([path for path in store.rglob("ec/*/*/*/*") if path.is_file()]) == 1
    assert not list(short_path.glob("ecshare-*")), "it leaves its scratch folder behind"


@pytest.mark.models
def test_s3_example_runs(vlm: Path) -> None:
    said = []
    with subprocess.Popen(
        [sys.executable, "-m", "examples.s3.run"],
        cwd=ROOT,
        env={**os.environ, "MODEL": str(vlm)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        assert program.stdout is not None
        try:
            for line in program.stdout:
                said.append(line)
                if line.startswith("Serving"):
                    break
            program.send_signal(signal.SIGINT)
            said += program.stdout
            assert program.wait() == 0, "".join(said)
        finally:
            program.kill()
    answers = [line for line in said if line.startswith("answered")]
    assert len(answers) == 2
    assert "by way of encode, prefill, decode:" in answers[0], answers
    assert "by way of decode:" in answers[1], answers
    assert any(line.startswith("s3://") and "/ec: 1 objects" in line for line in said), said
    assert said[-1] == "Stopped.\n"
