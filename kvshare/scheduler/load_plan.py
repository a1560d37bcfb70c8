# SPDX-License-Identifier: Apache-2.0
"""Orders loads, and keeps track of those under way."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ecshare.transfer.jobs import Tier
from kvshare.chunks.facts import UNSPECIFIED_SOURCE, KVFacts
from kvshare.chunks.prefix import Chunk, ChunkKey
from kvshare.messages import LoadOrder, Piece
from kvshare.scheduler.load_or_compute import UnderWay
from kvshare.scheduler.lookups import PrefixLookup
from kvshare.scheduler.pieces import BlocksOfGroups, Pieces
from kvshare.scheduler.room import Room

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# After this many reports in a row of blocks with another layout, nothing is looked up for this
# long: reading such blocks is wasted work.
_MOST_MISFITS = 8
_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Loading:
    """A load that was ordered, with the chunks of it that are known to be lost."""

    chunks: tuple[Chunk, ...]
    tiers: Mapping[ChunkKey, Tier]
    start_tokens: int
    num_tokens: int
    begun_s: float
    lost: set[ChunkKey] = field(default_factory=set)
    num_sound: int = 0
    """The number of chunks before the first lost one; set when it has ended."""
    seconds: float = 0.0
    """How long it took; set when it has ended."""

    @property
    def is_whole(self) -> bool:
        """Whether no chunk is lost; for one that has ended."""
        return self.num_sound == len(self.chunks)

    @property
    def num_loaded_tokens(self) -> int:
        """The number of tokens to load before the first lost chunk; for one that has ended."""
        if self.is_whole:
            return self.num_tokens
        return max(0, self.chunks[self.num_sound].start_tokens - self.start_tokens)


class LoadPlan:
    """Orders the loads of all requests, as many as leave room for their requests to run.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, facts: KVFacts, pieces: Pieces, clock_s: Callable[[], float]) -> None:
        """Start without loads. `clock_s`: monotonic seconds."""
        self._facts = facts
        self._pieces = pieces
        self._clock_s = clock_s
        self._orders: list[LoadOrder] = []
        self._abandoned: list[str] = []
        self._loading: dict[str, Loading] = {}
        self._room = Room()
        self._num_misfits = 0  # reports in a row
        self._paused_until_s = 0.0

    def __contains__(self, request_id: str) -> bool:
        """Return whether a load of this request is under way."""
        return request_id in self._loading

    @property
    def is_empty(self) -> bool:
        """Whether no load is under way, and nothing is ordered for the next step."""
        return not (self._loading or self._orders or self._abandoned)

    def bind(self, manager: "KVCacheManager") -> None:
        """Use the blocks of `manager`, at start-up."""
        self._room.bind(manager)

    def has_room(self, request: "Request") -> bool:
        """Return whether a load of `request` leaves all loads the blocks that they still need."""
        return self._room.is_left(request)

    def add(
        self,
        request: "Request",
        lookup: PrefixLookup,
        block_ids: BlocksOfGroups,
        start_tokens: int,
        num_tokens: int,
    ) -> None:
        """Order, with the next step, to load `num_tokens` after `start_tokens` of what was found.

        `block_ids`: all blocks of the request, in order, of each cache group.
        """
        self._room.take(request, block_ids)
        end_tokens = start_tokens + num_tokens
        pieces = [
            self._in_tp_size(piece, lookup)
            for chunk in lookup.found
            for piece in self._pieces.loaded(chunk, block_ids, start_tokens, end_tokens)
        ]
        request_id = request.request_id
        self._orders.append(LoadOrder(request_id, tuple(pieces), lookup.is_announced))
        self._loading[request_id] = Loading(
            lookup.found, lookup.tiers, start_tokens, num_tokens, self._clock_s()
        )

    def take(self) -> tuple[tuple[LoadOrder, ...], tuple[str, ...]]:
        """Return the orders since the last call, and the requests whose loads must be cancelled."""
        orders, self._orders = tuple(self._orders), []
        abandoned, self._abandoned = tuple(self._abandoned), []
        return orders, abandoned

    def lost(self, keys: Collection[ChunkKey]) -> None:
        """Record chunks that could not be loaded."""
        for loading in self._loading.values():
            loading.lost.update(keys)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is looked up now, because all KV found of late has another layout."""
        return self._clock_s() < self._paused_until_s

    def misfits(self) -> None:
        """Record that objects with another block layout were fetched.

        The layout is stated in objects and not in their names, so look-ups find these too.
        """
        self._num_misfits += 1
        if self._num_misfits >= _MOST_MISFITS:
            self._paused_until_s = self._clock_s() + _PAUSE_S
        if self._num_misfits == _MOST_MISFITS:
            logger.warning(
                "All KV that is found was stored by engines that lay out their blocks in another "
                "way. This engine looks for KV once in %.0f s until it finds some that it can use. "
                "Set another `epoch` for engines of each kind.",
                _PAUSE_S,
            )

    def ended(self, request_id: str, *, failed: bool) -> Loading | None:
        """Return the load that has ended; None if there was none. `failed`: nothing was loaded."""
        loading = self._loading.pop(request_id, None)
        if loading is None:
            return None
        lost = (number for number, chunk in enumerate(loading.chunks) if chunk.key in loading.lost)
        num_sound = 0 if failed else next(lost, len(loading.chunks))
        if failed:
            self._room.failed(request_id)
        if num_sound:
            self._num_misfits, self._paused_until_s = 0, 0.0
        return replace(loading, num_sound=num_sound, seconds=self._clock_s() - loading.begun_s)

    def runs(self, request_id: str) -> None:
        """Record that a request runs: its load, if any, needs no further blocks."""
        self._room.leave(request_id)

    def abandon(self, request_id: str) -> None:
        """Cancel the load of a request that has ended, if one is under way."""
        self._room.leave(request_id)
        if self._loading.pop(request_id, None) is not None:
            self._abandoned.append(request_id)

    def clear(self) -> None:
        """Remove all loads."""
        self._loading.clear()

    def under_way(self) -> list[UnderWay]:
        """Return the loads from the store that are under way."""
        now_s, state_tokens = self._clock_s(), self._facts.state_tokens
        loads = (each for each in self._loading.values() if Tier.STORE in each.tiers.values())
        return [(each.num_tokens + state_tokens, now_s - each.begun_s) for each in loads]

    def hit_sources(self, request_id: str, num_tokens: int) -> dict[str, int]:
        """Return the sources of `num_tokens` that were just allocated, with the number from each.

        As far as it is known: the look-up of a long prompt does not ask for every chunk.
        """
        sources: Counter[str] = Counter()
        loading = self._loading.get(request_id)
        if loading is not None:
            names = {Tier.HOST: "host", Tier.STORE: self._facts.store_source}
            position = loading.start_tokens
            for chunk in loading.chunks:
                end = min(chunk.end_tokens, loading.start_tokens + num_tokens)
                tier = loading.tiers.get(chunk.key)
                sources[names[tier] if tier else UNSPECIFIED_SOURCE] += max(0, end - position)
                position = max(position, end)
        sources[UNSPECIFIED_SOURCE] += num_tokens - sources.total()
        return {name: count for name, count in sources.items() if count}

    def _in_tp_size(self, piece: Piece, lookup: PrefixLookup) -> Piece:
        tp_size = lookup.other_tp_sizes.get(piece.key)
        return piece if tp_size is None else replace(piece, tp_size=tp_size)
