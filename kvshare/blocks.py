# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache tensors -> chunks of blocks as stored objects hold them, and back; pure.

A stored chunk is [head, layer, token, content], its blocks one after the other along the tokens:
one range of heads is one range of bytes, whatever the strides on the device. `content` is what the
attention kernel keeps for one token and head, K and V together. Only the head and the block are
axes that every kernel means alike: CPU kernels repack the inside of a block for their instruction
set. So blocks are moved whole, never by token.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from ecshare.store.format import TensorFacts
from ecshare.transfer.staging import dtype_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# The others can be made to collide on purpose, and a name in a shared store must mean one thing.
_TRUSTED_HASHES = ("sha256", "sha256_cbor")
# Where a copy costs its bytes. Elsewhere it costs a launch, and one for many blocks is better.
_HOST = "cpu"

Places = list[tuple[int, int, int]] | Tensor
"""Blocks as runs (see `_runs`), or as their numbers on the device."""


def refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    """Return why the blocks of such an engine cannot be shared; None if they can."""
    parallel = vllm_config.parallel_config
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups, and only one is supported"
    # By exact type: MLA and others derive from it and lay out their blocks in other ways.
    if type(spec) is not FullAttentionSpec:
        return f"the KV cache is of type {type(spec).__name__}, not plain full attention"
    if spec.kv_quant_mode is not KVQuantMode.NONE or spec.tokens_per_state != 1:
        return "quantized or compressed KV caches are not supported"
    if spec.non_causal:
        return "a token's KV depends on later tokens in this model"
    if parallel.pipeline_parallel_size > 1 or _context_parallel_size(parallel) > 1:
        return "pipeline and context parallelism are not supported"
    if algorithm not in _TRUSTED_HASHES:
        return (
            f"prefix_caching_hash_algo is {algorithm}, which needs to be one of {_TRUSTED_HASHES}"
        )
    return None


def _context_parallel_size(parallel: object) -> int:
    """Return over how many ranks one sequence is spread; older releases lack the fields."""
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return max(int(getattr(parallel, name, 1)) for name in names)


