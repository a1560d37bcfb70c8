# SPDX-License-Identifier: Apache-2.0
"""Differences between vLLM releases and devices in how they keep KV, and private functions for it.

Only this module asks about them; ecshare/plugin/compat.py has those that concern both connectors.
"""

import platform
import re
from collections.abc import Callable, Hashable
from typing import Any

from ecshare.plugin.compat import option

# vLLM's minor releases whose attention kernels fill KV blocks alike.
_LAYOUT_GENERATIONS = {"0.30": "1", "0.31": "1", "0.32": "1"}
# What `+` leads in is the build, for CPUs say. Any other addition is a release of its own.
_RELEASE = re.compile(r"([0-9]+\.[0-9]+)\.[0-9]+(\+.*)?")


def layout_generation() -> str:
    """Return how vLLM fills KV blocks, as far as its release says: equal for releases that agree.

    A release that nobody has compared yet, one in development too, is a generation of its own.
    """
    release = _RELEASE.fullmatch(vllm_release())
    return _LAYOUT_GENERATIONS.get(release[1] if release else "", f"vLLM {vllm_release()}")


def vllm_release() -> str:
    """Return the name of this vLLM release, with that of its build."""
    from vllm import __version__

    return __version__


def device_name() -> str:
    """Return what vLLM calls the kind of device that it runs on."""
    from vllm.platforms import current_platform

    return str(current_platform.device_name)


def cpu_attention_kernel(
    dtype: Any, block_tokens: int, head_elements: int, cache_dtype: Any
) -> str:
    """Return the name of the kernel that lays out the inside of a KV block on this CPU.

    vLLM has no public way to ask. Where its private one is missing, the name is the machine's
    architecture and vLLM's version: engines that would lay out blocks alike may then not share.
    """
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return f"{platform.machine()}-{vllm_release()}"
    return str(_get_attn_isa(dtype, block_tokens, head_elements, cache_dtype))


def hashed_adapter(request: Any) -> Hashable:
    """Return how the block hashes of `request` identify its LoRA adapter; before 0.31: its name."""
    try:
        from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
    except ImportError:
        return str(request.lora_request.lora_name)
    return tuple(_gen_lora_extra_hash_keys(request))


def event_extra_keys(
    request: Any, first_block: int, end_block: int, block_tokens: int
) -> list[tuple[Any, ...] | None] | None:
    """Return the extra keys that vLLM's KV events give for these blocks of `request`."""
    from vllm.v1.core import kv_cache_utils

    keys, at = [], 0
    for block in range(first_block, end_block):
        start = block * block_tokens
        extra, at = kv_cache_utils.generate_block_hash_extra_keys(
            request, start, start + block_tokens, at
        )
        keys.append(extra)
    # Before 0.31 they went into events as they go into hashes.
    published = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return published(keys) if published else keys


def cache_hit_source(name: str) -> Any:
    """Return vLLM's name for the source of cached tokens. Only for releases that ask (0.32 on)."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource(name)


def most_blocks(manager: Any) -> list[tuple[int, int | None]]:
    """Return for each cache group of vLLM's KV cache manager how many tokens a block of it holds,
    and the most blocks of it that a request holds at once. None: as many as its tokens take."""
    name = "max_admission_blocks_per_request"
    return [
        # Before 0.31 it was private.
        (each.block_size, getattr(each, name, None) or option(each, f"_{name}"))
        for each in manager.coordinator.single_type_managers
    ]


def repacks_blocks() -> bool:
    """Whether the attention kernels of this device mix the tokens of a block when they fill it."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def erase_slots(blocks: Any, first_slot: int, dtype: Any, cache_dtype: str) -> None:
    """Zero all tokens from `first_slot` on in `blocks` [block, head, token, content] of a CPU.

    vLLM's own kernel does it, because only it knows where it has put a token. `dtype`: the model's.

    Raises:
        Exception: this release has no such kernel, or another one. The type depends on the release.
    """
    import torch
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_blocks, num_heads, block_tokens, content = blocks.shape
    keys, values = blocks.view(num_blocks, num_heads, 2 * block_tokens, content // 2).chunk(2, 2)
    slots = torch.arange(first_slot, num_blocks * block_tokens)
    nothing = torch.zeros(len(slots), num_heads, content // 2, dtype=dtype)
    kernel = _get_attn_isa(dtype, block_tokens, content // 2, cache_dtype)
    options: dict[str, Any] = {}
    if cache_dtype.startswith("fp8"):
        options["kv_cache_dtype"] = cache_dtype
    _custom_ops.cpu_attn_reshape_and_cache(nothing, nothing, keys, values, slots, kernel, **options)


def device_copier() -> Callable[[Any, Any, Any], None] | None:
    """Return what queues copies between host and GPU on the current stream, by their addresses.

    It takes arrays of int64 (sources, targets, bytes). vLLM has one call for all of them; without
    it they go one by one, by the bindings of CUDA that torch requires. None: there are neither.
    """
    import torch

    try:
        from vllm import _custom_ops

        batch = _custom_ops.swap_blocks_batch
    except (ImportError, AttributeError):
        return _copier_one_by_one()

    def copy(sources: Any, targets: Any, sizes: Any) -> None:
        batch(torch.from_numpy(sources), torch.from_numpy(targets), torch.from_numpy(sizes))

    return copy


def _copier_one_by_one() -> Callable[[Any, Any, Any], None] | None:
    import torch

    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault

    def copy(sources: Any, targets: Any, sizes: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for source, target, size in zip(
            sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
        ):
            (error,) = runtime.cudaMemcpyAsync(target, source, size, kind, stream)
            if error:
                raise RuntimeError(f"cudaMemcpyAsync: {error}")

    return copy


def has_cache_operation(layer: Any) -> bool:
    """Whether `fill_cache` can have vLLM's attention layer write to its KV cache."""
    if not callable(option(option(layer, "impl"), "do_kv_cache_update")):
        return False
    return hasattr(layer, "kv_lora_rank") or not option(
        layer.get_attn_backend(), "forward_includes_kv_cache_update"
    )


def attention_backend(layer: Any) -> str:
    """Return vLLM's name for what computes the attention of `layer`; "unknown" without a layer."""
    return "unknown" if layer is None else str(layer.get_attn_backend().get_name())


def fill_cache(layer: Any, known: Callable[[str, int], Any], slots: Any) -> int:
    """Have `layer` write known keys and values, equal ones for each head, to `slots` of its cache.

    `known`: returns a tensor [slot, element] by its name and the number of elements. Returns how
    many elements were written for one token and head.

    Raises:
        Exception: whatever vLLM's operation raises.
    """
    update = layer.impl.do_kv_cache_update
    if hasattr(layer, "kv_lora_rank"):  # MLA: one latent vector a token, and a part with positions
        latent, position = layer.kv_lora_rank, layer.qk_rope_head_dim
        parts = known("key", latent), known("value", position).unsqueeze(1)
        update(*parts, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)
        return int(latent + position)
    widths = layer.head_size, layer.head_size_v
    keys, values = (
        known(name, width).unsqueeze(1).repeat(1, layer.num_kv_heads, 1)
        for name, width in zip(("key", "value"), widths, strict=True)
    )
    update(layer, keys, values, layer.kv_cache, slots)
    return int(sum(widths))
