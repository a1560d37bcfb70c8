# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache tensors -> chunks of blocks as stored objects hold them, and back; pure.

A stored chunk is [head, layer, token, content], its blocks one after the other along the tokens:
one range of heads is one range of bytes, whatever the strides on the device. `content` is what the
attention kernel keeps for one token and head, K and V together. Only the head and the block are
axes that every kernel means alike: CPU kernels repack the inside of a block for their instruction
set. So blocks are moved whole, never by token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from ecshare.store.format import TensorSpec
from ecshare.transfer.staging import dtype_name
from kvshare.layers import LayerSet

# Where a copy costs its bytes. Elsewhere it costs a launch, and one for many blocks is better.
_HOST = "cpu"
# What numpy is shown instead of types that it does not know, by the bytes of one.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Places = list[tuple[int, int, int]] | Tensor
"""Blocks as runs (see `_runs`), or as their numbers on the device."""

BlockIds = Sequence[Sequence[int]]
"""The blocks of some consecutive tokens, in each of the cache groups of a layer set."""


Erase = Callable[[Tensor, int], None]


class BlockCaches:
    """The KV cache of one layer set in one worker, as numbered blocks of one shape.

    Holds views of vLLM's tensors: what is read and written here is the cache itself.
    """

    def __init__(
        self,
        caches: Mapping[str, Tensor],
        layer_set: LayerSet,
        num_blocks: int,
        block_tokens: int,
        *,
        erase: Erase | None = None,
    ) -> None:
        """Find the axes of each layer's tensor in `caches`, which holds those of other sets too.

        `erase`: given where the kernel mixes the tokens of a block, so that none can be told from
        others; zeroes those from a given one on in blocks of a host, [block, head, token, content].

        Raises:
            ValueError: a layout this does not understand; the message says which and why.
        """
        num_heads = layer_set.num_heads
        distinct = _distinct(layer_set.layers, caches)
        pages = [_paged(*layer, num_blocks, block_tokens, num_heads) for layer, _ in distinct]
        shapes = {(tuple(each.shape), each.dtype, each.device) for each in pages}
        if len(shapes) > 1:
            raise ValueError(f"the layers' caches differ: {sorted(map(str, shapes))}")
        self._layers = [(each, group) for each, (_, group) in zip(pages, distinct, strict=True)]
        first = pages[0]
        self.device: torch.device = first.device
        self.dtype = dtype_name(first.dtype)
        self._num_heads = num_heads
        self._by_row = layer_set.is_checked_by_head
        self._block_tokens = block_tokens
        self._content = int(first.shape[-1])
        self._erase = erase
        self.erases = erase is None or _can_erase(erase, first)
        """Whether what follows the last token of a block can be zeroed."""

    def facts(self, num_blocks: int, num_tokens: int, name: str) -> TensorSpec:
        """Return what the object of a chunk of `num_blocks` says of itself; `num_tokens` count.

        `name`: the chunk's; an object that was moved to another key is told by it.
        """
        attributes = {
            "chunk": name,
            "num_tokens": num_tokens,
            "block_tokens": self._block_tokens,
            "num_layers": len(self._layers),
        }
        num_stored = num_blocks * self._block_tokens
        shape = (self._num_heads, len(self._layers), num_stored, self._content)
        return TensorSpec(self.dtype, shape, attributes, by_row=self._by_row)

    def read(self, block_ids: BlockIds, num_tokens: int, out: Tensor) -> None:
        """Copy blocks to `out` [head, layer, token, content], on the cache's device.

        What follows the first `num_tokens`, in the last block, are bytes of nobody or of an earlier
        request: they are zeroed, if it is one that `erases`.
        """
        places = [_places(ids, self.device) for ids in block_ids]
        for number, (pages, group) in enumerate(self._layers):
            rows = _rows(out, number, pages)
            _gather(pages, places[group], rows)
            if self._erase is not None and self.erases and num_tokens < out.shape[2]:
                # Of the last block, as kernels have it: [kernel block, head, token, content].
                block = rows[-1].transpose(0, 1).contiguous()
                self._erase(block, num_tokens % self._block_tokens)
                rows[-1].copy_(block.transpose(0, 1))
        if self._erase is None:
            out[:, :, num_tokens:] = 0

    def write(
        self, stored: Tensor, first_block: int, block_ids: BlockIds, first_head: int = 0
    ) -> None:
        """Overwrite blocks with those of the host's `stored` [head, layer, token, content].

        The blocks of `stored` from `first_block` on, as many as `block_ids` has in each group; the
        heads from `first_head` on, as many as `stored` has. The bytes have been read on return:
        `stored` may be released.
        """
        end_head = first_head + stored.shape[0]
        first, end = first_block, first_block + len(block_ids[0])
        here = stored[:, :, first * self._block_tokens : end * self._block_tokens].to(self.device)
        places = [_places(ids, self.device) for ids in block_ids]
        for number, (pages, group) in enumerate(self._layers):
            target = pages[:, first_head:end_head]
            _scatter(_rows(here, number, target), target, places[group])


