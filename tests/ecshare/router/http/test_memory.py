# SPDX-License-Identifier: Apache-2.0
"""What requests hold in memory: bounded together, and let go of when they end."""

import asyncio
import gc
import io
import json
import os
import random
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.api.errors import ApiError
from ecshare.router.fleet import client
from ecshare.router.http.bodies import MemoryBudget, Payload, Reservation
from ecshare.router.http.context import RequestContext
from ecshare.router.options.values import MIB
from lab.servers.processes import Port
from tests.ecshare.router.fake_engine import (
    HEAD,
    LOOPBACK,
    PNG,
    STATUS_KEY,
    Answer,
    FakeEngine,
    Fleet,
    Hanging,
    Held,
    break_in_the_stream,
    chat,
    data_url,
    decoded,
    encoded,
    failing,
    fleet,
    hang_up,
    listening,
    picture,
    prefilled,
)
from tests.waiting import until

JSON = {"Content-Type": "application/json"}
PICTURE = random.Random(1).randbytes(3 * MIB)
"""4 MiB of base64."""


def at(url: str) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": {"url": url}})


def test_shares_of_the_memory_are_given_back() -> None:
    memory = MemoryBudget(100)
    one, two = Reservation(memory), Reservation(memory)
    one.take(60)
    two.take(40)
    for refused in (one.take, two.take, two.expect):
        with pytest.raises(ApiError) as raised:
            refused(1)
        assert raised.value.status == 429
    assert memory.used_bytes == 100
    one.release()
    two.release()
    assert memory.used_bytes == 0
    alone = Reservation(memory)
    alone.take(60)
    alone.take(1000)  # a limit that is too low for one request serves it all the same
    with pytest.raises(ApiError):
        Reservation(memory).take(1)
    alone.release()
    assert memory.used_bytes == 0


def test_the_last_eighth_is_for_small_requests() -> None:
    memory = MemoryBudget(80 * MIB)
    large, another, small = (Reservation(memory) for _ in range(3))
    large.take(69 * MIB)
    with pytest.raises(ApiError):
        another.take(2 * MIB)
    small.take(MIB)
    with pytest.raises(ApiError):
        small.take(1)  # it is no longer small
    another.take(MIB)


@asynccontextmanager
async def one_in_flight(f: Fleet, body: dict[str, Any]) -> AsyncIterator[None]:
    """Let a request wait for decode while the block runs, for a while at most."""
    f.d.answer = held = Held(decoded)
    first = asyncio.create_task(f.post(body))
    async with asyncio.timeout(20):
        await held.asked.wait()
        yield
        held.let_go.set()
        assert (await first)[0].status == 200


