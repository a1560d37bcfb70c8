# SPDX-License-Identifier: Apache-2.0
"""Collects what the worker half reports to the scheduler half."""

from collections import Counter
from collections.abc import Set as AbstractSet

from ecshare.transfer.stats import Stats
from kvshare.chunks.prefix import ChunkKey
from kvshare.messages import Piece, Report


class Reports:
    """The report of the next step.

    Each save that was ordered from this rank is recorded exactly once, stored or not: the scheduler
    half reserves memory for it until then.

    Ownership: the worker's main thread.
    """

    def __init__(self, stats: Stats) -> None:
        """Count saved and dropped blocks in `stats`."""
        self._stats = stats
        self._num_ended: Counter[ChunkKey] = Counter()
        self._not_saved: set[ChunkKey] = set()
        self._lost: set[ChunkKey] = set()
        self._has_misfits = False
        self._is_idle = False

    def saved(self, piece: Piece) -> None:
        """Record that `piece` is stored."""
        self._stats.add("blocks/saved", piece.num_blocks)
        self._num_ended[piece.key] += 1

    def dropped(self, piece: Piece) -> None:
        """Record that `piece` is not stored."""
        self._stats.add("blocks/dropped", piece.num_blocks)
        self._num_ended[piece.key] += 1
        self._not_saved.add(piece.key)

    def merged(self, piece: Piece) -> None:
        """Record that a save of `piece` needs nothing: an earlier one is still under way."""
        self._num_ended[piece.key] += 1

    def lost(self, keys: AbstractSet[ChunkKey], *, has_misfits: bool) -> None:
        """Record chunks that could not be loaded. `has_misfits`: some have another layout."""
        self._lost |= keys
        self._has_misfits |= has_misfits

    def stopped(self) -> None:
        """Record that this worker saves and loads nothing from now on."""
        self._is_idle = True

    def take(self, *, saves_fail: bool) -> Report | None:
        """Return the report since the last call; None if there is nothing to report."""
        if not (self._lost or self._is_idle or self._num_ended or saves_fail):
            return None
        not_saved, ended = frozenset(self._not_saved), dict(self._num_ended)
        lost = not_saved.union(self._lost)
        report = Report(lost, self._is_idle, ended, saves_fail, not_saved, self._has_misfits)
        self._num_ended.clear()
        self._not_saved.clear()
        self._lost.clear()
        self._has_misfits = self._is_idle = False
        return report
