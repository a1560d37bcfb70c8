# SPDX-License-Identifier: Apache-2.0
"""The host memory that is needed to save chunks."""

from collections.abc import Callable, Sequence

from ecshare.store.format import PROLOGUE_BYTES
from ecshare.transfer.device.staging import slab_bytes

SlabBytes = Callable[[int, int], int]
"""(layer set number, number of blocks) -> the bytes of host memory that a rank needs to save them.
"""


def slab_sizes(block_bytes: Sequence[int]) -> SlabBytes:
    """Return a function that computes slab sizes. `block_bytes`: of one block, by layer set."""

    def slab_bytes_of(layer_set: int, num_blocks: int) -> int:
        payload = num_blocks * block_bytes[layer_set]
        return slab_bytes(PROLOGUE_BYTES + payload)

    return slab_bytes_of


def steps_bytes(chunk_bytes: int, chunk_tokens: int, step_tokens: int) -> int:
    """Return the bytes of the chunks of two steps: one is stored while the next is computed."""
    return 2 * -(-step_tokens // chunk_tokens) * chunk_bytes
