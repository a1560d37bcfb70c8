# SPDX-License-Identifier: Apache-2.0
"""Engines that share a store while requests are aborted and preempted, engines sleep, and stores
fail and lose objects: all tokens are right, all requests end, and no resource stays allocated. One
engine may have a second connector that loads wrong KV: then the others' tokens are right."""

from pathlib import Path

import pytest

from tests.fuzz.running import cases, dice
from tests.kvshare.chaos import BESIDE_SIBLINGS, EVENTS, KINDS, Play
from tests.kvshare.toy import write_model
from tests.releases import loads_may_hang

pytestmark = [pytest.mark.fuzz, loads_may_hang]

FEW = 2  # plays
MANY = 20


@pytest.mark.parametrize("kind", KINDS)
def test_random_events_give_right_tokens_and_leak_nothing(tmp_path: Path, kind: str) -> None:
    model = write_model(tmp_path / "model")
    never = set(EVENTS + (BESIDE_SIBLINGS if kind == "siblings" else ()))
    for number in range(max(cases(FEW), MANY)):
        if number >= cases(FEW) and not never:  # otherwise continue: rare events need several plays
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        play = Play(model, folder, dice(f"{kind} {number}"), kind)
        try:
            seen = play.run()
        finally:
            play.close()
        never -= {event for event in never if seen[event]}
    assert not never, f"did not happen in {number + 1} plays"
