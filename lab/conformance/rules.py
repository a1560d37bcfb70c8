# SPDX-License-Identifier: Apache-2.0
"""Holds each rule: one sentence, its reason, and the check that plays it.

A check is a function that plays one situation in a `Place`, and raises `Violation` if the connector
breaks its rule. The decorator `rule` adds it to `RULES`, the list that `play_all` works through.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lab.conformance.harness import Place

Check = Callable[[Place], None]


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

    def add(check: Check) -> Check:
        name, sentence = check.__name__, check.__doc__
        assert sentence is not None, f"{name} has no docstring for its rule"
        assert name not in RULES, f"two checks have the name {name}"
        RULES[name] = Rule(name, sentence, why, check)
        return check

    return add
