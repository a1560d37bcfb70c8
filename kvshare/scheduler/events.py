# SPDX-License-Identifier: Apache-2.0
"""Publishes the blocks in the store as KV events of vLLM."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from ecshare.store.recent import Recent
from kvshare.chunks.prefix import Chunk, ChunkKey, Grid
from kvshare.compat import event_extra_keys

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OWNERSHIP = "kvshare"
# The record of a save that a worker never reports is dropped after this many others. The memory of
# workers limits the saves in flight to far fewer.
MAX_ORDERED = 4096
# About 1.3 KB each. If a record is dropped, the loss of its chunk is never published, and costs a
# reader of the events a miss.
MAX_ANNOUNCED = 16_384


def publishes_events(vllm_config: "VllmConfig") -> bool:
    """Return whether vLLM's KV events are on."""
    config = vllm_config.kv_events_config
    return config is not None and config.enable_kv_cache_events


@dataclass(slots=True)
class _Ordered:
    """A chunk whose save was ordered, with the content of the event about it."""

    hashes: tuple[bytes, ...]
    hash_before: bytes | None
    token_ids: tuple[int, ...]
    lora: Any
    extra_keys: list[tuple[Any, ...] | None] | None
    num_missing: int
    """Shards that are not stored yet."""


class BlockEvents:
    """Publishes each full block once when it is stored, and once when it was found lost.

    A block may be in several chunks. It is published with the first one, and removed with the last.
    Tails are left out, because vLLM has no name for them. Ownership: vLLM's scheduler thread.
    """

    def __init__(self, grid: Grid, num_shards: int, *, group: int | None, is_remote: bool) -> None:
        """Publish nothing yet. `num_shards`: objects per chunk. `group`: vLLM's number of the cache
        group; None if there are several. `is_remote`: the store is certainly not on this host.
        """
        self._grid = grid
        self._num_shards = num_shards
        self._where: dict[str, Any] = {
            "medium": MEDIUM_STORAGE,
            "group_idx": group,
            "locality": "REMOTE" if is_remote else None,
            "ownership": OWNERSHIP,
        }
        self._ordered: Recent[ChunkKey, _Ordered] = Recent(MAX_ORDERED)
        self._announced: dict[ChunkKey, tuple[bytes, ...]] = {}  # the oldest first
        self._num_holders: Counter[bytes] = Counter()
        self._events: list[KVCacheEvent] = []

    def ordered(self, request: Request, chunk: Chunk) -> None:
        """Record that the save of `chunk` of `request` was ordered."""
        if chunk.num_tokens < chunk.num_blocks * self._grid.block_tokens:
            return
        first, end = chunk.first_block, chunk.first_block + chunk.num_blocks
        self._ordered[chunk.key] = _Ordered(
            tuple(request.block_hashes[first:end]),
            request.block_hashes[first - 1] if first else None,
            tuple(request.all_token_ids[chunk.start_tokens : chunk.end_tokens]),
            request.lora_request,
            event_extra_keys(request, first, end, self._grid.block_tokens),
            self._num_shards,
        )

    def stored(self, num_shards: Mapping[ChunkKey, int]) -> None:
        """Record that this number of further shards of each chunk is stored."""
        for key, count in num_shards.items():
            ordered = self._ordered.get(key)
            if ordered is None:
                continue
            ordered.num_missing -= count
            if ordered.num_missing <= 0:
                del self._ordered[key]
                self._announce(key, ordered)

    def lost(self, keys: Iterable[ChunkKey]) -> None:
        """Record that the store lacks these chunks."""
        for key in keys:
            if key not in self._announced:
                self._ordered.pop(key, None)
                continue
            # A new save of it may be in flight, and stays recorded: the next request that computes
            # a lost chunk saves it again.
            removed = self._drop(key)
            if removed:
                hashes = [maybe_convert_block_hash(each) for each in removed]  # type: ignore[arg-type]
                self._events.append(BlockRemoved(block_hashes=hashes, **self._where))

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        taken, self._events = self._events, []
        return taken

    def _announce(self, key: ChunkKey, chunk: _Ordered) -> None:
        if key in self._announced:
            return
        new = [at for at, each in enumerate(chunk.hashes) if not self._num_holders[each]]
        self._announced[key] = chunk.hashes
        self._num_holders.update(chunk.hashes)
        if len(self._announced) > MAX_ANNOUNCED:
            self._drop(next(iter(self._announced)))
        if new:
            self._events.append(self._event(chunk, new[0]))

    def _event(self, chunk: _Ordered, first: int) -> BlockStored:
        """Return the event for the blocks from number `first` of the chunk."""
        size, lora = self._grid.block_tokens, chunk.lora
        before = chunk.hashes[first - 1] if first else chunk.hash_before
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in chunk.hashes[first:]],  # type: ignore[arg-type]
            parent_block_hash=None if before is None else maybe_convert_block_hash(before),  # type: ignore[arg-type]
            token_ids=list(chunk.token_ids[first * size :]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=chunk.extra_keys and chunk.extra_keys[first:],
            **self._where,
        )

    def _drop(self, key: ChunkKey) -> list[bytes]:
        """Drop the record of a published chunk; return the blocks that no other chunk has."""
        hashes = self._announced.pop(key, ())
        self._num_holders.subtract(hashes)
        removed = [each for each in hashes if not self._num_holders[each]]
        for each in removed:
            del self._num_holders[each]
        return removed
