# SPDX-License-Identifier: Apache-2.0
"""Loads chunks into the blocks of waiting requests, a limited number of bytes at a time."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import monotonic
from typing import TypeAlias

import torch

from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.keys import Key
from ecshare.transfer.device.load_streams import LoadStreams
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Fetch, Handle, Outcome, StoredObject, Tier
from kvshare.chunks.prefix import ChunkKey
from kvshare.config import KVConfig
from kvshare.messages import LoadOrder, Piece
from kvshare.worker.block_writer import OTHER_LAYOUT, BlockWriter, Target
from kvshare.worker.blocks import BlockCaches
from kvshare.worker.rank_shards import RankShards

# How many chunks after the first missing one a load of announced chunks asks for. It starts with
# the first number, grows by one per chunk received, and drops to 0 on a missing chunk.
_FIRST_AHEAD = 8
_MOST_AHEAD = 32  # as many loads as the store is asked for at once
# An announced chunk may still arrive after these.
_NOT_YET = (Outcome.MISSING, Outcome.UNAVAILABLE, Outcome.CANCELLED)
# The longest pause between two requests for the next announced chunk: a client waits for it.
_LONGEST_PAUSE_S = 0.05
# More than the store is asked for at once, so that it is never idle. No more than this, because an
# object's time-out begins when its fetch is submitted, and should not pass in a queue.
_MAX_BYTES = 256 << 20
# An entry of the host cache that is younger is being stored by the engine that has written it: to
# ask the store for it would cost each hand-over to D more than the copy to the blocks.
_BEING_STORED_S = 5.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Requests whose load has ended, and what was not loaded."""

    requests: set[str] = field(default_factory=set)
    """All requests whose load has ended."""
    failed: set[str] = field(default_factory=set)
    """The requests of `requests` for which nothing was loaded."""
    invalid_blocks: set[int] = field(default_factory=set)
    """Blocks that were not filled: a request keeps the tokens before its first one of them."""
    lost: set[ChunkKey] = field(default_factory=set)
    """Chunks that could not be loaded, for these requests or for others that still load."""
    misfits: set[ChunkKey] = field(default_factory=set)
    """The chunks of `lost` of which an object has arrived that has another block layout."""


@dataclass(slots=True)
class _Load:
    """A request whose blocks are being filled, with the pieces before number `end`.

    Load threads read `end` and `is_over` and change `copying`, all under the lock of `Loads`.
    """

    request_id: str
    pieces: tuple[Piece, ...]
    keys: tuple[Key, ...]
    end: int
    missing: set[int]
    """The numbers of the pieces before `end` that have not arrived."""
    begun: torch.cuda.Event | None
    """The request's blocks may be written to after this event."""
    deadline_s: float | None = None
    """The deadline for announced chunks, extended by every arrival. None: they were not announced,
    so a piece that is missing is lost."""
    ahead: int = 0
    """How many pieces after the first missing one are asked for."""
    first: int = 0
    """No piece before this number is missing."""
    asked: set[int] = field(default_factory=set)
    copying: set[int] = field(default_factory=set)
    """The pieces that a load thread may be writing: their blocks cannot be given up yet."""
    is_over: bool = False

    def wants(self, number: int) -> bool:
        """Return whether piece `number` is still of use."""
        return not self.is_over and number < self.end

    def take_unasked(self) -> list[int]:
        """Return the pieces to ask for now, and mark them as asked for."""
        if self.is_over:
            return []
        while self.first < self.end and self.first not in self.missing:
            self.first += 1
        missing = (number for number in range(self.first, self.end) if number in self.missing)
        unasked = [each for each in islice(missing, 1 + self.ahead) if each not in self.asked]
        self.asked.update(unasked)
        return unasked

    def receive(self, number: int, wait_s: float) -> None:
        """Record that a piece is in its blocks. `wait_s`: for the next announced one."""
        self.missing.discard(number)
        if self.deadline_s is not None:
            self.ahead = min(self.ahead + 1, _MOST_AHEAD)
            self.deadline_s = monotonic() + wait_s

    def ask_again(self, number: int) -> None:
        """Have `take_unasked` return a piece again when it is next; it is not stored yet."""
        self.asked.discard(number)
        self.ahead = 0


