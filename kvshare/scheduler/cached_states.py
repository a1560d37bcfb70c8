# SPDX-License-Identifier: Apache-2.0
"""Finds states of recurrent layers in vLLM's prefix cache."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from kvshare.chunks.layers import LayerSet
from kvshare.compat import cached_blocks

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class CachedStates:
    """Finds a state by the hash of all its tokens, as vLLM does for a local hit.

    vLLM hands a state over once. This finds it later, until its block is used for other tokens.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(
        self, layer_sets: Iterable[LayerSet], is_foreign: Callable[[Mapping[int, int]], bool]
    ) -> None:
        """Find none until `bind`. `is_foreign`: takes the block of each cache group, and returns
        whether another connector has loaded one of them."""
        recurrent = (each for each in layer_sets if each.is_recurrent)
        self._groups = sorted({group for each in recurrent for group in each.groups})
        self._is_foreign = is_foreign
        self._manager: KVCacheManager | None = None

    def bind(self, manager: "KVCacheManager") -> None:
        """Use the prefix cache of `manager` from now on."""
        self._manager = manager

    def find(self, block_hash: bytes, num_tokens: int) -> Mapping[int, int]:
        """Return the block of each cache group that holds the state after `num_tokens`; empty if
        one is missing, or another connector has loaded it.

        `block_hash`: of the last block of these tokens. After the forward pass of the step that is
        being planned, the blocks hold the state.
        """
        if self._manager is None:
            return {}
        found = cached_blocks(self._manager, block_hash, self._groups, num_tokens)
        return {} if self._is_foreign(found) else found
