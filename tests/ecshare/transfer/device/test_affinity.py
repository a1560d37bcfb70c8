# SPDX-License-Identifier: Apache-2.0
"""The cores of a transfer engine's threads, in a process with bound cores as under vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BOUND = """
import json, os, sys, threading
import torch  # its OpenMP binds the main thread
from ecshare.store.config import StoreConfig
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Run

folder = sys.argv[1]
engine = TransferEngine(StoreConfig(url=f"file://{folder}/s", host_cache_dir=f"{folder}/h"), "o")
engine.probe(write=True)
engine.submit(Run("start a copy thread", lambda: None))
assert engine.drain(10)
found = {t.name: sorted(os.sched_getaffinity(t.native_id)) for t in threading.enumerate()}
print(json.dumps(found))
engine.close()
"""
MAIN = "MainThread"


@pytest.fixture
def cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    return cores


def threads(folder: Path, **environment: str) -> dict[str, list[int]]:
    """Return each thread's cores by the thread's name."""
    done = subprocess.run(
        [sys.executable, "-c", BOUND, str(folder)],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert {"ecshare-io", "ecshare-inbox", "ecshare-copy_0", "ecshare-files_0"} < set(found)
    return dict(found)


def test_threads_avoid_the_computing_cores(tmp_path: Path, cores: list[int]) -> None:
    found = threads(tmp_path, GOMP_CPU_AFFINITY=str(cores[0]))
    assert found.pop(MAIN) == cores[:1]
    for name, allowed in found.items():
        assert set(allowed) <= set(cores[1:]), name


def test_threads_are_not_moved_if_all_cores_compute(tmp_path: Path, cores: list[int]) -> None:
    found = threads(tmp_path, GOMP_CPU_AFFINITY=" ".join(map(str, cores)))
    assert set(map(tuple, found.values())) == {(cores[0],)}


def test_threads_are_not_moved_if_no_core_is_bound(tmp_path: Path, cores: list[int]) -> None:
    assert set(map(tuple, threads(tmp_path).values())) == {tuple(cores)}