class BlockCaches:
    """The KV cache of one worker as numbered blocks of one shape.

    Holds views of vLLM's tensors: what is read and written here is the cache itself.
    """

    def __init__(
        self,
        caches: Mapping[str, Tensor],
        num_blocks: int,
        block_tokens: int,
        num_heads: int,
        *,
        is_repacked: bool = False,
    ) -> None:
        """Find the axes of each layer's tensor in `caches`.

        `is_repacked`: the kernel mixes the tokens of a block, so that none can be told from others.

        Raises:
            ValueError: a layout this does not understand; the message says which and why.
        """
        self._pages = [
            _paged(name, caches[name], num_blocks, block_tokens, num_heads)
            for name in _distinct_layers(caches)
        ]
        if not self._pages:
            raise ValueError("the model registered no KV cache")
        shapes = {(tuple(pages.shape), pages.dtype, pages.device) for pages in self._pages}
        if len(shapes) > 1:
            raise ValueError(f"the layers' caches differ: {sorted(map(str, shapes))}")
        first = self._pages[0]
        self.device: torch.device = first.device
        self.dtype = dtype_name(first.dtype)
        self._num_heads = num_heads
        self._block_tokens = block_tokens
        self._content = int(first.shape[-1])
        self._is_repacked = is_repacked

    def facts(self, num_blocks: int, num_tokens: int, name: str) -> TensorFacts:
        """Return what the object of a chunk of `num_blocks` says of itself; `num_tokens` count.

        `name`: the chunk's; an object that was moved to another key is told by it.
        """
        attributes = {
            "chunk": name,
            "num_tokens": num_tokens,
            "block_tokens": self._block_tokens,
            "num_layers": len(self._pages),
        }
        num_stored = num_blocks * self._block_tokens
        shape = (self._num_heads, len(self._pages), num_stored, self._content)
        return TensorFacts(dtype=self.dtype, shape=shape, attributes=attributes)

    def read(self, block_ids: Sequence[int], num_tokens: int, out: Tensor) -> None:
        """Copy blocks to `out` [head, layer, token, content], on the cache's device.

        What follows the first `num_tokens` are bytes of nobody or of an earlier request: they are
        zeroed. Where the kernel mixes the tokens of a block that cannot be done.
        """
        places = _places(block_ids, self.device)
        for layer, pages in enumerate(self._pages):
            _gather(pages, places, self._rows(out, layer, len(block_ids)))
        if not self._is_repacked:
            out[:, :, num_tokens:] = 0

    def write(self, stored: Tensor, first_block: int, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with those of the host's `stored` [head, layer, token, content].

        The blocks of `stored` from `first_block` on, as many as there are `block_ids`. The bytes
        have been read on return: `stored` may be released.
        """
        first, end = first_block, first_block + len(block_ids)
        tokens = stored[:, :, first * self._block_tokens : end * self._block_tokens]
        here, places = tokens.to(self.device), _places(block_ids, self.device)
        for layer, pages in enumerate(self._pages):
            _scatter(self._rows(here, layer, len(block_ids)), pages, places)

    def _rows(self, chunk: Tensor, layer: int, num_blocks: int) -> Tensor:
        """View one layer of `chunk` as pages: [block, head, kernel block, token, content]."""
        page = self._pages[layer].shape[1:]
        return chunk[:, layer].view(page[0], num_blocks, *page[1:]).transpose(0, 1)


def _places(block_ids: Sequence[int], device: torch.device) -> Places:
    """Return where these blocks lie, in the form that is copied fastest on `device`."""
    if device.type == _HOST:
        return list(_runs(block_ids))
    return torch.tensor(block_ids, device=device)


def _gather(pages: Tensor, places: Places, rows: Tensor) -> None:
    """Copy the `pages` at `places` to `rows`, which have the same axes."""
    if isinstance(places, Tensor):
        rows.copy_(pages.index_select(0, places))
        return
    for row, block_id, count in places:
        rows[row : row + count].copy_(pages[block_id : block_id + count])


def _scatter(rows: Tensor, pages: Tensor, places: Places) -> None:
    """Copy `rows` to the `pages` at `places`."""
    if isinstance(places, Tensor):
        pages.index_copy_(0, places, rows)
        return
    for row, block_id, count in places:
        pages[block_id : block_id + count].copy_(rows[row : row + count])


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (place, first number, count) of each run of consecutive numbers.

    vLLM hands blocks out in order as long as it has them in order, and a copy of many is one.
    """
    start = 0
    for place in range(1, len(block_ids) + 1):
        if place == len(block_ids) or block_ids[place] != block_ids[place - 1] + 1:
            yield start, block_ids[start], place - start
            start = place


def _distinct_layers(caches: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order of their numbers, without layers that share another's cache."""
    places: dict[int, str] = {}
    for name in sorted(caches, key=_by_number):
        if not isinstance(caches[name], Tensor):
            raise ValueError(f"{name}: the cache is a {type(caches[name]).__name__}, not a tensor")  # noqa: TRY004 — one kind of refusal
        places.setdefault(caches[name].data_ptr(), name)
    return list(places.values())


def _by_number(name: str) -> list[tuple[str, int]]:
    """Sort `layers.10` after `layers.9`."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def _paged(name: str, cache: Tensor, num_blocks: int, block_tokens: int, num_heads: int) -> Tensor:
    """View `cache` as [block, head, kernel block, token, content].

    A kernel may work on blocks of fewer tokens; then several lie in one block of the cache.
    """
    fits = [
        axes
        for axes in permutations(range(cache.ndim))
        if cache.ndim == 4 and _is_page_order(cache, axes, num_blocks, block_tokens, num_heads)
    ]
    # vLLM's own order comes first among the permutations; sizes that fit another way too (as many
    # heads as tokens, say) do not make it doubtful.
    if not fits or (len(fits) > 1 and fits[0] != (0, 1, 2, 3)):
        raise ValueError(
            f"{name}: a cache of shape {tuple(cache.shape)} cannot be read as {num_blocks} blocks "
            f"of {num_heads} heads x {block_tokens} tokens"
        )
    pages = cache.permute(fits[0])
    return pages.view(num_blocks, -1, *pages.shape[1:]).permute(0, 2, 1, 3, 4)


def _is_page_order(
    cache: Tensor, axes: tuple[int, ...], num_blocks: int, block_tokens: int, num_heads: int
) -> bool:
    blocks, heads, tokens, _ = (cache.shape[axis] for axis in axes)
    return (
        blocks % num_blocks == 0
        and heads == num_heads
        and tokens * (blocks // num_blocks) == block_tokens
    )
