# SPDX-License-Identifier: Apache-2.0
"""Layer sets made from vLLM's cache groups, and the blocks that readers need."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PretrainedConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ecshare.plugin.ranks import Rank
from kvshare.chunks import layers
from kvshare.chunks.layers import (
    AttentionWindow,
    LayerSet,
    block_bytes,
    layer_sets,
    layer_sets_of,
    most_kv_heads,
    own_tp_size,
    readable_tp_sizes,
    refusal,
    shard_names_of,
    state_names_of,
)
from kvshare.chunks.prefix import Chunk, ChunkKey
from kvshare.compat import has_packed_layouts
from tests.releases import needs_packed_layouts

BLOCKS, HEADS, TOKENS = 5, 2, 16
SHAPE: dict[str, Any] = {"block_size": TOKENS, "dtype": torch.float32, "head_size": 8}
FULL = FullAttentionSpec(num_kv_heads=HEADS, **SHAPE)
MLA = MLAAttentionSpec(num_kv_heads=1, **SHAPE)
LOCAL = ChunkedLocalAttentionSpec(num_kv_heads=HEADS, attention_chunk_size=48, **SHAPE)
PER_TOKEN_HEAD = replace(
    FULL,
    dtype=torch.int8,
    kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
    state_content_bytes=2 * (8 + 4),
)
STATE_BYTES = 3 * 8 * 2 + 4 * 8 * 8 * 4
STATE = MambaSpec(
    block_size=TOKENS,
    shapes=((3, 8), (4, 8, 8)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=FULL.page_size_bytes,
    mamba_cache_mode="align",
)


def window(num_tokens: int, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(num_kv_heads=HEADS, sliding_window=num_tokens, **SHAPE, **more)


def engine(**more: Any) -> Any:
    """Return the fields of a VllmConfig that `refusal` reads; `more`: other values for them."""
    fields: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "distributed_executor_backend": "mp",
            "world_size": 2,
        },
        "device_config": {"device_type": "cpu"},
        "scheduler_config": {"enable_chunked_prefill": True},
        "cache_config": {
            "prefix_caching_hash_algo": "sha256",
            "block_size": TOKENS,
            "enable_prefix_caching": True,
            "cache_dtype": "auto",
            "calculate_kv_scales": False,
            "prefix_match_unit": None,
        },
    }
    parts = {
        name: SimpleNamespace(**{field: more.get(field, usual) for field, usual in part.items()})
        for name, part in fields.items()
    }
    return SimpleNamespace(**parts)


def cache(*specs: Any) -> KVCacheConfig:
    """Return a config with one group of two layers per spec; the groups alternate in the model."""
    groups = [
        KVCacheGroupSpec([f"l.{layer * len(specs) + group}" for layer in range(2)], spec)
        for group, spec in enumerate(specs)
    ]
    return KVCacheConfig(BLOCKS, [], groups)


@pytest.mark.parametrize(
    "specs",
    [
        (FULL,),
        (FULL, FULL),
        (FULL, window(64), window(64)),
        (window(64),),
        (FULL, LOCAL),
        (MLA,),
        (replace(MLA, cache_dtype_str="fp8_ds_mla", state_content_bytes=28),),
        (replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),),
        (STATE, FULL, STATE),
        (STATE, MLA),
    ],
)
def test_supported_caches_are_not_refused(specs: tuple[Any, ...]) -> None:
    assert refusal(engine(), cache(*specs)) is None
    assert refusal(engine(enable_prefix_caching=False), cache(*specs)) is None
    assert refusal(engine(device_type="cuda"), cache(*specs)) is None
    assert refusal(engine(pipeline_parallel_size=2), cache(*specs)) is None
    alone = engine(distributed_executor_backend="external_launcher", world_size=1)
    assert refusal(alone, cache(*specs)) is None


class Derived(FullAttentionSpec):
    """A spec whose layout we do not know."""


LEAVE_OUT = "leave --kv-transfer-config out"
OTHER_DTYPE = "set --kv-cache-dtype to another one, such as auto or fp8"


@pytest.mark.parametrize(
    ("config", "specs", "reason", "remedy"),
    [
        (engine(), (), "no KV cache", LEAVE_OUT),
        (engine(), (FULL, Derived(num_kv_heads=HEADS, **SHAPE)), "type Derived", LEAVE_OUT),
        (engine(), (replace(FULL, tokens_per_state=2),), "several tokens in one cell", LEAVE_OUT),
        (engine(), (replace(MLA, model_version="deepseek_v4"),), "deepseek_v4", LEAVE_OUT),
        (engine(), (MLA, replace(MLA, head_size=16)), "several kinds of MLA", LEAVE_OUT),
        (engine(), (replace(FULL, non_causal=True),), "later tokens", LEAVE_OUT),
        (
            engine(),
            (replace(FULL, num_head_slots=2),),
            "something else than heads",
            "set --attention-backend to another one",
        ),
        (
            engine(),
            (FULL, replace(window(64), block_size=32)),
            "blocks of 32 tokens",
            "on CPUs vLLM has no KV cache layout" if has_packed_layouts() else "set --block-size",
        ),
        (
            engine(),
            (FULL, replace(STATE, mamba_cache_mode="none")),
            "in mode 'align'",
            "with --enable-prefix-caching",
        ),
        (
            engine(),
            (FULL, replace(STATE, num_speculative_blocks=2)),
            "speculative",
            "leave --speculative-config out",
        ),
        (
            engine(),
            (FULL, replace(STATE, block_size=32)),
            "blocks of 32 tokens",
            "leave --mamba-block-size out",
        ),
        (engine(), (STATE, STATE), "recurrent layers only", LEAVE_OUT),
        (
            engine(decode_context_parallel_size=2),
            (FULL,),
            "ranks may share the tokens of a block",
            "leave --decode-context-parallel-size out",
        ),
        (
            engine(prefill_context_parallel_size=2),
            (FULL,),
            "ranks may share the tokens of a block",
            "leave --prefill-context-parallel-size out",
        ),
        (
            engine(prefix_caching_hash_algo="xxhash"),
            (FULL,),
            "--prefix-caching-hash-algo is xxhash",
            "set one of sha256, sha256_cbor",
        ),
        (
            engine(calculate_kv_scales=True),
            (FULL,),
            "calculate_kv_scales is on, and each engine would scale its KV in its own way",
            "leave it out",
        ),
        (
            engine(prefix_match_unit=8),
            (FULL,),
            "prefix_match_unit is set, and blocks are hashed in pieces",
            "leave it out",
        ),
        (
            engine(enable_prefix_caching=False, enable_chunked_prefill=False),
            (MLA,),
            "cannot continue a prompt",
            "turn --enable-prefix-caching on, and on CPUs use one with AMX",
        ),
        (
            engine(cache_dtype="mine"),
            (FULL,),
            "the KV cache dtype mine is a plugin's",
            OTHER_DTYPE,
        ),
        (
            engine(cache_dtype="int8_per_token_head"),
            (replace(FULL, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),),
            "where a KV cache of quantization INT8_PER_TOKEN_HEAD keeps its scales is unknown",
            OTHER_DTYPE,
        ),
        (
            engine(),
            (PER_TOKEN_HEAD,),
            "quantization INT8_PER_TOKEN_HEAD and --kv-cache-dtype is auto",
            "leave kv_cache_dtype out of --speculative-config",
        ),
    ],
)
def test_unsupported_engines_are_refused_with_the_reason_and_what_helps(
    config: Any, specs: tuple[Any, ...], reason: str, remedy: str
) -> None:
    sentence = refusal(config, cache(*specs)) or ""
    assert reason in sentence
    assert remedy in sentence.partition(reason)[2]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (engine(device_type="xpu"), "devices of the kind xpu"),
        (engine(distributed_executor_backend="external_launcher"), "external_launcher"),
    ],
)
def test_deployments_of_unsupported_kinds_are_refused(config: Any, says: str) -> None:
    assert says in (refusal(config, cache(FULL)) or "")


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ((STATE, replace(STATE, page_size_padded=None)), "states of another"),
        ((FULL, replace(LOCAL, num_kv_heads=4)), "look back unequally far"),
    ],
)
@needs_packed_layouts
def test_groups_of_kinds_that_vllm_does_not_make_yet_are_refused(
    specs: tuple[Any, ...], reason: str
) -> None:
    found = one_group(*specs)
    found.kv_cache_groups.append(KVCacheGroupSpec(["l.9"], FULL))
    sentence = refusal(engine(), found) or ""
    assert reason in sentence
    assert LEAVE_OUT in sentence


def test_stage_without_a_layer_of_a_group_is_refused() -> None:
    found = cache(FULL, window(64))
    found.kv_cache_groups[1].layer_names.clear()
    sentence = refusal(engine(), found) or ""
    assert "no layer of a cache group" in sentence
    assert sentence.endswith("lower --pipeline-parallel-size")


def test_states_are_refused_if_vllm_does_not_hand_them_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KVConnectorBlockState, "__dataclass_fields__", {})
    assert "does not hand over states" in (refusal(engine(), cache(FULL, STATE)) or "")


def test_states_are_layer_sets_after_those_of_attention() -> None:
    config = cache(STATE, FULL, STATE)
    attention, states = layer_sets(config, 1, HEADS)
    assert (attention.groups, attention.is_recurrent) == ((1,), False)
    assert (states.groups, states.is_recurrent, states.number) == ((0, 2), True, 1)
    assert [name for name, _ in states.layers] == ["l.0", "l.2", "l.3", "l.5"]
    assert [group for _, group in states.layers] == [0, 1, 0, 1]
    # The padding of a page is not stored.
    assert block_bytes(config, states) == 4 * STATE_BYTES
    assert block_bytes(config, attention) == 2 * FULL.page_size_bytes


@pytest.mark.parametrize(
    "other",
    [
        replace(STATE, shapes=((3, 8), (4, 8, 16))),
        replace(STATE, dtypes=(torch.float32, torch.float32)),
        replace(STATE, mamba_type=MambaAttentionBackendEnum.GDN_ATTN),
    ],
)
def test_another_kind_of_state_is_another_namespace(other: MambaSpec) -> None:
    facts = [layer_sets(cache(FULL, spec), 1, HEADS)[1].facts for spec in (STATE, other)]
    assert facts[0] != facts[1]


def test_large_states_are_divided_into_several_objects() -> None:
    large = replace(STATE, shapes=((1, 5 << 20),), dtypes=(torch.int32,), page_size_padded=None)
    groups = [KVCacheGroupSpec([f"l.{number}" for number in range(4)], large)]
    _, *states = layer_sets(
        KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["a.0"], FULL), *groups]), 1, HEADS
    )
    assert [len(each.layers) for each in states] == [1, 1, 1, 1]
    assert state_names_of(states, 1) == ("t0of1-s1", "t0of1-s2", "t0of1-s3", "t0of1-s4")


def test_states_are_shared_only_with_engines_of_the_same_tp_size() -> None:
    sets = layer_sets(cache(FULL, STATE), 2, HEADS)
    assert (own_tp_size(sets, 2), readable_tp_sizes(sets, 2)) == (2, (2,))
    assert shard_names_of(sets, 2) == ("t0of2", "t1of2")
    assert state_names_of(sets, 2) == ("t0of2-s1", "t1of2-s1")
    assert [sets[1].is_written_by(Rank(rank, 2)) for rank in range(2)] == [True, True]


def test_state_that_every_rank_holds_is_stored_by_one() -> None:
    sets = layer_sets(cache(FULL, replace(STATE, tp_replicated=True)), 2, HEADS)
    assert state_names_of(sets, 2) == ("t0of1-s1",)
    assert [sets[1].is_written_by(Rank(rank, 2)) for rank in range(2)] == [True, False]


def test_replicated_states_of_more_ranks_than_heads_are_readable_at_their_own_size() -> None:
    """With equal states on all ranks, the heads alone would give another size."""
    one_head = replace(FULL, num_kv_heads=1)
    sets = layer_sets(cache(one_head, replace(STATE, tp_replicated=True)), 4, 2)
    assert readable_tp_sizes(sets, 4) == (own_tp_size(sets, 4),) == (4,)


def test_states_that_every_rank_holds_are_not_mixed_with_divided_ones() -> None:
    sets = layer_sets(cache(FULL, STATE, replace(STATE, tp_replicated=True)), 2, HEADS)
    assert [each.total_heads for each in sets if each.is_recurrent] == [2, 1]


def test_hisparse_pools_are_refused() -> None:
    seen = cache(FULL)
    seen.hisparse_host_num_blocks = 64
    sentence = refusal(engine(), seen) or ""
    assert "HiSparse keeps blocks in a pool" in sentence
    assert sentence.endswith("leave HiSparseConnector and --attention-config.hisparse_config out")


def test_groups_with_equal_windows_form_one_layer_set() -> None:
    """vLLM's grouping does not matter: engines must agree on the order of the layers."""
    full, short = layer_sets(cache(window(64), FULL, window(64)), 1, HEADS)
    assert (full.window, full.groups) == (AttentionWindow(), (1,))
    assert full.layers == (("l.1", 0), ("l.4", 0))
    assert (short.window, short.groups) == (AttentionWindow(sliding_tokens=64), (0, 2))
    assert short.layers == (("l.0", 0), ("l.2", 1), ("l.3", 0), ("l.5", 1))
    assert [each.facts for each in (full, short)] == [["full", 2, 2], ["window 64", 4, 2]]


