# SPDX-License-Identifier: Apache-2.0
"""KV blocks of tensor-parallel engines: each rank stores and loads its own heads."""

from pathlib import Path

import pytest

from lab.servers.engines import EngineProcess, kv_argument
from tests.conftest import StartEngine
from tests.engines.chat import ask, stored_kv, text

pytestmark = pytest.mark.engine

STORY = [text("Tell me a story about the sea, the wind and the stars. " * 12)]
TWO_RANKS = ("--tensor-parallel-size=2", "--block-size=32")


def test_engine_with_two_ranks_loads_kv_of_another_with_two(
    engine: StartEngine, plain: EngineProcess, tmp_path: Path
) -> None:
    def sharing(name: str) -> EngineProcess:
        kv = kv_argument("both", f"file://{tmp_path}/store", host_cache_dir=f"{tmp_path}/{name}")
        one_core_each = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        return engine(name, *TWO_RANKS, kv, environment=one_core_each)

    first, second = sharing("first"), sharing("second")
    for each in (plain, first, second):
        each.wait_ready()
    expected = ask(plain, plain.model, STORY).tokens
    cold = ask(first, first.model, STORY)
    assert cold.tokens == expected
    shares = [
        {path.name.partition(".")[0] for path in stored_kv(tmp_path, part)}
        for part in ("t0of2", "t1of2")
    ]
    assert shares[0] == shares[1]
    assert len(shares[0]) > 1
    warm = ask(second, second.model, STORY)
    assert warm.tokens == expected
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1
