# SPDX-License-Identifier: Apache-2.0
"""D has its request while P computes: who is waited for, and what becomes of whose failure."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.stages import plan
from tests.ecshare.router.fake_engine import (
    EVENTS,
    PNG,
    Answer,
    Fleet,
    Hanging,
    Held,
    chat,
    decoded,
    failing,
    fleet,
    hang_up,
    picture,
    prefilled,
    streaming_until,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("short_is_long")

STREAMED_TOKENS = plan.STREAMED_TOKENS  # as users have it
STREAMED = {"kvshare": {"streamed": True}}
AFTER = {"kvshare": {"num_tokens": 7}}
SOON_S = 5.0

Asked = asyncio.Task[tuple[aiohttp.ClientResponse, bytes]]


@asynccontextmanager
async def known(**options: Any) -> AsyncIterator[Fleet]:
    """A fleet whose P has shown that it hands over while it computes."""
    async with fleet(**options) as f:
        await f.post(chat())
        for engine in (f.e, f.p, f.d):
            engine.bodies.clear()
        yield f


async def both_asked(f: Fleet, p: Answer, d: Answer, **fields: Any) -> tuple[Asked, Held, Held]:
    """Ask about a picture; return when P and D have been asked both."""
    held = Held(p), Held(d)
    f.p.answer, f.d.answer = held
    asked = asyncio.create_task(f.post(chat(picture(PNG), **fields)))
    for each in held:
        await asyncio.wait_for(each.asked.wait(), SOON_S)
    return asked, *held


def handed_over(f: Fleet) -> list[Any]:
    return [body.get("kv_transfer_params") for body in f.d.bodies]


async def no_hand_over(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"kv_transfer_params": None})


async def another_hand_over(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"kv_transfer_params": {"other": 1}})


async def test_p_is_waited_for_until_it_has_shown_that_it_hands_over() -> None:
    async with fleet() as f:
        for expected in (AFTER, STREAMED, STREAMED):
            response, _ = await f.post(chat())
            assert handed_over(f)[-1] == expected
            assert response.headers["x-ecshare-path"] == "prefill,decode"


async def test_p_is_waited_for_if_the_prompt_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in one step: there is nothing to load meanwhile."""
    async with known() as f:
        monkeypatch.setattr(plan, "STREAMED_TOKENS", STREAMED_TOKENS)
        long = {"type": "text", "text": 4 * STREAMED_TOKENS * "x"}
        for part, expected in ((picture(PNG), AFTER), (long, STREAMED)):
            await f.post(chat(part))
            assert handed_over(f)[-1] == expected


async def test_p_is_always_waited_for_where_the_operator_wants_that() -> None:
    async with known(hand_over="after") as f:
        await f.post(chat())
        assert handed_over(f) == [AFTER]


@pytest.mark.parametrize("stream", [False, True])
async def test_d_has_its_request_before_p_has_answered(stream: bool) -> None:
    async with known() as f:
        asked, p, d = await both_asked(f, prefilled, decoded, stream=stream)
        assert handed_over(f) == [STREAMED]
        p.let_go.set()
        d.let_go.set()
        response, body = await asked
        assert body == (b"".join(EVENTS) if stream else b'{"choices":  []}')
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"
        assert len(f.p.bodies) == len(f.d.bodies) == 1
        assert f.p.bodies[0]["messages"] == f.d.bodies[0]["messages"]
        _, health = await f.health()
        assert health["fallbacks"] == 0


async def test_times_tell_of_p_where_it_was_done() -> None:
    async with known() as f:
        asked, p, d = await both_asked(f, prefilled, decoded)
        p.let_go.set()
        await until(lambda: not f.in_flight("prefill"))
        d.let_go.set()
        response, _ = await asked
        assert re.fullmatch(
            r"encode;dur=[\d.]+, prefill;dur=[\d.]+, decode;dur=[\d.]+",
            response.headers["Server-Timing"],
        )


def telling(num_cached: int | None) -> Answer:
    """Answer as D does that had so much of its prompt; None: it does not tell."""

    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if num_cached is None:
            return await decoded(http, body)
        usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": num_cached}}
        told = json.dumps({"choices": [], "usage": usage}).encode()
        if not body.get("stream"):
            return web.Response(body=told, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for event in (*EVENTS[:-1], b"data: " + told + b"\n\n", EVENTS[-1]):
            await response.write(event)
        return response

    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_cached", "path"), [(992, "decode"), (16, "prefill,decode"), (None, "prefill,decode")]
)
async def test_d_that_is_done_first_needs_no_p_again_if_it_had_the_prompt(
    num_cached: int | None, path: str, stream: bool
) -> None:
    async with known() as f:
        asked, p, d = await both_asked(f, prefilled, telling(num_cached), stream=stream)
        d.let_go.set()
        response, _ = await asked
        assert response.status == 200
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"
        await asyncio.wait_for(p.left.wait(), SOON_S)
        f.p.answer, f.d.answer = prefilled, decoded
        response, _ = await f.post(chat(picture(PNG), stream=stream))
        assert response.headers["x-ecshare-path"] == path


@pytest.mark.parametrize("stream", [False, True])
async def test_what_p_refuses_is_refused(stream: bool) -> None:
    async with known() as f:
        asked, p, d = await both_asked(f, failing(400), decoded, stream=stream)
        p.let_go.set()
        response, body = await asked
        assert response.status == 400
        assert json.loads(body)["error"]["message"] == "engine says no"
        await asyncio.wait_for(d.left.wait(), SOON_S)
        assert len(f.d.bodies) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", [failing(500), failing(503), failing(429), hang_up])
