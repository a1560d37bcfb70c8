# SPDX-License-Identifier: Apache-2.0
"""Exceptions for a broken rule, and the effects of one on an engine."""

from enum import Enum


class Effect(Enum):
    """The effect of a broken rule on an engine; the worst comes first."""

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


def require(holds: object, effect: Effect, happened: str) -> None:
    """Raise if `holds` is false; `happened` says what happened.

    Raises:
        Violation: `holds` is false.
    """
    if not holds:
        raise Violation(effect, happened)