def test_layers_of_different_shapes_form_separate_layer_sets() -> None:
    first, second = layer_sets(cache(replace(FULL, head_size=16), FULL), 1, HEADS)
    assert [name for name, _ in first.layers] == ["l.1", "l.3"]
    assert [name for name, _ in second.layers] == ["l.0", "l.2"]


def test_group_with_shapes_that_vllm_does_not_tell_apart_is_refused() -> None:
    """Only workers can refuse it: vLLM gives the scheduler process the shape of one layer only."""
    same_bytes = FullAttentionSpec(num_kv_heads=2 * HEADS, **SHAPE | {"head_size": 4})
    for other, why_not in ((FULL, None), (same_bytes, "another shape")):
        found = one_group(FULL, other)
        seen = generate_scheduler_kv_cache_config([found])
        assert refusal(engine(), seen) is None
        sentence = refusal(engine(), found)
        assert sentence is None if why_not is None else why_not in (sentence or "")
    # As in earlier releases.
    found.kv_cache_tensors = []
    assert "another shape" in (refusal(engine(), found) or "")


def test_shapes_that_vllm_does_not_tell_apart_are_refused_with_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = one_group(FULL, FullAttentionSpec(num_kv_heads=2 * HEADS, **SHAPE | {"head_size": 4}))
    monkeypatch.setattr(layers, "has_packed_layouts", lambda: True)
    assert (refusal(engine(), found) or "").endswith(f"cannot tell: {LEAVE_OUT}")
    config = engine()
    config.speculative_config = WITH_OWN_DRAFT
    sentence = refusal(config, found) or ""
    assert sentence.endswith("leave the draft model out (--speculative-config)")
    monkeypatch.setattr(layers, "has_packed_layouts", lambda: False)
    assert (refusal(config, found) or "").endswith("use vLLM 0.32 or later")


