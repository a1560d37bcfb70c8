# SPDX-License-Identifier: Apache-2.0
"""Clients that are slow, silent, many, or speak no HTTP: others are served all the same."""

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.http.connections import fitting_connections
from tests.ecshare.router.answers import decoded
from tests.ecshare.router.bodies import HEAD, chat
from tests.ecshare.router.fake_engine import FakeEngine, Fleet, fleet
from tests.ecshare.router.http.raw import BODY, Connection, answer, connected, get, post
from tests.ecshare.router.router_process import router_process

GET = get(b"/v1/models")


@asynccontextmanager
async def answered(url: str) -> AsyncIterator[Connection]:
    """A connection that has had an answer."""
    async with connected(url, GET) as (reader, writer):
        assert (await answer(reader))[0] == 200
        yield reader, writer


@pytest.mark.parametrize("sent", [b"", b"GE", HEAD, HEAD + b"Content-Length: 2\r\n"])
async def test_a_connection_without_a_whole_head_is_closed(sent: bytes) -> None:
    async with fleet(0, 0, client_timeout_s=0.2) as f, connected(f.url, sent) as (reader, _):
        assert await reader.read() == b""


@pytest.mark.parametrize("more", [b"", HEAD])
async def test_a_connection_that_is_idle_after_its_answer_is_closed(more: bytes) -> None:
    async with fleet(0, 0, client_timeout_s=1.5) as f, answered(f.url) as (reader, writer):
        writer.write(more)
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "body", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
async def test_a_body_that_does_not_come_is_408(body: bytes) -> None:
    async with fleet(0, 0, client_timeout_s=0.3) as f, connected(f.url, HEAD + body) as (reader, _):
        status, content = await answer(reader)
        assert (status, json.loads(content)["error"]["code"]) == (408, "body_timeout")


async def test_a_client_that_does_not_read_is_left() -> None:
    ended = asyncio.Event()

    async def endless(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        try:
            while True:
                await response.write(b"data: " + b"x" * 65536 + b"\n\n")
        finally:
            ended.set()

    async with fleet(0, 0, client_timeout_s=0.3) as f:
        f.d.answer = endless
        request = post(json.dumps(chat(stream=True)).encode())
        async with connected(f.url, request) as (reader, writer):
            await reader.readline()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await ended.wait()


async def test_a_client_that_reads_slowly_gets_all() -> None:
    large = b" " * 40_000_000

    async def answer_much(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=large, content_type="application/json")

    async with fleet(0, 0, client_timeout_s=1.0) as f:
        f.d.answer = answer_much
        async with connected(f.url, post(BODY)) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            received = 0
            while received < len(large) and (part := await reader.read(500_000)):
                received += len(part)
                await asyncio.sleep(len(part) / 20e6)  # it is slow: 20 MB/s
        assert received == len(large)


async def test_a_client_beyond_the_limit_is_503_and_others_go_on() -> None:
    async with fleet(0, 0, max_connections=2) as f, answered(f.url) as (first, writer):
        async with answered(f.url), connected(f.url) as (third, _):
            status, content = await answer(third)
            assert (status, await third.read()) == (503, b"")
            assert json.loads(content)["error"]["code"] == "too_many_connections"
            writer.write(GET)
            assert (await answer(first))[0] == 200
        writer.close()
        assert await first.read() == b""
        async with answered(f.url):
            pass


async def test_a_router_of_its_own_refuses_them_too() -> None:
    """On the event loop that it prefers."""
    one = ("sh", "-c", 'exec "$0" "$@" --max-connections=1')
    async with (
        FakeEngine(decoded).serving() as engine,
        router_process(engine.url, *one) as router,
        answered(f":{router.port}"),
        connected(f":{router.port}", GET) as (second, _),
    ):
        assert (await answer(second))[0] == 503
    assert "Traceback" not in router.log


async def test_silent_connections_make_room() -> None:
    async with (
        fleet(0, 0, max_connections=2) as f,
        answered(f.url) as (served, writer),
        connected(f.url) as (silent, _),
        answered(f.url),
    ):
        assert await silent.read() == b""
        writer.write(GET)
        assert (await answer(served))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\xff / HTTP/1.1", b"GET / HTTP/9.9",
        b"GET / HTTP/1.1\r\nA B: c", b"GET / HTTP/1.1\r\nA: " + b"x" * 10_000,
        b"GET / HTTP/1.1\r\nContent-Length: x", b"GET / HTTP/1.1\r\nA: b\0c\x1b[31m",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3", b"GET",
    ],
)  # fmt: skip
async def test_what_is_no_http_is_one_line_and_400(
    sent: bytes, f: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(f.url, sent + b"\r\n\r\n") as (reader, _):
        status, content = await answer(reader)
        assert status == 400
        assert json.loads(content)["error"]["message"] == "The HTTP request is malformed."
        assert await reader.read() == b""
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert record.getMessage().startswith("malformed HTTP from 127.0.0.1: ")
    assert record.getMessage().isprintable()


def test_connections_fit_into_the_open_files() -> None:
    assert fitting_connections(4096, 1024) == 256
    assert fitting_connections(4096, 1_000_000) == 4096
    assert fitting_connections(4096, resource.RLIM_INFINITY) == 4096


async def test_more_connections_than_open_files_do_no_harm() -> None:
    limit = 1024
    few_files = ("sh", "-c", f'ulimit -n {limit}; ulimit -S -n 64; exec "$0" "$@"')
    async with (
        FakeEngine(decoded).serving() as engine,
        router_process(engine.url, *few_files) as router,
        aiohttp.ClientSession() as client,
        aiohttp.ClientSession() as another,
    ):
        many: list[socket.socket] = []
        # On a connection that was there before the many, and on a new one.
        for number, asking in enumerate((client, client, another), 1):
            url = f"http://127.0.0.1:{router.port}{CHAT}"
            async with asking.post(url, json=chat()) as response:
                assert (response.status, len(engine.bodies)) == (200, number)
            while len(many) < limit + 50:
                many.append(socket.create_connection(("127.0.0.1", router.port)))
        for each in many:
            each.close()
    text = router.log
    assert "--max-connections 4096 counts as 256: this process may have 1024 open files" in text
    assert "Traceback" not in text
    assert "Too many open files" not in text
    assert 5 <= text.count("to make room") < 100  # of some 800
