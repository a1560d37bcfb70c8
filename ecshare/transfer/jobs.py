# SPDX-License-Identifier: Apache-2.0
"""The jobs of the transfer engine, and their outcomes. No I/O."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from msgspec import Struct

from ecshare.store.errors import StoreUnavailable
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec
from ecshare.store.hostcache.cache import Entry
from ecshare.store.keys import Key
from ecshare.transfer.device.staging import Slab

# The longest pause between two requests to the store for an announced object.
_LONGEST_PAUSE_S = 0.5
# No tensor of any model is larger. A caller that knows the size of an object sets a lower limit.
MAX_OBJECT_BYTES = 4 << 30


class Outcome(Enum):
    """The end of a job. Everything but OK is a miss, and is counted under its name."""

    OK = "ok"
    MISSING = "missing"
    GIVEN_UP = "given_up"  # announced, and then not stored
    CORRUPT = "corrupt"
    UNAVAILABLE = "unavailable"
    REJECTED = "rejected"  # never tried, or no room on this host
    CANCELLED = "cancelled"  # the caller did not need it any more


class Tier(Enum):
    """The place to or from which bytes were moved."""

    HOST = "host"
    STORE = "store"


class StoredObject(Struct, frozen=True):
    """A verified object on this host, valid until `release`.

    `payload` is read-only. It resides in the host cache under `key`, pinned by `entry`. If the
    cache had no room, it resides in this process alone, and `entry` is None. An object that was
    just unpacked resides in both.
    """

    key: Key
    spec: TensorSpec
    payload: memoryview
    entry: Entry | None

    def read(self, offset: int, out: memoryview) -> None:
        """Fill `out`, uint8, with the bytes of the payload from `offset` on.

        Raises:
            StoreUnavailable: the host cache cannot be read.
        """
        if self.entry is None:
            out[:] = self.payload[offset : offset + len(out)]
            return
        try:
            self.entry.read(PROLOGUE_BYTES + offset, out)
        except OSError as exc:
            raise StoreUnavailable(f"the host cache cannot be read: {exc}") from exc

    def keep_pin(self) -> Entry | None:
        """Release all but the pin, which the caller closes. `payload` must not be used any more."""
        self.payload.release()
        if self.entry is not None:
            self.entry.unmap()
        return self.entry

    def release(self) -> None:
        """Unpin; `payload` must not be used any more. A second call does nothing."""
        self.payload.release()
        if self.entry is not None:
            self.entry.close()


class Moved(Struct, frozen=True):
    """Bytes that a job has moved."""

    direction: str  # "read" or "write"
    tier: Tier
    num_bytes: int
    seconds: float


R = TypeVar("R")

Accepts = Callable[[TensorSpec], bool]
"""Returns whether a job can use such a tensor."""


class Job(Struct, Generic[R], frozen=True):
    """Work for the transfer engine whose result is an `R`."""

    def is_hit(self, outcome: Outcome, value: R | None) -> bool | None:
        """Return whether it found something for this engine itself; None: it looked for nothing.

        `outcome`: OK or MISSING. `value`: its result, if it has one.
        """
        return None


class Put(Job[None], frozen=True):
    """Store the object in `slab` under `key`. The engine owns `slab` from now on.

    If it cannot be stored, a note says so to the readers that wait for it; see GiveUp.
    `keeps_unstored`: the object stays in this host's cache even if it could not be stored.
    """

    key: Key
    slab: Slab
    keeps_unstored: bool = True


class Fetch(Job[StoredObject], frozen=True):
    """Bring the object under `key` to this host, verified and pinned, within `timeout_s`.

    The result is the object, which the receiver owns; None if there is a `use`.

    `limit_bytes`: a larger object, prologue included, counts as damaged and is not read.
    `accepts`: a tensor that it rejects counts as damaged too, so that a usable one can replace it.
    Called on any thread.
    `is_announced`: another engine is storing the object now. If it is missing, it is looked up
    until the time is over: in the host cache every few milliseconds, in the store less and less
    often, but at least every `longest_pause_s`.
    `may_be_given_up`: with `is_announced`: the job ends as soon as there is a note that the object
    will not be stored. Any process that can write to the store can leave such a note.
    `is_guess`: no look-up has seen it in the store. Loads of objects that exist must not wait for
    it. If it is missing, the host cache is watched for it for 20 ms more.
    `in_store`: other hosts will need the object too. If only the host cache has it, it counts as
    missing until the store has it.
    `use`: called with the object on a load thread, which then releases it. The job ends only after
    `use` has returned, even if it is cancelled. `use` writes to nothing after the Done.
    """

    key: Key
    timeout_s: float
    limit_bytes: int = MAX_OBJECT_BYTES
    is_announced: bool = False
    accepts: Accepts | None = None
    use: Callable[[StoredObject], None] | None = None
    longest_pause_s: float = _LONGEST_PAUSE_S
    is_guess: bool = False
    in_store: bool = False
    may_be_given_up: bool = False

    def is_hit(self, outcome: Outcome, value: StoredObject | None) -> bool | None:
        """See Job. The outcome decides: with a `use`, there is no value."""
        return outcome is Outcome.OK


class GiveUp(Job[None], frozen=True):
    """Leave a note for waiting readers that the announced object under `key` will not be stored.

    `key`: of an object of several parts, any of its keys.
    """

    key: Key


class Backfill(Job[bool], frozen=True):
    """Store the entry of this host's cache under `key`, unless the store has the object.

    The result is whether the store lacked it.
    """

    key: Key


class Lookup(Job[tuple[bool, ...]], frozen=True):
    """Ask whether each of `keys` exists, within `timeout_s`.

    In the host cache or the store. With `store_only`, only in the store, where other hosts can read
    it too.
    """

    keys: tuple[Key, ...]
    timeout_s: float
    store_only: bool = False

    def is_hit(self, outcome: Outcome, value: tuple[bool, ...] | None) -> bool | None:
        """See Job. A `store_only` look-up is for other hosts."""
        return None if self.store_only else any(value or ())


LookupRounds = Generator[Sequence[Key], Sequence[Tier | None], R]
"""Yields keys, receives where each exists (None: nowhere), and returns the job's result."""


