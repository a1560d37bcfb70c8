# SPDX-License-Identifier: Apache-2.0
"""The KV cache layout that the connector asks for; vLLM reads the configurations of models."""

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from kvshare.chunks import layouts
from kvshare.chunks.layouts import layout_advice, layout_for
from kvshare.connector import KVShareConnector
from tests.kvshare.toy import engine_config
from tests.releases import needs_packed_layouts

pytestmark = needs_packed_layouts

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
KINDS = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA_3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "layer_types": KINDS,
    "sliding_window": 128,
}
GEMMA_4 = GEMMA_3 | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "per_layer_config": {"05": {"head_dim": 128, "num_key_value_heads": 2}},
}
MIMO_V2 = LLAMA | {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "layer_types": KINDS,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
}
STEP = LLAMA | {
    "layer_types": KINDS,
    "attention_other_setting": {"num_attention_groups": 4, "head_dim": 64},
}
ReadConfig = Callable[..., Any]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> ReadConfig:
    """Read models once: vLLM imports the code of each in a process of its own."""

    @cache
    def read(text: str) -> Any:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(text)
        ours = KVTransferConfig(
            kv_connector="KVShareConnector",
            kv_connector_module_path="kvshare.connector",
            kv_role="kv_both",
        )
        return engine_config(folder, ours)

    return read


@pytest.fixture
def read(engines: ReadConfig, monkeypatch: pytest.MonkeyPatch) -> ReadConfig:
    """Return the configuration of an engine on a GPU, as vLLM reads a model's."""
    monkeypatch.delitem(sys.modules, layouts._MULTI_CONNECTOR, raising=False)

    def read(model: dict[str, Any]) -> Any:
        config = deepcopy(engines(json.dumps(model | {"torch_dtype": "bfloat16"})))
        config.device_config.device_type = "cuda"
        config.cache_config.block_size = 16
        return config

    return read


@pytest.mark.parametrize("model", [GEMMA_4, MIMO_V2, STEP], ids=["Gemma 4", "MiMo-V2", "Step 3.5"])
def test_model_with_other_heads_in_its_window_layers_gets_a_packed_layout(
    read: ReadConfig, model: dict[str, Any]
) -> None:
    assert layout_for(read(model)) == "BLNHC"


@pytest.mark.parametrize("model", [LLAMA, GEMMA_3], ids=["no windows", "equal heads"])
def test_model_of_one_shape_keeps_vllms_layout(read: ReadConfig, model: dict[str, Any]) -> None:
    assert layout_for(read(model)) is None


def test_heads_that_are_equal_on_each_rank_keep_vllms_layout(read: ReadConfig) -> None:
    config = read(MIMO_V2)
    config.parallel_config.tensor_parallel_size = 8  # each rank has one head of either kind
    assert layout_for(config) is None


def test_draft_of_another_shape_counts(read: ReadConfig) -> None:
    config = read(GEMMA_3)
    draft = SimpleNamespace(
        hf_text_config=SimpleNamespace(),
        model_arch_config=SimpleNamespace(total_num_kv_heads=8, head_size=128),
    )
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    assert layout_for(config) == "BLNHC"


def test_only_engines_that_can_start_with_it_are_asked_for_it(read: ReadConfig) -> None:
    one_group = read(GEMMA_4)
    one_group.scheduler_config.disable_hybrid_kv_cache_manager = True
    assert layout_for(one_group) is None
    config = read(GEMMA_4)
    for block_tokens in (48, 64, 128):  # a kernel may need smaller ones
        config.cache_config.block_size = block_tokens
        assert layout_for(config) is None
    on_cpu = read(GEMMA_4)
    on_cpu.device_config.device_type = "cpu"
    assert layout_for(on_cpu) is None


def test_below_multi_connector_another_connector_chooses_the_layout(read: ReadConfig) -> None:
    """vLLM refuses to start if two of them ask for different ones."""
    config = read(GEMMA_4)
    ours = config.kv_transfer_config
    children = [
        {
            "kv_connector": ours.kv_connector,
            "kv_connector_module_path": ours.kv_connector_module_path,
            "kv_role": "kv_both",
        },
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
    ]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    assert get_kv_connector_cache_layout(config) == "LBHNC"


def test_configuration_of_an_unknown_form_asks_for_no_layout() -> None:
    assert layout_for(SimpleNamespace()) is None


def test_vllm_takes_the_layout_and_the_user_has_the_last_word(
    read: ReadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    supported = [["LBNHC", "LBHNC", "BLNHC", "BLHNC"]]
    for asked, expected in ((None, "BLNHC"), ("LBHNC", "LBHNC")):
        config = read(GEMMA_4)
        if asked:
            monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", asked)
        assert resolve_kv_cache_layout(config, supported).name == expected
    assert KVShareConnector.get_required_kvcache_layout(config) == "BLNHC"


def test_advice_names_what_helps(read: ReadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(LLAMA)
    assert "VLLM_KV_CACHE_LAYOUT=BLNHC" in layout_advice(config)
    config.device_config.device_type = "cpu"
    assert "no KV cache layout" in layout_advice(config)
    monkeypatch.setattr(layouts, "has_packed_layouts", lambda: False)
    assert "--block-size" in layout_advice(config)
