# SPDX-License-Identifier: Apache-2.0
"""How many objects one process may remove. For what is removed at all see test_fetch.py."""

import pytest

from ecshare.transfer.upkeep.removal import DeletionBudget


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budget(clock: Clock) -> DeletionBudget:
    return DeletionBudget(clock)


def test_single_damaged_objects_may_be_removed(budget: DeletionBudget, clock: Clock) -> None:
    for number in range(15):
        budget.found(f"key-{number}")
        assert budget.denial_reason() is None
        clock.now_s += 20


def test_repeated_damage_of_one_object_counts_once(budget: DeletionBudget) -> None:
    for _ in range(100):
        budget.found("key")
    assert not budget.is_paused


def test_many_damaged_objects_pause_removal_for_a_minute(
    budget: DeletionBudget, clock: Clock
) -> None:
    for number in range(10):
        assert not budget.is_paused
        budget.found(f"key-{number}")
    assert budget.is_paused
    assert "many objects" in str(budget.denial_reason())
    for number in range(10, 15):
        clock.now_s += 50
        budget.found(f"key-{number}")
        assert budget.is_paused
    clock.now_s += 61
    budget.found("key-15")
    assert not budget.is_paused
    assert budget.denial_reason() is None


def test_removals_per_hour_are_bounded(budget: DeletionBudget, clock: Clock) -> None:
    for _ in range(20):
        assert budget.denial_reason() is None
        budget.removed()
        clock.now_s += 60
    assert "20 objects" in str(budget.denial_reason())
    clock.now_s += 3600 - 20 * 60
    assert budget.denial_reason() is None
    budget.removed()
    assert "20 objects" in str(budget.denial_reason())
