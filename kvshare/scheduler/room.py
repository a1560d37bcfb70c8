# SPDX-License-Identifier: Apache-2.0
"""Limits loads in engines with sliding windows or recurrent layers, so that some request always has
blocks to run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvshare.compat import most_blocks
from kvshare.scheduler.pieces import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class Room:
    """Decides whether, after one more load, all loads have the blocks that their requests need.

    vLLM keeps the blocks free that admitted requests still need. But it counts blocks that a window
    has passed as if the request held them. So loads could take all blocks, and then no request
    could get blocks for its next tokens: vLLM preempts no request that does not run, so no request
    would ever run again. The same holds if a load fails as a whole: its request also has to compute
    the tokens that the windows have passed.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._limits: list[tuple[int, int | None]] = []
        # The requests that load, or have loaded and do not run yet: the most blocks that each
        # needs, and how many it holds.
        self._loading: dict[str, tuple[int, int]] = {}

    def bind(self, manager: "KVCacheManager") -> None:
        """Use the KV cache manager `manager` from now on, if some layers keep few blocks."""
        self._limits = most_blocks(manager)
        if any(limit is not None for _, limit in self._limits):
            self._manager = manager

    def is_left(self, request: "Request") -> bool:
        """Return whether `request` may load; one that loads alone always may."""
        if self._manager is None or not self._loading:
            return True
        pending = sum(max(0, needed - held) for needed, held in self._loading.values())
        return self._needed(request) + pending <= self._manager.block_pool.get_num_free_blocks()

    def take(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Record that `request` loads. `block_ids`: all its blocks, of each cache group."""
        if self._manager is not None:
            held = sum(block != NULL_BLOCK for ids in block_ids for block in ids)
            self._loading[request.request_id] = self._needed(request), held

    def failed(self, request_id: str) -> None:
        """Record that a load failed as a whole: its request gives its blocks back."""
        if request_id in self._loading:
            self._loading[request_id] = self._loading[request_id][0], 0

    def leave(self, request_id: str) -> None:
        """Record that a request runs, or has ended."""
        self._loading.pop(request_id, None)

    def _needed(self, request: "Request") -> int:
        """Return the most blocks that `request` holds at once until its prompt is computed, plus
        one of each group for speculative tokens."""
        blocks = ((-(-request.num_tokens // tokens), limit) for tokens, limit in self._limits)
        return sum(1 + (num if limit is None else min(num, limit)) for num, limit in blocks)
