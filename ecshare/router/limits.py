# SPDX-License-Identifier: Apache-2.0
"""How many requests may be in a stage at once. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ecshare.router.engines import EnginePool, Stage
from ecshare.router.errors import EngineError


class StageLimits:
    """Limits on the requests in each stage: a number for each engine that is up.

    A request counts once in a stage, however many media it brings. Belongs to the event loop's
    thread.
    """

    def __init__(self, pools: Mapping[Stage, EnginePool], limits: Mapping[Stage, int]) -> None:
        """`limits`: requests per engine; 0: no limit."""
        self._pools = pools
        self._limits = limits
        self.used: Counter[Stage] = Counter()
        """The requests that are in each stage now."""

    @contextmanager
    def place(self, stage: Stage) -> Iterator["Place"]:
        """Yield the place of one request. It is not taken yet, and is free when the block ends."""
        place = Place(self, stage)
        try:
            yield place
        finally:
            self.used[stage] -= place.is_taken

    def is_full(self, stage: Stage) -> bool:
        """Tell whether one more request would be too many."""
        # A stage without an engine that is up fails by itself, and says so.
        number = self._limits[stage] * max(1, self._pools[stage].num_up)
        return 0 < number <= self.used[stage]


class Place:
    """The place of one request in a stage."""

    def __init__(self, limits: StageLimits, stage: Stage) -> None:
        self._limits = limits
        self._stage = stage
        self.is_taken = False

    def take(self) -> None:
        """Take the place, unless it is taken already.

        Raises:
            EngineError: the stage is full.
        """
        if self.is_taken:
            return
        if self._limits.is_full(self._stage):
            reason = "as many requests are there as may be"
            raise EngineError(self._stage, reason, reached=True).note_overload()
        self._limits.used[self._stage] += 1
        self.is_taken = True
