# SPDX-License-Identifier: Apache-2.0
import pytest

from ecshare.transfer.health import StoreHealth


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(clock: Clock) -> StoreHealth:
    health = StoreHealth(clock)
    for _ in range(4):
        assert health.allows()
        health.failed()
    return health


def test_it_opens_after_consecutive_failures_only(clock: Clock) -> None:
    health = StoreHealth(clock)
    for _ in range(3):
        health.failed()
    health.succeeded()
    for _ in range(3):
        health.failed()
    assert not health.is_open
    health.failed()
    assert health.is_open
    assert not health.allows()


def test_one_probe_a_pause(clock: Clock) -> None:
    health = opened(clock)
    clock.now_s += 0.51
    assert health.allows()
    assert not health.allows()


def test_a_failed_probe_doubles_the_pause_up_to_a_limit(clock: Clock) -> None:
    health = opened(clock)
    clock.now_s += 0.51
    assert health.allows()
    health.failed()
    clock.now_s += 0.99
    assert not health.allows()
    clock.now_s += 0.02
    assert health.allows()
    for _ in range(20):
        health.failed()
    clock.now_s += 30.01
    assert health.allows()


def test_a_success_closes_it_and_forgets_the_pause(clock: Clock) -> None:
    health = opened(clock)
    clock.now_s += 0.51
    assert health.allows()
    health.succeeded()
    assert health.allows()
    assert health.allows()
    for _ in range(4):
        health.failed()
    clock.now_s += 0.51
    assert health.allows()
