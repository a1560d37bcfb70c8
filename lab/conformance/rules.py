# SPDX-License-Identifier: Apache-2.0
"""The parts of a check: a rule in one sentence, its reason, and the effect of breaking it.

A check is a function that plays one situation in a `Place`, and raises `Violation` if the connector
breaks its rule. The decorator `rule` adds it to `RULES`, the list that `play_all` works through.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.conformance.harness import Place


class Effect(Enum):
    """What a broken rule does to an engine; the worst effect first."""

    ENGINE_DIES = "the engine dies, for all its users"
    WRONG_ROWS = "wrong answers without an error"
    ESCAPES = "a client writes outside of the connector's folder"
    HANGS = "a request hangs"
    EVERYONE_WAITS = "delays every request of the engine"
    REQUEST_FAILS = "a request fails unnecessarily"
    NO_USE = "an embedding is computed again"


class Violation(Exception):
    """A connector broke a rule. The message says what happened."""

    def __init__(self, effect: Effect, happened: str) -> None:
        super().__init__(happened)
        self.effect = effect


class NotApplicable(Exception):
    """The rule cannot be checked with this connector. The message says why."""


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
    """Add a check to `RULES`. Its function gives the name, its docstring the rule's sentence."""

    def put(check: Check) -> Check:
        name, sentence = check.__name__, check.__doc__
        assert sentence is not None, f"{name} does not say what its rule is"
        assert name not in RULES, f"two checks are called {name}"
        RULES[name] = Rule(name, sentence, why, check)
        return check

    return put


def require(holds: object, effect: Effect, happened: str) -> None:
    """Check `holds`; `happened` says what happened otherwise.

    Raises:
        Violation: `holds` is false.
    """
    if not holds:
        raise Violation(effect, happened)
