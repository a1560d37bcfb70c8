# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from ecshare.store.errors import ObjectMissing, StoreError, StoreUnavailable
from ecshare.transfer.client.breaker import CircuitBreaker, Verdict


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


VERDICTS = ((ObjectMissing, Verdict.WORKS), (StoreError, Verdict.FAILED))


class Operation:
    """A running operation that the test ends."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self._held = breaker.attempt(VERDICTS)
        self._held.__enter__()

    def succeed(self) -> None:
        self._held.__exit__(None, None, None)

    def fail(self, exc: Exception) -> None:
        assert not self._held.__exit__(type(exc), exc, None)


def begun(breaker: CircuitBreaker) -> Operation:
    return Operation(breaker)


def fail(operation: Operation, words: str = "the disk is full") -> None:
    operation.fail(StoreError(words))


def may_begin(breaker: CircuitBreaker) -> bool:
    try:
        breaker.check()
    except StoreUnavailable:
        return False
    return True


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker("saves", clock)
    for _ in range(4):
        fail(begun(breaker))
    return breaker


def test_breaker_opens_after_consecutive_failures_only(clock: Clock) -> None:
    breaker = CircuitBreaker("saves", clock)
    for _ in range(3):
        fail(begun(breaker))
    begun(breaker).succeed()
    for _ in range(3):
        fail(begun(breaker))
    assert not breaker.is_open
    fail(begun(breaker))
    assert breaker.is_open
    assert not may_begin(breaker)


def test_open_breaker_is_probed_after_a_pause(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.49
    assert not may_begin(breaker)
    with pytest.raises(StoreUnavailable, match="saves failed repeatedly"):
        Operation(breaker)
    clock.now_s += 0.02
    assert may_begin(breaker)


def test_inconclusive_probe_is_followed_by_another(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.51
    probe = begun(breaker)
    assert not may_begin(breaker)
    probe.fail(ValueError())
    assert may_begin(breaker)
    fail(begun(breaker))
    clock.now_s += 0.99
    assert not may_begin(breaker)


def test_only_one_probe_runs_at_a_time(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.51
    probe = begun(breaker)
    clock.now_s += 60
    assert not may_begin(breaker)
    fail(probe)
    clock.now_s += 0.99
    assert not may_begin(breaker)
    clock.now_s += 0.02
    assert may_begin(breaker)


def test_failed_probe_doubles_the_pause_up_to_a_limit(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.51
    fail(begun(breaker))
    clock.now_s += 0.99
    assert not may_begin(breaker)
    clock.now_s += 0.02
    fail(begun(breaker))
    for _ in range(20):
        clock.now_s += 30.01
        fail(begun(breaker))
    clock.now_s += 29.99
    assert not may_begin(breaker)
    clock.now_s += 0.02
    assert may_begin(breaker)


def test_concurrent_failures_do_not_lengthen_the_pause(clock: Clock) -> None:
    breaker = CircuitBreaker("saves", clock)
    operations = [begun(breaker) for _ in range(20)]
    for operation in operations[:10]:
        fail(operation)
    clock.now_s += 0.51
    probe = begun(breaker)
    for operation in operations[10:]:
        fail(operation)
    assert not may_begin(breaker)
    fail(probe)
    clock.now_s += 1.01
    assert may_begin(breaker)


def test_success_closes_the_breaker_and_resets_the_pause(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.51
    fail(begun(breaker))
    clock.now_s += 1.01
    probe = begun(breaker)
    probe.succeed()
    assert may_begin(breaker)
    for _ in range(4):
        fail(begun(breaker))
    clock.now_s += 0.51
    assert may_begin(breaker)


def test_failures_started_before_a_success_do_not_count(clock: Clock) -> None:
    breaker = CircuitBreaker("saves", clock)
    before = [begun(breaker) for _ in range(4)]
    begun(breaker).succeed()
    for operation in before:
        fail(operation)
    assert not breaker.is_open
    for operation in [begun(breaker) for _ in range(4)]:
        fail(operation)
    assert breaker.is_open


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_breaker_logs_opening_and_closing_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    breaker = opened(clock)
    for _ in range(5):
        clock.now_s += 40
        fail(begun(breaker))
    opens = "store: saves failed repeatedly, and are paused for a while: the disk is full"
    assert said(caplog) == [(logging.WARNING, opens)]
    clock.now_s += 40
    begun(breaker).succeed()
    begun(breaker).succeed()
    assert said(caplog)[1:] == [(logging.INFO, "store: saves work again")]


def test_flapping_breaker_logs_once_a_minute(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    breaker = CircuitBreaker("saves", clock)
    for _ in range(100):
        for _ in range(4):
            fail(begun(breaker))
        clock.now_s += 1.3
        probe = begun(breaker)
        probe.succeed()
    assert len(said(caplog)) == 2 * 3, "it lasted a little over two minutes"


def test_server_message_is_escaped_in_the_log(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    breaker = CircuitBreaker("saves", clock)
    for _ in range(4):
        fail(begun(breaker), "no\n2026-01-01 ERROR all is lost\x1b[31m" + 1000 * "x")
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 400