def _can_erase(erase: Erase, pages: Tensor) -> bool:
    """Try it, on a block of ones."""
    block = torch.ones_like(pages[0].transpose(0, 1), memory_format=torch.contiguous_format)
    num_blocks, _, kernel_tokens, _ = block.shape
    block_tokens = num_blocks * kernel_tokens
    first_token = block_tokens // 2
    try:
        erase(block, first_token)
    except Exception:  # noqa: BLE001 — another release's kernel: whatever it raises, it cannot
        return False
    num_kept = block.numel() // block_tokens * first_token
    return int(block.count_nonzero()) == num_kept == int((block == 1).sum())


def _rows(chunk: Tensor, number: int, pages: Tensor) -> Tensor:
    """View layer `number` of `chunk` as pages: [block, head, kernel block, token, content]."""
    heads, *page = pages.shape[1:]
    rows = chunk[:, number]
    num_blocks = rows.shape[1] // (page[0] * page[1])
    return rows.view(heads, num_blocks, *page).transpose(0, 1)


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
    """Copy `rows` to the `pages` at `places`.

    On a host by this thread alone: torch would have the cores help that compute other requests
    meanwhile, once for each thread that copies.
    """
    if isinstance(places, Tensor):
        pages.index_copy_(0, places, rows)
        return
    source, target = _bits(rows), _bits(pages)
    for row, block_id, count in places:
        target[block_id : block_id + count] = source[row : row + count]


def _bits(tensor: Tensor) -> Any:  # noqa: ANN401 — an array of numpy's, which has no name here
    """View a host tensor as a numpy array of whole numbers, of the same shape."""
    return tensor.view(_BITS[tensor.dtype.itemsize]).numpy()


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (place, first number, count) of each run of consecutive numbers.

    vLLM hands blocks out in order as long as it has them in order, and a copy of many is one.
    """
    start = 0
    for place in range(1, len(block_ids) + 1):
        if place == len(block_ids) or block_ids[place] != block_ids[place - 1] + 1:
            yield start, block_ids[start], place - start
            start = place


def _distinct(
    layers: Sequence[tuple[str, int]], caches: Mapping[str, Tensor]
) -> list[tuple[tuple[str, Tensor], int]]:
    """Return the cache of each layer, by name, and the place of its group; without layers that
    share another's cache.

    Caches of layers in different groups may be one memory: a block belongs to one group at a time.
    """
    found: dict[tuple[int, int], tuple[tuple[str, Tensor], int]] = {}
    for name, group in layers:
        cache = caches.get(name)
        if not isinstance(cache, Tensor):
            raise ValueError(f"{name}: the cache is a {type(cache).__name__}, not a tensor")  # noqa: TRY004 — one kind of refusal
        found.setdefault((group, cache.data_ptr()), ((name, cache), group))
    return list(found.values())


def _paged(name: str, cache: Tensor, num_blocks: int, block_tokens: int, num_heads: int) -> Tensor:
    """View `cache` as [block, head, kernel block, token, content].

    A kernel may work on blocks of fewer tokens; then several lie in one block of the cache. One
    without heads (MLA) may leave out their axis.
    """
    if cache.ndim == 3 and num_heads == 1:
        cache = cache.unsqueeze(1)
    if cache.dtype.itemsize == 1:
        # Not every device can select or fill 8-bit floats.
        cache = cache.view(torch.uint8)
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
