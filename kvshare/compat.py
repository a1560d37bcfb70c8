# SPDX-License-Identifier: Apache-2.0
"""Differences between vLLM releases and devices in how they keep KV, and private vLLM functions.

Only this module depends on them; those of both connectors are in ecshare/plugin/compat.py.
"""

import ctypes
import platform
import re
from collections.abc import Callable, Hashable
from typing import Any

from ecshare.plugin.compat import option

# Minor releases of vLLM with equal values have attention kernels that fill KV blocks alike.
_LAYOUT_GENERATIONS = {"0.30": "1", "0.31": "1", "0.32": "1"}
# A suffix after `+` names the build, such as "cpu". With any other suffix it is another release.
_RELEASE = re.compile(r"([0-9]+\.[0-9]+)\.[0-9]+(\+.*)?")


def layout_generation() -> str:
    """Return the generation of vLLM's block layout: equal for releases that fill KV blocks alike.

    A release that was not compared with others, such as a development build, has its own one.
    """
    release = _RELEASE.fullmatch(vllm_release())
    return _LAYOUT_GENERATIONS.get(release[1] if release else "", f"vLLM {vllm_release()}")


def vllm_release() -> str:
    """Return the version of vLLM, with the name of its build."""
    from vllm import __version__

    return __version__


def device_name() -> str:
    """Return vLLM's name for the kind of device that it runs on."""
    from vllm.platforms import current_platform

    return str(current_platform.device_name)


def cpu_attention_kernel(
    dtype: Any, block_tokens: int, head_elements: int, cache_dtype: Any
) -> str:
    """Return the name of the kernel that lays out the inside of a KV block on this CPU.

    vLLM has no public function for this. If the private one is missing, the name is the machine's
    architecture and vLLM's version: then engines with equal layouts may fail to share.
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
    # Before 0.31 events contain the keys in the form that is hashed.
    published = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return published(keys) if published else keys


def cache_hit_source(name: str) -> Any:
    """Return vLLM's enum value for a source of cached tokens. Only from vLLM 0.32 on."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource(name)


def most_blocks(manager: Any) -> list[tuple[int, int | None]]:
    """Return for each cache group of vLLM's KV cache manager the tokens per block, and the largest
    number of blocks that a request holds at a time; None if that depends only on its tokens."""
    return [
        (each.block_size, _most_blocks(each)) for each in manager.coordinator.single_type_managers
    ]


def _most_blocks(manager: Any) -> int | None:
    """Return the most blocks that a request holds in one cache group; None: any number."""
    spec = manager.kv_cache_spec
    if option(spec, "mamba_cache_mode") == "align":
        # As `MambaSpec.max_memory_usage_bytes` counts them.
        extra = ("num_speculative_blocks", "num_prefill_checkpoint_blocks")
        return 2 + sum(int(option(spec, name) or 0) for name in extra)
    name = "max_admission_blocks_per_request"
    # Before 0.31 the attribute was private.
    found = getattr(manager, name, None) or option(manager, f"_{name}")
    return None if found is None else int(found)


def start_loads_first(output: Any) -> None:
    """Have the workers start a step's loads before they compute; `output`: its `SchedulerOutput`.

    From 0.32 on vLLM starts asynchronous loads after the forward pass of their step, so as not to
    delay its launch. They then end in the next step at best, and begin on a GPU when the pass has
    ended. To start a load of 8,192 tokens takes us a millisecond. The field says that a request of
    the step waits for its load; vLLM's own HiSparseConnector sets it for the same purpose.
    """
    if hasattr(output, "has_sync_kv_loads"):
        output.has_sync_kv_loads = True


def hands_over_states() -> bool:
    """Return whether vLLM tells connectors which blocks hold states of recurrent layers."""
    try:
        from vllm.v1.core.sched.output import KVConnectorBlockState
    except ImportError:
        return False
    return "boundary_state_offloads" in KVConnectorBlockState.__dataclass_fields__


