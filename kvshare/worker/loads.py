# SPDX-License-Identifier: Apache-2.0
"""Brings chunks to the blocks of waiting requests, some at a time."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import monotonic

import torch

from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.keys import Key
from ecshare.transfer.device.load_streams import LoadStreams
from ecshare.transfer.device.staging import as_tensor
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Fetch, Handle, Moved, Outcome, StoredObject
from kvshare.chunks.prefix import ChunkKey
from kvshare.config import KVConfig
from kvshare.messages import LoadOrder, Piece
from kvshare.worker.blocks import BlockCaches

logger = logging.getLogger(__name__)

# How many chunks behind the next one a load asks for that waits for what is being computed. It
# begins with the first number; each that comes adds one, and one that is not there yet takes all.
_FIRST_AHEAD = 8
_MOST_AHEAD = 32  # as many loads as the store is asked for at once
# What was announced may come after these.
_NOT_YET = (Outcome.MISSING, Outcome.UNAVAILABLE, Outcome.CANCELLED)
_OTHER_LAYOUT = "layout"  # a reason for a miss
# Between two questions for the next one: a client waits for the last of them.
_LONGEST_PAUSE_S = 0.05
# More than the store is asked for at once, so that it is never idle; and little enough that
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
    misfits: set[ChunkKey] = field(default_factory=set)
    """Those of `lost` of which an object has arrived whose blocks are laid out in another way."""


@dataclass(slots=True)
class _Load:
    """A request whose blocks are being filled: pieces number 0 to before `end`.

    Under the lock of `Loads`, as far as a load thread reads it: `end`, `is_over` and `copying`.
    """

    request_id: str
    pieces: tuple[Piece, ...]
    keys: tuple[Key, ...]
    end: int
    missing: set[int]
    """Those of them that have not arrived."""
    ahead: int
    """How many are asked for beyond the first missing one."""
    begun: torch.cuda.Event | None
    """Its blocks may be written to after this."""
    deadline_s: float | None = None
    """What was announced may come until then; each that comes puts it off. None: what is not there
    is lost."""
    first: int = 0
    """No piece before it is missing."""
    asked: set[int] = field(default_factory=set)
    copying: set[int] = field(default_factory=set)
    """Those that a load thread may be writing: the blocks cannot be given up yet."""
    is_over: bool = False

    def wants(self, number: int) -> bool:
        """Whether piece `number` is still of use."""
        return not self.is_over and number < self.end

    def take_unasked(self) -> list[int]:
        """Return the pieces to ask for now, which then count as asked for."""
        if self.is_over:
            return []
        while self.first < self.end and self.first not in self.missing:
            self.first += 1
        missing = (number for number in range(self.first, self.end) if number in self.missing)
        unasked = [each for each in islice(missing, 1 + self.ahead) if each not in self.asked]
        self.asked.update(unasked)
        return unasked


@dataclass(slots=True)
class _Wanted:
    """One object, and the pieces of loads that wait for it: it is fetched once."""

    piece: Piece
    """What the object is; its blocks are one waiter's."""
    waiters: list[tuple[_Load, int]] = field(default_factory=list)
    num_served: int = 0
    """How many of them it was copied to, if they still wanted it. Later ones came too late."""
    misfit: str = ""
    """Why it cannot be used, as a reason for a miss."""
    handle: Handle[StoredObject] = field(init=False)
    job: Fetch = field(init=False)

    @property
    def is_wanted(self) -> bool:
        return any(load.wants(number) for load, number in self.waiters)


_Name = tuple[str, bool, bool]
"""What a Fetch brings is called here, whether it is announced, and whether it is a guess: one that
waits must hold up no other."""


def _name(job: Fetch) -> _Name:
    return job.key, job.is_announced, job.is_guess