def one_group(*specs: Any) -> KVCacheConfig:
    """Return a config with one group of two layers per spec, as vLLM lays it out."""
    layers = {f"l.{2 * kind + n}": spec for kind, spec in enumerate(specs) for n in range(2)}
    group = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=layers)
    tensors = [
        KVCacheTensor(
            size=1 << 20,
            layers=[f"l.{2 * kind + n}" for n in range(2)],
            layer_stride=spec.page_size_bytes * BLOCKS,
            block_stride=spec.page_size_bytes,
        )
        for kind, spec in enumerate(specs)
    ]
    return KVCacheConfig(BLOCKS, tensors, [KVCacheGroupSpec(list(layers), group)])


WITH_OWN_DRAFT = SimpleNamespace(draft_model_config=SimpleNamespace(use_mla=False))
GQA_DRAFT = FullAttentionSpec(num_kv_heads=4, **SHAPE)
INDEXER = MLAAttentionSpec(num_kv_heads=1, **SHAPE | {"head_size": 12, "dtype": torch.uint8})


@needs_packed_layouts
@pytest.mark.parametrize(
    ("specs", "draft", "names", "sizes"),
    [
        ((FULL, GQA_DRAFT), WITH_OWN_DRAFT, ("t0of2", "t1of2", "t0of2-s1", "t1of2-s1"), (2,)),
        # Every rank holds all of an MLA cache, and a part of the draft's heads.
        ((MLA, GQA_DRAFT), WITH_OWN_DRAFT, ("t0of1", "t0of2-s1", "t1of2-s1"), (2,)),
        ((INDEXER, MLA), None, ("t0of1", "t0of1-s1"), (1,)),
        ((MLA, INDEXER), None, ("t0of1", "t0of1-s1"), (1,)),
    ],
    ids=["draft", "draft beside MLA", "indexer first", "indexer last"],
)
def test_shapes_of_one_group_are_layer_sets_that_both_halves_agree_on(
    specs: tuple[Any, ...], draft: Any, names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    found, config = one_group(*specs), engine()
    config.speculative_config = draft
    seen = generate_scheduler_kv_cache_config([found])
    assert refusal(config, found) is None
    assert refusal(config, seen) is None
    own, theirs = (
        layer_sets(each, 2, HEADS, has_own_draft=draft is not None) for each in (seen, found)
    )
    for each, worker in zip(own, theirs, strict=True):
        assert (each.number, each.groups, each.layers) == (
            worker.number,
            worker.groups,
            worker.layers,
        )
        assert each.shard_names(2) == worker.shard_names(2)
        assert block_bytes(seen, each) == block_bytes(found, worker)
        assert block_bytes(found, worker) == 2 * specs[each.number].page_size_bytes
        assert worker.num_heads == specs[each.number].num_heads
    assert shard_names_of(own, own_tp_size(own, 2)) == names
    assert readable_tp_sizes(own, 2) == sizes
    assert own[0].facts != own[1].facts


@needs_packed_layouts
def test_single_rank_with_a_draft_of_another_shape_reads_only_its_own_size() -> None:
    sets = layer_sets(one_group(FULL, GQA_DRAFT), 1, HEADS, has_own_draft=True)
    assert (own_tp_size(sets, 1), readable_tp_sizes(sets, 1)) == (1, (1,))


@needs_packed_layouts
def test_draft_without_mla_beside_mla_is_refused_if_no_option_names_a_draft() -> None:
    """Each rank would be taken to hold all of it."""
    sentence = refusal(engine(), one_group(MLA, GQA_DRAFT)) or ""
    assert sentence.endswith(f"not a draft model's: {LEAVE_OUT}")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 4),
        ({"swa_num_key_value_heads": 8}, 8),  # MiMo-V2's window layers
        ({"attention_other_setting": {"num_attention_groups": 8}}, 8),  # Step 3.5's
        ({"block_configs": [{"attention": {"n_heads_in_group": 2}}]}, 16),  # Nemotron-NAS
        ({"num_kv_heads_per_layer": [2, 8, 4]}, 8),
        ({"num_global_key_value_heads": 2}, 4),
        ({"num_key_value_heads": None, "rope": {"type": "default"}}, 4),
    ],
)
def test_most_kv_heads_returns_the_largest_count_of_any_layer(
    more: dict[str, Any], expected: int
) -> None:
    """With eight ranks, each holds one of four heads in some layers and one of eight in others."""
    text = PretrainedConfig(num_attention_heads=32, **{"num_key_value_heads": 4, **more})
    model = SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: 4)
    assert most_kv_heads(model) == expected


