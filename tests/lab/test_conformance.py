# SPDX-License-Identifier: Apache-2.0
"""ECShareConnector under the conformance kit: every rule, with each runner and all roles."""

from itertools import product
from pathlib import Path

import pytest

from lab import conformance
from lab.conformance import ROLES, RULES, RUNNERS, Verdict

# The gate plays each rule once, with the combinations in turn.
COMBINATIONS = list(product(RUNNERS, ROLES))
PLAYED = [
    pytest.param(
        *(name, runner, roles),
        marks=[] if number == rule % len(COMBINATIONS) else pytest.mark.nightly,
    )
    for rule, name in enumerate(RULES)
    for number, (runner, roles) in enumerate(COMBINATIONS)
]
OPTIONS = {"url": "{folder}", "host_cache_dir": "{host}", "wait_s": 3}


@pytest.fixture(scope="module")
def ours(vlm: Path) -> conformance.Subject:
    # `patience_s` allows for a busy machine.
    return conformance.Subject("ecshare.connector", "ECShareConnector", OPTIONS, vlm, patience_s=60)


def test_kit_has_more_than_40_rules() -> None:
    """Rules register themselves when their modules are imported."""
    assert len(RULES) > 40


@pytest.mark.parametrize(("name", "runner", "roles"), PLAYED)
def test_ecshare_keeps_every_rule(
    ours: conformance.Subject, name: str, runner: str, roles: str
) -> None:
    result = conformance.play(ours, RULES[name], runner, roles)  # type: ignore[arg-type]
    assert result.verdict is not Verdict.BROKEN, result.said
    if result.verdict is Verdict.NOT_APPLICABLE:
        pytest.skip(result.said)