async def chunked(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield json.dumps(body).encode()


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_requests_beyond_the_memory_are_429_until_others_end(is_chunked: bool) -> None:
    def body() -> Any:
        return chunked(chat(picture(PICTURE))) if is_chunked else chat(picture(PICTURE))

    async with fleet(0, 0, max_in_flight_bytes=6 * MIB) as f:
        async with one_in_flight(f, chat(picture(PICTURE))):
            response, answer = await f.post(body())
            assert response.status == 429
            assert response.headers["Retry-After"] == "2"
            error = json.loads(answer)["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_requests")
        assert (await f.post(body()))[0].status == 200


async def test_answers_count_until_their_clients_have_them() -> None:
    large = b" " * (40 * MIB)

    async def answer_much(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=large, content_type="application/json")

    async def used_bytes(f: Fleet) -> int:
        headers = {"Authorization": f"Bearer {STATUS_KEY}"}
        async with f.client.get(f.url + "/status", headers=headers) as response:
            return int((await response.json())["memory"])

    async def is_free() -> bool:
        return await used_bytes(f) == 0

    async with fleet(0, 0, max_in_flight_bytes=120 * MIB) as f, asyncio.timeout(20):
        f.d.answer = answer_much
        reader, writer = await asyncio.open_connection("127.0.0.1", int(f.url.rpartition(":")[2]))
        body = json.dumps(chat()).encode()
        writer.write(HEAD)
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        assert await used_bytes(f) >= 40 * MIB
        assert (await f.post(chat()))[0].status == 429
        assert head.startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(len(large)) == large
        await until(is_free)
        assert (await f.post(chat()))[0].status == 200
        writer.close()


@pytest.mark.parametrize("num_more", [0, 1])
async def test_an_answer_of_any_engine_is_bounded(
    num_more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of its length, and may have no end."""

    async def answer_much(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(http)
        for _ in range(10):
            await response.write(b" " * 100)
        await response.write(b"{}" + b" " * num_more)
        return response

    monkeypatch.setattr(client, "_MAX_ANSWER_BYTES", 1002)
    async with fleet(0, 1) as f:
        f.p.answer = answer_much
        response, _ = await f.post(chat())
        path = response.headers["x-ecshare-path"]
        assert path == ("decode" if num_more else "prefill,decode")
        f.d.answer = answer_much
        assert (await f.post(chat(n=2)))[0].status == (502 if num_more else 200)


async def test_a_body_that_says_it_is_too_much_is_not_read() -> None:
    async with (
        fleet(0, 0, max_in_flight_bytes=6 * MIB) as f,
        one_in_flight(f, chat(picture(PICTURE))),
    ):
        port = int(f.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        writer.write(b"Content-Length: %d\r\n\r\n" % (5 * MIB))
        assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")
        writer.close()
        await writer.wait_closed()


async def test_downloads_count_and_are_refused_by_their_length() -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        size = int(http.match_info["size"])
        response = web.StreamResponse()
        if http.match_info["kind"] == "told":
            response.content_length = size
        await response.prepare(http)
        if http.match_info["kind"] == "told":
            await asyncio.Event().wait()
        for _ in range(size // MIB):
            await response.write(b"x" * MIB)
        return response

    media = web.Application()
    media.router.add_get("/{kind}/{size}", serve)
    limits: dict[str, Any] = {"max_in_flight_bytes": 13 * MIB, "max_media_bytes": 8 * MIB}
    async with listening(media) as url, fleet(0, 0, allow_media_networks=LOOPBACK, **limits) as f:
        for kind in ("told", "untold"):
            assert (await f.post(at(f"{url}/{kind}/{9 * MIB}")))[0].status == 413
            async with one_in_flight(f, chat(picture(PICTURE))):
                response, answer = await f.post(at(f"{url}/{kind}/{7 * MIB}"))
                assert response.status == 429
                assert json.loads(answer)["error"]["code"] == "too_many_requests"
        assert (await f.post(at(f"{url}/untold/{7 * MIB}")))[0].status == 200


@pytest.mark.parametrize("value", ["[]", "{}", '{"a":0}', "0"])
async def test_json_of_very_many_values_is_400(value: str) -> None:
    async with fleet(0, 0) as f:
        many = ",".join([value] * 1_000_001)
        response, answer = await f.post(io.BytesIO(b'{"messages":[],"a":[' + many.encode() + b"]}"))
        assert response.status == 400
        message = json.loads(answer)["error"]["message"]
        assert message == "The body has more than 1,000,000 commas, colons and brackets."


async def test_values_count_as_the_memory_that_they_take() -> None:
    async with fleet(0, 0, max_in_flight_bytes=20 * MIB) as f:
        many = chat(extra=[[]] * 200_000)
        async with one_in_flight(f, chat()):
            assert (await f.post(many))[0].status == 429
        assert (await f.post(many))[0].status == 200


async def test_text_is_bounded_apart_from_media() -> None:
    async with fleet(0, 0) as f:
        response, answer = await f.post(chat(user="- " * (9 * MIB)))
        assert response.status == 413
        assert "16 MiB without its base64" in json.loads(answer)["error"]["message"]


@dataclass
class Process:
    """A router as a process of its own, without a garbage collector."""

    url: str
    pid: int
    client: aiohttp.ClientSession

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    async def post(self, body: Any) -> int:
        content = io.BytesIO(json.dumps(body).encode()) if isinstance(body, dict) else body
        async with self.client.post(self.url + CHAT, data=content) as response:
            await response.read()
            return response.status

    async def keeps_nothing(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Check that memory is back when nothing is in flight; `ask` holds 4 MiB or more."""
        await ask()
        before = self.resident_bytes()
        for _ in range(3):
            await ask()
        async with self.client.get(self.url + "/v1/models") as response:
            assert response.status == 200
        # A connection that was cut short lets go of what it was sending a moment later.
        await until(lambda: self.resident_bytes() - before < 4 * MIB)


@asynccontextmanager
async def process(*options: str, **engines: FakeEngine) -> AsyncIterator[Process]:
    reserved = Port()  # as long as the process runs
    port = reserved.number
    program = "import gc; gc.disable(); from ecshare.router.__main__ import main; main()"
    places = [f"--{stage}={engine.url}" for stage, engine in engines.items()]
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, f"--port={port}", *places, *options),
        # What is freed goes back to the system: the process's size shows what is held.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(256 * 1024)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert running.stderr is not None
        async with aiohttp.ClientSession(headers=JSON) as client:
            async with asyncio.timeout(30):
                await running.stderr.readline()
            yield Process(f"http://127.0.0.1:{port}", running.pid, client)
    finally:
        running.terminate()
        await running.communicate()


LARGE = random.Random(2).randbytes(3 * MIB)


@asynccontextmanager
async def e_p_d() -> AsyncIterator[tuple[FakeEngine, FakeEngine, FakeEngine, Process]]:
    async with (
        FakeEngine(encoded).serving() as e,
        FakeEngine(prefilled).serving() as p,
        FakeEngine(decoded).serving() as d,
        process("--max-body-mb=16", encoder=e, prefiller=p, decoder=d) as router,
    ):
        yield e, p, d, router


async def test_idle_connections_keep_nothing() -> None:
    async with e_p_d() as (*_, router), AsyncExitStack() as stack:
        body = json.dumps(chat(picture(LARGE))).encode()

        async def ask() -> None:
            client = await stack.enter_async_context(aiohttp.ClientSession(headers=JSON))
            async with client.post(router.url + CHAT, data=io.BytesIO(body)) as response:
                assert response.status == 200

        await router.keeps_nothing(ask)


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ({"d": failing(500)}, 500),
        ({"d": hang_up}, 502),
        ({"e": failing(400)}, 400),
        ({"e": hang_up}, 200),
        ({"p": failing(503)}, 200),
        ({"p": hang_up, "d": hang_up}, 502),
    ],
)
async def test_requests_that_fail_keep_nothing(answers: dict[str, Answer], status: int) -> None:
    async with e_p_d() as (e, p, d, router):
        for name, engine in (("e", e), ("p", p), ("d", d)):
            engine.answer = answers.get(name, engine.answer)

        async def ask() -> None:
            assert await router.post(chat(picture(LARGE), picture(LARGE[1:]))) == status

        await router.keeps_nothing(ask)


