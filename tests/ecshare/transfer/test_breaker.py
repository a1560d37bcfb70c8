# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from ecshare.transfer.breaker import CircuitBreaker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begun(breaker: CircuitBreaker) -> int:
    operation = breaker.admit()
    assert operation is not None
    return operation


def fail(breaker: CircuitBreaker, operation: int) -> None:
    breaker.failed(operation, "the disk is full")
    breaker.ended(operation)


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker("saves", clock)
    for _ in range(4):
        fail(breaker, begun(breaker))
    return breaker


def test_it_opens_after_consecutive_failures_only(clock: Clock) -> None:
    breaker = CircuitBreaker("saves", clock)
    for _ in range(3):
        fail(breaker, begun(breaker))
    breaker.succeeded()
    for _ in range(3):
        fail(breaker, begun(breaker))
    assert not breaker.is_open
    fail(breaker, begun(breaker))
    assert breaker.is_open
    assert breaker.admit() is None


def test_one_probe_a_pause(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.51
    assert breaker.is_worth_asking
    breaker.ended(begun(breaker))
    assert not breaker.is_worth_asking
    assert breaker.admit() is None
    clock.now_s += 0.51
    assert breaker.admit()


def test_a_probe_that_showed_nothing_leaves_its_turn_to_the_next(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.51
    probe = begun(breaker)
    breaker.withdrawn(probe)
    assert breaker.admit() is None
    breaker.ended(probe)
    fail(breaker, begun(breaker))
    breaker.withdrawn(probe)  # of old: changes nothing
    clock.now_s += 0.99
    assert breaker.admit() is None


def test_no_probe_while_one_is_out(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.51
    probe = begun(breaker)
    clock.now_s += 60
    assert not breaker.is_worth_asking
    assert breaker.admit() is None
    fail(breaker, probe)
    clock.now_s += 0.99
    assert breaker.admit() is None
    clock.now_s += 0.02
    assert breaker.admit()


def test_a_failed_probe_doubles_the_pause_up_to_a_limit(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.51
    fail(breaker, begun(breaker))
    clock.now_s += 0.99
    assert breaker.admit() is None
    clock.now_s += 0.02
    fail(breaker, begun(breaker))
    for _ in range(20):
        clock.now_s += 30.01
        fail(breaker, begun(breaker))
    clock.now_s += 29.99
    assert breaker.admit() is None
    clock.now_s += 0.02
    assert breaker.admit()


def test_many_failures_of_one_blip_make_no_longer_pause(clock: Clock) -> None:
    breaker = CircuitBreaker("saves", clock)
    operations = [begun(breaker) for _ in range(20)]
    for operation in operations[:10]:
        fail(breaker, operation)
    clock.now_s += 0.51
    probe = begun(breaker)
    for operation in operations[10:]:
        fail(breaker, operation)
    assert breaker.admit() is None
    fail(breaker, probe)
    clock.now_s += 1.01
    assert breaker.admit()


def test_a_success_closes_it_and_forgets_the_pause(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.51
    fail(breaker, begun(breaker))
    clock.now_s += 1.01
    probe = begun(breaker)
    breaker.succeeded()
    breaker.ended(probe)
    assert breaker.admit()
    assert breaker.admit()
    for _ in range(4):
        fail(breaker, begun(breaker))
    clock.now_s += 0.51
    assert breaker.admit()


def test_failures_of_what_began_before_a_success_are_old_news(clock: Clock) -> None:
    breaker = CircuitBreaker("saves", clock)
    before = [begun(breaker) for _ in range(4)]
    breaker.succeeded()
    for operation in before:
        fail(breaker, operation)
    assert not breaker.is_open
    for operation in [begun(breaker) for _ in range(4)]:
        fail(breaker, operation)
    assert breaker.is_open


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_the_log_says_once_that_it_opens_and_once_that_it_closes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    breaker = opened(clock)
    for _ in range(5):
        clock.now_s += 40
        fail(breaker, begun(breaker))
    opens = "store: saves failed repeatedly and are left alone for a while: the disk is full"
    assert said(caplog) == [(logging.WARNING, opens)]
    clock.now_s += 40
    begun(breaker)
    breaker.succeeded()
    breaker.succeeded()
    assert said(caplog)[1:] == [(logging.INFO, "store: saves work again")]


def test_a_store_that_fails_now_and_then_does_not_fill_the_log(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    breaker = CircuitBreaker("saves", clock)
    for _ in range(100):
        for _ in range(4):
            fail(breaker, begun(breaker))
        clock.now_s += 1.3
        probe = begun(breaker)
        breaker.succeeded()
        breaker.ended(probe)
    assert len(said(caplog)) == 2 * 3, "it lasted for two minutes and a bit"


def test_what_a_server_says_cannot_forge_the_log(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    breaker = CircuitBreaker("saves", clock)
    for _ in range(4):
        breaker.failed(begun(breaker), "no\n2026-01-01 ERROR all is lost\x1b[31m" + 1000 * "x")
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 400
