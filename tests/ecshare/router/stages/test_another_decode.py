# SPDX-License-Identifier: Apache-2.0
"""Where one D fails another is asked, as long as the client has seen nothing of an answer."""

import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from tests.ecshare.router.fake_engine import (
    EVENTS,
    PNG,
    Answer,
    FakeEngine,
    Fleet,
    break_in_the_stream,
    chat,
    decoded,
    failing,
    fleet,
    hang_up,
    picture,
)


@dataclass
class First:
    """Fails the first requests, whichever engine they come to; answers all later ones."""

    failure: Answer
    left: int = 1

    async def __call__(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.left -= 1
        return await (self.failure if self.left >= 0 else decoded)(http, body)


async def break_before_a_byte(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    assert http.transport is not None
    http.transport.close()
    return response


async def break_in_the_body(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(http)
    await response.write(b'{"choices"')
    assert http.transport is not None
    http.transport.close()
    return response


async def overloaded(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": "busy"}, status=429, headers={"Retry-After": "17"})


def answer_all(f: Fleet, answer: Answer) -> None:
    for engine in f.decoders:
        engine.answer = answer


def asked(f: Fleet) -> list[int]:
    return sorted(len(engine.bodies) for engine in f.decoders)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        hang_up,
        failing(500),
        failing(502),
        failing(503),
        failing(429),
        failing(408),
        break_before_a_byte,
        break_in_the_body,
    ],
)
async def test_another_is_asked(failure: Answer, stream: bool) -> None:
    async with fleet(0, 0, num_d=2) as f:
        answer_all(f, First(failure))
        response, body = await f.post(chat(stream=stream))
        assert response.status == 200
        assert body == (b"".join(EVENTS) if stream else b'{"choices":  []}')
        assert response.headers["x-ecshare-path"] == "decode"
        assert asked(f) == [1, 1]
        _, health = await f.health()
        assert health["answered"] == {"decode": 1}
        assert {each["in_flight"] for each in health["stages"]["decode"]} == {0}


async def test_another_is_asked_where_one_cannot_be_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncExitStack() as stack:
        async with FakeEngine(decoded).serving() as gone:
            f = await stack.enter_async_context(fleet(0, 0, 1, decoders_more=(gone.url,)))
            for _ in range(2):
                await f.post(chat())
        for _ in range(2):
            assert (await f.post(chat()))[0].status == 200
        assert (asked(f), len(gone.bodies)) == ([3], 1)
    assert caplog.text.count("tries another decode") == 1


async def test_another_is_asked_for_a_request_that_prefill_has_failed() -> None:
    async with fleet(num_e=1, num_p=1, num_d=2) as f:
        f.p.answer = failing(500)
        answer_all(f, First(failing(500)))
        response, _ = await f.post(chat(picture(PNG)))
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        assert asked(f) == [1, 1]
        assert (await f.health())[1]["fallbacks"] == 1


async def test_another_is_asked_after_the_fall_back_has_failed() -> None:
    async with fleet(num_e=0, num_p=1, num_d=2) as f:
        answer_all(f, First(failing(500), left=2))
        response, _ = await f.post(chat())
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        assert asked(f) == [1, 2]


async def test_three_are_asked_at_most_and_each_once() -> None:
    async with fleet(0, 0, num_d=4) as f:
        answer_all(f, failing(500))
        response, body = await f.post(chat())
        assert response.status == 500
        assert json.loads(body)["error"]["message"] == "engine says no"
        assert asked(f) == [0, 1, 1, 1]


async def test_each_is_asked_once_even_if_all_cool_down() -> None:
    async with fleet(0, 0, num_d=2) as f:
        answer_all(f, hang_up)
        for number in (1, 2):
            assert (await f.post(chat()))[0].status == 502
            assert asked(f) == [number, number]


async def test_one_that_cools_down_is_not_asked_for_a_better_answer() -> None:
    async with fleet(0, 0, num_d=2) as f:
        answer_all(f, First(hang_up))
        assert (await f.post(chat()))[0].status == 200
        answer_all(f, failing(500))
        response, body = await f.post(chat())
        assert (response.status, json.loads(body)["error"]["message"]) == (500, "engine says no")
        assert sum(asked(f)) == 3


@pytest.mark.parametrize("num_d", [1, 2])
async def test_the_last_ones_overload_is_passed_on(num_d: int) -> None:
    async with fleet(0, 0, num_d) as f:
        answer_all(f, overloaded)
        response, body = await f.post(chat())
        assert (response.status, body) == (429, b'{"error": "busy"}')
        assert response.headers["Retry-After"] == "17"
        assert asked(f) == [1] * num_d


@pytest.mark.parametrize("status", [400, 422])
async def test_a_refusal_is_no_failure(status: int) -> None:
    async with fleet(0, 0, num_d=2) as f:
        answer_all(f, failing(status))
        assert (await f.post(chat()))[0].status == status
        assert asked(f) == [0, 1]


async def test_one_that_has_not_got_the_model_is_not_the_last() -> None:
    async with fleet(0, 0, num_d=2) as f:
        f.d.answer = failing(404)
        for _ in range(2):
            assert (await f.post(chat()))[0].status == 200
        assert asked(f) == [1, 2]
        f.decoders[1].answer = failing(404)
        assert (await f.post(chat()))[0].status == 404


async def test_never_after_the_first_byte() -> None:
    async with fleet(0, 0, num_d=2) as f:
        answer_all(f, break_in_the_stream)
        response, body = await f.post(chat(stream=True))
        assert response.status == 200
        assert body.startswith(EVENTS[0])
        assert json.loads(body.rpartition(b"data: ")[2])["error"]["code"] == "engine_failed"
        assert asked(f) == [0, 1]


async def test_a_stream_of_nothing_is_an_answer() -> None:
    async def nothing(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        return response

    async with fleet(0, 0, num_d=2) as f:
        answer_all(f, nothing)
        response, body = await f.post(chat(stream=True))
        assert (response.status, body) == (200, b"")
        assert asked(f) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_rests_is_asked_where_no_other_is_left(stream: bool) -> None:
    """It may be back: engines start again sooner than they have rested."""
    async with fleet(0, 0, num_d=2) as f:
        for _ in range(2):
            answer_all(f, First(hang_up))
            assert (await f.post(chat(stream=stream)))[0].status == 200
        assert asked(f) == [2, 2]
