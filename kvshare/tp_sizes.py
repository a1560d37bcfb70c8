# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel sizes in which engines have stored KV, as far as is known."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from ecshare.store.keys import Key, Kind, tp_size_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Handle, Lookup

logger = logging.getLogger(__name__)

# An engine of another size may start any time; whoever misses looks for it, but not more often.
_PAUSE_S = 30.0


class StoredTpSizes:
    """The sizes to ask for, this engine's own first.

    Each writer leaves a mark that names its size (see shards.py). Which sizes there can be follows
    from the model, so that one look-up of few keys tells which there are: at start, and again after
    a miss.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(
        self,
        namespace: str,
        own: int,
        possible: Sequence[int],
        engine: TransferEngine,
        clock_s: Callable[[], float],
    ) -> None:
        """`clock_s`: monotonic seconds."""
        self.known: tuple[int, ...] = (own,)
        self._marks = {
            tp_size_key(Kind.KV, namespace, size): size for size in possible if size != own
        }
        self._engine = engine
        self._clock_s = clock_s
        self._next_look_s = clock_s()

    def look(self, timeout_s: float) -> None:
        """Ask the store for sizes that are not known, unless that was done a moment ago."""
        if self._marks and self._clock_s() >= self._next_look_s:
            self._next_look_s = self._clock_s() + _PAUSE_S
            job = Lookup(tuple(self._marks), timeout_s, store_only=True)
            self._engine.submit(Handle(job, partial(self._learn, job.keys)))

    def _learn(self, keys: Sequence[Key], done: Done[tuple[bool, ...]]) -> None:
        if done.value is None:
            return  # the store has failed; the next miss asks again
        for key, is_there in zip(keys, done.value, strict=True):
            if is_there and key in self._marks:
                self.known = (*self.known, self._marks.pop(key))
                logger.info("KV of engines with tensor-parallel size %d is used", self.known[-1])

    def with_announced(self, size: int) -> tuple[int, ...]:
        """Return the sizes to ask for where somebody says that he stores in `size`.

        It comes from the client, and counts if it is a possible one.
        """
        return (*self.known, size) if size in self._marks.values() else self.known
