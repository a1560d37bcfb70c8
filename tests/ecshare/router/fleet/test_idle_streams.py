# SPDX-License-Identifier: Apache-2.0
"""Comments in a stream keep the client's connection in use, and tell nothing of the engine.

vLLM sends them with `--sse-keep-alive-interval`, whatever its engine does.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from tests.ecshare.router.answers import EVENTS, Answer, First, decoded, failing, hang_up
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import Fleet, answer_all, asked, fleet
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("short_is_long", "polls_often")

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


@dataclass
class Idle:
    """Answers with a comment, and, once somebody lets it go on, ends otherwise."""

    end: End
    start: bytes = COMMENT
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, http: web.Request, body: dict[str, Any]) -> Stream:
        response = Stream(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(self.start)
        await self.go_on.wait()
        await self.end(http, response)
        return response


def idle_then(end: End, start: bytes = COMMENT) -> Idle:
    """Answer with a comment, and end otherwise at once."""
    idle = Idle(end, start)
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
        begun = idle_then(hang, start=EVENTS[0])
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
    async with fleet(0, 0, num_d=2) as f:
        idle = Idle(lambda http, stream: stream.write_eof())
        answer_all(f.decoders, idle)
        response, body = await streamed(f, idle.go_on, chat(stream=True))
        assert (response.status, body, asked(f.decoders)) == (200, COMMENT, [0, 1])


PATHS = {
    CHAT: chat(stream=True),
    "/v1/responses": {"model": "m", "input": "what?", "stream": True},
    "/v1/messages": chat(max_tokens=5, stream=True),
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


def whole(answer: Answer) -> Answer:
    """Answer as if the request asked for no stream."""
    return lambda http, body: answer(http, body | {"stream": False})


def unreadable(content: bytes) -> Answer:
    async def answer(http: web.Request, body: dict[str, Any]) -> Stream:
        return web.Response(status=418, body=content, content_type="text/html")

    return answer


@pytest.mark.parametrize(
    ("path", "last", "message"),
    [
        *(
            (path, failing(status), "engine says no")
            for path in PATHS
            for status in (500, 422, 429)
        ),
        *((path, whole(decoded), "The engine did not stream its answer.") for path in PATHS),
        *((path, hang_up, "The decode engine failed.") for path in PATHS),
        *(
            (CHAT, unreadable(content), "The engine answered HTTP 418.")
            for content in (b"<html>", b"[]", b'{"error": "no"}', b'{"detail": {}}', b"")
        ),
    ],
)
async def test_the_last_answer_is_an_error_event(path: str, last: Answer, message: str) -> None:
    async with fleet(0, 0, num_d=2) as f:
        idle = Idle(break_off)
        answer_all(f.decoders, First(idle, last))
        response, body = await streamed(f, idle.go_on, PATHS[path], path)
        assert response.status == 200
        assert error_in(path, body)["message"] == message
        assert asked(f.decoders) == [1, 1]


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


@pytest.mark.parametrize("status", [500, 400])
async def test_d_that_sends_comments_has_not_begun_while_p_computes(status: int) -> None:
    """If P fails then, D gets the whole request, in the client's stream. A refusal is its end."""
    async with fleet(0, prefill="always") as f:
        await f.post(chat())  # P shows that it hands over while it computes
        f.d.bodies.clear()
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
