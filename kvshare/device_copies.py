# SPDX-License-Identifier: Apache-2.0
"""Copies of many blocks between a GPU and the host as one call, by their addresses; pure.

A gather would take memory on the device and some launches for each chunk. The driver takes a list
of copies at once instead, as vLLM's own connectors give it one.
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
    """Where the blocks of some layers lie in memory. All layers have one layout.

    A block is some runs of bytes; on the host its runs follow each other.
    """

    bases: Addresses
    """[layer]: where block 0 begins."""
    groups: Addresses
    """[layer]: which of a piece's lists of blocks is this layer's."""
    block_stride: int
    """Bytes from a block to the next."""
    runs: Addresses
    """[run]: bytes from the beginning of a block to each of its runs, in their order."""
    run_bytes: int

    @classmethod
    def of(cls, layers: Sequence[tuple[Tensor, int]]) -> "BlockTable":
        """Describe `layers`, each as [block, ...] in the order of the host, and its group.

        Raises:
            ValueError: the bytes of a block lie too scattered to be copied by address.
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
        """The bytes of one block of one layer."""
        return len(self.runs) * self.run_bytes

    def places(self, block_ids: Sequence[Sequence[int]], layers: slice, blocks: slice) -> Addresses:
        """Return where these lie in the cache: [layer, block, run], flat.

        `block_ids`: by group. `layers`, `blocks`: which of the layers, and of the listed blocks.
        """
        ids = np.array(block_ids, np.int64)[self.groups[layers], blocks]
        places = self.bases[layers, None] + ids * self.block_stride
        return (places[..., None] + self.runs).reshape(-1)

    def packed(self, address: int, count: int) -> Addresses:
        """Return where `count` runs lie that follow each other on the host from `address` on."""
        return address + np.arange(count, dtype=np.int64) * self.run_bytes


def joined(
    sources: Addresses, targets: Addresses, sizes: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Make one copy of copies that follow each other in both places.

    vLLM hands blocks out in order as long as it has them in order.
    """
    starts = np.ones(len(sizes), bool)
    starts[1:] = (np.diff(sources) != sizes[:-1]) | (np.diff(targets) != sizes[:-1])
    first = np.flatnonzero(starts)
    return sources[first], targets[first], np.add.reduceat(sizes, first)


def copy_runs(copier: Copier, copies: Sequence[tuple[Addresses, Addresses, int]]) -> None:
    """Queue all `copies` on the current stream, as one call: sources, targets, bytes of each."""
    if copies:
        sources, targets, sizes = (
            np.concatenate(each)
            for each in zip(
                *((src, dst, np.full(len(src), size, np.int64)) for src, dst, size in copies),
                strict=True,
            )
        )
        copier(*joined(sources, targets, sizes))
