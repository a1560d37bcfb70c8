# SPDX-License-Identifier: Apache-2.0
"""Finds in vLLM's prefix cache what a request's block table does not have."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvshare.chunks.layers import LayerSet
from kvshare.compat import cached_blocks, prefix_index

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class CachedBlocks:
    """Finds blocks by the hash of all their tokens, as vLLM does for a local hit.

    vLLM hands a state over once, and gives a local hit no blocks that a window has passed. This
    finds them, until they are used for other tokens. After the forward pass of the step that is
    being planned they hold what their hash says.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(
        self,
        layer_sets: Iterable[LayerSet],
        block_tokens: int,
        is_foreign: Callable[[Mapping[int, int]], bool],
    ) -> None:
        """Find none until `bind`. `block_tokens`: tokens of vLLM's blocks. `is_foreign`: takes the
        block of each cache group, and returns whether another connector has loaded one of them."""
        recurrent = (each for each in layer_sets if each.is_recurrent)
        self._recurrent_groups = sorted({group for each in recurrent for group in each.groups})
        self._block_tokens = block_tokens
        self._is_foreign = is_foreign
        self._manager: KVCacheManager | None = None
        self._index: object = None

    def bind(self, manager: "KVCacheManager") -> None:
        """Use the prefix cache of `manager` from now on."""
        self._manager, self._index = manager, prefix_index(manager)

    @property
    def sees_resets(self) -> bool:
        """Return whether `take_reset` notices resets."""
        return self._index is not None

    def take_reset(self) -> bool:
        """Return whether vLLM has reset its prefix cache since the last call. It has done so only
        if no request had blocks then."""
        if self._manager is None or self._index is None:
            return False
        before, self._index = self._index, prefix_index(self._manager)
        return self._index is not before

    def state(self, hashes: Sequence[bytes], num_blocks: int) -> Mapping[int, int]:
        """Return the block of each group of recurrent layers that holds the state after the first
        `num_blocks` blocks of a request; empty if one is missing, or another connector has loaded
        it. `hashes`: of all its blocks."""
        return self._find(hashes, num_blocks, self._recurrent_groups)

    def run(
        self, hashes: Sequence[bytes], groups: Sequence[int], first_block: int, end_block: int
    ) -> tuple[tuple[int, ...], ...]:
        """Return the blocks in each of `groups` that hold the KV of the blocks from `first_block`
        to before `end_block` of a request; empty if one is missing, as for `state`, or not full."""
        if end_block > len(hashes):
            return ()
        found = []
        for end in range(first_block + 1, end_block + 1):
            block_of_group = self._find(hashes, end, list(groups))
            if not block_of_group:
                return ()
            found.append([block_of_group[group] for group in groups])
        return tuple(zip(*found, strict=True))

    def _find(self, hashes: Sequence[bytes], num_blocks: int, groups: list[int]) -> dict[int, int]:
        if self._manager is None:
            return {}
        num_tokens = num_blocks * self._block_tokens
        found = cached_blocks(self._manager, hashes[num_blocks - 1], groups, num_tokens)
        return {} if self._is_foreign(found) else found
