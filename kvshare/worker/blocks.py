# SPDX-License-Identifier: Apache-2.0
"""Copies blocks between vLLM's cache tensors and chunks as stored objects hold them; pure.

A stored chunk contains, layer after layer, its blocks with the bytes of vLLM's cache, so a save
copies runs of blocks. Its shape is [layer, kernel block, head, token, content] or, if the cache has
tokens outside heads, [layer, kernel block, token, head, content]; an attribute says which. A kernel
may work on blocks of fewer tokens than vLLM's; then a block contains several. `content` is the data
of the attention kernel for one token and head, K and V together. Only the axes of blocks and heads
mean the same for every kernel: CPU kernels repack the inside of a block for their instruction set.
So blocks are copied whole, never by token.

An object may hold the numbers of a block in 8 bits (float8.py): then the axes are the same, and
`content` is a byte longer than in the cache.

A CPU copies the blocks itself. For a GPU, the copies of all chunks of a step are listed and
launched by one call (device_copies.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecshare.store.format import TensorSpec
from ecshare.store.keys import JSON
from ecshare.transfer.device.load_streams import LoadStream
from ecshare.transfer.device.staging import Slab, dtype_name, is_gpu
from kvshare.chunks.layers import LayerSet
from kvshare.chunks.prefix import ChunkKey
from kvshare.chunks.shards import Heads
from kvshare.compat import device_copier
from kvshare.messages import Piece
from kvshare.worker import float8
from kvshare.worker.cache_axes import as_blocks, distinct_caches, heads_come_first
from kvshare.worker.device_copies import Addresses, BlockTable, Copier

# The integers as which numpy sees the types of torch that it lacks, by size in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Erase = Callable[[Tensor, int], None]
Read = Callable[[int, memoryview], None]
"""Fills memory, uint8, with the bytes of a stored tensor from an offset on."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A stored tensor, and how its bytes are read without mapping them, if they can be."""

    stored: Tensor
    read: Read | None

    def fill(self, out: Tensor, part: Tensor) -> bool:
        """Fill `out`, uint8, with the bytes of `part` [layer, block, ...], if they can be read: in
        the stored tensor those of a layer must be side by side, in this order. Return whether
        they could.
        """
        layers = [part] if part.is_contiguous() else [*part.unbind()]
        first = part.data_ptr() - self.stored.data_ptr()
        is_inside = 0 <= first < self.stored.nbytes
        if self.read is None or not is_inside or not layers[0].is_contiguous():
            return False
        memory = out.numpy().data
        for layer in layers:
            self.read(layer.data_ptr() - self.stored.data_ptr(), memory[: layer.nbytes])
            memory = memory[layer.nbytes :]
        return True


