# SPDX-License-Identifier: Apache-2.0
"""Plays checks against a connector, and returns their results."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from lab.conformance import (  # noqa: F401 - their checks put themselves on the list
    faults,
    hand_over,
    hostile_input,
    lifecycle,
    scheduling,
)
from lab.conformance.harness import Place, Roles, Subject
from lab.conformance.rules import RULES, Rule
from lab.conformance.violations import Effect, NotApplicable, Violation
from lab.vllm_loop import RUNNERS, HookFailed, RunnerName

ROLES: tuple[Roles, ...] = ("apart", "both")


class Verdict(Enum):
    """The outcome of a check."""

    HOLDS = "holds"
    BROKEN = "broken"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Result:
    """The result of one check with one runner and one distribution of roles."""

    rule: Rule
    runner: RunnerName
    roles: Roles
    verdict: Verdict
    said: str = ""
    """What happened, or why the rule is not applicable."""
    effect: Effect | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def play(subject: Subject, rule: Rule, runner: RunnerName, roles: Roles) -> Result:
    """Play one check."""
    start_s = time.monotonic()
    place = Place(subject, runner, roles)
    verdict, said, effect = Verdict.HOLDS, "", None
    try:
        with place:
            rule.check(place)
    except (Violation, HookFailed) as broken:
        verdict, said = Verdict.BROKEN, str(broken).replace(str(place.root), "")
        effect = broken.effect if isinstance(broken, Violation) else Effect.ENGINE_DIES
    except NotApplicable as reason:
        verdict, said = Verdict.NOT_APPLICABLE, str(reason)
    took_s = time.monotonic() - start_s
    return Result(rule, runner, roles, verdict, said, effect, tuple(place.notes), took_s)


def play_all(
    subject: Subject,
    names: Iterable[str] = RULES,
    runners: Iterable[RunnerName] = RUNNERS,
    roles: Iterable[Roles] = ROLES,
) -> Iterator[Result]:
    """Play checks, each with every runner and distribution of roles; yield each result at once."""
    scenes = [(runner, each) for runner in runners for each in roles]
    for name in names:
        for runner, each in scenes:
            yield play(subject, RULES[name], runner, each)
