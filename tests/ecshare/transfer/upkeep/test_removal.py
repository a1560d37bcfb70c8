# SPDX-License-Identifier: Apache-2.0
"""How many objects one process may remove. For what is removed at all see test_fetch.py."""

import pytest

from ecshare.transfer.upkeep.removal import Allowance


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def allowance(clock: Clock) -> Allowance:
    return Allowance(clock)


def test_single_damaged_objects_may_be_removed(allowance: Allowance, clock: Clock) -> None:
    for number in range(15):
        allowance.found(f"key-{number}")
        assert allowance.why_not() is None
        clock.now_s += 20


def test_repeated_damage_of_one_object_counts_once(allowance: Allowance) -> None:
    for _ in range(100):
        allowance.found("key")
    assert not allowance.is_braking


def test_many_damaged_objects_pause_removal_for_a_minute(
    allowance: Allowance, clock: Clock
) -> None:
    for number in range(10):
        assert not allowance.is_braking
        allowance.found(f"key-{number}")
    assert allowance.is_braking
    assert "many objects" in str(allowance.why_not())
    for number in range(10, 15):
        clock.now_s += 50
        allowance.found(f"key-{number}")
        assert allowance.is_braking
    clock.now_s += 61
    allowance.found("key-15")
    assert not allowance.is_braking
    assert allowance.why_not() is None


def test_removals_per_hour_are_bounded(allowance: Allowance, clock: Clock) -> None:
    for _ in range(20):
        assert allowance.why_not() is None
        allowance.removed()
        clock.now_s += 60
    assert "20 objects" in str(allowance.why_not())
    clock.now_s += 3600 - 20 * 60
    assert allowance.why_not() is None
    allowance.removed()
    assert "20 objects" in str(allowance.why_not())
