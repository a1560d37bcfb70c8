# SPDX-License-Identifier: Apache-2.0
"""The facts that decide whether the offloading tiers of two engines share objects."""

from typing import Any

from ecshare.plugin.model_facts import Namespace, weights_fingerprint
from ecshare.store.keys import FORMAT_VERSION, Kind
from kvshare.compat import device_name, vllm_release


def tier_namespace(
    offloading_spec: Any, chunk_bytes: int, epoch: str, integrity: str = ""
) -> Namespace:
    """Return the namespace of the chunks that vLLM's own offloading stores.

    `offloading_spec`: vLLM's description of the engine, the only one that a tier gets.
    `chunk_bytes`: size of a chunk, padding included. `epoch`, `integrity`: see `encoder_namespace`;
    `epoch` also stands for all facts that vLLM does not pass to a tier. A chunk contains the bytes
    of all ranks in an order that vLLM defines. So vLLM's version is a fact, and so are the parallel
    sizes, even where vLLM calls the bytes independent of them.
    """
    config = offloading_spec.config
    parallel = config.parallel
    facts = {
        "format": FORMAT_VERSION,
        "tier": 1,
        "vllm": vllm_release(),
        "model": config.model.name,
        "weights": weights_fingerprint(config.model.name, "", "", ""),
        "cache_dtype": config.model.dtype,
        "bytes_per_chunk": chunk_bytes,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in config.groups
        ],
        "ranks": [
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ],
        "replicated_layout": offloading_spec.replicated_layout,
        "canonical_layout": config.canonical_layout,
        "kv_cache_layout": config.kv_cache_layout or "",
        "device": device_name(),
        "epoch": epoch,
        "integrity": integrity,
    }
    return Namespace.of(Kind.KV, facts)