class Loads:
    """All loads of one worker.

    Each piece is copied to its blocks as soon as its chunk is here and verified, on a load thread:
    steps of other requests go on meanwhile. The blocks belong to the waiting request alone until it
    is reported, so nobody can read them half filled; and it is reported when no thread writes to
    them any more, whether it still wants them or not. Fetches are submitted as far as
    `buffer_bytes` allow, so that neither a long prompt nor many requests hold more host memory than
    that; half of it is for guesses. A piece that fails shortens the load to what lies before it:
    that is loaded and kept, and vLLM computes the rest. Where vLLM cannot keep it, the load fails.
    A request is reported once; what arrives later is let go unwritten.

    Pieces that were announced are being computed, one after the other. The first missing one is
    waited for, until `wait_s` have passed in which none came, or whoever announced it says that it
    will not come; those behind it are guesses: they are
    asked for, and again when their turn comes. The fetch that waits counts against no budget: it
    holds no memory, and what never comes must not keep others from theirs.

    Ownership: the worker's main thread; `_copy_in` alone runs on load threads.
    """

    def __init__(  # noqa: PLR0913 — all that the worker lends it
        self,
        config: KVConfig,
        engine: TransferEngine,
        blocks: Sequence[BlockCaches],
        streams: LoadStreams,
        *,
        keeps_prefix: bool,
        arrived_from: Callable[[Key, Piece, Sequence[Moved]], None],
    ) -> None:
        """`blocks`: of each layer set. `streams`: how load threads write to them.

        `arrived_from`: told of each fetch that ended its key, a piece that it was for, and what was
        moved for it.
        `keeps_prefix`: vLLM can keep what leads up to a piece that failed. It cannot for layers
        that look back over a window, whose earlier blocks it has not reserved, nor be told of
        single blocks where it has several cache groups.
        """
        self._config = config
        self._engine = engine
        self._blocks = blocks
        self._stats = engine.stats
        self._keeps_prefix = keeps_prefix
        self._arrived_from = arrived_from
        self._limit_bytes = min(config.buffer_bytes // 2, _MAX_BYTES)
        self._loads: dict[str, _Load] = {}
        self._wanted: dict[_Name, _Wanted] = {}
        # What is wanted and not submitted yet: what was found, and what is guessed.
        self._queues: dict[bool, deque[_Name]] = {False: deque(), True: deque()}
        self._fetching_bytes = {False: 0, True: 0}
        self._streams = streams
        self._lock = threading.Lock()
        self._has_stopped = False
        self._is_paused = False
        self._num_writing = 0  # load threads
        self._nobody_writes = threading.Condition(self._lock)
        self._knows_of_layout = False
        self._finished = Finished()

    def start(self, order: LoadOrder, key_of: Callable[[Piece], Key]) -> None:
        """Fill the blocks of `order` and have `take_finished` return it, once."""
        pieces, count = order.pieces, len(order.pieces)
        keys = tuple(key_of(piece) for piece in pieces)
        missing, begun = set(range(count)), self._streams.record()
        load = _Load(order.request_id, pieces, keys, count, missing, ahead=count, begun=begun)
        if order.is_announced:
            load.ahead = _FIRST_AHEAD
            load.deadline_s = monotonic() + self._config.wait_s
        self._loads[order.request_id] = load
        if self._is_paused:
            self._give_up(load)
        self._ask(load)
        self._submit()
        self._end_if_complete(load)  # an order for nothing is done

    def take_finished(self) -> Finished:
        """Return the loads that ended since the last call."""
        finished, self._finished = self._finished, Finished()
        return finished

    def abandon(self, request_id: str) -> None:
        """End the load of a request that is over, unless it has ended; see `start`."""
        load = self._loads.get(request_id)
        if load is None:
            return
        with self._lock:
            load.is_over = True
        load.missing.clear()
        self._end_if_complete(load)
        self._cancel_unwanted()

    def pause(self) -> None:
        """Give up all loads, and those to come until `resume`: each fails as a whole.

        Nothing is written to any block on return. Waits for the copies under way, and never for
        the store.
        """
        self._is_paused = True
        for load in tuple(self._loads.values()):
            self._give_up(load)
            self._end_if_complete(load)
        self._cancel_unwanted()
        self._wait_written()

    def _wait_written(self) -> None:
        """Block until no load thread writes to a block."""
        with self._nobody_writes:
            self._nobody_writes.wait_for(lambda: not self._num_writing)

    def resume(self) -> None:
        """Load again what is ordered from now on."""
        self._is_paused = False

    def _give_up(self, load: _Load) -> None:
        """Fail `load` as a whole, what has arrived of it too."""
        if load.pieces:
            self._failed(load, 0, Outcome.CANCELLED.value)

    def _cancel_unwanted(self) -> None:
        """Stop to wait for what was announced to loads that have ended."""
        for wanted in self._wanted.values():
            if wanted.job.is_announced and not wanted.is_wanted:
                self._engine.cancel(wanted.handle)

    @property
    def is_empty(self) -> bool:
        """Whether all loads have ended, and all that was fetched for them."""
        return not self._loads and not self._wanted

    @property
    def are_under_way(self) -> bool:
        """Whether a load has not ended."""
        return bool(self._loads)

    def has_stopped(self) -> bool:
        """Begin to write to no block any more; return whether no load thread does now."""
        with self._lock:
            self._has_stopped = True
            return not self._num_writing

    def stop(self) -> None:
        """As `has_stopped`, and wait for the copies under way."""
        self.has_stopped()
        self._wait_written()

    def _arrived(self, wanted: _Wanted, done: Done[StoredObject]) -> None:
        """Take note of what became of a fetch for all who waited for it, and go on."""
        job = wanted.job
        del self._wanted[_name(job)]
        if not job.is_announced:
            self._fetching_bytes[job.is_guess] -= job.limit_bytes
        is_here = done.outcome is Outcome.OK
        for place, (load, number) in enumerate(wanted.waiters):
            with self._lock:
                load.copying.discard(number)
            if not is_here:
                self._absent(load, number, done.outcome)
            elif not wanted.num_served:
                if wanted.misfit == _OTHER_LAYOUT:
                    self._finished.misfits.add(load.pieces[number].key)
                self._failed(load, number, wanted.misfit or Outcome.CORRUPT.value)
            elif place < wanted.num_served:
                self._filled(load, number)
            else:
                load.asked.discard(number)
                self._ask(load)
            if load.deadline_s is not None:
                self._ask(load)
            self._end_if_complete(load)
        self._submit()
        self._arrived_from(job.key, wanted.piece, done.moved)

    def _ask(self, load: _Load) -> None:
        """Want the pieces of `load` whose turn it is."""
        for number in load.take_unasked():
            is_awaited = load.deadline_s is not None and number == load.first
            wanted = self._new_wanted(load, number, is_awaited=is_awaited)
            name = _name(wanted.job)
            if name not in self._wanted:
                self._wanted[name] = wanted
                if is_awaited:
                    self._engine.submit(wanted.handle)
                else:
                    self._queues[wanted.job.is_guess].append(name)
            with self._lock:
                self._wanted[name].waiters.append((load, number))

    def _new_wanted(self, load: _Load, number: int, *, is_awaited: bool) -> _Wanted:
        piece, timeout_s = load.pieces[number], self._config.io_timeout_s
        if is_awaited and load.deadline_s is not None:
            timeout_s = max(0.0, load.deadline_s - monotonic())
        wanted = _Wanted(piece)
        blocks = self._blocks[piece.layer_set]
        wanted.job = Fetch(
            load.keys[number],
            timeout_s,
            PROLOGUE_BYTES + blocks.num_bytes(piece),
            is_awaited,
            use=partial(self._copy_in, wanted),
            longest_pause_s=_LONGEST_PAUSE_S,
            is_guess=load.deadline_s is not None and not is_awaited,
            may_be_given_up=is_awaited,
        )
        wanted.handle = Handle(wanted.job, partial(self._arrived, wanted))
        return wanted

    def _submit(self) -> None:
        """Fetch what is next in turn, as far as the budgets go; one alone may exceed its own."""
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

    def _misfit(self, stored: StoredObject, piece: Piece) -> str:
        """Return why the object is not what was asked for: sound bytes may be those of something
        else. Empty: it is."""
        blocks = self._blocks[piece.layer_set]
        if blocks.can_use(stored.spec, piece):
            if blocks.is_sound(as_tensor(stored.payload, stored.spec)):
                return ""
        elif blocks.has_another_layout(stored.spec, piece):
            self._tell_of_layout(stored)
            return _OTHER_LAYOUT
        # Out of the host cache with it: what is computed and saved instead is to be found there.
        logger.warning(
            "%s contains a tensor that does not fit its key: %s", stored.key, stored.spec
        )
        self._engine.host.discard(stored.key)
        return Outcome.CORRUPT.value

    def _tell_of_layout(self, stored: StoredObject) -> None:
        """Log once that others fill their blocks in another way."""
        with self._lock:
            is_known, self._knows_of_layout = self._knows_of_layout, True
        if not is_known:
            logger.warning(
                "%s was stored by an engine that lays out its KV blocks in another way. This "
                "engine does not use such objects. Set another `epoch` for engines of each kind.",
                stored.key,
            )

    def _copy_in(self, wanted: _Wanted, stored: StoredObject) -> None:
        """Copy an object to the blocks of all who wait for it now. Load thread."""
        wanted.misfit = self._misfit(stored, wanted.piece)
        if wanted.misfit:
            return
        with self._lock:
            if self._has_stopped:
                return
            self._num_writing += 1
            waiters = tuple(wanted.waiters)
            wanted.num_served = len(waiters)
            wanting = [each for each in waiters if each[0].wants(each[1])]
            for load, number in wanting:
                load.copying.add(number)
        try:
            tensor, order = as_tensor(stored.payload, stored.spec), stored.spec.attributes["order"]
            for load, number in wanting:
                piece = load.pieces[number]
                with self._streams.after(load.begun) as stream:
                    self._blocks[piece.layer_set].write(piece, tensor, order, stream)
        finally:
            with self._nobody_writes:
                self._num_writing -= 1
                self._nobody_writes.notify_all()

    def _filled(self, load: _Load, number: int) -> None:
        """Take note that a piece is in its blocks."""
        if not load.wants(number):
            return
        piece = load.pieces[number]
        if piece.shard is None or not piece.shard.heads.first_own:
            # Counted once, of how many objects it may come.
            self._stats.add("blocks/loaded", piece.num_held)
        load.missing.discard(number)
        if load.deadline_s is not None:
            load.ahead = min(load.ahead + 1, _MOST_AHEAD)
            load.deadline_s = monotonic() + self._config.wait_s

    def _absent(self, load: _Load, number: int, reason: Outcome) -> None:
        """Take note that a piece cannot be had now; what was announced is asked for again."""
        if load.deadline_s is None or reason not in _NOT_YET:
            self._failed(load, number, reason.value)
        elif load.wants(number) and monotonic() < load.deadline_s:
            load.asked.discard(number)
            load.ahead = 0
        elif load.wants(number):
            self._failed(load, number, "late")

    def _failed(self, load: _Load, number: int, reason: str) -> None:
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
