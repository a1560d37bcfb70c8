# SPDX-License-Identifier: Apache-2.0
"""How a check says that a connector broke its rule, and what that does to an engine."""

from enum import Enum


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


def require(holds: object, effect: Effect, happened: str) -> None:
    """Check `holds`; `happened` says what happened otherwise.

    Raises:
        Violation: `holds` is false.
    """
    if not holds:
        raise Violation(effect, happened)
