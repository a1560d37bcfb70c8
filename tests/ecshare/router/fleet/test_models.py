# SPDX-License-Identifier: Apache-2.0
"""Which models engines serve: read behind the requests, and never waited for twice."""

import asyncio
import json

import pytest

from ecshare.router.api.errors import ApiError, EngineError, RefusalError
from ecshare.router.fleet import models
from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.fleet.models import Headers, ModelLists
from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import Clock
from tests.waiting import until

SOON_S = 5.0


async def background() -> None:
    """Wait for the readings that go on behind requests."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


class OpenLists(ModelLists):
    async def check_client(self, headers: Headers) -> None:
        """Every client is served."""


class Lists:
    """What engines list, by url: an error if one does not answer, None if it does not tell, an
    event that it waits for."""

    def __init__(self, **lists: str | None | Exception | asyncio.Event) -> None:
        self.lists = lists
        self.asked: list[str] = []
        self.ended = False
        self.clock = Clock()
        self.pool = EnginePool(Stage.DECODE, lists, 5.0, self.clock)
        self.served = OpenLists({Stage.DECODE: self.pool}, self.read, self.clock)

    async def read(self, engine: Engine, headers: Headers, limit_s: float) -> bytes | None:
        assert 0 < limit_s < 10
        self.asked.append(engine.url)
        told = self.lists[engine.url]
        if isinstance(told, Exception):
            raise told
        if isinstance(told, asyncio.Event):
            try:
                await told.wait()
            finally:
                self.ended = True
            return None
        cards = [{"id": name, "root": engine.url} for name in told or ""]
        return None if told is None else json.dumps({"data": cards}).encode()

    async def refuses(self, model: str) -> bool:
        try:
            assert await self.served.resolve(model, {}) == model
        except ApiError as error:
            assert (error.status, error.param) == (404, "model")  # noqa: PT017
            return True
        return False


GONE = EngineError(Stage.DECODE, "gone", reached=False)
REFUSED = RefusalError(401, b"", "")


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_slow_list_is_awaited_once(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    d = Lists(d="m")
    if is_known:
        assert not await d.refuses("m")
        d.clock.now_s += 100
    d.lists["d"] = asyncio.Event()
    monkeypatch.setattr(models, "MAX_WAIT_S", 0.05)
    assert not await d.refuses("n"), "the stages are left to refuse it"
    monkeypatch.setattr(models, "MAX_WAIT_S", 60.0)
    if is_known:
        assert [*await d.served.cards({})] == ["m"]
    for model in "mnmn":
        assert not await asyncio.wait_for(d.refuses(model), SOON_S)
        d.clock.now_s += 100
    assert len(d.asked) == 1 + is_known, "one at a time"
    await d.served.close()


async def test_a_list_that_fails_to_come_leaves_the_old_one() -> None:
    d = Lists(d="m")
    assert await d.refuses("n"), "the first reading is waited for"
    d.lists["d"] = GONE
    d.clock.now_s += 10
    for _ in range(3):
        assert not await d.refuses("m"), "the old list"
    await background()
    assert not await d.refuses("n"), "only a list that has just come refuses"
    assert len(d.asked) == 2
    d.clock.now_s += 1
    d.lists["d"] = "n"
    assert not await d.refuses("o"), "not waited for after one that failed"
    await background()
    assert await d.refuses("m")
    assert not await d.refuses("n")
    assert len(d.asked) == 3
    await d.served.close()


async def test_what_cannot_tell_does_not_keep_others_from_refusing() -> None:
    d = Lists(a="m", b=GONE)
    assert await d.refuses("n")
    d.lists["b"] = None
    d.clock.now_s += 1
    await d.refuses("n")
    await background()
    assert not await d.refuses("n"), "it answers, and may serve it"
    assert [each.url for each in d.pool.serving("n")] == ["b"]
    assert [each.url for each in d.pool.serving("m")] == ["a"]


async def test_a_client_that_is_refused_keeps_nobody_from_being_told() -> None:
    d = Lists(d=REFUSED)
    assert not await d.refuses("n")
    d.lists["d"] = "m"
    assert await d.refuses("n"), "asked again at once"
    d.lists["d"] = REFUSED
    d.clock.now_s += 10
    for _ in range(3):
        assert not await d.refuses("m"), "the old list"
        await background()
    assert not await d.refuses("n"), "it is too old to refuse anything"
    d.lists["d"] = "mn"
    assert not await d.refuses("n")
    assert "n" in (d.pool.serving("n")[0].models or ())


async def test_an_engine_that_is_down_is_not_asked() -> None:
    d = Lists(a="m", b="n")
    _, b = d.pool
    b.health.note_lost_connection()
    assert await d.refuses("n")
    assert d.asked == ["a"]
    d.clock.now_s += 5
    await d.refuses("n")
    await background()
    assert not await d.refuses("n")


async def test_what_the_operator_says_counts_more_than_what_an_engine_lists() -> None:
    d = Lists(a="mn", b="mn", c=None)
    told = {"a": frozenset("m"), "c": frozenset("xy")}
    d.pool.update("abc", told)
    assert not await d.refuses("m")
    await background()
    for model, engines in {"m": "ab", "n": "b", "x": "c"}.items():
        assert not await d.refuses(model)
        assert "".join(each.url for each in d.pool.serving(model)) == engines
    d.clock.now_s += 1
    assert await d.refuses("o")
    cards = await d.served.cards({})
    assert [*cards] == [card["id"] for card in cards.values()] == ["m", "n", "x", "y"]
    assert cards["m"] == {"id": "m", "root": "a"}, "as the first engine describes it"


async def test_a_model_goes_with_the_last_engine_that_serves_it() -> None:
    d = Lists(a="m", b="n")
    assert not await d.refuses("n")
    d.pool.update("a")
    assert await d.refuses("n")


async def test_a_reading_ends_with_the_router() -> None:
    d = Lists(d=asyncio.Event())
    asked = asyncio.create_task(d.served.resolve("m", {}))
    await until(lambda: d.asked)
    asked.cancel()
    await asyncio.wait([asked])
    assert not d.ended, "others may wait for it"
    await d.served.close()
    assert d.ended
