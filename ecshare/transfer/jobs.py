# SPDX-License-Identifier: Apache-2.0
"""What is asked of the transfer engine, and how it ended. No I/O."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from msgspec import Struct

from ecshare.store.format import TensorSpec
from ecshare.store.hostcache.cache import Entry
from ecshare.store.keys import Key
from ecshare.transfer.staging import Slab

# Between two questions to the store for what was announced.
_LONGEST_PAUSE_S = 0.5
# No tensor of any model is larger; who knows the size of what it asks for gives a lower limit.
MAX_OBJECT_BYTES = 4 << 30


class Outcome(Enum):
    """How a job ended. Everything but OK is a miss, and is counted under its name."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    UNAVAILABLE = "unavailable"
    REJECTED = "rejected"  # never tried, or no room on this host
    CANCELLED = "cancelled"  # nobody waited for it any more


class Tier(Enum):
    """Where bytes were moved to or from."""

    HOST = "host"
    STORE = "store"


class StoredObject(Struct, frozen=True):
    """A verified object on this host, valid until `release`.

    `payload` is read-only. It lies in the host cache, pinned by `entry`, under `key`; or, where the
    cache had no room, in this process alone, and `entry` is None.
    """

    key: Key
    spec: TensorSpec
    payload: memoryview
    entry: Entry | None

    def release(self) -> None:
        """Unpin; `payload` must not be used any more. The second call does nothing."""
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


class Job(Struct, Generic[R], frozen=True):
    """Work for the transfer engine whose result is an `R`."""


class Put(Job[None], frozen=True):
    """Store the object in `slab` under `key`. The engine owns `slab` from now on.

    `keeps_unstored`: this host's cache keeps what the store did not take.
    """

    key: Key
    slab: Slab
    keeps_unstored: bool = True


class Fetch(Job[StoredObject], frozen=True):
    """Bring the object under `key` to this host, verified and pinned, within `timeout_s`.

    The result is the object, which the receiver owns; None where `use` had it.

    `limit_bytes`: what is larger, prologue included, counts as damaged and is not read.
    `accepts`: a tensor that it says no to counts as damaged too, so that a usable one can take the
    place. Any thread.
    `is_announced`: somebody is storing it now, so that "missing" is no answer before the time is
    over: look again, on this host every few milliseconds, in the store ever less often, but at
    least every `longest_pause_s`.
    `is_guess`: nobody has seen it in the store: loads of what is there must not wait for it.
    `use`: called with the object on a load thread, which then releases it. The job ends after that,
    cancelled or not: what `use` writes to is its own no longer once the Done is there.
    """

    key: Key
    timeout_s: float
    limit_bytes: int = MAX_OBJECT_BYTES
    is_announced: bool = False
    accepts: Callable[[TensorSpec], bool] | None = None
    use: Callable[[StoredObject], None] | None = None
    longest_pause_s: float = _LONGEST_PAUSE_S
    is_guess: bool = False


class Backfill(Job[bool], frozen=True):
    """Store what this host's cache holds under `key`, unless the store has it.

    The result is whether it had to be stored.
    """

    key: Key


class Lookup(Job[tuple[bool, ...]], frozen=True):
    """Ask of each of `keys` whether it exists, within `timeout_s`.

    In the host cache or the store; `store_only` asks what other hosts can read as well.
    """

    keys: tuple[Key, ...]
    timeout_s: float
    store_only: bool = False


LookupRounds = Generator[Sequence[Key], Sequence[Tier | None], R]
"""Yields keys, is sent where each exists (None: nowhere), and returns what it makes of it all."""


class MultiLookup(Job[R], frozen=True):
    """Ask which keys exist in several rounds, all within `timeout_s`; see Lookup for where.

    The result is what `questions` makes of the answers.

    `questions` is called and run on the I/O thread, so that to name many keys costs no other one.
    """

    questions: Callable[[], LookupRounds[R]]
    timeout_s: float


class Run(Job[R], frozen=True):
    """Call `work` off vLLM's threads; the result is what it returns. `name` says what for."""

    name: str
    work: Callable[[], R]


class Done(Struct, Generic[R], frozen=True):
    """What became of `job`.

    `value`: the job's result, where the outcome is OK; else None.
    `seconds`: from submit to the end.
    """

    job: Job[R]
    outcome: Outcome
    seconds: float
    value: R | None = None
    moved: tuple[Moved, ...] = ()


@dataclass(slots=True, eq=False)
class Handle(Generic[R]):
    """A job in the hands of the engine, and what follows it.

    `then` is called once, with the job's Done, on the thread that polls; it owns the value.
    Whoever submits keeps the handle to cancel the job; None of it need be kept otherwise.
    """

    job: Job[R]
    then: Callable[[Done[R]], None] | None = None
    started_s: float = 0.0
    task: asyncio.Task[None] | None = None
    """The I/O thread's."""

    def ended(self, done: Done[R]) -> None:
        """Go on with what follows."""
        if self.then is not None:
            self.then(done)
