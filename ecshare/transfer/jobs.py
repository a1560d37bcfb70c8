# SPDX-License-Identifier: Apache-2.0
"""What is asked of the transfer engine, and how it ended. Plain values; no I/O."""

from collections.abc import Callable, Generator, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct

from ecshare.store.format import TensorSpec
from ecshare.store.hostcache.cache import Entry
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


class Put(Struct, frozen=True):
    """Store the object in `slab` under `key`. The engine owns `slab` from now on.

    `keeps_unstored`: this host's cache keeps what the store did not take.
    """

    key: str
    slab: Slab
    keeps_unstored: bool = True


class Fetch(Struct, frozen=True):
    """Bring the object under `key` to this host, verified and pinned, within `timeout_s`.

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

    key: str
    timeout_s: float
    limit_bytes: int = MAX_OBJECT_BYTES
    is_announced: bool = False
    accepts: Callable[[TensorSpec], bool] | None = None
    use: "Callable[[StoredObject], None] | None" = None
    longest_pause_s: float = _LONGEST_PAUSE_S
    is_guess: bool = False


class Backfill(Struct, frozen=True):
    """Store what this host's cache holds under `key`, unless the store has it."""

    key: str


class Lookup(Struct, frozen=True):
    """Ask which of `keys` exist, within `timeout_s`.

    In the host cache or the store; `store_only` asks what other hosts can read as well.
    """

    keys: tuple[str, ...]
    timeout_s: float
    store_only: bool = False


LookupRounds = Generator[Sequence[str], Sequence[Tier | None], Any]
"""Yields keys, is sent where each exists (None: nowhere), and returns what it makes of it all."""


class MultiLookup(Struct, frozen=True):
    """Ask which keys exist in several rounds, all within `timeout_s`; see Lookup for where.

    `questions` is called and run on the I/O thread, so that to name many keys costs no other one.
    """

    questions: Callable[[], LookupRounds]
    timeout_s: float


class Run(Struct, frozen=True):
    """Call `work` off vLLM's threads; what it returns is the value. `name` says what for."""

    name: str
    work: Callable[[], Any]


Job = Put | Fetch | Backfill | Lookup | MultiLookup | Run


class StoredObject(Struct, frozen=True):
    """A verified object on this host, valid until `release`.

    `payload` is read-only. It lies in the host cache, pinned by `entry`, under `key`; or, where the
    cache had no room, in this process alone, and `entry` is None.
    """

    key: str
    facts: TensorSpec
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


class Done(Struct, frozen=True):
    """What became of `job`.

    `value`, where it is OK: a StoredObject for a Fetch (the receiver owns it; True where `use` had
    it), a tuple of bools in the order of the keys for a Lookup, whether the object had to be stored
    for a Backfill, what the work returned for a Run and the rounds for a MultiLookup; else None.
    `seconds`: from submit to the end.
    """

    job: Job
    outcome: Outcome
    seconds: float
    value: Any = None
    moved: tuple[Moved, ...] = ()
