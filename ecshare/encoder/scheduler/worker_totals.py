# SPDX-License-Identifier: Apache-2.0
"""Adds the workers' counts to those of the scheduler half."""

import time

from ecshare.plugin.ledger import Ledger, Totals, grown
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Handle, Run
from ecshare.transfer.stats import is_gauge

_READ_EVERY_S = 1.0


class WorkerTotals:
    """Receives the totals of all workers, from their reports and from the ledger.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, engine: TransferEngine, ledger: Ledger | None) -> None:
        """Add to the counts of `engine`. `ledger`: where workers write totals that vLLM drops;
        owned from now on."""
        self._engine = engine
        self._ledger = ledger
        self._last_totals: Totals = {}
        self._next_read_s = 0.0

    @property
    def has_lost_worker(self) -> bool:
        """Return whether a worker has reported that it has given up."""
        return any("gave_up/worker" in sums for sums in self._last_totals.values())

    def take(self, totals: Totals) -> None:
        """Add to each count by how much its total has grown. Gauges are replaced."""
        stats = self._engine.stats
        for name, count in grown(self._last_totals, totals).items():
            record = stats.set if is_gauge(name) else stats.add
            record(name, count)

    def read_ledger(self) -> None:
        """Start a read of the ledger, if there is one, at most once a second."""
        now_s = time.monotonic()
        if self._ledger is not None and now_s >= self._next_read_s:
            self._next_read_s = now_s + _READ_EVERY_S
            self._engine.submit(Handle(Run("ledger", self._ledger.read), self._ledger_read))

    def close(self) -> None:
        """Remove the ledger. The engine must be closed."""
        if self._ledger is not None:
            self._ledger.close()

    def _ledger_read(self, done: Done[Totals]) -> None:
        if done.value:
            self.take(done.value)
