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
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import LOOPBACK, Clock, Fleet, fleet, listening
from tests.waiting import until

GOOD = {"Authorization": "Bearer right"}
BAD = {"Authorization": "Bearer wrong"}


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


@pytest.mark.parametrize(("refusal", "status"), [(401, 401), (403, 403), (404, 502), (500, 502)])
@pytest.mark.parametrize("headers", [{}, BAD])
async def test_nothing_is_fetched_for_clients_unless_decode_says_that_it_serves_them(
    headers: dict[str, str], refusal: int, status: int
) -> None:
    async with guarded() as (f, url, fetched):
        f.d.refusal = refusal
        for body in (at(url), at(url) | {"model": "other"}):
            response, answer = await f.post(body, headers)
            assert response.status == status
            if status == refusal:
                assert answer == b'{"error": "who is this?"}'
            else:
                assert json.loads(answer)["error"]["code"] == "engine_failed"
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


async def test_nothing_is_fetched_while_no_decode_can_be_reached() -> None:
    gone = "http://127.0.0.1:9"
    async with guarded() as (_, url, fetched), fleet(0, 1, 0, decoders_more=(gone,)) as f:
        assert (await f.post(at(url)))[0].status == 503
        assert not fetched


class Decode:
    """Says what it is told to, if it answers; counts how often it is asked."""

    def __init__(self) -> None:
        self.answer: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[str] = []
        self.clock = Clock()
        self.known = KnownClients(self.ask, self.clock)

    async def ask(self, headers: models.Headers) -> None:
        self.asked.append(headers["Authorization"])
        await self.answers.wait()
        if self.answer is not None:
            raise self.answer


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Decode:
    monkeypatch.setattr(models, "MAX_CLIENTS", 3)
    return Decode()


async def test_a_key_that_is_withdrawn_is_good_for_no_more_than_one_request(decode: Decode) -> None:
    await decode.known.check(GOOD)
    decode.answer = refusal = RefusalError(401, b"", "")
    decode.clock.now_s += models.CLIENT_FRESH_S
    await decode.known.check(GOOD)
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))  # the check behind it
    assert len(decode.asked) == 2
    with pytest.raises(RefusalError) as caught:
        await decode.known.check(GOOD)
    assert caught.value is refusal
    decode.answer = None
    await decode.known.check(GOOD)
    assert len(decode.asked) == 4


async def test_a_known_key_outlives_a_decode_that_is_away_but_not_for_ever(decode: Decode) -> None:
    await decode.known.check(GOOD)
    decode.answer = EngineError(Stage.DECODE, "gone", reached=False)
    decode.clock.now_s += models.CLIENT_KEPT_S - 1
    await decode.known.check(GOOD)
    decode.clock.now_s += 1
    with pytest.raises(EngineError):
        await decode.known.check(GOOD)
    await decode.known.close()


async def test_what_is_kept_is_bounded_and_no_key(decode: Decode) -> None:
    names = [f"Bearer {number}" for number in range(4)]
    for name in names:
        await decode.known.check({"Authorization": name})
    assert "Bearer" not in repr(vars(decode.known))
    for name in (*names[1:], names[0]):
        await decode.known.check({"Authorization": name})
    assert decode.asked == [*names, names[0]], "the oldest had been forgotten"


async def test_each_key_is_asked_about_once_at_a_time_behind_requests(decode: Decode) -> None:
    await decode.known.check(GOOD)
    decode.answers.clear()
    decode.clock.now_s += models.CLIENT_FRESH_S
    for _ in range(3):
        await decode.known.check(GOOD)
        await until(lambda: len(decode.asked) > 1)
    assert len(decode.asked) == 2
    await decode.known.close()
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
