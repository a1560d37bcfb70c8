# SPDX-License-Identifier: Apache-2.0
"""The bound on downloads: nobody uses it up, and those who have a place keep it."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from ecshare.router.places import FullError, Places, Turns


def fill(places: Places, owner: str) -> int:
    """Take as many as there are for an owner."""
    taken = 0
    while True:
        try:
            places.take(owner)
        except FullError:
            return taken
        taken += 1


def test_each_owner_leaves_half_of_what_is_free_to_others() -> None:
    places = Places(64)
    assert [fill(places, str(n)) for n in range(7)] == [32, 16, 8, 4, 2, 1, 1]
    assert places.num_used == 64
    places.free("0")
    assert fill(places, "0") == 0
    assert fill(places, "new") == 1


def test_a_single_place_can_be_taken() -> None:
    assert fill(Places(1), "a") == 1


def test_a_place_changes_its_owner_and_is_free_in_the_end() -> None:
    places = Places(8)
    with places.place() as place:
        for owner in "aab":
            place.take(owner)
            assert (place.owner, places.num_used) == (owner, 1)
    assert places.num_used == 0
    assert fill(places, "a") == 4


def test_a_place_that_finds_no_new_one_is_free() -> None:
    places = Places(4)
    with places.place() as place:
        place.take("a")
        fill(places, "b"), fill(places, "c"), fill(places, "d")
        with pytest.raises(FullError):
            place.take("b")
    assert places.num_used == 3


async def begin(turns: Turns, stack: AsyncExitStack, number: int) -> list[asyncio.Task[None]]:
    """Ask for turns; returns the tasks, those that have one done."""
    asked = [asyncio.create_task(stack.enter_async_context(turns.turn())) for _ in range(number)]
    for _ in range(3):
        await asyncio.sleep(0)
    return asked


def num_done(asked: list[asyncio.Task[None]]) -> int:
    return sum(each.done() for each in asked)


async def test_a_request_has_a_few_turns_at_once_and_one_while_places_are_scarce() -> None:
    places = Places(16)
    turns = Turns(places)
    async with AsyncExitStack() as stack:
        asked = await begin(turns, stack, 12)
        assert num_done(asked) == 8
        for each in asked:
            each.cancel()
    others = ["a", "b"]
    for owner in others:
        fill(places, owner)
    scarce = Turns(places)
    async with AsyncExitStack() as stack:
        asked = await begin(scarce, stack, 3)
        assert num_done(asked) == 1
        for each in asked:
            each.cancel()
