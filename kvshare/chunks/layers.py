# SPDX-License-Identifier: Apache-2.0
"""Decides which layers of a model are stored together, and which of their tokens a reader needs.

vLLM puts layers that keep the same tokens into a *cache group* with a block table of its own. A
*layer set* is one or more such groups: layers whose blocks have one shape and that look back
equally far. A chunk of KV is stored as one object per layer set and shard of the heads.

Layers with full attention need all tokens of a prefix, and vLLM keeps all their blocks. Layers with
an attention window need only the last tokens of a prefix, and vLLM frees the blocks before those.
For such layers a chunk holds only the blocks that a prefix which ends in it, or later, can need.

The layers of one cache group may have several shapes: a draft model's beside the target's, or the
indexer of sparse attention beside its latent vectors. Each shape is a layer set of its own, in the
same blocks. vLLM gives the scheduler process the spec of a group's first layer only, but the sizes
of all layers' blocks. So layer sets are made of these alone, and are equal in both halves. Where
the scheduler half does not know a shape, a rank's part is never divided.

The states of recurrent layers are stored apart from chunks: see `state_of` in prefix.py.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ecshare.plugin.compat import option
from ecshare.plugin.deployment import deployment_refusal
from ecshare.plugin.ranks import Rank
from kvshare.chunks.layouts import layout_advice
from kvshare.chunks.prefix import Chunk
from kvshare.chunks.scales import keeps_scales, scales_refusal
from kvshare.chunks.shards import (
    ShardSlice,
    is_first_holder,
    num_shards,
    shard_of,
    shard_slices,
    stored_tp_size,
    stored_tp_sizes,
)
from kvshare.chunks.states import objects_of, state_facts, state_refusal
from kvshare.compat import has_packed_layouts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from kvshare.config import KVConfig

logger = logging.getLogger(__name__)

# Names in a shared store must be unique, and an attacker can construct collisions of other hashes.
_TRUSTED_HASHES = ("sha256", "sha256_cbor")
# Compared by exact type: subclasses lay out or free their blocks in other ways.
_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
# Where only another model, or another connector, would help.
_LEAVE_OUT = "leave --kv-transfer-config out"
_KV_HEADS = re.compile("kv_heads|key_value_heads|heads?_kv|attention_groups")


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """How far back a layer looks. Both None: to the first token."""

    sliding_tokens: int | None = None
    """The window in tokens, including the current one."""
    chunk_tokens: int | None = None
    """The layer looks back to the last multiple of this (vLLM's chunked local attention)."""

    @classmethod
    def of(cls, spec: KVCacheSpec) -> "AttentionWindow":
        """Return the window of layers that vLLM describes as `spec`."""
        if isinstance(spec, SlidingWindowSpec):
            # vLLM retains extra tokens where it may compute some again.
            kept = option(spec, "extra_retained_tokens") or 0
            return cls(sliding_tokens=spec.sliding_window + kept)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return cls(chunk_tokens=spec.attention_chunk_size)
        return cls()

    @property
    def is_full(self) -> bool:
        """Whether all tokens are needed."""
        return self.sliding_tokens is None and self.chunk_tokens is None

    def first_needed(self, num_tokens: int) -> int:
        """Return the first token whose KV the token after `num_tokens` needs.

        It never decreases as `num_tokens` grows.
        """
        if self.sliding_tokens is not None:
            return max(0, num_tokens - self.sliding_tokens + 1)
        return num_tokens // self.chunk_tokens * self.chunk_tokens if self.chunk_tokens else 0

    def __str__(self) -> str:
        # A fact of the namespace: a change of this text makes every stored object a miss.
        if self.sliding_tokens is not None:
            return f"window {self.sliding_tokens}"
        return f"section {self.chunk_tokens}" if self.chunk_tokens else "full"


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Layers that are stored together."""

    number: int
    groups: tuple[int, ...]
    """vLLM's cache groups of these layers."""
    layers: tuple[tuple[str, int], ...]
    """The layers' names in the order of the model, each with the index of its group in `groups`."""
    window: AttentionWindow
    num_heads: int
    """KV heads of one rank."""
    total_heads: int
    """KV heads of all ranks together."""
    state: str = ""
    """For recurrent layers: what their state consists of. Each rank's part of it counts as one
    head, so `total_heads` is the number of different parts."""
    page_bytes: int = 0
    """0 for the first shape of a cache group. For another one, the bytes of a block, all that the
    scheduler half knows of it. Then a rank's heads count as one in `total_heads`."""
    is_opaque: bool = False
    """Whether a block is more than the KV of its tokens one after the other. Of sparse attention
    only the worker half knows for sure; the other half may take further layers for such."""

    @property
    def is_recurrent(self) -> bool:
        """Whether the layers keep states, which are stored apart from chunks."""
        return bool(self.state)

    def is_in(self, chunk: Chunk) -> bool:
        """Return whether `chunk` contains blocks of these layers."""
        return chunk.is_state == self.is_recurrent

    def shard_name(self, shard: int, tp_size: int) -> str:
        """Return the name of a shard that engines of `tp_size` store; see shards.py."""
        name = f"t{shard}of{num_shards(self.total_heads, tp_size)}"
        return f"{name}-s{self.number}" if self.number else name

    def shard_names(self, tp_size: int) -> tuple[str, ...]:
        """Return the names of all shards that engines of `tp_size` store."""
        shards = range(num_shards(self.total_heads, tp_size))
        return tuple(self.shard_name(shard, tp_size) for shard in shards)

    def own_shard_name(self, rank: Rank) -> str:
        """Return the name of the shard of `rank`: the same for ranks that hold the same heads."""
        shard = shard_of(rank.tp_rank, rank.tp_size, self.total_heads)
        return self.shard_name(shard, rank.tp_size)

    def is_written_by(self, rank: Rank) -> bool:
        """Return whether `rank` stores its shard: one of the ranks that hold the shard does."""
        return is_first_holder(rank.tp_rank, rank.tp_size, self.total_heads)

    def shard_slices(self, rank: Rank, tp_size: int) -> tuple[ShardSlice, ...]:
        """Return where the heads of `rank` lie in what engines of `tp_size` store."""
        count = num_shards(self.total_heads, tp_size)
        return shard_slices(rank.tp_rank, rank.tp_size, self.total_heads, count)

    def first_block(self, chunk: Chunk, block_tokens: int) -> int:
        """Return the first block of `chunk` that is stored: no reader can need those before it.

        A reader may leave out the last token of the chunk, to compute it itself.
        """
        needed = self.window.first_needed(chunk.end_tokens - 1) // block_tokens
        return max(chunk.first_block, needed)

    @property
    def facts(self) -> list[Any]:
        """The facts that must agree between engines that share this layer set, as JSON values."""
        return [self.kind, len(self.layers), self.total_heads]

    @property
    def kind(self) -> str:
        """How far the layers look back, or what their state consists of; and their blocks' size,
        if other layers of the group come first."""
        what = self.state or str(self.window)
        return f"{what}, blocks of {self.page_bytes} bytes" if self.page_bytes else what


def refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    """Return why the blocks of an engine with these options cannot be shared; None if they can."""
    if option(kv_cache_config, "hisparse_host_num_blocks") is not None:
        return (
            "HiSparse keeps blocks in a pool of the host's memory, with numbers of its own: leave "
            "HiSparseConnector and --attention-config.hisparse_config out"
        )
    return (
        deployment_refusal(vllm_config)
        or _option_refusal(vllm_config)
        or _layer_refusal(vllm_config, kv_cache_config)
    )


def is_shareable(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: "KVConfig"
) -> bool:
    """Return whether the blocks of this engine can be shared. If not, log the reason.

    Raises:
        ConfigError: an option does not fit the engine's cache; names the option and the fix.
    """
    why_not = refusal(vllm_config, kv_cache_config)
    if why_not is not None:
        logger.warning("kvshare saves and loads nothing: %s.", why_not)
        return False
    config.check_dtypes(
        cache_dtypes(kv_cache_config),
        keeps_scales=keeps_scales(vllm_config.cache_config.cache_dtype),
    )
    return True


def _option_refusal(vllm_config: "VllmConfig") -> str | None:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(option(parallel, name) or 1) > 1:  # older vLLM releases lack the fields
            return (
                "context parallelism is not supported, because ranks may share the tokens of a "
                f"block: leave --{name.replace('_', '-')} out"
            )
    if cache.prefix_caching_hash_algo not in _TRUSTED_HASHES:
        return (
            f"--prefix-caching-hash-algo is {cache.prefix_caching_hash_algo}, which lets others "
            f"make names collide: set one of {', '.join(_TRUSTED_HASHES)}"
        )
    if option(cache, "calculate_kv_scales"):
        return (
            "calculate_kv_scales is on, and each engine would scale its KV in its own way: leave "
            "it out"
        )
    if option(cache, "prefix_match_unit") not in (None, cache.block_size):
        return "prefix_match_unit is set, and blocks are hashed in pieces: leave it out"
    return None


def _layer_refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    cache, scheduling = vllm_config.cache_config, vllm_config.scheduler_config
    specs = {spec for group in kv_cache_config.kv_cache_groups for _, spec in _layers(group)}
    if not specs:
        return f"the model has no KV cache: {_LEAVE_OUT}"
    if not all(group.layer_names for group in kv_cache_config.kv_cache_groups):
        return (
            "a pipeline stage has no layer of a cache group that other stages have layers of: "
            "lower --pipeline-parallel-size"
        )
    for spec in specs:
        why_not = _spec_refusal(spec, cache)
        if why_not is not None:
            return why_not
        if spec.block_size != cache.block_size:
            return (
                f"some layers have blocks of {spec.block_size} tokens and others of "
                f"{cache.block_size}: {layout_advice(vllm_config)}"
            )
    if all(isinstance(spec, MambaSpec) for spec in specs):
        return f"the model has recurrent layers only: {_LEAVE_OUT}"
    why_not = _shapes_refusal(vllm_config, kv_cache_config)
    if why_not is not None:
        return why_not
    latent = {spec for spec in _first_specs(kv_cache_config) if isinstance(spec, MLAAttentionSpec)}
    if len(latent) > 1:
        return f"the model keeps several kinds of MLA caches, in several cache groups: {_LEAVE_OUT}"
    if latent and not (cache.enable_prefix_caching or scheduling.enable_chunked_prefill):
        # vLLM turns both off where its kernel cannot continue a prompt: it would then compute the
        # rest of a partly loaded prompt as if nothing came before it.
        return (
            "prefix caching and chunked prefill are off, so the MLA kernel cannot continue a "
            "prompt: turn --enable-prefix-caching on, and on CPUs use one with AMX"
        )
    return None


def _shapes_refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    """Return why the layers of a cache group cannot be shared together; None if they can.

    Only workers know all of it: the scheduler process gets the spec of one layer per group.
    """
    sizes = _block_sizes(kv_cache_config)
    for group in kv_cache_config.kv_cache_groups:
        layers = list(_layers(group))
        keys = {(sizes.get(name), _set_key(spec)) for name, spec in layers}
        if len(keys) > len({size for size, _ in keys}):
            return (
                "some layers of one cache group have blocks of another shape than others, which "
                f"vLLM's scheduler process cannot tell: {_shapes_advice(vllm_config)}"
            )
        if len(keys) > 1 and any(isinstance(spec, MambaSpec) for _, spec in layers):
            return (
                "recurrent layers of one cache group have states of another shape than others: "
                f"{_LEAVE_OUT}"
            )
        if len({AttentionWindow.of(spec) for _, spec in layers}) > 1:
            return f"layers of one cache group look back unequally far: {_LEAVE_OUT}"
        if not isinstance(layers[0][1], MLAAttentionSpec) or _has_own_draft(vllm_config):
            continue
        if not all(isinstance(spec, MLAAttentionSpec) for _, spec in layers):
            return (
                "a layer beside those with MLA has other attention, and is not a draft model's: "
                f"{_LEAVE_OUT}"
            )
    return None


def _shapes_advice(vllm_config: "VllmConfig") -> str:
    """Return what to do about layers that the scheduler process cannot tell apart."""
    if not has_packed_layouts():  # older releases do not pass it the sizes of blocks
        return "use vLLM 0.32 or later"
    if _draft(vllm_config) is not None:
        return "leave the draft model out (--speculative-config)"
    return _LEAVE_OUT


def _spec_refusal(spec: KVCacheSpec, cache: Any) -> str | None:
    if type(spec) is MambaSpec:
        return state_refusal(spec, cache.block_size)
    if type(spec) not in _SPECS or not isinstance(spec, AttentionSpec):
        return f"a KV cache of type {type(spec).__name__} is not supported: {_LEAVE_OUT}"
    if (reason := scales_refusal(spec, cache.cache_dtype)) is not None:
        return reason
    if spec.tokens_per_state != 1:
        return f"the model keeps several tokens in one cell of its KV cache: {_LEAVE_OUT}"
    if option(spec, "num_head_slots") is not None and not keeps_scales(cache.cache_dtype):
        return (
            "the attention kernel keeps something else than heads side by side in a block: set "
            "--attention-backend to another one, such as TRITON_ATTN"
        )
    if option(spec, "model_version"):
        return f"the caches of {option(spec, 'model_version')} are not supported: {_LEAVE_OUT}"
    if option(spec, "non_causal"):
        return f"a token's KV depends on later tokens in this model: {_LEAVE_OUT}"
    return None


def layer_sets_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
) -> tuple[LayerSet, ...]:
    """Return the layer sets of an engine for which `refusal` returns None."""
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    models = (vllm_config.model_config, _draft(vllm_config))
    heads = max(most_kv_heads(each) for each in models if each is not None)
    return layer_sets(
        kv_cache_config,
        tp_size,
        heads,
        has_own_draft=_has_own_draft(vllm_config),
        is_opaque=keeps_scales(vllm_config.cache_config.cache_dtype),
    )


