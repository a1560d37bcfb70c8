# SPDX-License-Identifier: Apache-2.0
"""Engines of models whose layers have KV of several shapes."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvshare.chunks import layers
from kvshare.chunks.layers import refusal
from kvshare.worker import worker
from kvshare.worker.layout_check import LayoutCheck
from tests.kvshare.conftest import StartEngine
from tests.kvshare.shapes import (
    DRAFT,
    GEMMA_4,
    MIMO_V2,
    MLA_DRAFT,
    SPARSE,
    SPARSE_FP8,
    WINDOWS_AND_DRAFT,
    ShapedModel,
    caches,
    check_conversation,
)
from tests.kvshare.test_chunks import LONG, chunked
from tests.kvshare.toy import (
    BLOCK,
    ToyEngine,
    engine_config,
    objects,
    serve,
)
from tests.releases import needs_packed_layouts

pytestmark = needs_packed_layouts

Layers = Mapping[str, KVCacheSpec]

# These need a layout in which blocks are packed.
MIXED_WINDOWS: dict[str, Layers] = {
    "Gemma 4": GEMMA_4,
    "MiMo-V2": MIMO_V2,
    "windows and a draft": WINDOWS_AND_DRAFT,
}
# vLLM puts the layers of each into one cache group.
ONE_GROUP: dict[str, Layers] = {
    "draft": DRAFT,
    "draft beside MLA": MLA_DRAFT,
    "sparse MLA": SPARSE,
    "sparse MLA in 8 bits": SPARSE_FP8,
}
CASES = [
    *((name, layout) for name in MIXED_WINDOWS for layout in ("BLNHC", "BLHNC")),
    *((name, layout) for name in ONE_GROUP for layout in ("LBNHC", "LBHNC", "BLNHC")),
]
CASES_OF_A_LAYOUT = [
    pytest.param(*case, marks=[] if case[1] == "BLNHC" else pytest.mark.nightly) for case in CASES
]
each_case = pytest.mark.parametrize(("name", "layout"), CASES)


StartShaped = Callable[..., ToyEngine]


@pytest.fixture
def engine(start: StartEngine, text_model: Path, monkeypatch: pytest.MonkeyPatch) -> StartShaped:
    """Start an engine with the cache that vLLM makes for the layers `name` in this layout."""

    def start_shaped(name: str, layout: str, **more: Any) -> ToyEngine:
        monkeypatch.setattr(layers, "_has_own_draft", lambda _: "draft" in name)
        cache = caches(text_model, (MIXED_WINDOWS | ONE_GROUP)[name], layout)
        store = more.pop("store", {})
        return start(cache=cache, model=ShapedModel, store=chunked(3, **store), **more)

    return start_shaped


@each_case
def test_second_engine_computes_no_block(engine: StartShaped, name: str, layout: str) -> None:
    prompts = [[number, *LONG[: length - 1]] for number, length in enumerate((7, 12, 13, 53))]
    first = engine(name, layout)
    for number, prompt in enumerate(prompts):
        cold = serve(first, prompt, name=f"cold{number}")
        assert cold.computed_prompt_tokens == len(prompt)
    second = engine(name, layout)
    for number, prompt in enumerate(prompts):
        warm = serve(second, prompt, name=f"warm{number}").computed_prompt_tokens
        # The tails of MLA caches of several shapes are not stored.
        rest = (len(prompt) % BLOCK or 1) if "MLA" in name else 1
        assert warm == rest
    assert "blocks/failed" not in second.counts


@pytest.mark.parametrize(("name", "layout"), CASES_OF_A_LAYOUT)
def test_conversation_continues_in_another_engine(
    engine: StartShaped, name: str, layout: str
) -> None:
    """Other requests run beside it, and blocks are used again."""
    engines = [engine(name, layout, is_async=True) for _ in range(2)]
    check_conversation(*engines)


@pytest.mark.parametrize("name", ONE_GROUP)
def test_lost_object_of_either_shape_is_computed_again(
    engine: StartShaped, tmp_path: Path, name: str
) -> None:
    serve(engine(name, "LBNHC"), LONG, max_tokens=1)
    paths = objects(tmp_path)
    assert {path.name.endswith("-s1") for path in paths} == {True, False}
    for lost in (paths[0], paths[1], paths[-1]):
        shutil.rmtree(tmp_path / "host")
        lost.unlink()
        serve(engine(name, "LBNHC"), LONG, max_tokens=1)  # compares its tokens
        assert lost.exists()


@pytest.mark.parametrize("name", MIXED_WINDOWS)
def test_engine_in_vllms_usual_layout_logs_which_layout_helps(text_model: Path, name: str) -> None:
    config = engine_config(text_model)
    config.device_config.device_type = "cuda"
    assert refusal(config, caches(text_model, MIXED_WINDOWS[name], "BLNHC")) is None
    said = refusal(config, caches(text_model, MIXED_WINDOWS[name], "LBNHC")) or ""
    assert "blocks of 8 tokens and others of 4: start vLLM with VLLM_KV_CACHE_LAYOUT" in said


class Layer:
    """A layer whose backend writes to the cache in a way that cannot be tried."""

    impl = SimpleNamespace(do_kv_cache_update=lambda *_: pytest.fail("it is tried"))
    kv_lora_rank = qk_rope_head_dim = 12

    @staticmethod
    def get_attn_backend() -> Any:
        return SimpleNamespace(get_name=lambda: "SPARSE")


def test_blocks_of_sparse_attention_are_neither_erased_nor_tried(text_model: Path) -> None:
    """An indexer keeps its scales behind all numbers of a block, not in its tokens."""
    shape, own = worker_parts(text_model, SPARSE)
    blocks = [worker._block_caches(own, each, shape, as_float8=False) for each in shape.layer_sets]
    assert worker._learn_layouts(shape, blocks)
    assert [each.erases for each in blocks] == [False, False]
    assert {each.layout for each in blocks} == {shape.check.untried("SPARSE")}


def test_draft_of_another_shape_keeps_its_bits_in_a_store_of_8_bits(text_model: Path) -> None:
    """The scheduler half cannot know whether it has 8 bits already."""
    shape, own = worker_parts(text_model, DRAFT)
    blocks = [worker._block_caches(own, each, shape, as_float8=True) for each in shape.layer_sets]
    assert [each.as_float8 for each in blocks] == [True, False]


def worker_parts(model: Path, of: Layers) -> tuple[worker.CacheShape, dict[str, Tensor]]:
    """Return the shape of the cache that vLLM makes, and its tensors."""
    cache = caches(model, of, "LBNHC")
    sets = layers.layer_sets(cache, 1, 4)
    check = LayoutCheck(dict.fromkeys(of, Layer()))
    shape = worker.CacheShape(cache.num_blocks, BLOCK, sets, 1, check=check)
    return shape, ShapedModel(cache, lambda *_: None).kv_caches
