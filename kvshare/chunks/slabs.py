# SPDX-License-Identifier: Apache-2.0
"""The host memory that saves of chunks take."""

from collections.abc import Callable, Sequence

from ecshare.store.format import PROLOGUE_BYTES
from ecshare.transfer.device.staging import slab_bytes

SlabBytes = Callable[[int, int], int]
"""The memory that a rank needs to save so many blocks (the second) of a layer set (its number)."""


def slab_sizes(block_bytes: Sequence[int]) -> SlabBytes:
    """Return a function for the size of slabs. `block_bytes`: of one block, by layer set."""

    def slab_bytes_of(layer_set: int, num_blocks: int) -> int:
        payload = num_blocks * block_bytes[layer_set]
        return slab_bytes(PROLOGUE_BYTES + payload)

    return slab_bytes_of


def steps_bytes(chunk_bytes: int, chunk_tokens: int, step_tokens: int) -> int:
    """Return how much memory the chunks of two steps take: one is stored while one is computed."""
    return 2 * -(-step_tokens // chunk_tokens) * chunk_bytes
