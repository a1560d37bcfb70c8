# SPDX-License-Identifier: Apache-2.0
"""Facts of an engine: those that decide whether two engines share KV, and those that it needs."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import get_hash_fn_by_name

from ecshare.plugin.compat import max_steps_in_flight, names_media_by_request, option
from ecshare.plugin.model_facts import (
    Namespace,
    json_value,
    media_facts,
    model_facts,
    weights_identity,
)
from ecshare.store.keys import Kind
from kvshare.chunks.layers import (
    LayerSet,
    block_bytes,
    has_states,
    layer_sets_of,
    own_tp_size,
    readable_tp_sizes,
    shard_names_of,
    state_names_of,
)
from kvshare.chunks.prefix import Chunk, Grid, HashFunction
from kvshare.chunks.scales import keeps_scales
from kvshare.chunks.slabs import SlabBytes, chunk_bytes, slab_sizes, state_bytes
from kvshare.chunks.stages import kinds_of, layers_of_stages, parts_of_stages
from kvshare.compat import (
    cpu_attention_kernel,
    device_name,
    layout_generation,
    repacks_blocks,
    vllm_release,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvshare.config import KVConfig


UNSPECIFIED_SOURCE = "external_unspecified"
"""vLLM's name for hits from a remote or unknown store."""


