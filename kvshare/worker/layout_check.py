# SPDX-License-Identifier: Apache-2.0
"""Determines how an engine lays out the inside of its KV blocks, by having it fill one.

Blocks are stored byte by byte as in the cache. Two attention kernels may lay out a block
differently although their caches have the same shape, and no checksum detects that. So each worker
tries its kernels when it gets its caches: vLLM's own operation writes known keys and values to one
block of each layer. The bytes that would be stored of that block are hashed. All objects of this
worker have the digest as their `page`, and the worker uses no objects with another one.

In opaque blocks the written values cannot be recognized. Their digest is that of all bytes of the
block, of the backends' names and of vLLM's release.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ecshare.store.format import PROLOGUE_BYTES
from ecshare.transfer.device.staging import Staging
from kvshare.chunks.prefix import ChunkKey
from kvshare.compat import attention_backend, fill_cache, has_cache_operation
from kvshare.messages import Piece
from kvshare.worker.blocks import BlockCaches

_DIGITS = 16
# The known values are 1 to 8: exact even in 8-bit floats, and different from a zeroed block.
_LARGEST = 8


class LayoutCheckError(Exception):
    """The bytes that would be stored of a block are not those that the engine wrote to it."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of the inside of a block."""

    digest: str
    """16 hex digits; engines with equal ones can read each other's blocks."""
    untried: str = ""
    """The attention backends whose cache operation cannot be called. If there are any, the digest
    is of their names and vLLM's release."""


@dataclass(frozen=True, slots=True)
class LayoutCheck:
    """Tries the attention kernels of one worker."""

    layers: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's attention layers by name; each has its cache when `layout_of` is called."""
    dtype: Any = torch.float32
    """The torch dtype in which the model computes keys and values."""
    release: str = ""
    """The release of vLLM."""

    @torch.inference_mode()
    def layout_of(
        self,
        blocks: BlockCaches,
        block_ids: Sequence[int],
        block_tokens: int,
        *,
        is_opaque: bool = False,
    ) -> BlockLayout:
        """Try the layers of `blocks` on the block of each of their cache groups in `block_ids`.

        On return these blocks are as before. Worker's main thread, with no forward pass running.

        Raises:
            LayoutCheckError: the bytes that would be stored are not those that were written.
            Exception: any error of vLLM's operation.
        """
        found = blocks.layers_at(block_ids)
        layers = [self.layers.get(name) for name, *_ in found]
        untried = [each for each in layers if not _can_try(each, is_opaque=is_opaque)]
        if untried:
            names = _names_of(layers if is_opaque else untried)
            return BlockLayout(self.untried(names), names)
        before = [view.clone() for *_, view in found]
        try:
            widths = []
            for number, (name, block_id, view) in enumerate(found):
                view.zero_()
                known = partial(self._known, blocks.device, number, block_tokens)
                slots = torch.arange(block_tokens, device=blocks.device) + block_id * block_tokens
                widths.append(fill_cache(self.layers[name], known, slots))
            piece = Piece(
                ChunkKey(bytes(32)), 1, block_tokens, tuple((each,) for each in block_ids)
            )
            stored = _stored(blocks, piece)
        finally:
            for (*_, view), old in zip(found, before, strict=True):
                view.copy_(old)
        if is_opaque:
            return BlockLayout(self._opaque(stored, _names_of(layers)))
        heads = blocks.by_head(stored)
        for (name, *_), layer, width in zip(found, heads, widths, strict=True):
            _check(name, layer, block_tokens * width)
        # Only one head is hashed, so that the digest is equal for all tensor-parallel sizes.
        first = heads[:, 0].contiguous()
        return BlockLayout(_digest(first.view(torch.uint8).numpy().tobytes()))

    def untried(self, name: str) -> str:
        """Return the digest for kernels that cannot be tried: of their `name` and the release."""
        return _digest(f"untried {name} vLLM {self.release}".encode())

    def _opaque(self, stored: Tensor, backends: str) -> str:
        """Return the digest for opaque blocks, from a `stored` one of each layer."""
        content = stored.flatten(1).view(torch.uint8)
        if not content.any(1).all():
            raise LayoutCheckError("the engine wrote nothing to the block of a layer")
        kernel = f"opaque {backends} vLLM {self.release} ".encode()
        return _digest(kernel + content.numpy().tobytes())

    def _known(
        self, device: torch.device, number: int, num_tokens: int, name: str, width: int
    ) -> Tensor:
        """Return the known values [token, element] for layer `number`; pseudo-random."""
        values = hashlib.shake_256(f"{name} {number}".encode()).digest(num_tokens * width)
        flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) % _LARGEST + 1
        return flat.view(num_tokens, width).to(device, self.dtype)


def _can_try(layer: Any, *, is_opaque: bool) -> bool:
    # Opaque MLA is sparse: its indexer's cache, which another operation fills, is beside it.
    return has_cache_operation(layer) and not (is_opaque and hasattr(layer, "kv_lora_rank"))


def _names_of(layers: Sequence[Any]) -> str:
    return ", ".join(sorted({attention_backend(each) for each in layers}))


def _stored(blocks: BlockCaches, piece: Piece) -> Tensor:
    """Return on the host the bytes that would be stored of `piece`, copied as saves are."""
    spec = blocks.spec(piece)
    staging = Staging(blocks.device, PROLOGUE_BYTES + spec.num_bytes)
    slab = staging.reserve(spec)
    if slab is None:
        raise LayoutCheckError("there is no memory for one block")
    try:
        with staging.copying([slab]):
            blocks.save([(piece, slab)])
        slab.arrived()
        return slab.payload.clone()
    finally:
        slab.release()


def _check(name: str, layer: Tensor, num_written: int) -> None:
    """Check that `layer` [head, token, content] has all values that were written, for each head.

    Raises:
        LayoutCheckError: it has not.
    """
    num_found = int(layer[0].count_nonzero())
    if num_found != num_written:
        raise LayoutCheckError(
            f"{name}: of {num_written} numbers that the engine wrote to a head of a block, "
            f"{num_found} are where this connector looks for them"
        )
    if not torch.equal(layer, layer[:1].expand_as(layer)):
        raise LayoutCheckError(f"{name}: the heads of a block were filled alike, but differ")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
