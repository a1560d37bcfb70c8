# SPDX-License-Identifier: Apache-2.0
"""Brings chunks to the blocks of waiting requests, some at a time."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ecshare.store.format import PROLOGUE_BYTES, TensorFacts
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Fetch, Outcome, StoredObject
from ecshare.transfer.staging import as_tensor
from ecshare.transfer.stats import Stats
from kvshare.blocks import BlockCaches
from kvshare.config import KVConfig
from kvshare.messages import LoadOrder, Piece
from kvshare.prefix import ChunkKey

logger = logging.getLogger(__name__)

# More than the store's lanes take at once, so that they never run dry; and little enough that
# what waits here, and not there, does not use up the time-out of one object.
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Finished:
    """Requests whose load ended, and what is to be known of what did not go well."""

    requests: set[str] = field(default_factory=set)
    """All of them."""
    failed: set[str] = field(default_factory=set)
    """Those of which nothing was loaded."""
    invalid_blocks: set[int] = field(default_factory=set)
    """Blocks that were not filled: a request keeps what lies before its first one of them."""
    lost: set[ChunkKey] = field(default_factory=set)
    """Chunks that could not be loaded, for these requests or for some that go on."""


@dataclass(slots=True)
class _Load:
    """A request whose blocks are being filled: pieces number 0 to before `end`."""

    request_id: str
    pieces: tuple[Piece, ...]
    end: int
    missing: set[int]
    """Those of them that have not arrived."""
    is_over: bool = False

    def wants(self, number: int) -> bool:
        """Whether piece `number` is still of use."""
        return not self.is_over and number < self.end


@dataclass(slots=True)
class _Wanted:
    """One object, and the pieces of loads that wait for it: it is fetched once."""

    facts: TensorFacts
    waiters: list[tuple[_Load, int]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return PROLOGUE_BYTES + self.facts.num_bytes


class Loads:
    """All loads of one worker.

    Each piece is copied to its blocks as soon as its chunk is here and verified. The blocks belong
    to the waiting request alone until it is reported, so nobody can read them half filled. Fetches
    are submitted as far as `buffer_bytes` allow, so that neither a long prompt nor many requests
    hold more host memory than that. A piece that fails shortens the load to what lies before it:
    that is loaded and kept, and vLLM computes the rest. Where vLLM cannot keep it, the load fails.
    A request is reported once; what arrives later is let go unwritten.

    Ownership: the worker's main thread.
    """

    def __init__(
        self,
        config: KVConfig,
        engine: TransferEngine,
        blocks: Sequence[BlockCaches],
        stats: Stats,
        *,
        keeps_prefix: bool,
    ) -> None:
        """`blocks`: of each layer set.

        `keeps_prefix`: vLLM can keep what leads up to a piece that failed. It cannot for layers
        that look back over a window, whose earlier blocks it has not reserved, nor be told of
        single blocks where it has several cache groups.
        """
        self._config = config
        self._engine = engine
        self._blocks = blocks
        self._stats = stats
        self._keeps_prefix = keeps_prefix
        self._limit_bytes = min(config.buffer_bytes, _MAX_BYTES)
        self._wanted: dict[str, _Wanted] = {}
        self._queue: deque[str] = deque()  # keys of what is wanted and not submitted yet
        self._fetching_bytes = 0
        self.finished = Finished()

    def start(self, order: LoadOrder, key_of: Callable[[Piece], str]) -> None:
        """Fill the blocks of `order` and note it in `finished`, once."""
        count = len(order.pieces)
        load = _Load(order.request_id, order.pieces, count, set(range(count)))
        for number, piece in enumerate(order.pieces):
            key = key_of(piece)
            wanted = self._wanted.get(key)
            if wanted is None:
                blocks = self._blocks[piece.layer_set]
                facts = blocks.facts(piece.num_blocks, piece.num_tokens, piece.key.hex())
                wanted = self._wanted[key] = _Wanted(facts)
                self._queue.append(key)
            wanted.waiters.append((load, number))
        self._submit()
        self._end_if_complete(load)  # an order for nothing is done

    def arrived(self, done: Done) -> None:
        """Hand an object to all who wait for it, and go on."""
        assert isinstance(done.job, Fetch)
        wanted = self._wanted.pop(done.job.key)
        self._fetching_bytes -= wanted.num_bytes
        stored = done.value if isinstance(done.value, StoredObject) else None
        is_sound = stored is not None and self._fits(stored, wanted.facts)
        reason = done.outcome if stored is None else Outcome.CORRUPT
        for load, number in wanted.waiters:
            if stored is None or not is_sound:
                self._failed(load, number, reason.value)
            elif load.wants(number):
                self._copy_in(stored, load, number)
        if stored is not None:
            stored.release()
        self._submit()

    def _submit(self) -> None:
        """Fetch what is next in turn, as far as the budget goes; one alone may exceed it."""
        while self._queue:
            wanted = self._wanted[self._queue[0]]
            if not any(load.wants(number) for load, number in wanted.waiters):
                del self._wanted[self._queue.popleft()]
                continue
            after_bytes = self._fetching_bytes + wanted.num_bytes
            if self._fetching_bytes and after_bytes > self._limit_bytes:
                return
            self._fetching_bytes = after_bytes
            key = self._queue.popleft()
            self._engine.submit(Fetch(key, self._config.io_timeout_s, wanted.num_bytes))

    def _fits(self, stored: StoredObject, facts: TensorFacts) -> bool:
        """Whether the object is what was asked for: sound bytes may be those of something else."""
        if stored.facts == facts:
            return True
        # Out of the host cache with it: what is computed and saved instead is to be found there.
        logger.warning("%s does not hold what its key promises: %s", stored.key, stored.facts)
        self._engine.host.discard(stored.key)
        return False

    def _copy_in(self, stored: StoredObject, load: _Load, number: int) -> None:
        piece = load.pieces[number]
        tensor = as_tensor(stored.payload, stored.facts)
        self._blocks[piece.layer_set].write(tensor, piece.first_block, piece.block_ids)
        self._stats.add("blocks/loaded", piece.num_held)
        load.missing.discard(number)
        self._end_if_complete(load)

    def _failed(self, load: _Load, number: int, reason: str) -> None:
        piece = load.pieces[number]
        self.finished.lost.add(piece.key)
        if not load.wants(number):
            return
        self._stats.add("blocks/failed", piece.num_held)
        self._stats.add(f"misses/{reason}", piece.num_held)
        load.end = number if self._keeps_prefix else 0
        load.missing = {each for each in load.missing if each < load.end}
        self._end_if_complete(load)

    def _end_if_complete(self, load: _Load) -> None:
        if load.missing:
            return
        load.is_over = True
        self.finished.requests.add(load.request_id)
        if self._keeps_prefix:
            for piece in load.pieces[load.end :]:
                self.finished.invalid_blocks.update(*piece.block_ids)
        elif load.end < len(load.pieces):
            self.finished.failed.add(load.request_id)
