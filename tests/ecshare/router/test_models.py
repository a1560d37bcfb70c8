# SPDX-License-Identifier: Apache-2.0
"""Which models decode serves: read behind the requests, and never waited for twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ecshare.router import model_lists, models
from ecshare.router.models import ServedModels
from tests.ecshare.router.fake_engine import Clock, Fleet, chat, fleet

SOON_S = 5.0


@asynccontextmanager
async def slow_list() -> AsyncIterator[Fleet]:
    """A fleet that has read D's list once, long ago; it now never comes."""
    async with fleet(0, 0) as f:
        await f.post(chat())
        f.clock.now_s += 100
        f.d.lists = asyncio.Event()
        yield f


async def test_a_slow_list_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_MAX_WAIT_S", 60.0)  # would be seen
    async with slow_list() as f:
        for _ in range(3):
            assert (await f.post(chat()))[0].status == 200
            f.clock.now_s += 100
        assert f.d.num_lists_awaited == 1, "still, and one at a time"
        assert f.d.num_model_lists == 2


async def test_a_slow_list_holds_nobody_up_when_nothing_is_known_yet() -> None:
    async with fleet(0, 0) as f:
        f.d.lists = asyncio.Event()
        for _ in range(2):
            assert (await f.post(chat()))[0].status == 200
        assert f.d.num_lists_awaited == f.d.num_model_lists == 1


async def test_a_slow_list_holds_nobody_up_who_asks_for_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stages are left to refuse it."""
    async with slow_list() as f:
        for patience_s in (0.05, 60.0):  # nobody waits for one that was waited for in vain
            monkeypatch.setattr(models, "_MAX_WAIT_S", patience_s)
            assert (await f.post(chat() | {"model": "other"}))[0].status == 200
        assert f.d.num_lists_awaited == 1
        assert f.d.num_model_lists == 2


async def test_an_engine_with_a_slow_list_is_asked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_lists, "_TIMEOUT_S", 0.1)
    async with fleet(0, 0, num_d=2) as f:
        for engine in f.decoders:
            engine.lists = asyncio.Event()
        await f.post(chat())
        asked = next(engine for engine in f.decoders if engine.num_model_lists)
        await asyncio.wait_for(asked.list_left.wait(), SOON_S)
        f.clock.now_s += 0.5
        for _ in range(4):
            await f.post(chat())
        assert all(engine.bodies for engine in f.decoders)
        assert len(asked.bodies) >= 2


async def test_a_model_that_was_loaded_a_moment_ago_is_found() -> None:
    async with fleet(0, 0) as f:
        await f.post(chat())
        f.d.models = ("m", "new")
        assert (await f.post(chat() | {"model": "new"}))[0].status == 404
        f.clock.now_s += 1
        assert (await f.post(chat() | {"model": "new"}))[0].status == 200
        assert f.d.num_model_lists == 2


async def background() -> None:
    """Wait for the readings that go on behind requests."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


async def test_a_list_that_fails_to_come_leaves_the_old_one() -> None:
    answers: list[frozenset[str] | None] = [frozenset("m"), None, None, frozenset("n")]
    asked = []

    async def read(headers: dict[str, str]) -> frozenset[str] | None:
        asked.append(headers)
        return answers.pop(0)

    clock = Clock()
    served = ServedModels(read, clock)
    assert await served.lacks("n", {"a": "1"}), "the first reading is waited for"
    clock.now_s += 10
    for _ in range(3):
        assert not await served.lacks("m", {}), "the old list"
    await background()
    assert not await served.lacks("n", {}), "only a list that has just come refuses"
    assert asked == [{"a": "1"}, {}]
    clock.now_s += 1
    assert not await served.lacks("m", {})
    assert len(asked) == 2
    assert not await served.lacks("n", {}), "not waited for after one that failed"
    await background()
    clock.now_s += 10
    assert not await served.lacks("m", {})
    await background()
    assert await served.lacks("m", {})
    assert not await served.lacks("n", {})
    await served.close()
    assert not answers


async def test_a_reading_ends_with_the_router() -> None:
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def read(headers: dict[str, str]) -> frozenset[str] | None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return None

    served = ServedModels(read, Clock())
    asked = asyncio.create_task(served.lacks("m", {}))
    await begun.wait()
    asked.cancel()
    await asyncio.wait([asked])
    assert not ended.is_set(), "others may wait for it"
    await served.close()
    assert ended.is_set()
