# SPDX-License-Identifier: Apache-2.0
"""Finds blocks, heads and tokens among the axes of vLLM's cache tensors; pure."""

from collections.abc import Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor


def distinct_caches(
    layers: Sequence[tuple[str, int]], caches: Mapping[str, Tensor]
) -> list[tuple[tuple[str, Tensor], int]]:
    """Return name, cache and number of the group of each layer, without layers that share another
    layer's cache.

    Caches of layers in different groups may be one memory: a block belongs to one group at a time.

    Raises:
        ValueError: a layer has no tensor for a cache; names it.
    """
    found: dict[tuple[int, int], tuple[tuple[str, Tensor], int]] = {}
    for name, group in layers:
        cache = caches.get(name)
        if not isinstance(cache, Tensor):
            raise ValueError(f"{name}: the cache is a {type(cache).__name__}, not a tensor")  # noqa: TRY004 — one kind of refusal
        found.setdefault((group, cache.data_ptr()), ((name, cache), group))
    return list(found.values())


def as_blocks(
    name: str, cache: Tensor, num_blocks: int, block_tokens: int, num_heads: int
) -> Tensor:
    """View `cache` as [block, kernel block, head, token, content].

    A kernel may work on blocks of fewer tokens; then a block of the cache contains several. A cache
    without heads (MLA) may lack their axis.

    Raises:
        ValueError: no order of its axes fits; names the layer.
    """
    if cache.ndim == 3 and num_heads == 1:
        cache = cache.unsqueeze(1)
    if cache.dtype.itemsize == 1:
        # Some devices cannot select or fill 8-bit floats.
        cache = cache.view(torch.uint8)
    fits = [
        axes
        for axes in permutations(range(cache.ndim))
        if cache.ndim == 4 and _is_axis_order(cache, axes, num_blocks, block_tokens, num_heads)
    ]
    # vLLM's own order is the first permutation. If it fits, it is right, even if sizes fit another
    # order too, e.g. because there are as many heads as tokens.
    if not fits or (len(fits) > 1 and fits[0] != (0, 1, 2, 3)):
        raise ValueError(
            f"{name}: a cache of shape {tuple(cache.shape)} cannot be read as {num_blocks} blocks "
            f"of {num_heads} heads x {block_tokens} tokens"
        )
    blocks = cache.permute(fits[0])
    return blocks.view(num_blocks, -1, *blocks.shape[1:])


def _is_axis_order(
    cache: Tensor, axes: tuple[int, ...], num_blocks: int, block_tokens: int, num_heads: int
) -> bool:
    blocks, heads, tokens, _ = (cache.shape[axis] for axis in axes)
    return (
        blocks % num_blocks == 0
        and heads == num_heads
        and tokens * (blocks // num_blocks) == block_tokens
    )


def heads_come_first(cache: Tensor) -> bool:
    """Return whether [block, kernel block, head, token, content] has heads outside tokens."""
    return cache.stride(2) >= cache.stride(3)
