# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from ecshare.transfer.breaker import StoreHealth


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begun(health: StoreHealth) -> int:
    operation = health.admit()
    assert operation is not None
    return operation


def fail(health: StoreHealth, operation: int) -> None:
    health.failed(operation, "the disk is full")
    health.ended(operation)


def opened(clock: Clock) -> StoreHealth:
    health = StoreHealth("saves", clock)
    for _ in range(4):
        fail(health, begun(health))
    return health


def test_it_opens_after_consecutive_failures_only(clock: Clock) -> None:
    health = StoreHealth("saves", clock)
    for _ in range(3):
        fail(health, begun(health))
    health.succeeded()
    for _ in range(3):
        fail(health, begun(health))
    assert not health.is_open
    fail(health, begun(health))
    assert health.is_open
    assert health.admit() is None


def test_one_probe_a_pause(clock: Clock) -> None:
    health = opened(clock)
    clock.now_s += 0.51
    assert health.is_worth_asking
    health.ended(begun(health))
    assert not health.is_worth_asking
    assert health.admit() is None
    clock.now_s += 0.51
    assert health.admit()


def test_a_probe_that_showed_nothing_leaves_its_turn_to_the_next(clock: Clock) -> None:
    health = opened(clock)
    clock.now_s += 0.51
    probe = begun(health)
    health.withdrawn(probe)
    assert health.admit() is None
    health.ended(probe)
    fail(health, begun(health))
    health.withdrawn(probe)  # of old: changes nothing
    clock.now_s += 0.99
    assert health.admit() is None


def test_no_probe_while_one_is_out(clock: Clock) -> None:
    health = opened(clock)
    clock.now_s += 0.51
    probe = begun(health)
    clock.now_s += 60
    assert not health.is_worth_asking
    assert health.admit() is None
    fail(health, probe)
    clock.now_s += 0.99
    assert health.admit() is None
    clock.now_s += 0.02
    assert health.admit()


def test_a_failed_probe_doubles_the_pause_up_to_a_limit(clock: Clock) -> None:
    health = opened(clock)
    clock.now_s += 0.51
    fail(health, begun(health))
    clock.now_s += 0.99
    assert health.admit() is None
    clock.now_s += 0.02
    fail(health, begun(health))
    for _ in range(20):
        clock.now_s += 30.01
        fail(health, begun(health))
    clock.now_s += 29.99
    assert health.admit() is None
    clock.now_s += 0.02
    assert health.admit()


def test_many_failures_of_one_blip_make_no_longer_pause(clock: Clock) -> None:
    health = StoreHealth("saves", clock)
    operations = [begun(health) for _ in range(20)]
    for operation in operations[:10]:
        fail(health, operation)
    clock.now_s += 0.51
    probe = begun(health)
    for operation in operations[10:]:
        fail(health, operation)
    assert health.admit() is None
    fail(health, probe)
    clock.now_s += 1.01
    assert health.admit()


def test_a_success_closes_it_and_forgets_the_pause(clock: Clock) -> None:
    health = opened(clock)
    clock.now_s += 0.51
    fail(health, begun(health))
    clock.now_s += 1.01
    probe = begun(health)
    health.succeeded()
    health.ended(probe)
    assert health.admit()
    assert health.admit()
    for _ in range(4):
        fail(health, begun(health))
    clock.now_s += 0.51
    assert health.admit()


def test_failures_of_what_began_before_a_success_are_old_news(clock: Clock) -> None:
    health = StoreHealth("saves", clock)
    before = [begun(health) for _ in range(4)]
    health.succeeded()
    for operation in before:
        fail(health, operation)
    assert not health.is_open
    for operation in [begun(health) for _ in range(4)]:
        fail(health, operation)
    assert health.is_open


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_the_log_says_once_that_it_opens_and_once_that_it_closes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    health = opened(clock)
    for _ in range(5):
        clock.now_s += 40
        fail(health, begun(health))
    opens = "store: saves failed repeatedly and are left alone for a while: the disk is full"
    assert said(caplog) == [(logging.WARNING, opens)]
    clock.now_s += 40
    begun(health)
    health.succeeded()
    health.succeeded()
    assert said(caplog)[1:] == [(logging.INFO, "store: saves work again")]


def test_a_store_that_fails_now_and_then_does_not_fill_the_log(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    health = StoreHealth("saves", clock)
    for _ in range(100):
        for _ in range(4):
            fail(health, begun(health))
        clock.now_s += 1.3
        probe = begun(health)
        health.succeeded()
        health.ended(probe)
    assert len(said(caplog)) == 2 * 3, "it lasted for two minutes and a bit"


def test_what_a_server_says_cannot_forge_the_log(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    health = StoreHealth("saves", clock)
    for _ in range(4):
        health.failed(begun(health), "no\n2026-01-01 ERROR all is lost\x1b[31m" + 1000 * "x")
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 400
