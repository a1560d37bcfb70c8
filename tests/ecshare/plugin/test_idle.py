# SPDX-License-Identifier: Apache-2.0
"""Idle steps, in which a hook may wait."""

from types import SimpleNamespace

import pytest

from ecshare.plugin.compat import max_steps_in_flight
from ecshare.plugin.idle import IdleSteps

SOME, NONE = ("a request",), ()


def test_step_with_scheduled_requests_is_not_idle() -> None:
    steps = IdleSteps(1)
    assert [steps.is_idle(each) for each in (SOME, NONE, SOME, SOME, NONE)] == [
        *(False, True, False, False, True)
    ]


def test_empty_step_is_not_idle_while_one_in_flight_computes() -> None:
    steps = IdleSteps(2)
    scheduled = (SOME, NONE, NONE, NONE, SOME, NONE, NONE)
    assert [steps.is_idle(each) for each in scheduled] == [
        *(False, False, True, True, False, False, True)
    ]


def test_no_step_is_idle_with_data_parallel_engines() -> None:
    steps = IdleSteps(None)
    assert not any(steps.is_idle(NONE) for _ in range(5))


@pytest.mark.parametrize(
    ("ranks", "stages", "told", "expected"),
    [(1, 1, {"max_concurrent_batches": 2}, 2), (1, 2, {}, 3), (2, 1, {}, None)],
)
def test_max_steps_in_flight_follows_from_the_vllm_config(
    ranks: int, stages: int, told: dict[str, int], expected: int | None
) -> None:
    parallel = SimpleNamespace(data_parallel_size=ranks, pipeline_parallel_size=stages)
    assert max_steps_in_flight(SimpleNamespace(parallel_config=parallel, **told)) == expected
