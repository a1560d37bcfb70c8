# SPDX-License-Identifier: Apache-2.0
"""What a check says: a rule in one sentence, why it matters, and what breaking it does.

A check is a function that plays a scene in a `Place` and raises `Violation` when the connector
breaks its rule. `rule` puts it on the list that `run` works through.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.conformance.harness import Place


class Effect(Enum):
    """What an engine suffers from a broken rule, worst first."""

    ENGINE_DIES = "kills the engine, for every user"
    WRONG_ROWS = "wrong answers, and nothing says so"
    ESCAPES = "a client writes outside of the connector's folder"
    HANGS = "a request hangs"
    EVERYONE_WAITS = "holds up every request of the engine"
    REQUEST_FAILS = "a request fails that need not"
    NO_USE = "an embedding is computed again"


class Violation(Exception):
    """A connector broke a rule; what happened, and to whom."""

    def __init__(self, effect: Effect, happened: str) -> None:
        super().__init__(happened)
        self.effect = effect


class NotApplicable(Exception):
    """The rule says nothing about this connector here; the message says why."""


Check = Callable[["Place"], None]


@dataclass(frozen=True)
class Rule:
    """One rule, and the check that plays it."""

    name: str
    sentence: str
    why: str
    check: Check


RULES: dict[str, Rule] = {}


def rule(*, why: str) -> Callable[[Check], Check]:
    """Put a check on the list, named as its function; the rule's sentence is its docstring."""

    def put(check: Check) -> Check:
        name, sentence = check.__name__, check.__doc__
        assert sentence is not None, f"{name} does not say what its rule is"
        assert name not in RULES, f"two checks are called {name}"
        RULES[name] = Rule(name, sentence, why, check)
        return check

    return put


def require(holds: object, effect: Effect, happened: str) -> None:
    """Raise `Violation` unless it holds."""
    if not holds:
        raise Violation(effect, happened)