def _draft(vllm_config: "VllmConfig") -> Any:
    """Return the ModelConfig of the draft model; None without one."""
    return option(option(vllm_config, "speculative_config"), "draft_model_config")


def _has_own_draft(vllm_config: "VllmConfig") -> bool:
    """Return whether a draft model has heads, of which each rank has some, and not MLA."""
    draft = _draft(vllm_config)
    return draft is not None and not draft.use_mla


def most_kv_heads(model_config: Any) -> int:
    """Return the largest number of KV heads that any layer of the model has, over all ranks.

    vLLM gives one number per model. Some models have another number for their window layers, or for
    single layers, in a configuration field of their own. If the result is too large, ranks with
    equal heads do not share them. If it were too small, ranks would take different heads for equal.
    """
    text = model_config.hf_text_config
    found = _head_counts(text.to_dict(), int(getattr(text, "num_attention_heads", 0) or 0))
    return max(int(model_config.get_total_num_kv_heads()), *found, 0)


def _head_counts(value: Any, num_query_heads: int) -> Iterator[int]:
    """Yield every number of KV heads in `value`, a model's configuration or a part of it."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            numbers = inner if isinstance(inner, list | tuple) else [inner]
            counts = [each for each in numbers if type(each) is int and each > 0]
            if _KV_HEADS.search(str(name)):
                yield from counts
            elif name == "n_heads_in_group":  # query heads for each KV head
                yield from (num_query_heads // each for each in counts)
    if isinstance(value, Mapping | list | tuple):
        inner_values = value.values() if isinstance(value, Mapping) else value
        for inner in inner_values:
            yield from _head_counts(inner, num_query_heads)


def layer_sets(
    kv_cache_config: "KVCacheConfig",
    tp_size: int,
    model_heads: int,
    *,
    has_own_draft: bool = False,
    is_opaque: bool = False,
) -> tuple[LayerSet, ...]:
    """Return the layer sets of an engine for which `refusal` returns None.

    `model_heads`: the result of `most_kv_heads`, for the model or its draft, whichever has more.
    `has_own_draft`: whether there is a draft model without MLA. `is_opaque`: whether blocks hold
    scales. The order is the same in every engine of the model: layers without a window come first,
    then by window, then by shape.
    """
    members: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
    specs: dict[tuple[Any, ...], tuple[KVCacheSpec, KVCacheSpec]] = {}
    sizes = _block_sizes(kv_cache_config)
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        of_group = list(_layers(group))
        for name, spec in of_group:
            first_name, first = of_group[0]
            is_first = sizes.get(name) == sizes.get(first_name)
            kind = (*_set_key(first), 0 if is_first else sizes.get(name, 0))
            members.setdefault(kind, []).append((name, group_id))
            specs.setdefault(kind, (first, spec))
    latent = sum(isinstance(spec, MLAAttentionSpec) for _, spec in specs.values())
    sets: list[LayerSet] = []
    for kind in sorted(members):
        first, spec = specs[kind]
        layers = sorted(members[kind], key=lambda layer: _by_number(layer[0]))
        if isinstance(spec, MambaSpec):
            for part in objects_of(layers, spec.state_content_size_bytes):
                sets.append(_state_set(len(sets), part, spec, tp_size))
            continue
        made = _attention_set(len(sets), layers, spec, tp_size, model_heads)
        if page_bytes := kind[-1]:
            # Both halves must compute the same number, and only the worker half knows `spec`.
            is_replicated = isinstance(first, MLAAttentionSpec) and not has_own_draft
            total_heads = 1 if is_replicated else tp_size
            made = replace(made, page_bytes=page_bytes, total_heads=total_heads)
        # The indexer of sparse attention keeps scales behind the numbers of all tokens.
        is_sparse = latent > 1 or "ds_mla" in str(option(spec, "cache_dtype_str"))
        is_own_opaque = is_opaque or (is_sparse and isinstance(spec, MLAAttentionSpec))
        sets.append(replace(made, is_opaque=is_own_opaque))
    return tuple(sets)


def _block_sizes(kv_cache_config: "KVCacheConfig") -> dict[str, int]:
    """Return the bytes of a block of each layer, as far as vLLM passes them to both halves."""
    sizes = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        strides = option(tensor, "layer_stride"), option(tensor, "block_stride")
        if all(strides):  # one of them skips whole layers or blocks
            sizes.update(dict.fromkeys(tensor.layers, min(strides)))
    return sizes


def _first_specs(kv_cache_config: "KVCacheConfig") -> Iterator[KVCacheSpec]:
    """Yield the spec of the first layer of each cache group, which both halves know."""
    for group in kv_cache_config.kv_cache_groups:
        yield next(spec for _, spec in _layers(group))


def _attention_set(
    number: int,
    layers: Sequence[tuple[str, int]],
    spec: KVCacheSpec,
    tp_size: int,
    model_heads: int,
) -> LayerSet:
    """Return a layer set of `layers`, each with its name and cache group."""
    assert isinstance(spec, AttentionSpec)
    num_heads = total_heads = spec.num_heads
    if not isinstance(spec, MLAAttentionSpec):  # with MLA, every rank has all of it
        total_heads = num_heads * tp_size
        if num_heads == 1:  # with more ranks than heads, several ranks hold the same head
            total_heads = min(total_heads, max(1, model_heads))
    return LayerSet(number, *_by_group(layers), AttentionWindow.of(spec), num_heads, total_heads)


def _state_set(
    number: int, layers: Sequence[tuple[str, int]], spec: MambaSpec, tp_size: int
) -> LayerSet:
    """Return a layer set of recurrent `layers`; see `_attention_set`."""
    total = 1 if option(spec, "tp_replicated") else tp_size
    window = AttentionWindow()
    return LayerSet(number, *_by_group(layers), window, 1, total, state_facts(spec))


def _by_group(
    layers: Sequence[tuple[str, int]],
) -> tuple[tuple[int, ...], tuple[tuple[str, int], ...]]:
    """Return the cache groups of `layers`, and each layer with the index of its group in these."""
    groups = tuple(sorted({group_id for _, group_id in layers}))
    return groups, tuple((name, groups.index(group_id)) for name, group_id in layers)


def block_bytes(kv_cache_config: "KVCacheConfig", layer_set: LayerSet) -> int:
    """Return the bytes that are stored of one block on one rank, in all layers of the set."""
    if layer_set.page_bytes:
        return layer_set.page_bytes * len(layer_set.layers)
    specs = {
        name: spec for group in kv_cache_config.kv_cache_groups for name, spec in _layers(group)
    }
    return sum(_stored_bytes(specs[name]) for name, _ in layer_set.layers)


def _stored_bytes(spec: KVCacheSpec) -> int:
    if isinstance(spec, MambaSpec):
        return int(spec.state_content_size_bytes)  # the rest of its page is padding
    return int(spec.page_size_bytes)


def cache_dtypes(kv_cache_config: "KVCacheConfig") -> set[Any]:
    """Return the torch dtypes of the KV cache of an engine for which `refusal` returns None.

    Without those of layers that share a group with others before them: see `LayerSet.page_bytes`.
    """
    specs = _first_specs(kv_cache_config)
    return {spec.dtype for spec in specs if isinstance(spec, AttentionSpec)}


def _set_key(spec: KVCacheSpec) -> tuple[Any, ...]:
    """Return a value that is equal for two layers exactly if they belong to one layer set."""
    if isinstance(spec, MambaSpec):  # after all attention layers
        return (True, bool(option(spec, "tp_replicated")), state_facts(spec))
    window = AttentionWindow.of(spec)
    assert isinstance(spec, _SPECS)
    is_replicated = isinstance(spec, MLAAttentionSpec)
    shape = (spec.num_heads, spec.page_size_bytes, str(spec.dtype))
    return (False, window.sliding_tokens or 0, window.chunk_tokens or 0, is_replicated, *shape)


def _by_number(name: str) -> list[tuple[str, int]]:
    """Return a sort key that puts `layers.10` after `layers.9`."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def _layers(group: "KVCacheGroupSpec") -> Iterator[tuple[str, KVCacheSpec]]:
    """Yield each layer of a cache group, with the spec of its KV cache."""
    spec = group.kv_cache_spec
    for name in group.layer_names:
        yield name, spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def shard_names_of(sets: Sequence[LayerSet], tp_size: int) -> tuple[str, ...]:
    """Return the names of all shards of a chunk that engines of `tp_size` store."""
    return _names(sets, tp_size, of_states=False)


