# SPDX-License-Identifier: Apache-2.0
"""Finds the layout of vLLM's KV cache in which the blocks of all layers have equally many tokens.

vLLM's cache groups share one memory. If layers with a window have more or larger heads than the
others, a block of the same number of tokens has more bytes. In its usual layouts vLLM then gives
the smaller layers more tokens a block, and such blocks are not shared. In a layout with the axis of
blocks outermost, vLLM packs the layers of a group into a block, and all blocks have equally many
tokens. There the blocks of one layer do not follow each other, so copies are smaller. So it is
asked for only where layers differ.
"""

import logging
import sys
from collections.abc import Iterator
from typing import Any

from ecshare.plugin.compat import option
from kvshare.compat import has_packed_layouts, packed_layout

logger = logging.getLogger(__name__)

_MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
# In a packed layout vLLM gives kernels whole blocks, also those that take smaller ones only. All
# that work with blocks of these sizes take them whole, but some of ROCm's do not take 64.
_BLOCK_TOKENS = (16, 32)
# The fields of models that give their window layers another shape, and the usual ones.
_WINDOW_HEADS = "swa_num_key_value_heads"
_WINDOW_KEYS = "swa_head_dim"
_WINDOW_VALUES = "swa_v_head_dim"


def layout_for(vllm_config: Any) -> str | None:
    """Return the layout that keeps the blocks of this engine equal; None if any layout does, or
    if it is unknown.

    vLLM asks for it before the layers' caches are known, in a process that may not have the model.
    It takes another layout, with a warning, if an attention backend lacks this one.
    """
    try:
        return packed_layout() if _needs_packing(vllm_config) else None
    except Exception:
        # Models have many forms of configurations, and vLLM must start with any.
        logger.debug("kvshare asks for no KV cache layout", exc_info=True)
        return None


def layout_advice(vllm_config: Any) -> str:
    """Return what to do about blocks of different numbers of tokens, after a colon."""
    if not has_packed_layouts():
        return "set --block-size so that all are equal, if the model allows"
    if vllm_config.device_config.device_type == "cpu":
        return "on CPUs vLLM has no KV cache layout in which they are equal"
    return (
        "start vLLM with VLLM_KV_CACHE_LAYOUT=BLNHC, or BLHNC if its attention backend lacks that"
    )


def _needs_packing(vllm_config: Any) -> bool:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if not has_packed_layouts() or vllm_config.device_config.device_type == "cpu":
        return False
    if _MULTI_CONNECTOR in sys.modules:
        # With children that ask for different layouts MultiConnector refuses to start. A child is
        # not told of the others.
        return False
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return False  # all layers are one group
    if model.use_mla or model.is_hybrid or cache.block_size not in _BLOCK_TOKENS:
        return False
    models = [model]
    draft = option(vllm_config.speculative_config, "draft_model_config")
    if draft is not None:
        models.append(draft)
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    sizes = {size for each in models for size in _token_sizes(each, tp_size)}
    return len(sizes) > 1 and any(_has_windows(each.hf_text_config) for each in models)


def _token_sizes(model: Any, tp_size: int) -> Iterator[int]:
    """Yield how many numbers a rank keeps of a token, for each shape of the model's layers."""
    for heads, head_sizes in _shapes(model):
        yield max(1, heads // tp_size) * head_sizes


def _shapes(model: Any) -> Iterator[tuple[int, int]]:
    """Yield the number of KV heads, and the size of a key and a value together."""
    text, whole = model.hf_text_config, model.model_arch_config
    heads, size = int(whole.total_num_kv_heads), int(whole.head_size)
    overrides = option(whole, "per_layer_overrides")
    if overrides:
        for each in overrides:
            yield each.get("total_num_kv_heads", heads), 2 * each.get("head_size", size)
        return
    has_own_values = bool(option(text, _WINDOW_KEYS))
    values = option(text, "v_head_dim") if has_own_values else None
    yield heads, size + int(values or size)
    if option(text, _WINDOW_HEADS) or has_own_values:
        keys = int(option(text, _WINDOW_KEYS) or size)
        values = int(option(text, _WINDOW_VALUES) or keys)
        yield int(option(text, _WINDOW_HEADS) or heads), keys + values
    other = option(text, "attention_other_setting") or {}
    if other:
        other_size = int(other.get("head_dim") or size)
        yield int(other.get("num_attention_groups") or heads), 2 * other_size


def _has_windows(text: Any) -> bool:
    kinds = option(text, "layer_types")
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    names = ("sliding_window", "sliding_window_size", "attention_chunk_size")
    return any(option(text, name) for name in names)
