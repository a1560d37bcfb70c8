# SPDX-License-Identifier: Apache-2.0
"""The router with engines of a stage in turns, for comparison in benchmarks.balance.

It takes the router's options: `python -m benchmarks.turns_router OPTIONS`.
"""

from collections.abc import Collection

from ecshare.router import __main__, app
from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.types import Work


class Turns(EnginePool):
    """Chooses the engine that has waited longest, whatever the work is."""

    def choose(self, excluded: Collection[Engine] = (), work: Work | None = None) -> Engine | None:
        """Return it, among engines that are available and not `excluded`; None: there is none."""
        live = [
            each
            for each in self
            if each.health.takes_one_more(each.in_flight) and each not in excluded
        ]
        return min(live, key=lambda each: each.last_turn, default=None)


if __name__ == "__main__":
    app.EnginePool = Turns  # type: ignore[attr-defined]
    __main__.main()
