# SPDX-License-Identifier: Apache-2.0
"""The uses that an engine records for its next note."""

from ecshare.upkeep.record import UseRecord
from tests.ecshare.upkeep.stores import taken
from tests.waiting import Clock


def test_chain_has_one_age_and_growing_positions() -> None:
    clock = Clock()
    record = UseRecord(clock_s=clock.now_s)
    record.add_chain([b"a", b"b", b"c"], 16)
    clock.forward(600)
    assert taken(record) == [(b"a", 10, 16), (b"b", 10, 32), (b"c", 10, 48)]
    assert taken(record) == []


def test_later_use_of_a_name_replaces_the_earlier_one() -> None:
    clock = Clock()
    record = UseRecord(clock_s=clock.now_s)
    record.add_chain([b"a", b"b"], 1)
    clock.forward(300)
    record.add_chain([b"a"], 1)
    record.add(b"x", 7)
    assert sorted(taken(record)) == [(b"a", 0, 1), (b"b", 5, 2), (b"x", 0, 7)]


def test_chain_that_does_not_fit_keeps_its_beginning() -> None:
    record = UseRecord(3)
    record.add(b"x")
    record.add_chain([b"a", b"b", b"c"], 1)
    record.add_chain([b"d"], 1)
    record.add(b"y")
    assert [name for name, _, _ in taken(record)] == [b"x", b"a", b"b"]


def test_positions_beyond_all_chains_change_no_age() -> None:
    record = UseRecord()
    record.add(b"a", 1 << 60)
    record.add_chain([b"b", b"c", b"d"], 10_000_000)
    found = {name: (age, position) for name, age, position in taken(record)}
    assert {age for age, _ in found.values()} == {0}
    assert "d" not in found


def test_uses_are_taken_some_at_a_time_and_none_is_lost_or_held() -> None:
    record = UseRecord()
    record.add_chain([n.to_bytes(4, "big") for n in range(10_000)], 1)
    parts = record.take()
    assert len(record) == 0
    record.add(b"later")
    found = [use for some in parts for use in some if len(some) <= 256]
    assert {position for _, _, position in found} == set(range(1, 10_001))
    assert [name for name, _, _ in taken(record)] == [b"later"]