def states_of_step(output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """Return the states that vLLM hands over with a step's `SchedulerOutput`.

    For each request: (cache group, block, tokens). After the step's forward pass, and until the
    next one, the block holds the group's state after exactly these tokens of the request.
    """
    state = option(output, "kv_connector_block_state")
    return dict(option(state, "boundary_state_offloads") or {})


def cached_blocks(
    manager: Any, block_hash: bytes, groups: list[int], num_tokens: int
) -> dict[int, int]:
    """Return the block of each cache group in `groups` whose hash in vLLM's prefix cache is that of
    `num_tokens` tokens; empty if a group has none."""
    found = manager.block_pool.get_cached_block(block_hash, groups) or ()
    if any(option(block, "block_hash_num_tokens") != num_tokens for block in found):
        return {}
    return {group: block.block_id for group, block in zip(groups, found, strict=False)}


def prefix_index(manager: Any) -> object:
    """Return the index of vLLM's prefix cache, another object after each reset; None if this
    release keeps none there."""
    return option(option(manager, "block_pool"), "cached_block_hash_to_block")


def has_packed_layouts() -> bool:
    """Return whether vLLM has KV cache layouts that pack all layers of a group into a block."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return False
    return {"BLNHC", "BLHNC"} <= set(KVCacheLayout.__members__)


def packed_layout() -> str:
    """Return the name of the packed layout that most attention backends of this device have."""
    from vllm.platforms import current_platform

    # FlashInfer and its kin want heads outside tokens on these GPUs.
    is_blackwell = current_platform.is_device_capability_family(100)
    return "BLHNC" if is_blackwell else "BLNHC"


def repacks_blocks() -> bool:
    """Return whether this device's attention kernels interleave the tokens of a block."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def erase_slots(blocks: Any, first_slot: int, dtype: Any, cache_dtype: str) -> None:
    """Zero all tokens from `first_slot` on in `blocks` [block, head, token, content] of a CPU.

    This uses vLLM's own kernel, because only it knows where it has put a token. `dtype`: the
    model's.

    Raises:
        Exception: this release lacks the kernel, or has another one. The type depends on the
            release.
    """
    import torch
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_blocks, num_heads, block_tokens, content = blocks.shape
    keys, values = blocks.view(num_blocks, num_heads, 2 * block_tokens, content // 2).chunk(2, 2)
    slots = torch.arange(first_slot, num_blocks * block_tokens)
    zeros = torch.zeros(len(slots), num_heads, content // 2, dtype=dtype)
    kernel = _get_attn_isa(dtype, block_tokens, content // 2, cache_dtype)
    options: dict[str, Any] = {}
    if cache_dtype.startswith("fp8"):
        options["kv_cache_dtype"] = cache_dtype
    _custom_ops.cpu_attn_reshape_and_cache(zeros, zeros, keys, values, slots, kernel, **options)


class _CopyAttributes(ctypes.Structure):
    """CUDA's `CUmemcpyAttributes`."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),  # for memory that CUDA did not allocate
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = _CopyAttributes(source_access_order=1)


def device_copier() -> Callable[[Any, Any, Any], None] | None:
    """Return a function that queues copies between host and GPU addresses on the current stream.

    It takes three int64 arrays: sources, targets and sizes in bytes. The stream must not be CUDA's
    default one. vLLM has one call for all copies; without vLLM CUDA's driver is called, as vLLM
    does. None if the driver is missing too, or older than CUDA 12.8.
    """
    import torch

    try:
        from vllm import _custom_ops

        batch = _custom_ops.swap_blocks_batch
    except (ImportError, AttributeError):
        return _copier_of_driver()

    def copy(sources: Any, targets: Any, sizes: Any) -> None:
        batch(torch.from_numpy(sources), torch.from_numpy(targets), torch.from_numpy(sizes))

    return copy


def _copier_of_driver() -> Callable[[Any, Any, Any], None] | None:
    import torch

    try:
        # The exported name has the signature of CUDA 12.8 in later drivers, too.
        batch = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_size_t
    batch.argtypes = [*[pointer] * 3, number, *[pointer] * 2, number, *[pointer] * 2]

    def copy(sources: Any, targets: Any, sizes: Any) -> None:
        arrays = (array.ctypes.data for array in (targets, sources, sizes))
        first_copy, failed_copy = number(0), number(0)
        attributes = ctypes.byref(_IN_STREAM_ORDER), ctypes.byref(first_copy), 1
        stream = torch.cuda.current_stream().cuda_stream
        error = batch(*arrays, len(sizes), *attributes, ctypes.byref(failed_copy), stream)
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {error}")

    return copy


def has_cache_operation(layer: Any) -> bool:
    """Return whether `fill_cache` can write to the KV cache of this vLLM attention layer."""
    if not callable(option(option(layer, "impl"), "do_kv_cache_update")):
        return False
    return hasattr(layer, "kv_lora_rank") or not option(
        layer.get_attn_backend(), "forward_includes_kv_cache_update"
    )


def attention_backend(layer: Any) -> str:
    """Return vLLM's name for the attention backend of `layer`; "unknown" if that is None."""
    return "unknown" if layer is None else str(layer.get_attn_backend().get_name())


def fill_cache(layer: Any, known: Callable[[str, int], Any], slots: Any) -> int:
    """Write known keys and values, equal for all heads, to `slots` of the cache of `layer`.

    vLLM's own operation writes them. `known`: returns a tensor [slot, element] for a name and a
    number of elements. Returns the number of elements written for one token and head.

    Raises:
        Exception: any error of vLLM's operation.
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