class BlockCaches:
    """The KV cache of one layer set in one worker, as numbered blocks of one shape.

    Holds views of vLLM's tensors: reads and writes access the cache itself.
    """

    def __init__(  # noqa: PLR0913 — all parameters of a layer set's cache
        self,
        caches: Mapping[str, Tensor],
        layer_set: LayerSet,
        num_blocks: int,
        block_tokens: int,
        *,
        erase: Erase | None = None,
        as_float8: bool = False,
    ) -> None:
        """Find the axes of each layer's tensor in `caches`, which may hold those of other sets too.

        `erase`: zeroes the tokens from a given one on in blocks of the host, [block, head, token,
        content]. Given if the kernel interleaves the tokens of a block. `as_float8`: objects hold
        8-bit floats.

        Raises:
            ValueError: the layout is not supported; the message says which and why.
        """
        num_heads = layer_set.num_heads
        distinct = distinct_caches(layer_set.layers, caches)
        views = [as_blocks(*layer, num_blocks, block_tokens, num_heads) for layer, _ in distinct]
        layouts = {
            (tuple(each.shape), each.dtype, each.device, heads_come_first(each)) for each in views
        }
        if len(layouts) > 1:
            raise ValueError(f"the layers' caches differ: {sorted(map(str, layouts))}")
        first = views[0]
        self.layout = ""
        """The digest of the layout of the inside of a block; see layout_check.py."""
        self._names = [name for (name, _), _ in distinct]
        self._is_head_first = heads_come_first(first)
        self._layers = [
            (self._in_memory_order(each), group)
            for each, (_, group) in zip(views, distinct, strict=True)
        ]
        self.device: torch.device = first.device
        self.dtype = dtype_name(first.dtype)
        self.as_float8 = as_float8
        """Whether objects hold 8-bit floats."""
        self._block_tokens = block_tokens
        _, self._kernel_blocks, self._num_heads, self._kernel_tokens, self._content = first.shape
        one_block = self._stored(self.spec(Piece(ChunkKey(b""), 1, block_tokens, ())))
        self._head_bytes = one_block.num_bytes // self._num_heads  # of one block, as stored
        self._erase = erase
        self.erases = erase is None or _can_erase(erase, first)
        """True if the bytes after the last token of a block can be zeroed."""
        self._copier: Copier | None = None
        if is_gpu(self.device):
            self._copier = device_copier()
            if self._copier is None:
                raise ValueError("neither vLLM nor CUDA's driver copies blocks here")
            self._table = BlockTable.of(self._layers)

    @property
    def num_layers(self) -> int:
        """Return the number of layers of a stored block."""
        return len(self._layers)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block of one layer."""
        cache, _ = self._layers[0]
        return cache[0].nbytes

    def spec(self, piece: Piece) -> TensorSpec:
        """Return the spec of the object of this rank to which `save` copies `piece`."""
        attributes: dict[str, JSON] = {
            "chunk": piece.key.hex(),  # detects an object that was moved to another key
            "num_tokens": piece.num_tokens,
            "block_tokens": self._block_tokens,
            "order": _order(is_head_first=self._is_head_first),
            "page": self.layout,
        }
        inside = (self._num_heads, self._kernel_tokens)
        shape = (
            len(self._layers),
            piece.num_blocks * self._kernel_blocks,
            *(inside if self._is_head_first else inside[::-1]),
            self._content,
        )
        return TensorSpec(self.dtype, shape, attributes)

    def num_in_part(self, piece: Piece) -> int:
        """Return the number of valid tokens in the last block of `piece`; 0: all."""
        return piece.num_tokens % self._block_tokens

    def num_bytes(self, piece: Piece) -> int:
        """Return the size of the payload of the object in which `piece` is stored."""
        return self._head_bytes * piece.num_blocks * self._num_stored_heads(piece)

    def _stored(self, spec: TensorSpec) -> TensorSpec:
        return float8.stored_spec(spec) if self.as_float8 else spec

    def can_use(self, stored: TensorSpec, piece: Piece) -> bool:
        """Return whether `stored` is an object of `piece` in a form that this engine can read.

        Heads may be outside tokens or inside them and kernel blocks may have any size, if the
        kernel keeps the tokens of a block one after the other.
        """
        if not self._is_of(piece, stored) or stored.attributes["page"] != self.layout:
            return False
        if self._erase is None:
            return True
        order, tokens = stored.attributes["order"], _kernel_tokens(stored)
        return (order, tokens) == (_order(is_head_first=self._is_head_first), self._kernel_tokens)

    def has_another_layout(self, stored: TensorSpec, piece: Piece) -> bool:
        """Return whether `stored`, which `can_use` refuses, has the blocks of `piece` in another
        layout."""
        return isinstance(stored.attributes.get("page"), str) and self._is_of(piece, stored)

    def _is_of(self, piece: Piece, stored: TensorSpec) -> bool:
        """Return whether `stored` has the blocks of `piece`, in any layout."""
        own = self._stored(self.spec(piece))
        free = {name: stored.attributes.get(name) for name in ("order", "page")}
        if stored.attributes != {**own.attributes, **free} or len(stored.shape) != 5:
            return False
        order = stored.attributes["order"]
        if order not in _ORDERS or stored.dtype != own.dtype:
            return False
        layers, blocks, heads, tokens, content = stored.shape
        if order == _order(is_head_first=False):
            heads, tokens = tokens, heads
        return (
            (layers, content) == (len(self._layers), own.shape[-1])
            and heads == self._num_stored_heads(piece)
            and blocks * tokens == piece.num_blocks * self._block_tokens
            and blocks % piece.num_blocks == 0
        )

    def is_sound(self, stored: Tensor) -> bool:
        """Return whether the bytes of an object that `can_use` has accepted may go to blocks."""
        return not self.as_float8 or float8.is_sound(stored)

    def layers_at(self, block_ids: Sequence[int]) -> list[tuple[str, int, Tensor]]:
        """Return for each layer its name, the block of its group in `block_ids`, and a view of that
        block of its cache."""
        return [
            (name, block_ids[group], cache[block_ids[group]])
            for name, (cache, group) in zip(self._names, self._layers, strict=True)
        ]

    def by_head(self, stored: Tensor) -> Tensor:
        """Return one stored block as [layer, head, token, content]."""
        return self._in_memory_order(stored).transpose(1, 2).flatten(2, 3)

    def save(self, saves: Sequence[tuple[Piece, Slab]]) -> None:
        """Copy the blocks of each piece to its slab, which has the shape of `spec`.

        On a GPU the copies are launched on the current stream, by one call. `Slab.finish` is set to
        the work that is left when they have arrived. Call this inside `Staging.copying`.

        In the last block of a piece, the bytes after its last token are undefined or those of an
        earlier request. They are zeroed, if this `erases`.
        """
        if self._copier is None:
            for piece, slab in saves:
                self._read(piece, slab.payload)
                self._finish(piece, slab.payload)
            return
        by_size: dict[int, list[tuple[Piece, Slab]]] = {}
        for piece, slab in saves:
            by_size.setdefault(piece.num_held, []).append((piece, slab))
            if self.num_in_part(piece):
                slab.finish = partial(self._finish, piece, slab.payload)
        copies = [self._copies_to(equal) for equal in by_size.values()]
        if copies:
            self._copier(*map(np.concatenate, zip(*copies, strict=True)))

    def write(
        self,
        piece: Piece,
        stored: Tensor,
        order: JSON,
        stream: LoadStream | None = None,
        read: Read | None = None,
    ) -> None:
        """Overwrite the blocks of `piece` with those of `stored`, a tensor of the host that passed
        `can_use` and `is_sound`.

        `order`: its attribute of that name. `stream`: to the GPU, see `LoadStreams.after`; None on
        a CPU. `read`: may be called instead of reading `stored`. The bytes have been read on
        return: `stored` may be released.

        Raises:
            StoreError: `read` has failed. Some blocks may have been written.
        """
        is_head_first = order == _order(is_head_first=True)
        tokens = stored.shape[3 if is_head_first else 2]
        blocks = self._blocks_of(stored, self._block_tokens // tokens)
        own = self._in_own_layout(blocks, is_head_first=is_head_first)
        own = own[:, piece.first_block : piece.first_block + piece.num_held]
        heads = None if piece.shard is None else piece.shard.heads
        if heads is not None:
            own = own.narrow(self._head_axis + 1, heads.first, heads.count)
        layers = [(self._of_heads(cache, heads), group) for cache, group in self._layers]
        if self._copier is not None and stream is not None:
            table = self._table if heads is None else BlockTable.of(layers)
            source = _Source(stored, None if self.as_float8 else read)
            self._send(own, piece, table, stream, self._copier, source)
            return
        runs = [list(_runs(ids)) for ids in piece.block_ids]
        for number, (cache, group) in enumerate(layers):
            rows = own[number]
            if self.as_float8:
                rows = self._fill(torch.empty(self._in_cache(rows), dtype=cache.dtype), rows)
            _scatter(rows, cache, runs[group])

    def _in_cache(self, stored: Tensor) -> tuple[int, ...]:
        """Return the shape that `stored` blocks have in the cache."""
        return (*stored.shape[:-1], self._content)

    def _fill(self, blocks: Tensor, stored: Tensor) -> Tensor:
        """Write `stored` blocks to `blocks`, and return these: contiguous, of the cache's dtype."""
        if self.as_float8:
            float8.decode(stored, blocks)
        else:
            _bits(blocks)[...] = _bits(stored)
        return blocks

    def _send(  # noqa: PLR0913 — all that a copy needs
        self,
        own: Tensor,
        piece: Piece,
        table: BlockTable,
        stream: LoadStream,
        copier: Copier,
        source: "_Source",
    ) -> None:
        """Copy `own` [layer, block, ...] on the host to the blocks of `piece` on the GPU.

        The copy passes through the stream's pinned memory, a buffer at a time: as many layers as
        fit, or as many blocks of one layer.
        """
        num_layers, num_blocks = own.shape[:2]
        dtype = self._layers[0][0].dtype
        block_ids = np.array([piece.block_ids], np.int64)
        blocks_at_once = min(num_blocks, stream.buffer_bytes // table.block_bytes)
        layers_at_once = max(1, stream.buffer_bytes // (num_blocks * table.block_bytes))
        for layer in range(0, num_layers, layers_at_once):
            layers = slice(layer, layer + layers_at_once)
            for block in range(0, num_blocks, blocks_at_once):
                blocks = slice(block, block + blocks_at_once)
                part = own[layers, blocks]
                pinned = stream.buffer()
                shape = self._in_cache(part)
                num_bytes = math.prod(shape) * dtype.itemsize
                if not source.fill(pinned[:num_bytes], part):
                    self._fill(pinned[:num_bytes].view(dtype).view(shape), part)
                host = np.array([pinned.data_ptr()], np.int64)
                targets, sources, sizes = table.copies(block_ids[..., blocks], host, layers)
                copier(sources, targets, sizes)
                stream.sent()

    def _copies_to(
        self, saves: Sequence[tuple[Piece, Slab]]
    ) -> tuple[Addresses, Addresses, Addresses]:
        """List the copies of pieces of one size to their slabs."""
        block_ids = np.array([piece.block_ids for piece, _ in saves], np.int64)
        payloads = np.array([slab.payload_address for _, slab in saves], np.int64)
        return self._table.copies(block_ids, payloads)

    def _read(self, piece: Piece, out: Tensor) -> None:
        """Copy the blocks of `piece` to `out`; CPU."""
        runs = [list(_runs(ids)) for ids in piece.block_ids]
        blocks = self._blocks_of(out, self._kernel_blocks)
        for number, (cache, group) in enumerate(self._layers):
            for row, block_id, count in runs[group]:
                blocks[number, row : row + count].copy_(cache[block_id : block_id + count])

    @torch.inference_mode()
    def _finish(self, piece: Piece, payload: Tensor) -> None:
        """Zero the bytes after the last token of `piece`. Any thread.

        vLLM makes steps in inference mode, and a view of another dtype that is made in that mode
        can be written in no other.
        """
        num_tokens = self.num_in_part(piece)
        if self.erases and num_tokens:
            self._zero(self._blocks_of(payload, self._kernel_blocks)[:, -1], num_tokens)

    @property
    def _head_axis(self) -> int:
        """Return the axis of the heads in the cache of one layer, in the order of its memory."""
        return 2 if self._is_head_first else 3

    def _of_heads(self, cache: Tensor, heads: Heads | None) -> Tensor:
        """Return the part of a layer's cache that `heads` are copied to; None: all of it."""
        if heads is None:
            return cache
        return cache.narrow(self._head_axis, heads.first_own, heads.count)

    def _num_stored_heads(self, piece: Piece) -> int:
        return self._num_heads if piece.shard is None else piece.shard.num_heads

    def _blocks_of(self, chunk: Tensor, kernel_blocks: int) -> Tensor:
        """View a stored chunk as [layer, block, kernel block, ...]; `kernel_blocks` per block."""
        layers, blocks, *inside = chunk.shape
        return chunk.view(layers, blocks // kernel_blocks, kernel_blocks, *inside)

    def _in_own_layout(self, blocks: Tensor, *, is_head_first: bool) -> Tensor:
        """Reorder [layer, block, kernel block, ...] as in the cache; a view if possible."""
        ordered = blocks if is_head_first else blocks.transpose(3, 4)
        layers, number, kernel_blocks, heads, _, content = ordered.shape
        if kernel_blocks != self._kernel_blocks:
            whole = ordered.transpose(2, 3).reshape(layers, number, heads, -1, content)
            ordered = whole.view(layers, number, heads, -1, self._kernel_tokens, content)
            ordered = ordered.transpose(2, 3)
        return self._in_memory_order(ordered)

    def _in_memory_order(self, blocks: Tensor) -> Tensor:
        """View [..., head, token, content] with its axes in the order of the cache's memory."""
        return blocks if self._is_head_first else blocks.transpose(-3, -2)

    def _zero(self, last: Tensor, num_tokens: int) -> None:
        """Zero the tokens after the first `num_tokens` in the `last` block of each layer."""
        # The order's own inverse: [layer, kernel block, head, token, ...].
        blocks = self._in_memory_order(last)
        if self._erase is None:
            whole, rest = divmod(num_tokens, self._kernel_tokens)
            blocks[:, whole, :, rest:] = 0
            blocks[:, whole + 1 :] = 0
            return
        for layer in blocks:
            block = layer.contiguous()
            self._erase(block, num_tokens)
            layer.copy_(block)


_ORDERS = ("head token", "token head")


def _kernel_tokens(stored: TensorSpec) -> int:
    """Return the tokens of a kernel block in an object with one of `_ORDERS`."""
    is_head_first = stored.attributes["order"] == _order(is_head_first=True)
    return stored.shape[3 if is_head_first else 2]


def _order(*, is_head_first: bool) -> str:
    return _ORDERS[0 if is_head_first else 1]


def _can_erase(erase: Erase, cache: Tensor) -> bool:
    """Return whether `erase` works, tried on a block of ones."""
    block = torch.ones_like(cache[0], memory_format=torch.contiguous_format)
    num_blocks, _, kernel_tokens, _ = block.shape
    block_tokens = num_blocks * kernel_tokens
    first_token = block_tokens // 2
    try:
        erase(block, first_token)
    except Exception:  # noqa: BLE001 — the kernel of another release may raise any class
        return False
    num_kept = block.numel() // block_tokens * first_token
    return int(block.count_nonzero()) == num_kept == int((block == 1).sum())


def _scatter(rows: Tensor, cache: Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy `rows` to the blocks of `cache` that `runs` name.

    Numpy copies in this thread only. Torch would use further threads for each thread that copies,
    on the cores that compute other requests.
    """
    source, target = _bits(rows), _bits(cache)
    for row, block_id, count in runs:
        target[block_id : block_id + count] = source[row : row + count]


def _bits(tensor: Tensor) -> Any:  # noqa: ANN401 — an array of numpy's, which has no name here
    """View a host tensor as a numpy array of whole numbers, of the same shape."""
    return tensor.view(_BITS[tensor.dtype.itemsize]).numpy()


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (place, first number, count) of each run of consecutive numbers.

    vLLM often gives out consecutive blocks, and a run of many is one copy.
    """
    start = 0
    for place in range(1, len(block_ids) + 1):
        if place == len(block_ids) or block_ids[place] != block_ids[place - 1] + 1:
            yield start, block_ids[start], place - start
            start = place
