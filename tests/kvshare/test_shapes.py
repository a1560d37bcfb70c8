# SPDX-License-Identifier: Apache-2.0
"""Engines of models whose layers have KV of several shapes."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvshare.chunks.layers import refusal
from tests.kvshare.conftest import StartEngine
from tests.kvshare.shapes import GEMMA_4, MIMO_V2, ShapedModel, caches
from tests.kvshare.test_chunks import LONG, chunked
from tests.kvshare.toy import ToyEngine, engine_config, serve
from tests.releases import needs_packed_layouts

pytestmark = needs_packed_layouts

MODELS: dict[str, Mapping[str, KVCacheSpec]] = {"Gemma 4": GEMMA_4, "MiMo-V2": MIMO_V2}
each_model = pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
each_packed_layout = pytest.mark.parametrize("layout", ["BLNHC", "BLHNC"])


@pytest.fixture
def engine(start: StartEngine, text_model: Path) -> Callable[..., ToyEngine]:
    """Start an engine with the cache that vLLM makes for these layers in this layout."""

    def start_shaped(layers: Mapping[str, KVCacheSpec], layout: str, **more: object) -> ToyEngine:
        cache = caches(text_model, layers, layout)
        return start(cache=cache, model=ShapedModel, **{"store": chunked(3)} | more)

    return start_shaped


@each_model
@each_packed_layout
def test_second_engine_computes_one_token(
    engine: Callable[..., ToyEngine], layers: Mapping[str, KVCacheSpec], layout: str
) -> None:
    prompts = [[number, *LONG[: length - 1]] for number, length in enumerate((7, 12, 13, 53))]
    first = engine(layers, layout)
    for number, prompt in enumerate(prompts):
        assert serve(first, prompt, name=f"cold{number}").computed_prompt_tokens == len(prompt)
    second = engine(layers, layout)
    for number, prompt in enumerate(prompts):
        assert serve(second, prompt, name=f"warm{number}").computed_prompt_tokens == 1
    assert "blocks/failed" not in second.counts


@each_model
def test_engine_in_vllms_usual_layout_says_which_layout_helps(
    text_model: Path, layers: Mapping[str, KVCacheSpec]
) -> None:
    config = engine_config(text_model)
    config.device_config.device_type = "cuda"
    assert refusal(config, caches(text_model, layers, "BLNHC")) is None
    said = refusal(config, caches(text_model, layers, "LBNHC")) or ""
    assert "blocks of 8 tokens and others of 4: start vLLM with VLLM_KV_CACHE_LAYOUT" in said
