# SPDX-License-Identifier: Apache-2.0
"""A conformance kit for any encoder-cache connector of vLLM; needs no GPU, engine or network.

It plays vLLM's own scheduler, and the calls of its V1 and V2 model runners, against a connector,
with faults and hostile requests. Each rule states what a violation does to an engine.

    python -m lab.conformance --connector MODULE:CLASS --extra-config JSON

As tests of your own connector:

    from lab import conformance

    SUBJECT = conformance.Subject("my.module", "MyConnector", {"path": "{folder}"}, model)

    @pytest.mark.parametrize("name", conformance.RULES)
    @pytest.mark.parametrize("runner", conformance.RUNNERS)
    @pytest.mark.parametrize("roles", conformance.ROLES)
    def test_my_connector(name, runner, roles):
        result = conformance.play(SUBJECT, conformance.RULES[name], runner, roles)
        assert result.verdict is not conformance.Verdict.BROKEN, result.said
"""

from lab.conformance.harness import Subject
from lab.conformance.rules import RULES, Rule
from lab.conformance.runner import ROLES, Result, Verdict, play, play_all
from lab.conformance.violations import Effect, Violation
from lab.vllm_loop import RUNNERS

__all__ = [
    "ROLES",
    "RULES",
    "RUNNERS",
    "Effect",
    "Result",
    "Rule",
    "Subject",
    "Verdict",
    "Violation",
    "play",
    "play_all",
]
