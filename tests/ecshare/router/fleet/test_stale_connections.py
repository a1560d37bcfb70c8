# SPDX-License-Identifier: Apache-2.0
"""A connection to an engine that ends as it is used again says nothing of the engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import (
    EVENTS,
    PNG,
    FakeEngine,
    Fleet,
    Hanging,
    Held,
    chat,
    decoded,
    fleet,
    hang_up,
    picture,
)
from tests.waiting import until

SOON_S = 10.0
ALL_STAGES = "encode,prefill,decode"


@asynccontextmanager
async def stale(**options: Any) -> AsyncIterator[Fleet]:
    """A fleet to which the router has connections that the engines reset when they are used."""
    async with fleet(prefill="always", hand_over="after", **options) as f:
        for engine in engines(f):
            engine.keeps_connections = True
        assert (await f.post(chat(picture(PNG))))[0].status == 200
        for engine in engines(f):
            engine.resets_reused = True
            engine.bodies.clear()
        yield f


def engines(f: Fleet) -> list[FakeEngine]:
    return [*f.encoders, *f.prefillers, *f.decoders]


def states(f: Fleet) -> set[str]:
    return {each.state for pool in f.router.pools.values() for each in pool}


def other(number: int) -> bytes:
    return PNG + bytes([number])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("large", [False, True])
async def test_a_request_is_sent_once_more_to_the_same_engine(large: bool, stream: bool) -> None:
    """A large body is sent in pieces; the connection ends while some of them are on their way."""
    async with stale(retry_share=0.0) as f:
        text = {"type": "text", "text": "x" * (2_000_000 if large else 10)}
        for number in range(3):
            response, body = await f.post(chat(text, picture(other(number)), stream=stream))
            assert body == (b"".join(EVENTS) if stream else b'{"choices":  []}')
            assert response.headers["x-ecshare-path"] == ALL_STAGES
        for engine in engines(f):
            assert engine.num_resets >= 1
            assert len(engine.bodies) == 3
            assert json.dumps(engine.bodies[-1]).count("xxxxxxxxxx") == (engine is not f.e) * (
                200_000 if large else 1
            )
        assert states(f) == {"up"}
        _, health = await f.health()
        assert (health["fallbacks"], health["retries"]) == (0, {"made": 0, "refused": 0})


async def test_probes_and_model_lists_are_sent_once_more_too() -> None:
    async with fleet(0, 0) as f:
        f.d.keeps_connections = True
        f.d.answer = held = Held(decoded)
        asked = [asyncio.create_task(f.post(chat())) for _ in range(4)]
        await until(lambda: len(f.d.bodies) == 4)
        held.let_go.set()
        await asyncio.gather(*asked)  # there are four connections now
        f.d.resets_reused = True
        f.clock.now_s += 60.0
        status, report = await f.health()
        assert (status, report["stages"]["decode"][0]["healthy"]) == (200, True)
        assert f.d.num_resets == 1
        f.clock.now_s += 60.0
        async with f.client.get(f.url + "/v1/models") as response:
            assert [each["id"] for each in (await response.json())["data"]] == ["m"]
        assert states(f) == {"up"}


async def test_what_fails_on_a_new_connection_has_failed() -> None:
    async with stale(num_d=2) as f:
        bad = next(each for each in f.decoders if f.is_next(each))
        bad.answer = hang_up
        for number in range(4):
            response, _ = await f.post(chat(picture(other(number))))
            assert (response.status, response.headers["x-ecshare-path"]) == (200, ALL_STAGES)
        assert len(bad.bodies) == 1
        decoders = f.router.pools[Stage.DECODE]
        assert {each.url: each.state for each in decoders}[bad.url] == "down"
        assert (await f.health())[1]["retries"]["made"] == 1


async def test_an_answer_that_has_begun_is_not_asked_for_again() -> None:
    async def break_off(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(http)
        await response.write(b"{")
        assert http.transport is not None
        http.transport.abort()
        return response

    async with stale() as f:
        f.d.resets_reused = False
        f.d.answer = break_off
        response, _ = await f.post(chat(picture(PNG)))
        assert response.status == 502
        # Once with what E and P have prepared, and once with everything.
        assert len(f.d.bodies) == 2


async def test_a_silent_engine_is_not_asked_once_more() -> None:
    async with stale(stage_timeout_s=0.2) as f:
        f.p.resets_reused = False
        f.p.answer = hanging = Hanging()
        response, _ = await asyncio.wait_for(f.post(chat(picture(other(1)))), SOON_S)
        assert response.headers["x-ecshare-path"] == "decode"
        await asyncio.wait_for(hanging.left.wait(), SOON_S)
        assert len(f.p.bodies) == 1
