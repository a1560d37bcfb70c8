# SPDX-License-Identifier: Apache-2.0
"""Comments in a stream keep the client's connection in use, and tell nothing of the engine.

vLLM sends them with `--sse-keep-alive-interval`, whatever its engine does.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.fleet import watch
from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import (
    EVENTS,
    PNG,
    Answer,
    First,
    Fleet,
    answer_all,
    asked,
    chat,
    decoded,
    failing,
    fleet,
    hang_up,
    picture,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("short_is_long")

SOON_S = 10.0
COMMENT = b": keep-alive\n\n"
ANSWER = b"".join(EVENTS)
ERROR = b'data: {"error": {"message": "dead", "code": 500}}\n\ndata: [DONE]\n\n'
STREAMED = {"kvshare": {"streamed": True}}

Stream = web.StreamResponse
End = Callable[[web.Request, Stream], Awaitable[None]]


async def error_event(http: web.Request, stream: Stream) -> None:
    await stream.write(ERROR)


async def break_off(http: web.Request, stream: Stream) -> None:
    assert http.transport is not None
    http.transport.close()


async def hang(http: web.Request, stream: Stream) -> None:
    while True:
        await asyncio.sleep(0.01)
        await stream.write(COMMENT)


class Idle:
    """Answers with a comment, and, once somebody lets it go on, ends otherwise."""

    def __init__(self, end: End, start: bytes = COMMENT) -> None:
        self._end, self._start = end, start
        self.go_on = asyncio.Event()

    async def __call__(self, http: web.Request, body: dict[str, Any]) -> Stream:
        response = Stream(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(self._start)
        await self.go_on.wait()
        await self._end(http, response)
        return response


def idle_then(end: End) -> Idle:
    """Answer with a comment, and end otherwise at once."""
    idle = Idle(end)
    idle.go_on.set()
    return idle


async def streamed(
    f: Fleet, go_on: asyncio.Event, body: object, path: str = CHAT
) -> tuple[aiohttp.ClientResponse, bytes]:
    """Ask for a stream; let an engine go on once the client has a comment. Returns all of it."""
    async with (
        asyncio.timeout(SOON_S),
        f.client.post(f.url + path, data=json.dumps(body)) as response,
    ):
        assert await response.content.readexactly(len(COMMENT)) == COMMENT
        go_on.set()
        return response, COMMENT + await response.content.read()


async def all_events(http: web.Request, stream: Stream) -> None:
    for event in EVENTS:
        await stream.write(event)


# Longer than a busy machine holds up the process in which all of them run.
PATIENCE_S = 1.0


@pytest.fixture(autouse=True)
def _every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_EVERY_S", 0.02)


@pytest.mark.parametrize("end", [error_event, break_off, hang])
@pytest.mark.parametrize("otherwise", [decoded, idle_then(all_events)])
async def test_another_engine_goes_on_with_the_stream(end: End, otherwise: Answer) -> None:
    async with fleet(0, 0, num_d=2, first_byte_timeout_s=PATIENCE_S) as f:
        idle = Idle(end)
        answer_all(f.decoders, First(idle, otherwise))
        response, body = await streamed(f, idle.go_on, chat(stream=True))
        assert response.status == 200
        assert "x-ecshare-path" not in response.headers, "nobody had worked for it by then"
        assert body.replace(COMMENT, b"") == ANSWER
        assert asked(f.decoders) == [1, 1]
        assert (await f.health())[1]["answered"] == {"decode": 1}


@pytest.mark.parametrize("healthy", [True, False])
async def test_comments_are_no_sign_of_life(healthy: bool) -> None:
    """Neither those of the request itself, nor those of a stream that has begun before."""
    async with fleet(0, 0, num_d=2, first_byte_timeout_s=PATIENCE_S) as f:
        f.decoders.sort(key=lambda engine: not f.is_next(engine))
        bad, good = f.decoders
        bad.healthy = healthy
        begun = Idle(hang, start=EVENTS[0])
        begun.go_on.set()
        bad.answer = First(begun, idle_then(hang))
        body = json.dumps(chat(stream=True))
        async with f.client.post(f.url + CHAT, data=body) as response:
            assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            with f.busy(good):
                later = asyncio.create_task(f.post(chat(stream=True)))
                await until(lambda: len(bad.bodies) == 2)
            _, body_of_later = await asyncio.wait_for(later, SOON_S)
            assert body_of_later.replace(COMMENT, b"") == ANSWER
            await until(lambda: f.is_left_out(bad))


async def test_a_stream_of_comments_alone_ends_as_the_engine_ends_it() -> None:
    async def end(http: web.Request, stream: Stream) -> None:
        await stream.write_eof()

    async with fleet(0, 0, num_d=2) as f:
        idle = Idle(end)
        answer_all(f.decoders, idle)
        response, body = await streamed(f, idle.go_on, chat(stream=True))
        assert (response.status, body, asked(f.decoders)) == (200, COMMENT, [0, 1])


async def test_comments_do_not_show_that_an_engine_serves_again() -> None:
    async with fleet(0, 0) as f:
        (engine,) = f.router.pools[Stage.DECODE]
        engine.health.note_failure()
        f.d.answer = idle = Idle(all_events)
        body = json.dumps(chat(stream=True))
        async with f.client.post(f.url + CHAT, data=body) as response:
            assert await response.content.readexactly(len(COMMENT)) == COMMENT
            assert engine.state == "failing"
            idle.go_on.set()
            assert await response.content.read() == ANSWER
        assert engine.state == "up"


PATHS = {
    CHAT: chat(stream=True),
    "/v1/responses": {"model": "m", "input": "what?", "stream": True},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "what?"}],
        "stream": True,
    },
}


def error_in(path: str, body: bytes) -> dict[str, Any]:
    """Return the error with which a stream ends, as the client of each path expects it."""
    start, _, event = body.rstrip(b"\n").rpartition(b"\n\n")
    assert start.strip(b"\n") == COMMENT.strip(b"\n")
    name, _, data = event.rpartition(b"data: ")
    told: dict[str, Any] = json.loads(data)
    assert name == (b"" if path == CHAT else b"event: error\n")
    if path == "/v1/responses":
        assert (told["type"], told["sequence_number"]) == ("error", 0)
        return told
    if path == "/v1/messages":
        assert told["type"] == "error"
    error: dict[str, Any] = told["error"]
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("last", "message"),
    [
        (failing(500), "engine says no"),
        (failing(422), "engine says no"),
        (failing(429), "engine says no"),
        (decoded, "The engine did not stream its answer."),
        (hang_up, "The decode engine failed."),
    ],
)
async def test_the_last_answer_is_an_error_event(path: str, last: Answer, message: str) -> None:
    async def whole(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await last(http, body | {"stream": False})

    async with fleet(0, 0, num_d=2) as f:
        idle = Idle(break_off)
        answer_all(f.decoders, First(idle, whole))
        response, body = await streamed(f, idle.go_on, PATHS[path], path)
        assert response.status == 200
        assert error_in(path, body)["message"] == message
        assert asked(f.decoders) == [1, 1]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"error": "no"}', b'{"detail": {}}', b""])
async def test_an_error_that_is_no_json_is_an_error_event_too(body: bytes) -> None:
    async def answer(http: web.Request, asked: dict[str, Any]) -> Stream:
        return web.Response(status=418, body=body, content_type="text/html")

    async with fleet(0, 0, num_d=2) as f:
        idle = Idle(break_off)
        answer_all(f.decoders, First(idle, answer))
        _, told = await streamed(f, idle.go_on, chat(stream=True))
        assert error_in(CHAT, told)["message"] == "The engine answered HTTP 418."


async def test_the_deadline_is_an_error_event() -> None:
    async with fleet(0, 0, timeout_s=1.0) as f:
        f.d.answer = idle_then(hang)
        response, body = await asyncio.wait_for(f.post(chat(stream=True)), SOON_S)
        assert response.status == 200
        assert json.loads(body.rpartition(b"data: ")[2])["error"]["code"] == "timeout"


async def test_what_is_lost_is_encoded_again_behind_a_comment() -> None:
    async with fleet(hand_over="after") as f:
        await f.post(chat(picture(PNG)))
        idle = Idle(error_event)
        f.d.answer = First(idle, decoded)
        _, body = await streamed(f, idle.go_on, chat(picture(PNG), stream=True))
        assert body == COMMENT + ANSWER
        assert len(f.e.bodies) == 2
        assert (await f.health())[1]["encodes"]["repeated"] == 1


async def known(f: Fleet) -> None:
    """Have P show that it hands over while it computes."""
    await f.post(chat())
    for engine in (f.p, f.d):
        engine.bodies.clear()


@pytest.mark.parametrize("status", [500, 400])
async def test_d_that_sends_comments_has_not_begun_while_p_computes(status: int) -> None:
    """If P fails then, D gets the whole request, in the client's stream. A refusal is its end."""
    async with fleet(0, prefill="always") as f:
        await known(f)
        go_on = asyncio.Event()

        async def fail(http: web.Request, body: dict[str, Any]) -> Stream:
            await go_on.wait()
            return await failing(status)(http, body)

        f.p.answer, f.d.answer = fail, First(idle_then(hang), decoded)
        _, body = await streamed(f, go_on, chat(stream=True))
        handed_over = [sent.get("kv_transfer_params") for sent in f.d.bodies]
        told = COMMENT + body.replace(COMMENT, b"")
        if status == 500:
            assert (told, handed_over) == (COMMENT + ANSWER, [STREAMED, None])
        else:
            assert error_in(CHAT, told)["message"] == "engine says no"
            assert handed_over == [STREAMED]


async def test_metrics_count_from_the_first_event() -> None:
    async with fleet(0, 0, timeout_s=1.0) as f:
        f.d.answer = idle_then(hang)
        await asyncio.wait_for(f.post(chat(stream=True)), SOON_S)
        f.d.answer = idle_then(all_events)
        await f.post(chat(stream=True))
        headers = {"Authorization": "Bearer a key to all that /health tells"}
        async with f.client.get(f.url + "/metrics", headers=headers) as response:
            lines = (await response.text()).splitlines()
        counts = [line for line in lines if "first_byte_seconds_count" in line]
        assert {float(line.rpartition(" ")[2]) for line in counts} == {1.0}
        assert len(counts) == 2, "of the request, and of the engine's call"


async def test_the_head_tells_what_was_known_when_the_first_comment_came() -> None:
    async with fleet() as f:
        f.d.answer = idle = Idle(all_events)
        response, body = await streamed(f, idle.go_on, chat(picture(PNG), stream=True))
        assert body == COMMENT + ANSWER
        assert response.headers["x-ecshare-path"] == "encode,prefill"