def test_ranks_that_share_heads_of_the_model_but_not_of_its_draft_store_all_parts() -> None:
    """On four ranks the layers of both have one head each, so they are one layer set."""
    config = engine(tensor_parallel_size=4)
    config.model_config, draft = (model_of(heads=2), model_of(heads=4))
    one_head = cache(replace(FULL, num_kv_heads=1))
    (alone,) = layer_sets_of(config, one_head)
    assert alone.own_shard_name(Rank(0, 4)) == alone.own_shard_name(Rank(1, 4))
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    (both,) = layer_sets_of(config, one_head)
    assert len({both.own_shard_name(Rank(rank, 4)) for rank in range(4)}) == 4


def model_of(heads: int) -> Any:
    """Return the fields of a ModelConfig that count its KV heads."""
    text = PretrainedConfig(num_attention_heads=8, num_key_value_heads=heads)
    return SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: heads, use_mla=False)


def test_shard_names_are_unique_and_replicas_share_one() -> None:
    sets = layer_sets(cache(FULL, window(64)), 1, HEADS)
    assert shard_names_of(sets, 2) == ("t0of2", "t1of2", "t0of2-s1", "t1of2-s1")
    (replicated,) = layer_sets(cache(MLA), 1, HEADS)
    assert shard_names_of((replicated,), 2) == ("t0of1",)
    assert [replicated.is_written_by(Rank(rank, 2)) for rank in range(2)] == [True, False]
    assert all(sets[0].is_written_by(Rank(rank, 2)) for rank in range(2))


