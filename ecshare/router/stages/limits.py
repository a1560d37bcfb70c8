# SPDX-License-Identifier: Apache-2.0
"""How many requests may be in a stage at once. Pure."""

from collections.abc import Mapping

from ecshare.router.api.errors import EngineError
from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.types import Stage

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
        self._used: dict[Stage, dict[Engines, int]] = {stage: {} for stage in pools}
        """The requests that are in each stage now, by the engines that serve their model."""

    def used(self, stage: Stage) -> int:
        """Return how many requests are in a stage now."""
        return sum(self._used[stage].values())

    def slot(self, stage: Stage, model: str | None) -> "Slot":
        """Return the slot of a request for `model`. It is not taken yet, and is free when its block
        ends.
        """
        return Slot(self, stage, model)

    def take(self, stage: Stage, model: str | None) -> Engines:
        """Count one more request, and return the engines that may serve it.

        Raises:
            EngineError: the stage is full.
        """
        engines = self.check(stage, model) if self._limits[stage] else _ANY
        used = self._used[stage]
        used[engines] = used.get(engines, 0) + 1
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

    def free(self, stage: Stage, engines: Engines) -> None:
        """Count one request less of those that `take` has counted."""
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
        number = self._limits[stage] * max(1, sum(not each.health.is_down for each in engines))
        used = self._used[stage].items()
        return number <= sum(count for group, count in used if group <= engines)


class Slot:
    """The place of one request in a stage."""

    __slots__ = ("_engines", "_limits", "_model", "_stage")

    def __init__(self, limits: StageLimits, stage: Stage, model: str | None) -> None:
        self._limits = limits
        self._stage = stage
        self._model = model
        self._engines: Engines | None = None

    def check(self) -> None:
        """Check that the slot could be taken now.

        Raises:
            EngineError: the stage is full.
        """
        self._limits.check(self._stage, self._model)

    def take(self) -> None:
        """Take the slot, unless it is taken already.

        Raises:
            EngineError: the stage is full.
        """
        if self._engines is None:
            self._engines = self._limits.take(self._stage, self._model)

    def __enter__(self) -> "Slot":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._engines is not None:
            self._limits.free(self._stage, self._engines)
            self._engines = None
