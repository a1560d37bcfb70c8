# SPDX-License-Identifier: Apache-2.0
"""The default of `buffer_bytes`, for engines on GPUs."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec import structs

from ecshare.plugin.compat import option
from ecshare.plugin.deployment import has_remote_workers
from ecshare.store.config import GIB
from kvshare.chunks.layers import block_bytes, layer_sets_of, refusal
from kvshare.chunks.slabs import (
    chunk_bytes,
    slab_sizes,
    state_bytes,
    steps_bytes,
    steps_state_bytes,
)
from kvshare.config import KVConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_MOST_BYTES = 4 * GIB
# The ranks of a host together take at most 1/16 of its memory, because it is pinned at start.
_MOST_OF_MEMORY = 16

_CGROUPS = Path("/sys/fs/cgroup")
# The files of cgroups version 2 and version 1. A container sees its own limits.
_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def with_default_buffer(
    config: KVConfig, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
) -> KVConfig:
    """Return `config` with the default `buffer_bytes` of this engine; call it if the user set none.

    A GPU fills a gigabyte in one step. If a request ends with that step, the chunks without buffer
    memory are lost. So the default holds what two steps compute: two times

        ceil(step tokens / chunk tokens) chunks
        + min(ceil(step tokens / block tokens), max_num_seqs) states,

    the latter for hybrid models only, one for each prompt that can end with a step. It is at least
    1 GiB, at most 4 GiB, and for all ranks of a host at most a sixteenth of its memory. A CPU
    engine takes many steps to fill a gigabyte, and its model needs the same memory.
    Both halves of a connector must compute the same number. So if workers may be on other hosts,
    with other memory, the default is that of a CPU engine.
    """
    role = vllm_config.kv_transfer_config
    is_to_grow = (
        role is not None
        and role.is_kv_producer
        and vllm_config.device_config.device_type == "cuda"
        and not has_remote_workers(vllm_config)
        and refusal(vllm_config, kv_cache_config) is None
    )
    if not is_to_grow:
        return config
    chunk_blocks = config.chunk_blocks(vllm_config.cache_config.block_size)
    sets = layer_sets_of(vllm_config, kv_cache_config)
    slab_bytes = slab_sizes([block_bytes(kv_cache_config, each) for each in sets])
    wanted = steps_bytes(
        chunk_bytes(sets, slab_bytes, chunk_blocks),
        chunk_blocks * vllm_config.cache_config.block_size,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )
    wanted += steps_state_bytes(
        state_bytes(sets, slab_bytes),
        vllm_config.cache_config.block_size,
        vllm_config.scheduler_config.max_num_batched_tokens,
        vllm_config.scheduler_config.max_num_seqs,
    )
    affordable = memory_bytes() // _MOST_OF_MEMORY // num_local_ranks(vllm_config)
    num_bytes = max(config.buffer_bytes, min(wanted, _MOST_BYTES, affordable))
    return structs.replace(config, buffer_bytes=num_bytes)


def num_local_ranks(vllm_config: "VllmConfig") -> int:
    """Return how many workers may share this host; only for engines without remote workers.

    With several replicas of a dense model, vLLM configures each engine as the only one. So every
    visible GPU is counted as the GPU of a worker.
    """
    parallel = vllm_config.parallel_config
    configured = int(parallel.world_size) * int(option(parallel, "data_parallel_size_local") or 1)
    return max(configured, torch.cuda.device_count())


def memory_bytes(cgroups: Path = _CGROUPS) -> int:
    """Return the memory of this host in bytes, or the limit of this container if it is lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int((cgroups / name).read_text()))
    return min(limits)
