# SPDX-License-Identifier: Apache-2.0
"""Connectors that vLLM closes one after another share one time limit."""

from ecshare.transfer.closing import ClosingTime


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_consecutive_closes_share_one_deadline() -> None:
    clock = Clock()
    closing, deadlines_s = ClosingTime(clock), []
    for wait_s in (3.0, 1.0, 0.0):
        with closing.until(4.0) as deadline_s:
            clock.now_s += wait_s
        deadlines_s.append(deadline_s)
    assert deadlines_s == [104.0] * 3


def test_later_close_has_its_own_deadline() -> None:
    clock = Clock()
    closing = ClosingTime(clock)
    with closing.until(4.0):
        clock.now_s += 4.0
    clock.now_s += 0.5
    with closing.until(4.0) as deadline_s:
        pass
    assert deadline_s == clock.now_s + 4.0


def test_closes_that_do_not_wait_use_up_no_time() -> None:
    clock = Clock()
    closing = ClosingTime(clock)
    for _ in range(100):
        clock.now_s += 0.09
        with closing.until(4.0) as deadline_s:
            pass
    assert deadline_s == clock.now_s + 4.0
