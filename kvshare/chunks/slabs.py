# SPDX-License-Identifier: Apache-2.0
"""The host memory that is needed to save chunks."""

from collections.abc import Callable, Iterable, Sequence

from ecshare.store.format import PROLOGUE_BYTES
from ecshare.transfer.device.staging import slab_bytes
from kvshare.chunks.layers import LayerSet

SlabBytes = Callable[[int, int], int]
"""(layer set number, number of blocks) -> the bytes of host memory that a rank needs to save them.
"""


def slab_sizes(block_bytes: Sequence[int]) -> SlabBytes:
    """Return a function that computes slab sizes. `block_bytes`: of one block, by layer set."""

    def slab_bytes_of(layer_set: int, num_blocks: int) -> int:
        payload = num_blocks * block_bytes[layer_set]
        return slab_bytes(PROLOGUE_BYTES + payload)

    return slab_bytes_of


def chunk_bytes(sets: Iterable[LayerSet], slab_bytes: SlabBytes, num_blocks: int) -> int:
    """Return how much memory a rank needs at most to save a chunk of so many blocks."""
    return sum(slab_bytes(each.number, num_blocks) for each in sets if not each.is_recurrent)


def state_bytes(sets: Iterable[LayerSet], slab_bytes: SlabBytes) -> int:
    """Return how much memory a rank needs at most to save a state; 0: the model has none."""
    return sum(slab_bytes(each.number, 1) for each in sets if each.is_recurrent)


def steps_bytes(chunk_bytes: int, chunk_tokens: int, step_tokens: int) -> int:
    """Return the bytes of the chunks of two steps: one is stored while the next is computed."""
    return 2 * -(-step_tokens // chunk_tokens) * chunk_bytes


def steps_state_bytes(
    state_bytes: int, block_tokens: int, step_tokens: int, most_requests: int
) -> int:
    """Return the bytes of the states at the ends of prompts that two steps compute.

    `block_tokens`: a state is at the end of a block, so a step ends at most one prompt for each
    block of tokens. `most_requests`: a step computes no more than that.
    """
    return 2 * min(-(-step_tokens // block_tokens), most_requests) * state_bytes