async def test_d_does_without_a_p_that_failed(answer: Answer, stream: bool) -> None:
    async with known(when_overloaded="decode") as f:
        asked, p, d = await both_asked(f, answer, decoded, stream=stream)
        f.d.answer = decoded
        p.let_go.set()
        response, body = await asked
        assert body == (b"".join(EVENTS) if stream else b'{"choices":  []}')
        assert response.headers["x-ecshare-path"] == "decode"
        await asyncio.wait_for(d.left.wait(), SOON_S)
        assert handed_over(f) == [STREAMED, None]
        assert "image_url" in json.dumps(f.d.bodies[1]), "with its picture"
        _, health = await f.health()
        assert health["fallbacks"] == 1


async def test_d_does_without_a_p_that_takes_too_long() -> None:
    async with known(stage_timeout_s=0.3) as f:
        asked, _, d = await both_asked(f, prefilled, decoded)
        f.d.answer = decoded
        response, _ = await asked
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        await asyncio.wait_for(d.left.wait(), SOON_S)


async def test_an_answer_that_has_begun_goes_on_without_p() -> None:
    second = asyncio.Event()
    async with known() as f:
        f.p.answer, f.d.answer = held, _ = Held(failing(500)), streaming_until(second)
        body = json.dumps(chat(stream=True))
        async with f.client.post(f.url + CHAT, data=body) as response:
            assert await response.content.readany() == EVENTS[0]
            held.let_go.set()
            await until(lambda: not f.in_flight("prefill"))
            second.set()
            assert await response.content.read() == EVENTS[-1]
        assert len(f.d.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "expected"), [(no_hand_over, None), (another_hand_over, {"other": 1})]
)
async def test_p_that_hands_nothing_over_is_not_waited_for_twice(
    answer: Answer, expected: Any
) -> None:
    async with known() as f:
        asked, p, d = await both_asked(f, answer, decoded)
        f.d.answer = decoded
        p.let_go.set()
        response, _ = await asked
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"
        await asyncio.wait_for(d.left.wait(), SOON_S)
        assert handed_over(f) == [STREAMED, expected]
        f.p.answer = prefilled
        for again in (AFTER, STREAMED):
            await f.post(chat())
            assert handed_over(f)[-1] == again
        _, health = await f.health()
        assert health["fallbacks"] == 0


async def test_behind_other_requests_p_is_waited_for() -> None:
    """D would hold room in its cache for what P has not begun."""
    async with known() as f:
        asked, p, d = await both_asked(f, prefilled, decoded)
        f.p.answer, f.d.answer = prefilled, decoded
        await f.post(chat())
        assert handed_over(f) == [STREAMED, AFTER]
        p.let_go.set()
        d.let_go.set()
        assert (await asked)[0].status == 200


async def test_p_is_free_for_one_of_those_that_come_at_the_same_moment() -> None:
    """They have waited together, for the models that D serves."""
    async with known() as f:
        f.clock.now_s += 60
        f.p.models = f.d.models = ("m", "new")
        f.d.lists = asyncio.Event()
        f.p.answer, f.d.answer = p, d = Held(prefilled), Held(decoded)
        asked = [asyncio.create_task(f.post(chat() | {"model": "new"})) for _ in range(3)]
        await until(lambda: len(f.router.in_flight) == 3 and f.d.num_model_lists > 1)
        f.d.lists.set()
        await until(lambda: len(f.p.bodies) == 3)
        for held in (p, d):
            held.let_go.set()
        for each in asked:
            assert (await each)[0].status == 200
        assert sorted(handed_over(f), key=str) == [AFTER, AFTER, STREAMED]


async def test_each_p_is_known_by_itself() -> None:
    async with fleet(num_p=2) as f:
        f.prefillers[1].answer = no_hand_over
        for _ in range(4):
            await f.post(chat())
        assert handed_over(f) == [AFTER, None, STREAMED, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_d_that_fails_is_asked_once_more_with_pictures(stream: bool) -> None:
    async with known() as f:
        asked, p, d = await both_asked(f, prefilled, failing(500), stream=stream)
        f.d.answer = decoded
        d.let_go.set()
        response, _ = await asked
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        await asyncio.wait_for(p.left.wait(), SOON_S)
        assert handed_over(f) == [STREAMED, None]
        assert (await f.health())[1]["fallbacks"] == 1


async def test_what_d_refuses_is_refused() -> None:
    async with known() as f:
        asked, p, d = await both_asked(f, prefilled, failing(400))
        d.let_go.set()
        response, _ = await asked
        assert response.status == 400
        await asyncio.wait_for(p.left.wait(), SOON_S)
        assert len(f.d.bodies) == 1


async def test_nobody_works_for_a_client_that_left() -> None:
    async with known() as f:
        asked, p, d = await both_asked(f, prefilled, decoded)
        asked.cancel()
        for each in (p, d):
            await asyncio.wait_for(each.left.wait(), SOON_S)
        await asyncio.wait([asked])
        _, health = await f.health()
        assert {each["in_flight"] for group in health["stages"].values() for each in group} == {0}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_holds_for_both(stream: bool) -> None:
    async with known(timeout_s=0.5) as f:
        f.p.answer = p = Hanging()
        f.d.answer = d = Hanging(start=EVENTS[0] if stream else None)
        response, body = await f.post(chat(stream=stream))
        assert response.status == (200 if stream else 504)
        assert b"timeout" in body
        for each in (p, d):
            await asyncio.wait_for(each.left.wait(), SOON_S)