@given(st.integers(1, 100), st.integers(0, 3), st.integers(0, 1000))
def test_first_needed_token_equals_the_first_that_vllm_keeps(
    size: int, extra: int, num_tokens: int
) -> None:
    spec = window(size, extra_retained_tokens=extra)
    manager: Any = SimpleNamespace(
        sliding_window=size, extra_retained_tokens=extra, attention_chunk_size=size
    )
    kept = SlidingWindowManager.get_num_skipped_tokens(manager, num_tokens)
    assert AttentionWindow.of(spec).first_needed(num_tokens) == kept
    local = replace(LOCAL, attention_chunk_size=size)
    kept = ChunkedLocalAttentionManager.get_num_skipped_tokens(manager, num_tokens)
    assert AttentionWindow.of(local).first_needed(num_tokens) == kept


@given(
    st.sampled_from(
        [
            AttentionWindow(),
            AttentionWindow(sliding_tokens=1),
            AttentionWindow(sliding_tokens=7),
            AttentionWindow(sliding_tokens=64),
            AttentionWindow(chunk_tokens=48),
        ]
    ),
    st.integers(1, 4),
    st.integers(1, 400),
)
def test_stored_blocks_suffice_for_every_prefix(
    window: AttentionWindow, chunk_blocks: int, num_tokens: int
) -> None:
    """The prefix ends at any token, and is divided into chunks as in `prefix`."""
    layer_set = LayerSet(0, (0,), (("l.0", 0),), window, HEADS, HEADS)
    blocks, rest = divmod(num_tokens, TOKENS)
    ends = [*range(chunk_blocks, blocks, chunk_blocks), *([blocks] if blocks else [])]
    chunks = [
        Chunk(ChunkKey(b""), first, end - first, first * TOKENS, (end - first) * TOKENS)
        for first, end in zip([0, *ends], ends, strict=False)
    ]
    if rest:
        chunks.append(Chunk(ChunkKey(b""), blocks, 1, blocks * TOKENS, rest))
    stored = {
        block
        for chunk in chunks
        for block in range(
            layer_set.first_block(chunk, TOKENS), chunk.first_block + chunk.num_blocks
        )
    }
    # A reader may load one token less, to compute the last one itself.
    for end in (num_tokens, num_tokens - 1):
        needed = set(range(window.first_needed(end) // TOKENS, -(-end // TOKENS)))
        assert needed <= stored
