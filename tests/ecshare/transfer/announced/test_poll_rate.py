# SPDX-License-Identifier: Apache-2.0
from contextlib import ExitStack

import pytest

from ecshare.transfer.announced.poll_rate import PollRate, Waiter


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def joined(stack: ExitStack, poll_rate: PollRate, number: int) -> list[Waiter]:
    return [stack.enter_context(poll_rate.joined()) for _ in range(number)]


def test_few_waiters_poll_at_full_rate(clock: Clock) -> None:
    poll_rate = PollRate(clock)
    with ExitStack() as stack:
        (one, *_) = joined(stack, poll_rate, 5)
        assert poll_rate.pause_s(one) <= 0.01
        joined(stack, poll_rate, 20)
        clock.now_s += 1
        assert poll_rate.pause_s(one) == pytest.approx(0.05)


@pytest.mark.parametrize("number", [1, 30, 1000, 20_000])
def test_any_number_of_waiters_polls_500_times_a_second(clock: Clock, number: int) -> None:
    poll_rate = PollRate(clock)
    with ExitStack() as stack:
        waiters = []
        for _ in range(4):
            waiters += joined(stack, poll_rate, -(-number // 4))
            clock.now_s += 0.25
        assert sum(1 / poll_rate.pause_s(each) for each in waiters) == pytest.approx(500)


def test_many_old_waiters_poll_less_often(clock: Clock) -> None:
    poll_rate = PollRate(clock)
    with ExitStack() as stack:
        (one, *_) = joined(stack, poll_rate, 5)
        clock.now_s += 1.5
        assert poll_rate.pause_s(one) == pytest.approx(0.05)
        joined(stack, poll_rate, 195)
        clock.now_s += 1.5
        assert poll_rate.pause_s(one) == pytest.approx(1.5), "half its age"
        clock.now_s += 2
        assert poll_rate.pause_s(one) == pytest.approx(2.0), "100 a second together"


def test_waiters_joining_together_count_at_once(clock: Clock) -> None:
    poll_rate = PollRate(clock)
    with ExitStack() as stack:
        (first,) = joined(stack, poll_rate, 1)
        poll_rate.pause_s(first)
        joined(stack, poll_rate, 999)
        assert poll_rate.pause_s(first) == pytest.approx(2)


def test_new_waiter_polls_often_beside_many_old_ones(clock: Clock) -> None:
    poll_rate = PollRate(clock)
    with ExitStack() as stack:
        (old, *_) = joined(stack, poll_rate, 1000)
        clock.now_s += 2
        (young,) = joined(stack, poll_rate, 1)
        assert poll_rate.pause_s(young) < 0.02
        assert poll_rate.pause_s(old) > 2


def test_waiters_that_left_do_not_count(clock: Clock) -> None:
    poll_rate = PollRate(clock)
    with poll_rate.joined() as one:
        with ExitStack() as stack:
            joined(stack, poll_rate, 1000)
            assert poll_rate.pause_s(one) > 1
        clock.now_s += 0.06
        assert poll_rate.pause_s(one) < 0.01
