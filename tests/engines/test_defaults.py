# SPDX-License-Identifier: Apache-2.0
"""The options that users have who write none, on an engine as theirs: the V2 model runner,
asynchronous scheduling, a worker in a process of its own.

Its model is large enough that to compute a prompt takes several times as long as to load it.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from lab.models import make_qwen2
from lab.servers.engines import ON_V2, RANK_APART, EngineProcess
from tests.conftest import StartEngine
from tests.engines.chat import complete, counting, stored_kv
from tests.releases import needs_v2_runner

pytestmark = [pytest.mark.engine, needs_v2_runner]

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
PROMPT_TOKENS = 700
STORED = range(8)
NEW = range(100, 108)


def test_default_options_load_stored_prompts(engine: StartEngine, tmp_path: Path) -> None:
    """Only the first load, a trial, is smaller than with `load` = `always`."""
    model = make_qwen2(tmp_path / "model", **SIZES)

    def start(name: str) -> EngineProcess:
        """An engine as on a host of its own; the host cache folder is its only option."""
        transfer = {
            "kv_connector": "KVShareConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "url": f"{tmp_path}/store",
                "host_cache_dir": f"{tmp_path}/{name}-host",
            },
        }
        argument = f"--kv-transfer-config={json.dumps(transfer)}"
        environment = {**ON_V2, **RANK_APART}
        return engine(name, argument, model=model, environment=environment)

    writer, reader = start("writer"), start("reader")
    writer.wait_ready()
    expected = answers(writer, STORED)
    stored_kv(tmp_path, "t0of1")
    writer.stop()
    reader.wait_ready()
    with counting(reader) as counted:
        given = answers(reader, [each for pair in zip(NEW, STORED, strict=True) for each in pair])
    assert given[1::2] == expected
    num_stored = len(STORED) * (PROMPT_TOKENS - 1)
    assert counted["kvshare_tokens/hit"] >= 0.95 * num_stored, counted
    assert counted["kvshare_tokens/loaded"] == counted["kvshare_tokens/hit"]


def prompt(number: int) -> list[int]:
    return [(number * 7919 + position * 31) % 200 + 5 for position in range(PROMPT_TOKENS)]


def answers(engine: EngineProcess, numbers: Iterable[int]) -> list[list[int]]:
    return [complete(engine, engine.model, prompt(n), max_tokens=2).tokens for n in numbers]
