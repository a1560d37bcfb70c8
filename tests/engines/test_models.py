# SPDX-License-Identifier: Apache-2.0
"""The small model suits token comparisons: its tokens depend on all inputs, and on nothing else."""

from pathlib import Path

import pytest

from lab.servers.engines import EngineProcess
from lab.servers.openai_client import ask, picture, question
from tests.conftest import StartEngine

pytestmark = pytest.mark.engine


def test_tokens_depend_on_picture_question_and_weights(
    engine: StartEngine, plain: EngineProcess, other_vlm: Path
) -> None:
    other = engine("other", model=other_vlm)
    url, other_url = (each.wait_ready().base_url for each in (plain, other))
    asked = question("Describe this picture.", [picture(1)])
    first = ask(url, asked)
    assert len(first.token_ids) == asked["max_tokens"]
    assert ask(url, asked).token_ids == first.token_ids
    assert ask(url, asked, stream=True).token_ids == first.token_ids
    answers = {
        first.token_ids,
        ask(url, question("Describe this picture.", [picture(2)])).token_ids,
        ask(url, question("Describe this picture.", [picture(1), picture(2)])).token_ids,
        ask(url, question("Describe this picture.", [picture(2), picture(1)])).token_ids,
        ask(url, question("Why is the sky blue?", [picture(1)])).token_ids,
        ask(url, question("Describe this picture.")).token_ids,
        ask(other_url, asked).token_ids,
    }
    assert len(answers) == 7
