# SPDX-License-Identifier: Apache-2.0
"""How many requests may be in a stage, and what happens to one more."""

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
from tests.ecshare.router.answers import DECODED, Answer, failing, hang_up
from tests.ecshare.router.bodies import PNG, PNG_2, chat, picture, text
from tests.ecshare.router.fake_engine import LOOPBACK, Clock, FakeEngine, Fleet, fleet
from tests.ecshare.router.held import soon
from tests.ecshare.router.media.fake_media import at, media_server
from tests.waiting import until

ALL = "encode,prefill,decode"
ONE_EACH: dict[str, Any] = {"max_encodes": 1, "max_prefills": 1}


@asynccontextmanager
async def one_inside(
    f: Fleet, engine: FakeEngine, path: str = CHAT, **fields: Any
) -> AsyncIterator[None]:
    """While the block runs, an engine has a request that it does not answer."""
    usual, held = engine.answer, engine.hold()
    first = f.start(chat(picture(PNG), **fields), path)
    await soon(held.asked)
    engine.answer = usual
    yield
    held.let_go.set()
    assert (await first)[0].status == 200


def another(**fields: Any) -> dict[str, Any]:
    return chat(text("something else"), picture(PNG_2), **fields)


@pytest.mark.parametrize("stage", ["e", "p"])
async def test_one_more_than_encode_or_prefill_may_have_is_refused(stage: str) -> None:
    async with fleet(**ONE_EACH) as f:
        engine: FakeEngine = getattr(f, stage)
        async with one_inside(f, engine):
            response, body = await f.post(another())
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
            assert b'"code":"overloaded"' in body
            assert len(engine.bodies) == 1
            assert f.d.bodies == []
        assert "prefill" in await f.way(another()), "there is room again"


@pytest.mark.parametrize("stage", ["e", "p"])
async def test_an_option_leaves_one_more_to_decode(stage: str) -> None:
    async with fleet(**ONE_EACH, when_overloaded="decode") as f, one_inside(f, getattr(f, stage)):
        assert await f.way(another()) == "decode"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("option", ["refuse", "decode"])
async def test_one_more_than_decode_may_have_keeps_nobody_busy(option: str, stream: bool) -> None:
    async with fleet(max_decodes=1, when_overloaded=option) as f:
        async with one_inside(f, f.d, stream=stream):
            response, _ = await f.post(another(stream=stream))
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
            assert [len(engine.bodies) for engine in (f.e, f.p, f.d)] == [1, 1, 1]
        assert (await f.post(another(stream=stream)))[1] == DECODED[stream]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_request_that_decode_has_no_room_for_fetches_nothing(path: str) -> None:
    fetched = []

    async def serve(http: web.Request) -> web.Response:
        fetched.append(http.path)
        return web.Response(body=PNG)

    options: dict[str, Any] = {"max_decodes": 1, "allow_media_networks": LOOPBACK}
    async with media_server(serve) as media, fleet(**options) as f:
        async with one_inside(f, f.d):
            assert (await f.post(at(media + "/a.png"), path=path))[0].status == 429
            assert not fetched
        await f.way(at(media + "/a.png"), path=path)
        assert fetched


@pytest.mark.parametrize(("stage", "path"), [("p", CHAT), ("d", "/v1/embeddings")])
async def test_what_waits_in_prefill_or_is_passed_on_counts_for_decode(
    stage: str, path: str
) -> None:
    async with fleet(max_decodes=1) as f, one_inside(f, getattr(f, stage), path):
        assert (await f.post(another()))[0].status == 429


async def test_prefill_has_room_again_while_decode_streams() -> None:
    async with fleet(max_prefills=1) as f, one_inside(f, f.d, stream=True):
        assert await f.way(another()) == ALL


async def test_many_media_of_one_request_are_one_request() -> None:
    async with fleet(max_encodes=1) as f:
        assert await f.way(chat(picture(PNG), picture(PNG_2))) == ALL
        assert len(f.e.bodies) == 2


async def test_who_waits_for_anothers_encode_needs_no_place() -> None:
    async with fleet(max_encodes=1) as f:
        held = f.e.hold()
        asked = [f.start(chat(picture(PNG))) for _ in range(3)]
        await until(lambda: f.count("encodes", "waiting") == 2)
        held.let_go.set()
        assert [(await each)[0].status for each in asked] == [200] * 3
        assert len(f.e.bodies) == 1


@pytest.mark.parametrize("answer", [hang_up, failing(500), failing(422)])
async def test_what_fails_leaves_its_place(answer: Answer) -> None:
    async with fleet(**ONE_EACH, max_decodes=1) as f:
        for engine in (f.e, f.p, f.d):
            usual, engine.answer = engine.answer, answer
            await f.post(another())
            engine.answer = usual
        f.clock.now_s = 100.0
        assert await f.way(chat(picture(PNG))) == ALL


async def test_a_client_that_leaves_leaves_its_place() -> None:
    async with fleet(max_decodes=1) as f:
        usual, held = f.p.answer, f.p.hold()
        request = f.start(another())
        await soon(held.asked)
        request.cancel()
        await soon(held.left)
        await until(lambda: not f.in_flight("prefill"))
        f.p.answer = usual
        await f.way(another())


# --- by engines and their models ---


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


def two_engines(clock: Clock) -> tuple[EnginePool, StageLimits]:
    """Engines `a` and `b` that serve a model each, and `both`; each may have two requests."""
    pool = EnginePool(Stage.DECODE, ["a", "b"], 5.0, clock)
    for engine in pool:
        pool.set_cards(engine, {engine.url: {}, "both": {}})
    return pool, StageLimits({Stage.ENCODE: pool}, {Stage.ENCODE: 2})


def test_the_limit_follows_the_engines_that_are_up() -> None:
    pool, limits = two_engines(clock := Clock())
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


@pytest.mark.parametrize(
    "taken",
    [[("a", 2), ("b", 4), ("both", 4)], [("both", 4), ("a", 4), (None, 4)]],
    ids=["one model leaves room for another", "several models do not bring an engine more"],
)
def test_each_model_has_the_places_of_its_engines(taken: list[tuple[str | None, int]]) -> None:
    _, limits = two_engines(Clock())
    with ExitStack() as stack:
        assert [(model, places(limits, stack, model)) for model, _ in taken] == taken


def test_places_of_engines_that_are_gone_are_free_again() -> None:
    pool, limits = two_engines(Clock())
    with ExitStack() as stack:
        places(limits, stack, "a")
        pool.update(["b"])
        assert places(limits, stack, "b") == 4
    assert limits.used(Stage.ENCODE) == 0
