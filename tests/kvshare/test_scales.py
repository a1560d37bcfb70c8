# SPDX-License-Identifier: Apache-2.0
"""Engines whose KV dtype has scales of its own: their blocks are opaque, and shared whole."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
)

from ecshare.store.errors import ConfigError
from kvshare.chunks import facts
from kvshare.chunks.layers import LayerSet, layer_sets_of, own_tp_size, readable_tp_sizes, refusal
from kvshare.worker import layout_check
from tests.kvshare.conftest import StartEngine
from tests.kvshare.shapes import ShapedModel, W, caches, check_conversation, full, mla, named
from tests.kvshare.test_chunks import LONG, chunked
from tests.kvshare.toy import (
    BLOCK,
    ToyEngine,
    engine_config,
    serve,
)
from tests.nightly import gate_tries
from tests.releases import needs_packed_layouts

pytestmark = needs_packed_layouts

SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8}


def per_token_head(mode: KVQuantMode, dtype: torch.dtype, **window: Any) -> AttentionSpec:
    kind = SlidingWindowSpec if window else FullAttentionSpec
    spec = kind(**SHAPE, dtype=dtype, kv_quant_mode=mode, **window)
    return TritonAttentionBackend.customize_spec(spec)


def turboquant(mode: KVQuantMode) -> AttentionSpec:
    spec = FullAttentionSpec(**SHAPE | {"head_size": 64}, dtype=torch.uint8, kv_quant_mode=mode)
    return TurboQuantAttentionBackend.customize_spec(spec)


def nvfp4(num_kv_heads: int = 2) -> AttentionSpec:
    """As `FlashInferBackend.customize_spec` makes it: slots of keys, then of values, each with half
    a byte for each number, and behind those of all tokens a byte for 16 numbers."""
    return FullAttentionSpec(
        **SHAPE | {"head_size": 64, "num_kv_heads": num_kv_heads},
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.NVFP4,
        num_head_slots=2 * num_kv_heads,
        state_content_bytes=64 // 2 + 64 // 16,
    )


@dataclass(frozen=True)
class Kind:
    dtype: str
    layers: Mapping[str, KVCacheSpec]


INT8 = per_token_head(KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8)
FP8 = KVQuantMode.FP8_PER_TOKEN_HEAD
K8V4 = turboquant(KVQuantMode.TURBOQUANT_K8V4)
KINDS = {
    "int8": Kind("int8_per_token_head", named(full=(4, INT8))),
    "windows": Kind(
        "fp8_per_token_head",
        named(
            window=(4, per_token_head(FP8, torch.uint8, sliding_window=W)),
            full=(4, per_token_head(FP8, torch.uint8)),
        ),
    ),
    "nvfp4": Kind("nvfp4", named(full=(4, nvfp4()))),
    "one head of nvfp4": Kind("nvfp4_4over6", named(full=(4, nvfp4(1)))),
    "turboquant": Kind("turboquant_k8v4", named(full=(4, K8V4))),
    # vLLM keeps the first and last layers as they are.
    "turboquant between others": Kind("turboquant_k8v4", named(outer=(2, full()), tq=(4, K8V4))),
    "sparse MLA": Kind(
        "nvfp4_ds_mla",
        named(
            index=(4, mla(12, torch.uint8)),
            latent=(
                4,
                mla(
                    dtype=torch.uint8,
                    cache_dtype_str="nvfp4_ds_mla",
                    kv_quant_mode=KVQuantMode.NVFP4_DS_MLA,
                    state_content_bytes=36,
                ),
            ),
        ),
    ),
}
each_kind = pytest.mark.parametrize("name", KINDS)

StartKind = Callable[..., ToyEngine]


@pytest.fixture
def engine(start: StartEngine, text_model: Path) -> StartKind:
    """Start an engine with the cache that vLLM makes for the layers of a kind."""

    def start_kind(name: str, layout: str = "LBNHC", **more: Any) -> ToyEngine:
        kind = KINDS[name]
        store = chunked(3, **more.pop("store", {}))
        return start(
            cache=caches(text_model, kind.layers, layout),
            model=ShapedModel,
            store=store,
            kv_cache_dtype=kind.dtype,
            **more,
        )

    return start_kind


@each_kind
@pytest.mark.parametrize("layout", gate_tries("LBNHC", "LBHNC"))
def test_second_engine_loads_all_whole_blocks(engine: StartKind, name: str, layout: str) -> None:
    first, second = engine(name, layout), engine(name, layout)
    for number, length in enumerate((7, 12, 13, 53)):
        prompt = [number, *LONG[: length - 1]]
        cold = serve(first, prompt, name=f"cold{number}")
        assert cold.computed_prompt_tokens == length
        warm = serve(second, prompt, name=f"warm{number}")
        assert warm.computed_prompt_tokens == (length % BLOCK or 1)
    assert "blocks/failed" not in second.counts
    assert not first.counts.get("blocks/dropped")


@each_kind
def test_conversation_continues_in_another_engine(engine: StartKind, name: str) -> None:
    engines = [engine(name, is_async=True) for _ in range(2)]
    check_conversation(*engines)


@each_kind
def test_both_halves_share_only_with_engines_of_their_size(text_model: Path, name: str) -> None:
    found = caches(text_model, KINDS[name].layers, "LBNHC")
    for tp_size in (1, 2):
        config = engine_config(text_model, kv_cache_dtype=KINDS[name].dtype)
        config.parallel_config.tensor_parallel_size = tp_size
        for seen in (found, generate_scheduler_kv_cache_config([found])):
            assert refusal(config, seen) is None
            sets = layer_sets_of(config, seen)
            assert all(each.is_opaque for each in sets)
            # Of MLA every rank has all.
            sizes = (1,) if name == "sparse MLA" else (tp_size,)
            assert readable_tp_sizes(sets, tp_size) == sizes
            assert own_tp_size(sets, tp_size) in sizes


@each_kind
def test_store_of_8_bits_is_refused(engine: StartKind, name: str) -> None:
    with pytest.raises(ConfigError, match=r"stored_dtype: .* Leave the option out"):
        engine(name, store={"stored_dtype": "fp8"})


def misses(engine: ToyEngine) -> dict[str, float]:
    """Serve a prompt, of which nothing may be loaded, and return the misses by reason."""
    assert serve(engine, LONG).computed_prompt_tokens == len(LONG)
    assert not engine.counts.get("blocks/loaded")
    found = {name.partition("misses/")[2]: count for name, count in engine.counts.items()}
    return {reason: count for reason, count in found.items() if reason and count}


@pytest.mark.parametrize("name", gate_tries(*KINDS))
def test_blocks_of_another_release_are_misses(
    engine: StartKind, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """These releases share plain blocks."""
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    serve(engine(name), LONG)
    monkeypatch.setattr("vllm.__version__", "0.32.0")
    assert set(misses(engine(name))) == {"missing"}, "it looks in another namespace"
    # If the objects lay in its namespace all the same:
    monkeypatch.setattr(facts, "vllm_release", lambda: "any")
    serve(engine(name), LONG)
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    assert misses(engine(name)).get("layout")


@pytest.mark.parametrize("name", gate_tries(*KINDS))
def test_blocks_of_another_kernel_are_misses(
    engine: StartKind, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    serve(engine(name), LONG)
    monkeypatch.setattr(layout_check, "attention_backend", lambda _: "OTHER")
    assert misses(engine(name)).get("layout")


@pytest.mark.parametrize("name", ["nvfp4", "int8", "turboquant"])
def test_blocks_with_heads_and_tokens_in_another_order_are_misses(
    engine: StartKind, name: str
) -> None:
    """They cannot be reordered: only the kernel knows which bytes belong to which token."""
    serve(engine(name, "LBNHC"), LONG)
    assert misses(engine(name, "LBHNC")).get("layout")


@pytest.mark.parametrize(
    "other",
    [nvfp4(1), nvfp4(4), replace(nvfp4(1), head_size=128, state_content_bytes=72)],
    ids=["fewer heads", "more heads", "fewer heads of as many bytes"],
)
def test_blocks_with_other_heads_are_misses(
    engine: StartKind, monkeypatch: pytest.MonkeyPatch, other: AttentionSpec
) -> None:
    monkeypatch.setitem(KINDS, "other", Kind("nvfp4", named(full=(4, other))))
    serve(engine("nvfp4"), LONG)
    assert set(misses(engine("other"))) == {"missing"}, "it looks in another namespace"
    monkeypatch.setattr(LayerSet, "facts", property(lambda _: ["equal"]))
    serve(engine("nvfp4"), LONG)
    assert misses(engine("other")).get("corrupt")
