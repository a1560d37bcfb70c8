# SPDX-License-Identifier: Apache-2.0
from ecshare.transfer.stats import Stats, merged


def test_take_returns_each_count_once() -> None:
    stats = Stats()
    stats.add("items/loaded")
    stats.add("items/loaded", 2)
    stats.add("items/saved", 5)
    assert stats.take() == {"items/loaded": 3, "items/saved": 5}
    assert stats.take() == {}


def test_merged_adds_up_and_changes_neither() -> None:
    first, second = {"a": 1.0}, {"a": 2.0, "b": 3.0}
    assert merged(first, second) == {"a": 3.0, "b": 3.0}
    assert (first, second) == ({"a": 1.0}, {"a": 2.0, "b": 3.0})
