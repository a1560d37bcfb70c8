# SPDX-License-Identifier: Apache-2.0
"""The bound on downloads: nobody uses it up, and those who have a place keep it if they use it."""

import asyncio
import weakref
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial

import pytest

from ecshare.router.media.places import FullError, Place, Places, Turns

KIB = 1024


def never() -> None:
    raise AssertionError("there is room")


@dataclass
class Slow:
    """Places whose clock a test moves, and the downloads that have them, by host."""

    stack: ExitStack
    now_s: float = 0.0
    held: dict[str, Place] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    """Hosts whose downloads others have ended, in order."""

    def __post_init__(self) -> None:
        self.places = Places(16, lambda: self.now_s)

    def begin(self, *hosts: str) -> None:
        for host in hosts:
            place = Place(self.places, partial(self.ended.append, host))
            self.held[host] = self.stack.enter_context(place)
            place.take(host)


@pytest.fixture
def slow() -> Iterator[Slow]:
    with ExitStack() as stack:
        yield (slow := Slow(stack))
    assert slow.places.num_used == 0


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
    with Place(places, never) as place:
        for owner in "aab":
            place.take(owner)
            assert (place.owner, places.num_used) == (owner, 1)
    assert places.num_used == 0
    assert fill(places, "a") == 4


def test_an_owner_without_places_is_forgotten() -> None:
    """Clients name as many hosts as they like."""

    class Name(str):
        pass

    places, name = Places(8), Name("a")
    kept = weakref.ref(name)
    places.take(name)
    places.free(name)
    del name
    assert kept() is None


def test_a_place_that_finds_no_new_one_is_free() -> None:
    places = Places(4)
    with Place(places, never) as place:
        place.take("a")
        for other in "bcd":
            fill(places, other)
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
        await stack.aclose()
        async with asyncio.timeout(10):
            await asyncio.gather(*asked)
    fill(places, "a"), fill(places, "b")
    async with AsyncExitStack() as stack:
        asked = await begin(Turns(places), stack, 3)
        assert num_done(asked) == 1
        for each in asked:
            each.cancel()


def test_downloads_keep_their_places_while_some_are_free(slow: Slow) -> None:
    slow.begin(*map(str, range(14)))
    slow.now_s = 3600.0
    slow.begin("new")  # the last one that finds an eighth free
    assert not slow.ended


def test_the_slowest_end_for_those_that_begin_where_few_places_are_free(slow: Slow) -> None:
    slow.begin(*map(str, range(16)))
    with pytest.raises(FullError):
        slow.begin("early")
    assert not slow.ended, "none has had its time"
    slow.now_s = 2.0
    slow.begin("a")
    assert slow.ended == ["0", "1"]
    slow.begin("b")
    assert slow.ended == ["0", "1", "2"], "an eighth is free then"
    assert slow.places.num_used == 15


def test_what_gets_on_keeps_its_place_and_a_trickle_does_not(slow: Slow) -> None:
    slow.begin(*map(str, range(16)))
    for slow.now_s in (1.0, 2.0):
        slow.held["0"].received(64 * KIB)
        slow.held["1"].received(KIB)
    slow.begin("a")
    assert slow.ended == ["1", "2"]


def test_a_host_ends_nothing_to_have_more_than_are_free(slow: Slow) -> None:
    slow.begin("honest")
    num_silent = fill(slow.places, "silent")
    slow.now_s = 3600.0
    with pytest.raises(FullError):
        slow.begin("silent")
    assert not slow.ended
    for _ in range(num_silent):
        slow.places.free("silent")