@dataclass(slots=True)
class _Wanted:
    """One object, which is fetched once, and the pieces of loads that wait for it."""

    piece: Piece
    """What the object contains. Its blocks are those of one waiter."""
    is_announced: bool
    """The fetch waits until the object is stored."""
    is_guess: bool
    """No look-up has seen the object in the store."""
    waiters: list[tuple[_Load, int]]
    """Loads, with the number of the piece. Under the lock of `Loads`."""
    num_served: int = 0
    """How many of `waiters` there were when it was copied. Later ones need another fetch."""
    misfit: str = ""
    """Why it cannot be used, as the reason for a miss."""
    may_be_unstored: bool = False
    """It has been in this host's cache for a while."""
    job: Fetch = field(init=False)
    handle: Handle[StoredObject] = field(init=False)

    @property
    def is_wanted(self) -> bool:
        return any(load.wants(number) for load, number in self.waiters)

    def claim(self) -> list[Target]:
        """Return the blocks to copy it to now, and mark them as being written. Under the lock."""
        self.num_served = len(self.waiters)
        wanting = [(load, number) for load, number in self.waiters if load.wants(number)]
        for load, number in wanting:
            load.copying.add(number)
        return [(load.pieces[number], load.begun) for load, number in wanting]


_Name: TypeAlias = tuple[Key, bool, bool]
"""What identifies a fetch: key, `is_announced` and `is_guess`. A fetch that waits for an announced
object must not delay a load that found the same object."""


class _Fetches:
    """The fetches of all loads: one for each object at a time.

    Guesses, and fetches of objects that a look-up has found, are submitted as far as `limit_bytes`
    allows for each of the two kinds; one alone may exceed it. A fetch that waits for the next
    announced chunk is submitted at once. It counts against no limit, because it takes no memory
    while it waits, and an object that never arrives must not keep others from theirs.

    Ownership: the worker's main thread.
    """

    def __init__(
        self, engine: TransferEngine, blocks: Sequence[BlockCaches], limit_bytes: int
    ) -> None:
        self._engine = engine
        self._blocks = blocks
        self._limit_bytes = limit_bytes
        self._wanted: dict[_Name, _Wanted] = {}
        # For guesses, and for others: what is not submitted yet, and the bytes of what is.
        self._queues: dict[bool, deque[_Name]] = {False: deque(), True: deque()}
        self._fetching_bytes = {False: 0, True: 0}

    @property
    def is_empty(self) -> bool:
        """Whether all fetches have ended."""
        return not self._wanted

    def find(self, name: _Name) -> _Wanted | None:
        """Return the object of a fetch that has not ended."""
        return self._wanted.get(name)

    def add(
        self,
        key: Key,
        wanted: _Wanted,
        timeout_s: float,
        use: Callable[[StoredObject], None],
        then: Callable[[Done[StoredObject]], None],
    ) -> None:
        """Fetch an object: at once if it is announced, else when `submit_next` has room for it.

        `use`, `then`: called with the object, and when the fetch has ended; see Fetch and Handle.
        """
        is_announced, is_guess, piece = wanted.is_announced, wanted.is_guess, wanted.piece
        wanted.job = Fetch(
            key,
            timeout_s,
            PROLOGUE_BYTES + self._blocks[piece.layer_set].num_bytes(piece),
            is_announced,
            use=use,
            longest_pause_s=_LONGEST_PAUSE_S,
            is_guess=is_guess,
            may_be_given_up=is_announced,
        )
        wanted.handle = Handle(wanted.job, then)
        name = key, is_announced, is_guess
        self._wanted[name] = wanted
        if is_announced:
            self._engine.submit(wanted.handle)
        else:
            self._queues[is_guess].append(name)

    def end(self, wanted: _Wanted) -> None:
        """Remove a fetch that has ended, and free its bytes."""
        del self._wanted[wanted.job.key, wanted.is_announced, wanted.is_guess]
        if not wanted.is_announced:
            self._fetching_bytes[wanted.is_guess] -= wanted.job.limit_bytes

    def submit_next(self) -> None:
        """Submit fetches in the order in which they were added, as far as the limits allow."""
        for is_guess, queue in self._queues.items():
            while queue:
                wanted = self._wanted[queue[0]]
                if not wanted.is_wanted:
                    del self._wanted[queue.popleft()]
                    continue
                before_bytes = self._fetching_bytes[is_guess]
                after_bytes = before_bytes + wanted.job.limit_bytes
                if before_bytes and after_bytes > self._limit_bytes:
                    break
                self._fetching_bytes[is_guess] = after_bytes
                queue.popleft()
                self._engine.submit(wanted.handle)

    def cancel_unwanted(self) -> None:
        """Cancel fetches of announced objects for which no load waits any more."""
        for wanted in self._wanted.values():
            if wanted.is_announced and not wanted.is_wanted:
                self._engine.cancel(wanted.handle)


