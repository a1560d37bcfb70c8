# SPDX-License-Identifier: Apache-2.0
"""In which steps a hook may wait."""

from ecshare.plugin.idle import IdleSteps

SOME, NONE = ("a request",), ()


def test_a_step_that_computes_is_never_idle() -> None:
    steps = IdleSteps(1)
    assert [steps.is_idle(each) for each in (SOME, NONE, SOME, SOME, NONE)] == [
        *(False, True, False, False, True)
    ]


def test_no_step_is_idle_while_one_may_still_compute() -> None:
    steps = IdleSteps(2)
    scheduled = (SOME, NONE, NONE, NONE, SOME, NONE, NONE)
    assert [steps.is_idle(each) for each in scheduled] == [
        *(False, False, True, True, False, False, True)
    ]