@dataclass(frozen=True, slots=True)
class KVFacts:
    """The facts of this engine that the scheduler half needs."""

    namespace: str
    """The digest of the namespace."""
    grid: Grid
    layer_sets: tuple[LayerSet, ...]
    tp_size: int
    """The tensor-parallel size in which the engine stores chunks; see shards.py."""
    shard_names: Mapping[int, tuple[str, ...]]
    """For each tensor-parallel size that the engine can read, the names of a chunk's shards, of all
    pipeline stages. A chunk is stored if all shards of one size are."""
    slab_bytes: SlabBytes
    hash_function: HashFunction
    """vLLM's own, which computes the block hashes."""
    saves: bool
    loads: bool
    numbers_media: bool = False
    """True if vLLM names media by numbers. KV computed from such media is not shared."""
    store_source: str = UNSPECIFIED_SOURCE
    """vLLM's name for hits in this kind of store."""
    max_steps_in_flight: int | None = 1
    """See `IdleSteps`."""
    state_names: tuple[str, ...] = ()
    """The names of a state's objects; empty: the model has no recurrent layers."""
    num_stages: int = 1
    """The number of pipeline stages."""
    kinds: str = ""
    """See `Orders`."""

    def names_of(self, chunk: Chunk, tp_size: int) -> tuple[str, ...]:
        """Return the names of the objects of `chunk` that engines of `tp_size` store."""
        return self.state_names if chunk.is_state else self.shard_names[tp_size]

    def chunk_bytes(self, num_blocks: int) -> int:
        """Return how much memory a rank needs at most to save a chunk of so many blocks."""
        return chunk_bytes(self.layer_sets, self.slab_bytes, num_blocks)

    @property
    def state_bytes(self) -> int:
        """How much memory a rank needs at most to save a state; 0: the model has none."""
        return state_bytes(self.layer_sets, self.slab_bytes)

    @property
    def state_tokens(self) -> int:
        """The number of tokens whose chunks are as many bytes as a state."""
        whole_bytes = self.chunk_bytes(self.grid.chunk_blocks)
        return -(-self.state_bytes * self.grid.chunk_tokens // max(1, whole_bytes))


def kv_facts(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    config: "KVConfig",
    *,
    can_share: bool,
) -> KVFacts:
    """Return the facts of this engine. `namespace` is empty: it is known once the store is open.

    `can_share`: whether the engine's blocks are shareable. If not, it neither saves nor loads.
    """
    role, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    assert role is not None  # otherwise vLLM does not create the connector
    chunk_blocks = config.chunk_blocks(cache.block_size) if can_share else 1
    sets = layer_sets_of(vllm_config, kv_cache_config) if can_share else ()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    tp_size, tp_sizes = own_tp_size(sets, ranks), readable_tp_sizes(sets, ranks)
    stages = layers_of_stages(vllm_config)
    # What earlier requests have left in the block of a tail can be erased only token by token.
    tails = "never" if any(each.is_opaque for each in sets) else config.tails
    return KVFacts(
        namespace="",
        grid=Grid(cache.block_size, chunk_blocks, tails=tails, has_states=has_states(sets)),
        layer_sets=sets,
        tp_size=tp_size,
        shard_names={
            each: parts_of_stages(shard_names_of(sets, each), len(stages)) for each in tp_sizes
        },
        slab_bytes=slab_sizes(
            [_most_block_bytes(block_bytes(kv_cache_config, each), stages) for each in sets]
        ),
        hash_function=get_hash_fn_by_name(cache.prefix_caching_hash_algo),
        saves=role.is_kv_producer and can_share,
        loads=role.is_kv_consumer and can_share,
        numbers_media=names_media_by_request(vllm_config),
        store_source="disk" if config.folder else UNSPECIFIED_SOURCE,
        max_steps_in_flight=max_steps_in_flight(vllm_config),
        state_names=parts_of_stages(state_names_of(sets, tp_size), len(stages)),
        num_stages=max(1, len(stages)),
        kinds=kinds_of(sets) if stages else "",
    )


def _most_block_bytes(num_bytes: int, stages: Sequence[int]) -> int:
    """Return at least the bytes of a block in any stage; `num_bytes`: in the first one."""
    return -(-num_bytes * max(stages) // stages[0]) if stages else num_bytes


def kv_namespace(  # noqa: PLR0913 — one parameter for each fact that our options decide
    vllm_config: Any,
    epoch: str,
    integrity: str = "",
    *,
    chunk_blocks: int = 1,
    layer_sets: Sequence[Any] = (),
    stored_dtype: str = "auto",
    compression: str = "none",
    only_tp_size: int | None = None,
) -> Namespace:
    """Return the namespace of this engine's KV; `epoch` and `integrity`: see `encoder_namespace`.

    `chunk_blocks`: the number of blocks in one object. `layer_sets`: the `facts` of each layer set,
    as JSON can hold them. `stored_dtype`, `compression`: the options. `only_tp_size`: the
    tensor-parallel size, if only engines of that size share. Tokens, media identifiers, LoRA names
    and cache_salt are not among the facts: the block hashes contain them.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    # Media options change the embeddings of a picture, and so the KV computed from them.
    facts = model_facts(vllm_config, epoch, integrity) | media_facts(vllm_config)
    facts |= {
        "cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "chunk_blocks": chunk_blocks,
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "num_layers": model.hf_text_config.num_hidden_layers,
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "layer_sets": list(layer_sets),
        "page": _kernel_name(vllm_config),
        "layout": vllm_release() if keeps_scales(cache.cache_dtype) else layout_generation(),
        "other_dtype_layers": json_value(option(cache, "kv_cache_dtype_skip_layers")),
        "context": _context_facts(model),
        "draft": _draft_facts(vllm_config),
    }
    stages = layers_of_stages(vllm_config)
    # Defaults are left out, so that older engines, which lack these options, share the namespace.
    if stages:
        facts |= {"stages": list(stages)}
    if stored_dtype != "auto":
        facts |= {"stored_dtype": stored_dtype}
    if compression != "none":
        facts |= {"compression": compression}
    if only_tp_size is not None:
        facts |= {"tensor_parallel_size": only_tp_size}
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:  # vLLM's block hashes begin with it
        facts |= {"hash_seed": hashlib.sha256(os.fsencode(seed)).hexdigest()}
    return Namespace.of(Kind.KV, facts)


def _context_facts(model: Any) -> list[Any]:
    """Return the facts that depend on the longest context that an engine serves.

    The length itself is not a fact, because it changes the KV of few models. LongRoPE has two
    sets of factors, of which vLLM always uses one (`Phi3LongRoPEScaledRotaryEmbedding`). Llama 4
    scales its attention for long contexts, unless the generation config says otherwise
    (`Llama4ForCausalLM`).
    """
    facts: list[Any] = []
    for rope in _long_ropes(model.hf_text_config):
        original = rope.get("original_max_position_embeddings") or getattr(
            model.hf_text_config, "original_max_position_embeddings", 0
        )
        facts.append(model.max_model_len > int(original or 0))
    if any(name.startswith("Llama4") for name in model.architectures):
        generation = model.try_get_generation_config() | model.override_generation_config
        is_long = model.max_model_len > 32768
        facts.append(json_value(generation.get("attn_temperature_tuning", is_long)))
    return facts


def _long_ropes(text_config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters that have separate factors for long contexts."""
    given: Any = getattr(text_config, "rope_parameters", None)
    given = given or getattr(text_config, "rope_scaling", None) or {}
    for rope in (given, *given.values()):
        if isinstance(rope, Mapping) and "long_factor" in rope:
            yield rope


def _draft_facts(vllm_config: Any) -> list[str]:
    """Return the facts of a separate draft model for speculative decoding; empty without one.

    They count because the draft model's KV is in the same blocks.
    """
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    # vLLM names the model itself here if there is no draft model, or the draft is a part of it.
    if draft is None or draft.model == vllm_config.model_config.model:
        return []
    return [str(draft.model), str(draft.revision or ""), weights_identity(draft, vllm_config)]


def _kernel_name(vllm_config: Any) -> str:
    """Return a name for the layout inside a block, as far as it depends on the kind of device.

    CPU kernels repack keys for their instruction set, so another CPU or a GPU would read wrong
    values from a block of the same shape. In addition each worker checks the kernels of its device:
    see layout_check.py.
    """
    if not repacks_blocks():
        return device_name()
    model, cache = vllm_config.model_config, vllm_config.cache_config
    kernel = cpu_attention_kernel(
        model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype
    )
    return f"cpu-{kernel}"