@pytest.mark.parametrize(
    ("answers", "limits", "status"),
    [
        ({}, {}, 200),
        ({"d": break_in_the_stream}, {}, 200),
        ({"d": failing(404)}, {}, 404),
        ({"d": hang_up}, {}, 502),
        ({"e": hang_up, "p": hang_up}, {}, 200),
        ({"p": Hanging()}, {"stage_timeout_s": 0.3}, 200),
        ({"d": Hanging()}, {"timeout_s": 0.5}, 504),
    ],
)
async def test_no_cycle_keeps_a_request_or_its_answer(
    answers: dict[str, Answer],
    limits: dict[str, Any],
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def kept() -> list[object]:
        return [each for each in gc.get_objects() if type(each) in (RequestContext, Payload)]

    caplog.set_level("CRITICAL", "ecshare")  # pytest keeps the errors in records
    async with fleet(**limits) as f:
        await f.post(chat(picture(PNG)))  # P is found to stream
        for stage, answer in answers.items():
            getattr(f, stage).answer = answer
        gc.collect()
        gc.disable()
        try:
            for number in range(2):
                response, _ = await f.post(chat(picture(b"%d" % number), stream=number == 1))
                assert response.status == status
            await until(lambda: not kept(), within_s=10)
        finally:
            gc.enable()


async def test_bodies_that_are_refused_keep_nothing() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * MIB

    async with e_p_d() as (*_, router):
        broken = {"type": "image_url", "image_url": {"url": data_url(LARGE) + "===="}}

        async def ask() -> None:
            assert await router.post(chat(broken)) == 400
            assert (
                await router.post(io.BytesIO(json.dumps(chat(picture(LARGE))).encode()[:-1])) == 400
            )
            assert await router.post(endless()) == 413

        await router.keeps_nothing(ask)


async def test_clients_that_leave_keep_nothing() -> None:
    async with e_p_d() as (_, _, d, router):

        async def ask() -> None:
            _, writer = await asyncio.open_connection(
                "127.0.0.1", int(router.url.rpartition(":")[2])
            )
            writer.write(HEAD)
            writer.write(b"Content-Length: %d\r\n\r\n" % (6 * MIB))
            for _ in range(5):
                writer.write(b" " * MIB)
                await writer.drain()
            writer.close()
            await writer.wait_closed()
            d.answer = held = Held(decoded)
            asking = asyncio.create_task(router.post(chat(picture(LARGE))))
            await held.asked.wait()
            asking.cancel()
            await held.left.wait()

        await router.keeps_nothing(ask)


@pytest.mark.parametrize("kind", ["large", "broken"])
async def test_downloads_that_fail_keep_nothing(kind: str) -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        for _ in range(9 if kind == "large" else 6):
            await response.write(b"x" * MIB)
        if kind == "broken":
            assert http.transport is not None
            http.transport.abort()
        return response

    media = web.Application()
    media.router.add_get("/", serve)
    options = ("--max-media-mb=8", "--allow-media-network=127.0.0.0/8")
    async with (
        listening(media) as url,
        FakeEngine(decoded).serving() as d,
        process(*options, decoder=d) as router,
    ):

        async def ask() -> None:
            assert await router.post(at(url)) == (413 if kind == "large" else 502)

        await router.keeps_nothing(ask)
