# SPDX-License-Identifier: Apache-2.0
"""How many requests may be in a stage at once. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ecshare.router.engines import Engine, EnginePool, Stage
from ecshare.router.errors import EngineError

Engines = frozenset[Engine]
_ANY: Engines = frozenset()


class StageLimits:
    """Limits on the requests in each stage: a number for each engine that is up.

    A request counts once in a stage, however many media it brings. Where engines serve different
    models, no group of engines gets more requests that only it can serve than it may have. Belongs
    to the event loop's thread.
    """

    def __init__(self, pools: Mapping[Stage, EnginePool], limits: Mapping[Stage, int]) -> None:
        """`limits`: requests per engine; 0: no limit."""
        self._pools = pools
        self._limits = limits
        self._used: dict[Stage, Counter[Engines]] = {stage: Counter() for stage in pools}
        """The requests that are in each stage now, by the engines that serve their model."""

    def used(self, stage: Stage) -> int:
        """Return how many requests are in a stage now."""
        return self._used[stage].total()

    @contextmanager
    def place(self, stage: Stage, model: str | None = None) -> Iterator["Place"]:
        """Yield the place of a request for `model`. It is not taken yet, and is free when the block
        ends.
        """
        place = Place(self, stage, model)
        try:
            yield place
        finally:
            if place.engines is not None:
                self._free(stage, place.engines)

    def take(self, stage: Stage, model: str | None) -> Engines:
        """Count one more request, and return the engines that may serve it.

        Raises:
            EngineError: the stage is full.
        """
        engines = self.check(stage, model)
        self._used[stage][engines] += 1
        return engines

    def check(self, stage: Stage, model: str | None) -> Engines:
        """Return the engines that may serve one more request; empty: there is no limit.

        Raises:
            EngineError: the stage is full.
        """
        if not self._limits[stage]:
            return _ANY
        engines = frozenset(self._pools[stage].serving(model))
        if self._is_full(stage, engines):
            reason = "as many requests are there as may be"
            raise EngineError(stage, reason, reached=True).note_overload()
        return engines

    def _free(self, stage: Stage, engines: Engines) -> None:
        used = self._used[stage]
        used[engines] -= 1
        if not used[engines]:
            del used[engines]

    def _is_full(self, stage: Stage, engines: Engines) -> bool:
        """Tell whether one more request for these engines would be too many for them, or for more
        engines of which they are a part.
        """
        used = self._used[stage]
        groups = (group for group in {engines, *used} if engines <= group)
        return any(self._has_enough(stage, group) for group in groups)

    def _has_enough(self, stage: Stage, engines: Engines) -> bool:
        # A stage without an engine that is up fails by itself, and says so.
        number = self._limits[stage] * max(1, self._pools[stage].num_up(engines))
        used = self._used[stage].items()
        return number <= sum(count for group, count in used if group <= engines)


class Place:
    """The place of one request in a stage."""

    def __init__(self, limits: StageLimits, stage: Stage, model: str | None) -> None:
        self._limits = limits
        self._stage = stage
        self._model = model
        self.engines: Engines | None = None
        """The engines that may serve the request, once the place is taken."""

    def check(self) -> None:
        """Check that the place could be taken now.

        Raises:
            EngineError: the stage is full.
        """
        self._limits.check(self._stage, self._model)

    def take(self) -> None:
        """Take the place, unless it is taken already.

        Raises:
            EngineError: the stage is full.
        """
        if self.engines is None:
            self.engines = self._limits.take(self._stage, self._model)
