# SPDX-License-Identifier: Apache-2.0
"""Connectors that vLLM closes one after the other must not take the time of each."""

from ecshare.transfer.closing import ClosingTime


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_those_that_close_one_right_after_the_other_share_their_time() -> None:
    clock = Clock()
    closing, deadlines_s = ClosingTime(clock), []
    for wait_s in (3.0, 1.0, 0.0):
        with closing.until(4.0) as deadline_s:
            clock.now_s += wait_s
        deadlines_s.append(deadline_s)
    assert deadlines_s == [104.0] * 3


def test_who_closes_later_has_time_of_its_own() -> None:
    clock = Clock()
    closing = ClosingTime(clock)
    with closing.until(4.0):
        clock.now_s += 4.0
    clock.now_s += 0.5
    with closing.until(4.0) as deadline_s:
        pass
    assert deadline_s == clock.now_s + 4.0


def test_who_does_not_wait_takes_no_time_of_others() -> None:
    clock = Clock()
    closing = ClosingTime(clock)
    for _ in range(100):
        clock.now_s += 0.09
        with closing.until(4.0) as deadline_s:
            pass
    assert deadline_s == clock.now_s + 4.0
