# SPDX-License-Identifier: Apache-2.0
"""On which cores our threads run in an engine that vLLM binds to one of several."""

import os
from pathlib import Path

import pytest

from lab.servers.engines import RANK_APART, kv_argument
from tests.conftest import StartEngine
from tests.engines.chat import ask, stored_kv, text

pytestmark = [pytest.mark.engine, pytest.mark.models]

OURS = 4
"""The least number of our threads: for I/O, for its inbox, for copies, for files."""


def test_threads_avoid_the_computing_core(engine: StartEngine, tmp_path: Path) -> None:
    computing, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("one core")
    sharing = kv_argument("both", f"{tmp_path}/store", host_cache_dir=f"{tmp_path}/host")
    one_core = {**RANK_APART, "VLLM_CPU_OMP_THREADS_BIND": str(computing)}
    # vLLM binds a rank by its environment at its start, which a forked one does not read again.
    bound = engine(
        "bound", "--block-size=32", sharing, environment=one_core, as_users=True
    ).wait_ready()
    assert ask(bound, bound.model, [text("Tell me of the sea. " * 20)]).tokens
    assert stored_kv(tmp_path, "t0of1")

    # vLLM binds its worker's main thread.
    (worker,) = (each for each in bound.processes() if os.sched_getaffinity(each) == {computing})
    threads = (int(task.name) for task in Path(f"/proc/{worker}/task").iterdir())
    aside = [each for each in threads if os.sched_getaffinity(each) <= set(others)]
    assert len(aside) >= OURS
