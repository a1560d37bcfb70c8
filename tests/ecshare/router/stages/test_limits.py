# SPDX-License-Identifier: Apache-2.0
"""How many requests may be in a stage, and what happens to one more."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.api.errors import EngineError
from ecshare.router.fleet.engines import EnginePool
from ecshare.router.stages.limits import StageLimits
from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import (
    EVENTS,
    LOOPBACK,
    PNG,
    PNG_2,
    Clock,
    FakeEngine,
    Fleet,
    Held,
    chat,
    decoded,
    failing,
    fleet,
    hang_up,
    listening,
    picture,
)
from tests.waiting import until

SOON_S = 10.0


@asynccontextmanager
async def one_inside(f: Fleet, engine: FakeEngine, **fields: Any) -> AsyncIterator[None]:
    """While the block runs, an engine has a request that it does not answer."""
    usual = engine.answer
    engine.answer = held = Held(usual)
    request = chat(picture(PNG), **fields)
    first = asyncio.create_task(f.post(request))
    await asyncio.wait_for(held.asked.wait(), SOON_S)
    engine.answer = usual
    yield
    held.let_go.set()
    assert (await asyncio.wait_for(first, SOON_S))[0].status == 200


def another(**fields: Any) -> dict[str, Any]:
    return chat({"type": "text", "text": "something else"}, picture(PNG_2), **fields)


@pytest.mark.parametrize("stage", ["e", "p"])
async def test_one_more_than_encode_or_prefill_may_have_is_refused(stage: str) -> None:
    async with fleet(max_encodes=1, max_prefills=1) as f:
        engine: FakeEngine = getattr(f, stage)
        async with one_inside(f, engine):
            response, body = await f.post(another())
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
            assert json.loads(body)["error"]["code"] == "overloaded"
            assert len(engine.bodies) == 1
            assert f.d.bodies == []
        assert (await f.post(another()))[0].status == 200, "there is room again"


@pytest.mark.parametrize("stage", ["e", "p"])
async def test_an_option_leaves_one_more_to_decode(stage: str) -> None:
    options: Any = {"max_encodes": 1, "max_prefills": 1, "when_overloaded": "decode"}
    async with fleet(**options) as f, one_inside(f, getattr(f, stage)):
        response, _ = await f.post(another())
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("option", ["refuse", "decode"])
async def test_one_more_than_decode_may_have_keeps_nobody_busy(option: str, stream: bool) -> None:
    async with fleet(max_decodes=1, when_overloaded=option) as f:
        async with one_inside(f, f.d, stream=stream):
            response, _ = await f.post(another(stream=stream))
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
            assert [len(engine.bodies) for engine in (f.e, f.p, f.d)] == [1, 1, 1]
        response, body = await f.post(another(stream=stream))
        assert body == (b"".join(EVENTS) if stream else b'{"choices":  []}')


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_request_that_decode_has_no_room_for_fetches_nothing(path: str) -> None:
    fetched = []

    async def serve(http: web.Request) -> web.Response:
        fetched.append(http.path)
        return web.Response(body=PNG)

    app = web.Application()
    app.router.add_get("/a.png", serve)
    options: dict[str, Any] = {"max_decodes": 1, "allow_media_networks": LOOPBACK}
    async with listening(app) as media, fleet(**options) as f:
        request = chat({"type": "image_url", "image_url": {"url": media + "/a.png"}})
        async with one_inside(f, f.d):
            assert (await f.post(request, path=path))[0].status == 429
            assert not fetched
        assert (await f.post(request, path=path))[0].status == 200
        assert fetched


async def test_a_request_that_waits_in_prefill_counts_for_decode() -> None:
    async with fleet(max_decodes=1) as f, one_inside(f, f.p):
        assert (await f.post(another()))[0].status == 429


async def test_prefill_has_room_again_while_decode_streams() -> None:
    async with fleet(max_prefills=1) as f, one_inside(f, f.d, stream=True):
        response, _ = await f.post(another())
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"


async def test_many_media_of_one_request_are_one_request() -> None:
    async with fleet(max_encodes=1) as f:
        response, _ = await f.post(chat(picture(PNG), picture(PNG_2)))
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"
        assert len(f.e.bodies) == 2


async def test_who_waits_for_anothers_encode_needs_no_place() -> None:
    async with fleet(max_encodes=1) as f:
        usual = f.e.answer
        f.e.answer = held = Held(usual)
        asked = [asyncio.create_task(f.post(chat(picture(PNG)))) for _ in range(3)]
        await until(lambda: f.router.counts()["encodes"]["waiting"] == 2)
        held.let_go.set()
        assert [(await each)[0].status for each in asked] == [200] * 3
        assert len(f.e.bodies) == 1


@pytest.mark.parametrize("answer", [hang_up, failing(500), failing(422)])
async def test_what_fails_leaves_its_place(answer: Any) -> None:
    async with fleet(max_encodes=1, max_prefills=1, max_decodes=1) as f:
        for engine in (f.e, f.p, f.d):
            usual, engine.answer = engine.answer, answer
            await f.post(another())
            engine.answer = usual
        f.clock.now_s = 100.0
        response, _ = await f.post(chat(picture(PNG)))
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"


async def test_a_client_that_leaves_leaves_its_place() -> None:
    async with fleet(max_decodes=1) as f:
        f.p.answer = held = Held(decoded)
        request = asyncio.create_task(f.post(another()))
        await asyncio.wait_for(held.asked.wait(), SOON_S)
        request.cancel()
        await asyncio.wait_for(held.left.wait(), SOON_S)
        await until(lambda: not f.in_flight("prefill"))
        f.p.answer = decoded
        assert (await f.post(another()))[0].status == 200


def test_the_limit_follows_the_engines_that_are_up() -> None:
    clock = Clock()
    pool = EnginePool(Stage.DECODE, ["a", "b"], 5.0, clock)
    limits = StageLimits({Stage.ENCODE: pool}, {Stage.ENCODE: 2})
    a, b = pool

    def number_of_places() -> int:
        with ExitStack() as stack:
            return places(limits, stack)

    assert number_of_places() == 4
    a.health.note_lost_connection()
    assert number_of_places() == 2
    b.health.note_lost_connection()
    assert number_of_places() == 2, "with none up the stage fails by itself"
    clock.now_s = 5.0
    assert number_of_places() == 4
    a.health.note_poll(is_healthy=False, silent_s=1.0)
    assert number_of_places() == 2
    assert limits.used(Stage.ENCODE) == 0


def places(limits: StageLimits, stack: ExitStack, model: str | None = None) -> int:
    """Take all places for a model that are free, and return how many are taken in all."""
    try:
        while True:
            slot = stack.enter_context(limits.slot(Stage.ENCODE, model))
            slot.take()
            slot.take()
    except EngineError as full:
        assert "as many requests" in str(full)  # noqa: PT017
    return limits.used(Stage.ENCODE)


def models_of_two() -> tuple[EnginePool, StageLimits]:
    """Engines `a` and `b` that serve a model each, and `both`."""
    pool = EnginePool(Stage.DECODE, ["a", "b"], 5.0, Clock())
    for engine in pool:
        pool.set_cards(engine, {engine.url: {}, "both": {}})
    return pool, StageLimits({Stage.ENCODE: pool}, {Stage.ENCODE: 2})


def test_requests_for_one_model_leave_room_for_another() -> None:
    _, limits = models_of_two()
    with ExitStack() as stack:
        assert places(limits, stack, "a") == 2
        assert places(limits, stack, "b") == 4
        assert places(limits, stack, "both") == 4


def test_no_engine_gets_more_because_it_serves_several_models() -> None:
    _, limits = models_of_two()
    with ExitStack() as stack:
        assert places(limits, stack, "both") == 4
        assert places(limits, stack, "a") == 4, "both engines have all that they may have"
        assert places(limits, stack, None) == 4


def test_places_of_engines_that_are_gone_are_free_again() -> None:
    pool, limits = models_of_two()
    with ExitStack() as stack:
        places(limits, stack, "a")
        pool.update(["b"])
        assert places(limits, stack, "b") == 4
    assert limits.used(Stage.ENCODE) == 0
