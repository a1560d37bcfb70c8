# SPDX-License-Identifier: Apache-2.0
"""Copies chunks from the blocks of one worker to slabs, and stores them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

from ecshare.store.keys import Key
from ecshare.transfer.device.staging import Slab, Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Backfill, Done, GiveUp, Handle, Outcome, Put
from kvshare.chunks.recent_keys import RecentKeys
from kvshare.messages import Piece
from kvshare.worker import float8
from kvshare.worker.blocks import BlockCaches
from kvshare.worker.rank_shards import RankShards
from kvshare.worker.reports import Reports


@dataclass(frozen=True, slots=True)
class _Save:
    """A piece that is copied to `slab` and stored under `key`."""

    key: Key
    piece: Piece
    slab: Slab


class Saves:
    """All saves of one worker: at most one for each object at a time.

    Blocks are copied out in stream order before any later write to them, so vLLM may free or refill
    them at once. A save for which there is no slab is dropped.

    Ownership: the worker's main thread.
    """

    def __init__(  # noqa: PLR0913 — all that the worker lends it
        self,
        engine: TransferEngine,
        blocks: Sequence[BlockCaches],
        staging: Staging,
        shards: RankShards,
        reports: Reports,
    ) -> None:
        """Save from `blocks`, those of each layer set."""
        self._engine = engine
        self._blocks = blocks
        self._staging = staging
        self._shards = shards
        self._reports = reports
        self._under_way: set[Key] = set()
        self._in_store = RecentKeys[str](monotonic)
        self._is_paused = False

    @property
    def are_under_way(self) -> bool:
        """Whether a save has not ended."""
        return bool(self._under_way)

    @property
    def queue_bytes(self) -> int:
        """The memory that saves under way take."""
        return self._staging.used_bytes

    def start(self, namespace: str, pieces: Iterable[Piece]) -> None:
        """Copy out `pieces` and store them. Their blocks may be refilled, in stream order, then."""
        saves = [save for piece in pieces if (save := self._reserve(namespace, piece)) is not None]
        if not saves:
            return
        with self._staging.copying([save.slab for save in saves]):
            for number, blocks in enumerate(self._blocks):
                own = [(each.piece, each.slab) for each in saves if each.piece.layer_set == number]
                blocks.save(own)
        for save in saves:
            if self._blocks[save.piece.layer_set].as_float8:
                # On the thread that stores the slab, once its bytes have arrived.
                save.slab.finish = partial(float8.pack, save.slab, save.slab.finish)
        # In one call: if they were submitted one by one, the threads that store the first would
        # slow the copies of the rest, for which the step waits.
        self._engine.submit(*map(self._put, saves))

    def backfill(self, key: Key, piece: Piece) -> None:
        """Store an object of this host's cache that the store may lack.

        Its writer may have been killed before it stored the object, and the scheduler half does not
        save a chunk that a look-up has found. `piece`: a part of a chunk that was loaded from it.
        """
        if self._shards.is_first_reader(piece) and key not in self._in_store:
            self._in_store.add(key)
            self._engine.submit(Backfill(key))

    def pause(self) -> None:
        """Drop all saves from now on until `resume`, and block until the blocks are copied out."""
        self._is_paused = True
        self.wait_copied()

    def resume(self) -> None:
        """Save again what is ordered from now on."""
        self._is_paused = False

    def wait_copied(self) -> None:
        """Block until all saves have copied their blocks out."""
        self._staging.wait_copied()

    def _reserve(self, namespace: str, piece: Piece) -> _Save | None:
        """Reserve a slab for `piece`. None: another rank stores it, or it is not saved."""
        if not self._shards.writes(piece):
            return None
        key = self._shards.own_key(namespace, piece)
        if key in self._under_way:
            self._reports.merged(piece)
            return None
        blocks = self._blocks[piece.layer_set]
        # Do not store stale tokens of a previous request.
        is_clean = blocks.erases or not blocks.num_in_part(piece)
        slab = None
        if is_clean and not self._is_paused:
            slab = self._staging.reserve(blocks.spec(piece))
        if slab is None:
            self._reports.dropped(piece)
            self._engine.submit(GiveUp(key))
            return None
        self._under_way.add(key)
        return _Save(key, piece, slab)

    def _put(self, save: _Save) -> Handle[None]:
        # The host cache must not claim what the store lacks: no engine of this host would save it.
        put = Put(save.key, save.slab, keeps_unstored=False)
        return Handle(put, partial(self._ended, save.key, save.piece))

    def _ended(self, key: Key, piece: Piece, done: Done[None]) -> None:
        self._under_way.discard(key)
        if done.outcome is Outcome.OK:
            self._in_store.add(key)
            self._reports.saved(piece)
        else:
            self._reports.dropped(piece)