class Loads:
    """All loads of one worker.

    Each piece is copied to its blocks as soon as its chunk is verified, on a load thread: steps of
    other requests go on meanwhile. The blocks belong to the waiting request alone until it is
    reported, so no other request can read them half filled. A request is reported once, when no
    thread writes to its blocks any more; what arrives later is not written.

    Fetches are submitted as far as `buffer_bytes` allows, half of it for guesses, so that neither a
    long prompt nor many requests hold more host memory than that. If a piece fails, the pieces
    before it are loaded and kept, and vLLM computes the rest. If vLLM cannot keep them, the load
    fails.

    Announced chunks are being computed, one after the other. The load waits for the first missing
    one, until no chunk has arrived for `wait_s`, or the engine that announced it says that it will
    not be stored. The chunks after it are guesses: they are asked for, and again when they are
    next.

    Ownership: the worker's main thread; `_copy` alone runs on load threads.
    """

    def __init__(  # noqa: PLR0913 — all that the worker lends it
        self,
        config: KVConfig,
        engine: TransferEngine,
        blocks: Sequence[BlockCaches],
        streams: LoadStreams,
        shards: RankShards,
        *,
        keeps_prefix: bool,
        backfill: Callable[[Key, Piece], None] | None = None,
    ) -> None:
        """Fill `blocks`, those of each layer set. `streams`: how load threads write to them.

        `keeps_prefix`: vLLM can keep the blocks before a piece that failed. It cannot for layers
        with a window, for which it has not reserved the earlier blocks, and if there are several
        cache groups, for which it cannot be told of single blocks.
        `backfill`: called with each object that was fetched from this host's cache alone and has
        been there for some seconds.
        """
        self._config = config
        self._stats = engine.stats
        self._shards = shards
        self._streams = streams
        self._keeps_prefix = keeps_prefix
        self._backfill = backfill
        self._lock = threading.Lock()
        self._writer = BlockWriter(blocks, streams, engine.host, self._lock)
        self._fetches = _Fetches(engine, blocks, min(config.buffer_bytes // 2, _MAX_BYTES))
        self._loads: dict[str, _Load] = {}
        self._finished = Finished()
        self._is_paused = False

    def start(self, order: LoadOrder, namespace: str) -> None:
        """Fill the blocks of `order` and have `take_finished` return it, once."""
        objects = [
            each for piece in order.pieces for each in self._shards.objects(namespace, piece)
        ]
        keys, pieces = tuple(key for key, _ in objects), tuple(piece for _, piece in objects)
        count = len(pieces)
        missing, begun = set(range(count)), self._streams.record()
        load = _Load(order.request_id, pieces, keys, count, missing, begun, ahead=count)
        if order.is_announced:
            load.ahead = _FIRST_AHEAD
            load.deadline_s = monotonic() + self._config.wait_s
        self._loads[order.request_id] = load
        if self._is_paused:
            self._give_up(load)
        self._ask(load)
        self._fetches.submit_next()
        self._end_if_complete(load)  # if the order was empty

    def take_finished(self) -> Finished:
        """Return the loads that ended since the last call."""
        finished, self._finished = self._finished, Finished()
        return finished

    def abandon(self, request_id: str) -> None:
        """End the load of a request that has ended, unless the load has; see `start`."""
        load = self._loads.get(request_id)
        if load is None:
            return
        with self._lock:
            load.is_over = True
        load.missing.clear()
        self._end_if_complete(load)
        self._fetches.cancel_unwanted()

    def pause(self) -> None:
        """Give up all loads, and those to come until `resume`: each fails as a whole.

        No block is written to any more on return. Waits for the copies under way, and never for the
        store. Does nothing if they are paused already.
        """
        if self._is_paused:
            return
        self._is_paused = True
        for load in tuple(self._loads.values()):
            self._give_up(load)
            self._end_if_complete(load)
        self._fetches.cancel_unwanted()
        self._writer.wait_idle()

    def resume(self) -> None:
        """Load again what is ordered from now on."""
        self._is_paused = False

    @property
    def is_empty(self) -> bool:
        """Whether all loads and all their fetches have ended."""
        return not self._loads and self._fetches.is_empty

    @property
    def are_under_way(self) -> bool:
        """Whether a load has not ended."""
        return bool(self._loads)

    @property
    def have_ended(self) -> bool:
        """Whether a load has ended that `take_finished` has not returned."""
        return bool(self._finished.requests)

    def has_stopped(self) -> bool:
        """Begin no further copy to a block; return whether none is under way."""
        return self._writer.stop()

    def stop(self) -> None:
        """Begin no further copy to a block, and wait for those under way."""
        self._writer.stop()
        self._writer.wait_idle()

    def _give_up(self, load: _Load) -> None:
        """Fail `load` as a whole, including what has arrived of it."""
        if load.pieces:
            self._fail(load, 0, Outcome.CANCELLED.value)

    def _ask(self, load: _Load) -> None:
        """Fetch the pieces of `load` that are next, or wait for fetches of the same objects."""
        for number in load.take_unasked():
            is_announced = load.deadline_s is not None and number == load.first
            is_guess = load.deadline_s is not None and not is_announced
            key, waiter = load.keys[number], (load, number)
            wanted = self._fetches.find((key, is_announced, is_guess))
            if wanted is not None:
                with self._lock:
                    wanted.waiters.append(waiter)
                continue
            timeout_s = self._config.io_timeout_s
            if is_announced and load.deadline_s is not None:
                timeout_s = max(0.0, load.deadline_s - monotonic())
            wanted = _Wanted(load.pieces[number], is_announced, is_guess, [waiter])
            copy, arrived = partial(self._copy, wanted), partial(self._arrived, wanted)
            self._fetches.add(key, wanted, timeout_s, copy, arrived)

    def _copy(self, wanted: _Wanted, stored: StoredObject) -> None:
        """Copy an object to the blocks of all loads that wait for it now. Load thread."""
        wanted.misfit = self._writer.write(wanted.piece, stored, wanted.claim)
        with suppress(OSError):
            entry = stored.entry
            wanted.may_be_unstored = entry is not None and entry.age_s >= _BEING_STORED_S

    def _arrived(self, wanted: _Wanted, done: Done[StoredObject]) -> None:
        """Record the end of a fetch for all loads that wait for it, and ask for what is next."""
        self._fetches.end(wanted)
        for place, (load, number) in enumerate(wanted.waiters):
            with self._lock:
                load.copying.discard(number)
            if done.outcome is not Outcome.OK:
                self._miss(load, number, done.outcome)
            elif not wanted.num_served:
                if wanted.misfit == OTHER_LAYOUT:
                    self._finished.misfits.add(load.pieces[number].key)
                self._fail(load, number, wanted.misfit or Outcome.CORRUPT.value)
            elif place < wanted.num_served:
                self._fill(load, number)
            else:
                load.asked.discard(number)
                self._ask(load)
            if load.deadline_s is not None:
                self._ask(load)
            self._end_if_complete(load)
        self._fetches.submit_next()
        is_from_host = [each.tier for each in done.moved] == [Tier.HOST]
        if self._backfill is not None and is_from_host and wanted.may_be_unstored:
            self._backfill(wanted.job.key, wanted.piece)

    def _fill(self, load: _Load, number: int) -> None:
        """Record that a piece is in its blocks."""
        if not load.wants(number):
            return
        piece = load.pieces[number]
        if piece.shard is None or not piece.shard.heads.first_own:
            # Count blocks once, from however many objects they are loaded.
            self._stats.add("blocks/loaded", piece.num_held)
        load.receive(number, self._config.wait_s)

    def _miss(self, load: _Load, number: int, reason: Outcome) -> None:
        """Record that a piece is not available now; ask again if it may still arrive."""
        if load.deadline_s is None or reason not in _NOT_YET:
            self._fail(load, number, reason.value)
        elif load.wants(number) and monotonic() < load.deadline_s:
            load.ask_again(number)
        elif load.wants(number):
            self._fail(load, number, "late")

    def _fail(self, load: _Load, number: int, reason: str) -> None:
        """Shorten the load to the pieces before `number`, if vLLM can keep these, else to none."""
        piece = load.pieces[number]
        self._finished.lost.add(piece.key)
        if not load.wants(number):
            return
        self._stats.add("blocks/failed", piece.num_held)
        self._stats.add(f"misses/{reason}", piece.num_held)
        with self._lock:
            load.end = number if self._keeps_prefix else 0
        load.missing = {each for each in load.missing if each < load.end}

    def _end_if_complete(self, load: _Load) -> None:
        if load.missing or load.copying or self._loads.get(load.request_id) is not load:
            return
        with self._lock:
            load.is_over = True
        del self._loads[load.request_id]
        self._finished.requests.add(load.request_id)
        if self._keeps_prefix:
            for piece in load.pieces[load.end :]:
                self._finished.invalid_blocks.update(*piece.block_ids)
        elif load.end < len(load.pieces):
            self._finished.failed.add(load.request_id)
