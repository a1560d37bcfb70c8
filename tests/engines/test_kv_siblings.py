# SPDX-License-Identifier: Apache-2.0
"""A real engine whose MultiConnector has, beside ours, a connector that brings wrong KV."""

import json
from pathlib import Path

import pytest

from lab.servers.engines import EngineProcess, kv_argument
from tests.conftest import StartEngine
from tests.engines.chat import complete, counting, stored_kv
from tests.sibling import from_prefiller

pytestmark = [pytest.mark.engine, pytest.mark.models]  # two more engines: not in the gate

BLOCK = 32
PROMPT = [20 + number * 7 % 400 for number in range(10 * BLOCK + 5)]
ANSWER_TOKENS = 2 * BLOCK


def test_wrong_kv_of_a_sibling_connector_is_not_stored(
    engine: StartEngine, plain: EngineProcess, tmp_path: Path
) -> None:
    own, alone = (
        kv_argument("both", f"file://{tmp_path}/store", host_cache_dir=f"{tmp_path}/{name}-host")
        for name in ("beside", "alone")
    )
    theirs = {
        "kv_connector": "Sibling",
        "kv_connector_module_path": "tests.sibling",
        "kv_role": "kv_both",
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [theirs, json.loads(own.partition("=")[2])]},
    }
    beside = engine("beside", f"--block-size={BLOCK}", f"--kv-transfer-config={json.dumps(both)}")
    reader = engine("alone", f"--block-size={BLOCK}", alone)
    for each in (beside, reader, plain):
        each.wait_ready()
    expected = complete(plain, plain.model, PROMPT, ANSWER_TOKENS).tokens

    params = from_prefiller()
    with counting(beside) as gained:
        wrong = complete(beside, beside.model, PROMPT, ANSWER_TOKENS, kv_transfer_params=params)
        again = complete(beside, beside.model, [*PROMPT, 7], ANSWER_TOKENS)
    assert wrong.num_cached_tokens >= len(PROMPT) - 1
    assert wrong.tokens != expected
    assert again.num_cached_tokens >= 10 * BLOCK, "in the local cache"
    assert stored_kv(tmp_path, "t0of1") == set()
    assert gained["kvshare_declined/"] >= 2 * 10, gained

    read = complete(reader, reader.model, PROMPT, ANSWER_TOKENS)
    assert (read.tokens, read.num_cached_tokens) == (expected, 0)
    other = PROMPT[::-1]
    cold = complete(beside, beside.model, other, ANSWER_TOKENS)
    assert stored_kv(tmp_path, "t0of1")
    warm = complete(reader, reader.model, other, ANSWER_TOKENS)
    assert warm.tokens == cold.tokens == complete(plain, plain.model, other, ANSWER_TOKENS).tokens
    assert warm.num_cached_tokens == len(other) - 1
