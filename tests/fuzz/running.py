# SPDX-License-Identifier: Apache-2.0
"""How many cases, and which: the gate runs a few hundred of each kind, `make fuzz` many times more.

One seed makes the same cases every time. Hypothesis shrinks failures, and prints them as calls.
"""

import os
import random
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, seed, settings

F = TypeVar("F", bound=Callable[..., Any])

SEED = int(os.environ.get("FUZZ_SEED", "1"))
SCALE = float(os.environ.get("FUZZ_CASES", "1"))


def cases(number: int) -> int:
    """The number of cases to run where the gate runs `number`."""
    return max(1, round(number * SCALE))


def dice(name: str) -> random.Random:
    return random.Random(f"{SEED} {name}")


def fuzzed(number: int) -> Callable[[F], F]:
    """Run a hypothesis test with as many cases as `cases(number)`. Nothing is kept on the disk."""

    def wrap(test: F) -> F:
        limited = settings(
            max_examples=cases(number),
            database=None,
            deadline=None,
            # Large or slow cases are intended.
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
        )
        return seed(SEED)(limited(test))

    return wrap
