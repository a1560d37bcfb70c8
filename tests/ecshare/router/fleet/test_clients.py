# SPDX-License-Identifier: Apache-2.0
"""Media are downloaded only for clients that engines would serve."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from ecshare.router.api.errors import EngineError, RefusalError
from ecshare.router.fleet import models
from ecshare.router.fleet.models import KnownClients
from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import (
    LOOPBACK,
    PNG,
    Clock,
    Fleet,
    chat,
    fleet,
    listening,
    picture,
)

GOOD = {"Authorization": "Bearer right"}
BAD = {"Authorization": "Bearer wrong"}
SOON_S = 5.0


@asynccontextmanager
async def guarded() -> AsyncIterator[tuple[Fleet, str, list[str]]]:
    """A D that takes one key; a server of media, and what has been fetched of it."""
    fetched: list[str] = []

    async def serve(http: web.Request) -> web.Response:
        fetched.append(http.path)
        return web.Response(body=PNG)

    media = web.Application()
    media.router.add_get("/{name}", serve)
    async with listening(media) as url, fleet(0, 0, allow_media_networks=LOOPBACK) as f:
        f.d.key = GOOD["Authorization"]
        yield f, url + "/a.png", fetched


def at(url: str) -> dict[str, object]:
    return chat({"type": "image_url", "image_url": {"url": url}})


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("headers", [{}, BAD])
async def test_nothing_is_fetched_for_a_client_that_decode_refuses(
    headers: dict[str, str], status: int
) -> None:
    async with guarded() as (f, url, fetched):
        f.d.refusal = status
        for body in (at(url), at(url) | {"model": "other"}):
            response, answer = await f.post(body, headers)
            assert (response.status, answer) == (status, b'{"error": "who is this?"}')
        assert not fetched
        assert not f.d.bodies


async def test_inline_media_and_text_need_no_check() -> None:
    async with guarded() as (f, _, _):
        await f.post(chat(), GOOD)
        number = f.d.num_model_lists
        for body in (chat(), chat(picture(PNG)), chat() | {"model": None}):
            assert (await f.post(body, BAD))[0].status == 401
        assert len(f.d.headers) == 4, "decode refuses itself"
        assert f.d.num_model_lists == number


async def test_nothing_is_fetched_while_no_decode_can_say() -> None:
    async with guarded() as (f, url, fetched):
        f.d.refusal = 404
        response, body = await f.post(at(url), BAD)
        assert (response.status, json.loads(body)["error"]["code"]) == (502, "engine_failed")
        f.d.refusal = 500
        assert (await f.post(at(url), BAD))[0].status == 502
        assert not fetched
    async with guarded() as (_, url, fetched), fleet(0, 1, 0, decoders_more=(GONE,)) as f:
        assert (await f.post(at(url)))[0].status == 503
        assert not fetched


GONE = "http://127.0.0.1:9"


async def background() -> None:
    """Wait for the checks that go on behind requests."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


class Decode:
    """Says what it is told to; counts how often it is asked."""

    def __init__(self) -> None:
        self.answer: Exception | None = None
        self.asked: list[str] = []

    async def __call__(self, headers: models.Headers) -> None:
        self.asked.append(headers["Authorization"])
        if self.answer is not None:
            raise self.answer


@pytest.fixture
def decode() -> Decode:
    return Decode()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(decode: Decode, clock: Clock) -> KnownClients:
    return KnownClients(decode, clock)


async def test_a_key_that_is_withdrawn_is_good_for_no_more_than_one_request(
    known: KnownClients, decode: Decode, clock: Clock
) -> None:
    await known.check(GOOD)
    decode.answer = refusal = RefusalError(401, b"", "")
    clock.now_s += models.CLIENT_FRESH_S
    await known.check(GOOD)
    await background()
    assert len(decode.asked) == 2
    with pytest.raises(RefusalError) as caught:
        await known.check(GOOD)
    assert caught.value is refusal
    decode.answer = None
    await known.check(GOOD)
    assert len(decode.asked) == 4


async def test_a_known_key_outlives_a_decode_that_is_away_but_not_for_ever(
    known: KnownClients, decode: Decode, clock: Clock
) -> None:
    await known.check(GOOD)
    decode.answer = EngineError(Stage.DECODE, "gone", reached=False)
    clock.now_s += models.CLIENT_KEPT_S - 1
    await known.check(GOOD)
    clock.now_s += 1
    with pytest.raises(EngineError):
        await known.check(GOOD)
    await known.close()


async def test_what_is_remembered_is_bounded_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MAX_CLIENTS", 3)
    decode = Decode()
    known = KnownClients(decode, Clock())
    names = [f"Bearer {number}" for number in range(4)]
    for name in names:
        await known.check({"Authorization": name})
    assert "Bearer" not in repr(vars(known))
    for name in (*names[1:], names[0]):
        await known.check({"Authorization": name})
    assert decode.asked == [*names, names[0]], "the oldest had been forgotten"


async def test_each_key_is_asked_about_once_at_a_time_behind_requests() -> None:
    asked, asked_again = [], asyncio.Event()

    async def ask(headers: models.Headers) -> None:
        asked.append(headers)
        if len(asked) > 1:
            asked_again.set()
            await asyncio.Event().wait()

    clock = Clock()
    known = KnownClients(ask, clock)
    await known.check(GOOD)
    clock.now_s += models.CLIENT_FRESH_S
    for _ in range(3):
        await known.check(GOOD)
        await asked_again.wait()
    assert len(asked) == 2
    await known.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_client_that_engines_refuse_is_not_told_what_is_stored() -> None:
    async with fleet() as f:
        for engine in (f.e, f.p, f.d):
            engine.key = GOOD["Authorization"]
        for stages in ("encode,prefill,decode", "prefill,decode"):
            response, _ = await f.post(chat(picture(PNG)), GOOD)
            assert response.headers["x-ecshare-path"] == stages
            assert "Server-Timing" in response.headers
        told = []
        for content in (PNG, PNG + b"another"):
            response, body = await f.post(chat(picture(content)), BAD)
            assert response.status == 401
            told.append((sorted(response.headers), body))
        assert told[0] == told[1]
        assert not {"x-ecshare-path", "x-ecshare-avoided", "Server-Timing"} & set(told[0][0])
