# SPDX-License-Identifier: Apache-2.0
"""Many ask the store in one operation, and whoever stops waiting leaves the others alone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreUnavailable
from ecshare.store.keys import Key, Kind, object_key
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.transfer.announced.roll_call import RollCall
from ecshare.transfer.client.store_client import StoreClient
from tests.waiting import until

KEYS = [object_key(Kind.EC, "0" * 32, str(number)) for number in range(5)]


class Watched:
    """A store in a folder. It tells what it was asked, and may stall or fail."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.questions: list[Sequence[Key]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        self.questions.append(keys)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return await self._store.exists(keys)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Watched]:
    real = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    for key in KEYS[:2]:
        await real.put(key, b"an object")
    yield Watched(real)
    await real.close()


@pytest.fixture
def roll_call(store: Watched) -> RollCall:
    # Nothing ends because the store has taken too long.
    return RollCall(StoreClient(store, 300))


def later_s(seconds: float = 20.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_one_operation_serves_all_who_ask_at_one_moment(
    store: Watched, roll_call: RollCall
) -> None:
    asked = [*KEYS, *KEYS]
    answers = await asyncio.gather(*(roll_call.has(key, later_s()) for key in asked))
    assert list(answers) == 2 * [True, True, False, False, False]
    assert store.questions == [KEYS]
    assert await roll_call.has(KEYS[0], later_s())
    assert store.questions == [KEYS, KEYS[:1]]


async def test_who_asks_while_others_are_being_answered_is_answered_anew(
    store: Watched, roll_call: RollCall
) -> None:
    store.may_answer.clear()
    first = asyncio.create_task(roll_call.has(KEYS[4], later_s()))
    await until(lambda: store.questions)
    second = asyncio.create_task(roll_call.has(KEYS[4], later_s()))
    await until(lambda: len(store.questions) == 2)
    store.may_answer.set()
    assert not await first
    assert not await second


async def test_what_the_store_does_not_say_is_not_there(
    store: Watched, roll_call: RollCall
) -> None:
    store.error = StoreUnavailable("503")
    assert not await roll_call.has(KEYS[0], later_s())
    store.error = None
    store.may_answer.clear()
    assert not await roll_call.has(KEYS[0], later_s(0.01))


async def test_who_stops_waiting_leaves_the_others_alone(
    store: Watched, roll_call: RollCall
) -> None:
    store.may_answer.clear()
    waiting = [asyncio.create_task(roll_call.has(key, later_s())) for key in KEYS]
    await until(lambda: store.questions)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    store.may_answer.set()
    assert await waiting[1]


async def test_when_the_last_one_stops_nothing_is_left_but_what_the_store_was_asked(
    store: Watched, roll_call: RollCall
) -> None:
    store.may_answer.clear()
    tasks = asyncio.all_tasks()
    waiting = asyncio.create_task(roll_call.has(KEYS[0], later_s()))
    await until(lambda: store.questions)
    waiting.cancel()
    await until(lambda: len(asyncio.all_tasks() - tasks) == 1)
    store.may_answer.set()
    await until(lambda: asyncio.all_tasks() == tasks)
    assert await roll_call.has(KEYS[0], later_s())


@pytest.mark.parametrize(
    ("now_s", "pause_s", "moment_s"),
    [(1000.0, 2.0, 1002.0), (1000.1, 2.0, 1002.0), (1000.1, 0.3, 1000.25), (1000.1, 0.1, 1000.2)],
)
async def test_moments_to_ask_are_the_same_for_all_and_never_late(
    roll_call: RollCall,
    monkeypatch: pytest.MonkeyPatch,
    now_s: float,
    pause_s: float,
    moment_s: float,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
        assert now_s + roll_call.until_moment_s(pause_s) == pytest.approx(moment_s)
