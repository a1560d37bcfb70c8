# SPDX-License-Identifier: Apache-2.0
"""Plans what to load, and knows which loads go on."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ecshare.transfer.jobs import Tier
from kvshare.chunks.facts import UNSPECIFIED_SOURCE, KVFacts
from kvshare.chunks.prefix import Chunk, ChunkKey
from kvshare.messages import LoadOrder, Piece
from kvshare.scheduler.load_or_compute import UnderWay
from kvshare.scheduler.lookups import Search
from kvshare.scheduler.pieces import Pieces

logger = logging.getLogger(__name__)

# After so many reports in a row of blocks that this engine cannot use, nothing is looked up for so
# long: each would be read for nothing.
_MOST_MISFITS = 8
_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Loading:
    """A load that was ordered; which of its chunks came to nothing, as far as is known."""

    chunks: tuple[Chunk, ...]
    tiers: Mapping[ChunkKey, Tier]
    start_tokens: int
    num_tokens: int
    begun_s: float
    lost: set[ChunkKey] = field(default_factory=set)

    @property
    def num_sound(self) -> int:
        """The number of chunks before the first lost one."""
        lost = (number for number, chunk in enumerate(self.chunks) if chunk.key in self.lost)
        return next(lost, len(self.chunks))


class LoadPlan:
    """Orders the loads of all requests. Ownership: vLLM's scheduler thread."""

    def __init__(self, facts: KVFacts, pieces: Pieces, clock_s: Callable[[], float]) -> None:
        """`clock_s`: monotonic seconds."""
        self._facts = facts
        self._pieces = pieces
        self._clock_s = clock_s
        self._orders: list[LoadOrder] = []
        self._abandoned: list[str] = []
        self._loading: dict[str, Loading] = {}
        self._num_misfits = 0  # reports in a row
        self._paused_until_s = 0.0

    def __contains__(self, request_id: str) -> bool:
        """Whether a load of this request goes on."""
        return request_id in self._loading

    @property
    def is_empty(self) -> bool:
        """Whether no load goes on, and nothing is ordered for the next step."""
        return not (self._loading or self._orders or self._abandoned)

    def add(
        self,
        request_id: str,
        search: Search,
        block_ids: Sequence[Sequence[int]],
        start_tokens: int,
        num_tokens: int,
    ) -> None:
        """Order, with the next step, to load `num_tokens` after `start_tokens` of what was found.

        `block_ids`: all blocks of the request, in order, of each cache group.
        """
        end_tokens = start_tokens + num_tokens
        pieces = [
            self._of_tp_size(piece, search)
            for chunk in search.found
            for piece in self._pieces.loaded(chunk, block_ids, start_tokens, end_tokens)
        ]
        self._orders.append(LoadOrder(request_id, tuple(pieces), search.is_announced))
        self._loading[request_id] = Loading(
            search.found, search.tiers, start_tokens, num_tokens, self._clock_s()
        )

    def take(self) -> tuple[tuple[LoadOrder, ...], tuple[str, ...]]:
        """Return what was ordered since the last call, and the requests whose loads must end."""
        orders, self._orders = tuple(self._orders), []
        abandoned, self._abandoned = tuple(self._abandoned), []
        return orders, abandoned

    def lost(self, keys: Collection[ChunkKey]) -> None:
        """Take note that these chunks could not be loaded."""
        for loading in self._loading.values():
            loading.lost.update(keys)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be looked up now, because nothing that is found can be used."""
        return self._clock_s() < self._paused_until_s

    def misfits(self) -> None:
        """Take note that what was loaded is laid out in another way than this engine's blocks.

        The layout is a fact of objects and not of their names, so a look-up finds them too.
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

    def fits(self) -> None:
        """Take note that something could be loaded."""
        self._num_misfits, self._paused_until_s = 0, 0.0

    def ended(self, request_id: str) -> Loading | None:
        """Return the load that has ended; None: there was none."""
        return self._loading.pop(request_id, None)

    def abandon(self, request_id: str) -> None:
        """Have the workers end the load of a request that is over, if one goes on."""
        if self._loading.pop(request_id, None) is not None:
            self._abandoned.append(request_id)

    def clear(self) -> None:
        """Forget all loads."""
        self._loading.clear()

    def under_way(self) -> list[UnderWay]:
        """Return the loads from the store that go on."""
        now_s = self._clock_s()
        going = (each for each in self._loading.values() if Tier.STORE in each.tiers.values())
        return [(each.num_tokens, now_s - each.begun_s) for each in going]

    def hit_sources(self, request_id: str, num_tokens: int) -> dict[str, int]:
        """Return how many of the tokens that were just allocated come from where.

        As far as the look-up knows: of a long prompt it has not asked for every chunk.
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

    def _of_tp_size(self, piece: Piece, search: Search) -> Piece:
        tp_size = search.other_tp_sizes.get(piece.key)
        return piece if tp_size is None else replace(piece, tp_size=tp_size)
