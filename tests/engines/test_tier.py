# SPDX-License-Identifier: Apache-2.0
"""KVShareTier below vLLM's OffloadingConnector in real engines, a restart apart."""

import json
import os
from pathlib import Path

import pytest

from lab.servers.engines import SMALL_ENGINE, EngineProcess
from tests.docs.pages import ROOT
from tests.engines.chat import ask, counts, text, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.models]

BLOCK = 32
STORY = "Tell me a story about the sea, the wind and the stars, and of an old stone house. " * 8


def offloading(name: str, model: Path, root: Path) -> EngineProcess:
    """An engine with a host cache of its own, so its hits come from the store."""
    tier = {
        "type": "KVShareTier",
        "module_path": "kvshare.tier",
        "url": f"file://{root}/store",
        "host_cache_dir": f"{root}/{name}-host",
        "epoch": "test",
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostCopySpec",
            "spec_module_path": "tests.engines.host_copy",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier],
        },
    }
    flags = (f"--block-size={BLOCK}", f"--kv-transfer-config={json.dumps(transfer)}")
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    return EngineProcess(name, model, root, (*SMALL_ENGINE, *flags), {"PYTHONPATH": paths})


def wait_stored(root: Path, num_objects: int) -> None:
    objects = root / "store" / "kv" / "2"
    wait_until(lambda: len(list(objects.glob("*/??/*"))) >= num_objects, "not stored", 60.0)


def test_engine_loads_chunks_stored_by_another(
    plain: EngineProcess, vlm: Path, tmp_path: Path
) -> None:
    right = ask(plain.wait_ready(), plain.model, [text(STORY)])
    num_blocks = right.num_prompt_tokens // BLOCK
    with offloading("first", vlm, tmp_path) as first:
        cold = ask(first, first.model, [text(STORY)])
        assert cold.tokens == right.tokens
        assert cold.num_cached_tokens == 0
        wait_stored(tmp_path, num_blocks)
    with offloading("second", vlm, tmp_path) as second:
        warm = ask(second, second.model, [text(STORY)])
        assert warm.tokens == right.tokens
        assert warm.num_cached_tokens == num_blocks * BLOCK
        assert counts(second)["kvshare_tier_chunks/loaded"] == num_blocks
