# SPDX-License-Identifier: Apache-2.0
"""Finds out what the inside of an engine's blocks looks like, by having the engine fill one.

Blocks are stored as they lie in the cache. Two attention kernels may lay out one in different ways
and still have caches of one shape, and no checksum could tell. So each worker tries its kernels
when it gets its caches: vLLM's own operation writes known keys and values to one block of each
layer, and what would be stored of that block gives a digest. All objects of this worker have it as
their `page`, and the worker uses no others.
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
# The known values are 1 to this: even 8-bit floats hold them, and none is what a zeroed block has.
_LARGEST = 8


class LayoutCheckError(Exception):
    """What would be stored of a block is not what the engine has written to it."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What the inside of a block looks like."""

    digest: str
    """16 hex digits; engines with equal ones can read each other's blocks."""
    untried: str = ""
    """Attention back ends whose cache operation cannot be called: the digest is then of their names
    and vLLM's release."""


@dataclass(frozen=True, slots=True)
class LayoutCheck:
    """What it takes to try the attention kernels of one worker."""

    layers: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's attention layers by name; each has its cache by the time of `layout_of`."""
    dtype: Any = torch.float32
    """A torch dtype: in which the model computes keys and values."""
    release: str = ""
    """Of vLLM."""

    @torch.inference_mode()
    def layout_of(
        self, blocks: BlockCaches, block_ids: Sequence[int], block_tokens: int
    ) -> BlockLayout:
        """Try the layers of `blocks` on the block of each of their cache groups in `block_ids`.

        On return these blocks are as before. Worker's main thread, with no forward pass under way.

        Raises:
            LayoutCheckError: see there.
            Exception: whatever vLLM's operation raises.
        """
        found = blocks.layers_at(block_ids)
        untried = {
            attention_backend(self.layers.get(name))
            for name, *_ in found
            if not has_cache_operation(self.layers.get(name))
        }
        if untried:
            names = ", ".join(sorted(untried))
            return BlockLayout(_digest(f"untried {names} vLLM {self.release}".encode()), names)
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
            heads = blocks.by_head(_stored(blocks, piece))
        finally:
            for (*_, view), old in zip(found, before, strict=True):
                view.copy_(old)
        for (name, *_), layer, width in zip(found, heads, widths, strict=True):
            _check(name, layer, block_tokens * width)
        # Of one head, so that engines find the same, over how many ranks heads are spread.
        first = heads[:, 0].contiguous()
        return BlockLayout(_digest(first.view(torch.uint8).numpy().tobytes()))

    def _known(
        self, device: torch.device, number: int, num_tokens: int, name: str, width: int
    ) -> Tensor:
        """Return [token, element] that layer `number` is to hold: other values at each place."""
        values = hashlib.shake_256(f"{name} {number}".encode()).digest(num_tokens * width)
        flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) % _LARGEST + 1
        return flat.view(num_tokens, width).to(device, self.dtype)


def _stored(blocks: BlockCaches, piece: Piece) -> Tensor:
    """Return on the host what would be stored of `piece`, by the way that saves go."""
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
    """Raise if `layer` [head, token, content] is not all that was written for each head."""
    num_found = int(layer[0].count_nonzero())
    if num_found != num_written:
        raise LayoutCheckError(
            f"{name}: of {num_written} numbers that the engine wrote to a head of a block, "
            f"{num_found} are where this connector looks for them"
        )
    if not torch.equal(layer, layer[:1].expand_as(layer)):
        raise LayoutCheckError(f"{name}: the heads of a block differ that were filled alike")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