class MultiLookup(Job[R], frozen=True):
    """Ask in several rounds which keys exist, all within `timeout_s`; see Lookup for where.

    The result is the return value of the generator of `questions`. It runs on the I/O thread, so
    that making many keys costs no time on other threads.
    """

    questions: Callable[[], LookupRounds[R]]
    timeout_s: float

    def is_hit(self, outcome: Outcome, value: R | None) -> bool | None:
        """See Job. A result is true if it found something."""
        return bool(value)


class Run(Job[R], frozen=True):
    """Call `work` outside of vLLM's threads. The result is its return value. `name`: for logs."""

    name: str
    work: Callable[[], R]


class Done(Struct, Generic[R], frozen=True):
    """The end of `job`.

    `value`: the job's result if the outcome is OK, else None.
    `seconds`: from submit to the end.
    """

    job: Job[R]
    outcome: Outcome
    seconds: float
    value: R | None = None
    moved: tuple[Moved, ...] = ()

    @property
    def is_late(self) -> bool:
        """Return whether the job is a look-up that the store did not answer in time."""
        if not isinstance(self.job, Lookup | MultiLookup):
            return False
        return self.outcome is Outcome.UNAVAILABLE and self.seconds >= self.job.timeout_s


@dataclass(slots=True, eq=False)
class Handle(Generic[R]):
    """A submitted job and its continuation.

    `then` is called once with the job's Done, on the thread that polls; it owns the value. Keep the
    handle only to cancel the job.
    """

    job: Job[R]
    then: Callable[[Done[R]], None] | None = None
    started_s: float = 0.0
    task: asyncio.Task[None] | None = None
    """Belongs to the I/O thread."""

    def ended(self, done: Done[R]) -> None:
        """Call the continuation."""
        if self.then is not None:
            self.then(done)
