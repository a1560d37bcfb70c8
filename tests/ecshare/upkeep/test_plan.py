# SPDX-License-Identifier: Apache-2.0
"""What the planner removes, for any store."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ecshare.upkeep.plan import FOREVER, Candidates, Limit, Rules, removals

SPACES = 3
COLUMNS = ("spaces", "sizes", "names", "ages", "positions")


@dataclass(frozen=True)
class Name:
    """A name with objects of these sizes."""

    space: int
    age: int
    position: int
    sizes: tuple[int, ...]


NAMES = st.lists(
    st.builds(
        Name,
        st.integers(0, SPACES - 1),
        st.integers(0, 40),
        st.integers(0, 5),
        st.lists(st.integers(0, 100), min_size=1, max_size=3).map(tuple),
    ),
    max_size=30,
)
LIMITS = st.lists(
    st.builds(
        Limit,
        st.frozensets(st.integers(0, SPACES - 1), min_size=1),
        st.integers(0, 1500),
    ),
    max_size=3,
)
TTLS = st.lists(st.sampled_from([0, 10, 30, FOREVER]), min_size=SPACES, max_size=SPACES)
HOLDS = st.lists(st.sampled_from([0, 0, 5]), min_size=SPACES, max_size=SPACES)


def candidates(names: list[Name]) -> Candidates:
    rows = [
        (name.space, size, number, name.age, name.position)
        for number, name in enumerate(names)
        for size in name.sizes
    ]
    # Listings have no order that means anything.
    rows.sort(key=lambda row: (row[1], row[2]))
    columns = [np.array([row[n] for row in rows], np.uint32) for n in range(5)]
    spaces, sizes, numbers, ages, positions = columns
    return Candidates(spaces, sizes.astype(np.uint64), numbers, ages, positions)


def total(objects: Candidates, spaces: frozenset[int], gone: set[int]) -> int:
    return sum(
        int(size)
        for number, (space, size) in enumerate(zip(objects.spaces, objects.sizes, strict=True))
        if space in spaces and number not in gone
    )


@given(NAMES, LIMITS, TTLS, HOLDS)
def test_limits_hold_after_removals_except_for_held_objects(
    names: list[Name], limits: list[Limit], ttls: list[int], holds: list[int]
) -> None:
    objects = candidates(names)
    gone = set(removals(objects, Rules(limits, ttls, holds)).tolist())
    for limit in limits:
        held = sum(
            int(objects.sizes[n])
            for n in range(len(objects.sizes))
            if objects.spaces[n] in limit.spaces and 0 < holds[objects.spaces[n]] >= objects.ages[n]
        )
        assert total(objects, limit.spaces, gone) <= max(limit.max_bytes, held)
    expired = [n for n in range(len(objects.ages)) if objects.ages[n] > ttls[objects.spaces[n]]]
    assert gone.issuperset(expired)


@given(NAMES, LIMITS, TTLS)
def test_nothing_within_ttl_and_limits_is_removed(
    names: list[Name], limits: list[Limit], ttls: list[int]
) -> None:
    objects = candidates(names)
    exceeded = {
        space
        for limit in limits
        if total(objects, limit.spaces, set()) > limit.max_bytes
        for space in limit.spaces
    }
    for number in removals(objects, Rules(limits, ttls, [0] * SPACES)):
        space = objects.spaces[number]
        assert space in exceeded or objects.ages[number] > ttls[space]


@given(NAMES, st.integers(0, 1500))
def test_kept_objects_were_used_later_or_are_nearer_to_the_beginning(
    names: list[Name], max_bytes: int
) -> None:
    """So a chain that was used as a whole never loses its beginning before its end."""
    objects = candidates(names)
    limit = Limit(frozenset(range(SPACES)), max_bytes)
    order = removals(objects, Rules([limit], [FOREVER] * SPACES, [0] * SPACES)).tolist()
    keys = [(int(objects.ages[n]), int(objects.positions[n])) for n in order]
    assert keys == sorted(keys, reverse=True)
    stays = set(range(len(objects.ages))) - set(order)
    if order and stays:
        most = max((int(objects.ages[n]), int(objects.positions[n])) for n in stays)
        assert most <= keys[-1]


@given(NAMES, LIMITS)
def test_objects_of_one_name_are_removed_together(names: list[Name], limits: list[Limit]) -> None:
    objects = candidates(names)
    gone = set(removals(objects, Rules(limits, [FOREVER] * SPACES, [0] * SPACES)).tolist())
    sizeless = {n for n in range(len(objects.sizes)) if objects.sizes[n] == 0}
    for name in range(len(names)):
        own = {n for n in range(len(objects.names)) if objects.names[n] == name} - sizeless
        assert not own & gone or own <= gone


@given(NAMES, st.integers(1, 1500))
def test_a_second_run_removes_nothing(names: list[Name], max_bytes: int) -> None:
    objects = candidates(names)
    rules = Rules([Limit(frozenset({0, 1}), max_bytes)], [20] * SPACES, [0] * SPACES)
    gone = set(removals(objects, rules).tolist())
    left = np.array([n for n in range(len(objects.ages)) if n not in gone], np.int64)
    rest = Candidates(*(getattr(objects, name)[left] for name in COLUMNS))
    assert not len(removals(rest, rules))


def test_a_full_store_is_cleaned_to_slightly_below_its_budget() -> None:
    names = [Name(0, age, 0, (10,)) for age in range(200)]
    objects = candidates(names)
    gone = removals(objects, Rules([Limit(frozenset({0}), 1000)], [FOREVER], [0]))
    assert total(objects, frozenset({0}), set(gone.tolist())) == 970
