# SPDX-License-Identifier: Apache-2.0
"""KV caches in vLLM's layouts, made without vLLM.

A cache is viewed as [layer, block, head, token, content], the order in which vLLM views its layers.
A layout is the order of these axes in memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SHOWN = "LBHNC"
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's names of the layouts; a test compares the two."""
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,  # as vLLM declares some caches of 8-bit floats
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a cache; `content`: of K and V together, for one head and token."""

    layers: int
    blocks: int
    heads: int
    block_tokens: int = 16
    content: int = 64

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the view."""
        return (self.layers, self.blocks, self.heads, self.block_tokens, self.content)


SMALL = Sizes(layers=3, blocks=12, heads=4)
EIGHT_B = Sizes(layers=32, blocks=512, heads=8, content=256)
"""The cache of Llama-3-8B for 8,192 tokens: 1 GiB in bfloat16."""


def make_cache(sizes: Sizes, layout: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed cache of `sizes.shape` whose memory is in the order of `layout`."""
    lengths = dict(zip(SHOWN, sizes.shape, strict=True))
    lengths["C"] *= dtype.itemsize
    in_memory = [lengths[axis] for axis in layout]
    memory = torch.zeros(in_memory, dtype=torch.uint8, device=device).view(dtype)
    return memory.permute([layout.index(axis) for axis in SHOWN])


def bits(cache: Tensor) -> Tensor:
    """View a cache as bytes: not every device can compare or fill 8-bit floats."""
    return cache.view(torch.uint8)


def fill(cache: Tensor, seed: int) -> None:
    """Write random bytes, different ones for each `seed`."""
    generator = torch.Generator(cache.device).manual_seed(seed)
    for layer in bits(cache):
        drawn = torch.empty(layer.shape, dtype=torch.uint8, device=cache.device)
        layer.copy_(drawn.random_(generator=generator))