def state_names_of(sets: Sequence[LayerSet], tp_size: int) -> tuple[str, ...]:
    """Return the names of all objects of a state that engines of `tp_size` store."""
    return _names(sets, tp_size, of_states=True)


def _names(sets: Sequence[LayerSet], tp_size: int, *, of_states: bool) -> tuple[str, ...]:
    wanted = (each for each in sets if each.is_recurrent == of_states)
    return tuple(part for layer_set in wanted for part in layer_set.shard_names(tp_size))


def own_tp_size(sets: Sequence[LayerSet], tp_size: int) -> int:
    """Return the size in which an engine of `tp_size` stores chunks; see shards.py."""
    if is_bound(sets):
        return tp_size
    return stored_tp_size(tp_size, [each.total_heads for each in sets])


def readable_tp_sizes(sets: Sequence[LayerSet], tp_size: int) -> tuple[int, ...]:
    """Return the tensor-parallel sizes of writers whose chunks an engine of `tp_size` can read.

    If its parts are bound to their rank (`is_bound`), that is only its own size.
    """
    if is_bound(sets):
        return (tp_size,)
    return stored_tp_sizes([each.total_heads for each in sets])


def is_bound(sets: Sequence[LayerSet]) -> bool:
    """Return whether only the same rank of an engine of equal size can read a rank's objects.

    So it is with states, and with heads in blocks that are opaque or of an unknown shape.
    """
    has_heads = any(each.total_heads > 1 for each in sets)
    is_whole = any(each.page_bytes or each.is_opaque for each in sets)
    return has_states(sets) or (has_heads and is_whole)


def has_states(sets: Sequence[LayerSet]) -> bool:
    """Return whether the model has recurrent layers."""
    return any(each.is_recurrent for each in sets)
