# SPDX-License-Identifier: Apache-2.0
"""KV blocks of tensor-parallel engines: each rank stores and loads its own heads."""

from pathlib import Path

import pytest

from lab.servers.engines import SMALL_ENGINE, EngineProcess, kv_argument
from tests.engines.chat import Answer, ask, stored_kv, text

pytestmark = pytest.mark.engine

STORY = [text("Tell me a story about the sea, the wind and the stars. " * 12)]
TWO_RANKS = ("--tensor-parallel-size=2", "--block-size=32")


def run(vlm: Path, root: Path, name: str) -> Answer:
    """Ask an engine that lives for this question alone, until it has stored what it computed."""
    kv = kv_argument("both", f"file://{root}/store", host_cache_dir=f"{root}/{name}-host")
    arguments = (*SMALL_ENGINE, *TWO_RANKS, kv)
    one_core_each = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with EngineProcess(name, vlm, root, arguments, one_core_each) as engine:
        answer = ask(engine, engine.model, STORY)
        stored_kv(root, "t?of2")
        return answer


def test_two_ranks_hand_over_to_two_ranks(vlm: Path, tmp_path: Path) -> None:
    cold = run(vlm, tmp_path, "first")
    shares = [
        {path.name.partition(".")[0] for path in stored_kv(tmp_path, part)}
        for part in ("t0of2", "t1of2")
    ]
    assert shares[0] == shares[1]
    assert len(shares[0]) > 2
    warm = run(vlm, tmp_path, "second")
    assert warm.tokens == cold.tokens
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
