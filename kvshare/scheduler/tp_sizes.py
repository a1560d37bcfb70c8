# SPDX-License-Identifier: Apache-2.0
"""Finds the tensor-parallel sizes in which engines have stored KV."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from ecshare.store.keys import Key, Kind, tp_size_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Handle, Lookup

logger = logging.getLogger(__name__)

# An engine of another size may start at any time, so a miss looks up its mark; at most this often.
_PAUSE_S = 30.0


class StoredTpSizes:
    """Holds the sizes to look up, this engine's own first.

    Each writer leaves a mark with its size (see shards.py). The model limits the possible sizes, so
    one look-up of few keys finds those in use: at start, and again after a miss.

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
        """Begin with the size `own`. `clock_s`: monotonic seconds."""
        self.known: tuple[int, ...] = (own,)
        self._marks = {
            tp_size_key(Kind.KV, namespace, tp_size): tp_size
            for tp_size in possible
            if tp_size != own
        }
        self._engine = engine
        self._clock_s = clock_s
        self._next_look_s = clock_s()

    def look(self, timeout_s: float) -> None:
        """Look up the marks of sizes that are not known yet, at most once in 30 s."""
        if self._marks and self._clock_s() >= self._next_look_s:
            self._next_look_s = self._clock_s() + _PAUSE_S
            job = Lookup(tuple(self._marks), timeout_s, store_only=True)
            self._engine.submit(Handle(job, partial(self._learn, job.keys)))

    def _learn(self, keys: Sequence[Key], done: Done[tuple[bool, ...]]) -> None:
        if done.value is None:
            return  # the store has failed; the next miss looks again
        for key, is_stored in zip(keys, done.value, strict=True):
            if is_stored and key in self._marks:
                self.known = (*self.known, self._marks.pop(key))
                logger.info("KV of engines with tensor-parallel size %d is used", self.known[-1])

    def with_announced(self, tp_size: int) -> tuple[int, ...]:
        """Return the sizes to look up if an announcement names `tp_size`.

        An announcement may come from a client. An impossible size is ignored.
        """
        return (*self.known, tp_size) if tp_size in self._marks.values() else self.known
