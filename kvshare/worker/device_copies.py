# SPDX-License-Identifier: Apache-2.0
"""Lists copies of many blocks between a GPU and the host by address, for one call; pure.

A gather would need memory on the device, and several launches per chunk. Instead, the driver gets a
list of copies in one call, as from vLLM's own connectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Addresses = NDArray[np.int64]
Copier = Callable[[Addresses, Addresses, Addresses], None]
"""Queues copies on the current stream: sources, targets, and numbers of bytes."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The addresses of the blocks of some layers. All layers have one layout.

    A block is a number of runs of bytes; on the host its runs are contiguous.
    """

    bases: Addresses
    """[layer]: the address of block 0."""
    groups: Addresses
    """[layer]: the position of the layer's group in `Piece.block_ids`."""
    block_stride: int
    """Bytes from a block to the next."""
    runs: Addresses
    """[run]: bytes from the beginning of a block to each of its runs, in their order."""
    run_bytes: int

    @classmethod
    def of(cls, layers: Sequence[tuple[Tensor, int]]) -> "BlockTable":
        """Describe `layers`, each as [block, ...] in the order of the host, and its group.

        Raises:
            ValueError: the bytes of a block are too scattered to be copied by address.
        """
        first = layers[0][0]
        item = first.dtype.itemsize
        offsets, length = np.zeros(1, np.int64), 1
        axes = list(zip(first.shape[1:], first.stride()[1:], strict=True))
        while axes and (axes[-1][0] == 1 or axes[-1][1] == length):
            length *= axes.pop()[0]
        if length == 1:
            raise ValueError(f"blocks of strides {first.stride()} hold no two values side by side")
        for size, stride in axes:
            offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return cls(
            np.array([each.data_ptr() for each, _ in layers], np.int64),
            np.array([group for _, group in layers], np.int64),
            first.stride(0) * item,
            offsets * item,
            length * item,
        )

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block of one layer."""
        return len(self.runs) * self.run_bytes

    @property
    def _is_gapless(self) -> bool:
        """Return whether a block ends where the next one begins."""
        return len(self.runs) == 1 and self.run_bytes == self.block_stride

    def copies(
        self, block_ids: Addresses, host: Addresses, layers: slice = slice(None)
    ) -> tuple[Addresses, Addresses, Addresses]:
        """List the copies between the cache and pieces of equal size on the host.

        `block_ids`: [piece, group, block]. `host`: where each piece begins, as [layer, block, run]
        of these `layers`. Return the addresses in the cache, those on the host, and the bytes.

        Consecutive blocks are one copy, if the cache has nothing between them. vLLM often gives out
        consecutive blocks.
        """
        groups = self.groups[layers]
        blocks = self.bases[layers, None] + block_ids[:, groups] * self.block_stride
        cache = (blocks[..., None] + self.runs).reshape(len(host), -1)
        packed = host[:, None] + np.arange(cache.shape[1], dtype=np.int64) * self.run_bytes
        if not self._is_gapless:
            return cache.reshape(-1), packed.reshape(-1), np.full(cache.size, self.run_bytes)
        begins = np.ones(block_ids.shape, bool)
        begins[..., 1:] = np.diff(block_ids) != 1
        first = np.flatnonzero(begins[:, groups])
        sizes = np.diff(first, append=cache.size) * self.run_bytes
        return cache.reshape(-1)[first], packed.reshape(-1)[first], sizes
