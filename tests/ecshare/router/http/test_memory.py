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
from tests.ecshare.router import answers, bodies
from tests.ecshare.router.bodies import chat, picture
from tests.ecshare.router.fake_engine import FakeEngine, Fleet, fleet
from tests.ecshare.router.held import Hanging, Held
from tests.ecshare.router.http.raw import BODY, connected, post
from tests.ecshare.router.media.fake_media import at, media_server, served
from tests.waiting import until

JSON = {"Content-Type": "application/json"}
PICTURE = random.Random(1).randbytes(3 * MIB)
"""4 MiB of base64."""


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
    one.take(60)
    one.take(1000)  # a limit that is too low for one request serves it all the same
    with pytest.raises(ApiError):
        two.take(1)
    one.release()
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
    f.d.answer = held = Held(answers.decoded)
    first = asyncio.create_task(f.post(body))
    async with asyncio.timeout(20):
        await held.asked.wait()
        yield
        held.let_go.set()
        assert (await first)[0].status == 200


async def chunked(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield json.dumps(body).encode()


@pytest.mark.parametrize(
    ("limit_mib", "small", "body", "is_chunked"),
    [
        (6, chat(picture(PICTURE)), chat(picture(PICTURE)), False),
        (6, chat(picture(PICTURE)), chat(picture(PICTURE)), True),
        (20, chat(), chat(extra=[[]] * 200_000), False),  # values take more than their text
    ],
    ids=["a picture", "a picture in chunks", "many values"],
)
async def test_requests_beyond_the_memory_are_429_until_others_end(
    limit_mib: int, small: dict[str, Any], body: dict[str, Any], is_chunked: bool
) -> None:
    def sent() -> object:
        return chunked(body) if is_chunked else body

    async with fleet(0, 0, max_in_flight_bytes=limit_mib * MIB) as f:
        async with one_in_flight(f, small):
            response, answer = await f.post(sent())
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
            error = json.loads(answer)["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_requests")
        assert (await f.post(sent()))[0].status == 200


async def test_answers_count_until_their_clients_have_them() -> None:
    large = b" " * (40 * MIB)

    async def answer_much(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=large, content_type="application/json")

    async with fleet(0, 0, max_in_flight_bytes=120 * MIB) as f:
        f.d.answer = answer_much
        async with connected(f.url, post(BODY)) as (reader, _):
            head = await reader.readuntil(b"\r\n\r\n")
            assert f.router.known()["memory"] >= 40 * MIB
            assert (await f.post(chat()))[0].status == 429
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(len(large)) == large
            await until(lambda: f.router.known()["memory"] == 0)
            assert (await f.post(chat()))[0].status == 200


@pytest.mark.parametrize("num_more", [0, 1])
async def test_an_answer_of_any_engine_is_bounded(
    num_more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of its length, and may have no end."""

    async def answer_much(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(http)
        for part in (b" " * 100,) * 10 + (b"{}" + b" " * num_more,):
            await response.write(part)
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
    sent = bodies.HEAD + b"Content-Length: %d\r\n\r\n" % (5 * MIB)
    async with (
        fleet(0, 0, max_in_flight_bytes=6 * MIB) as f,
        one_in_flight(f, chat(picture(PICTURE))),
        connected(f.url, sent) as (reader, _),
    ):
        assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")


async def test_each_part_of_a_body_counts_besides_its_bytes(f: Fleet) -> None:
    least = 0

    def is_taken() -> bool:
        return bool(f.router.known()["memory"] >= least)

    async with connected(f.url, post(BODY)[: -len(BODY)]) as (reader, writer):
        for at in range(len(BODY) - 1):
            least += 1 + 64
            writer.write(BODY[at : at + 1])
            await until(is_taken)
        writer.write(BODY[-1:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("num_more", "status"), [(0, 200), (1, 413)])
async def test_a_body_that_does_not_say_its_length_is_bounded(num_more: int, status: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (BODY, b" " * num_more):
            yield piece

    async with fleet(0, 0, max_body_bytes=len(BODY)) as f:
        assert (await f.post(pieces()))[0].status == status


async def test_downloads_count_and_are_refused_by_their_length() -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        kind, size = http.match_info["name"].split("-")
        response = web.StreamResponse()
        if kind == "told":
            response.content_length = int(size)
        await response.prepare(http)
        if kind == "told":
            await asyncio.Event().wait()
        await response.write(b"x" * int(size))
        return response

    limits: dict[str, Any] = {"max_in_flight_bytes": 13 * MIB, "max_media_bytes": 8 * MIB}
    async with served(serve, **limits) as (f, url):
        for kind in ("told", "untold"):
            assert (await f.post(at(f"{url}/{kind}-{9 * MIB}")))[0].status == 413
            async with one_in_flight(f, chat(picture(PICTURE))):
                response, answer = await f.post(at(f"{url}/{kind}-{7 * MIB}"))
                assert response.status == 429
                assert json.loads(answer)["error"]["code"] == "too_many_requests"
        assert (await f.post(at(f"{url}/untold-{7 * MIB}")))[0].status == 200


@pytest.mark.parametrize("value", ["[]", "{}", '{"a":0}', "0"])
async def test_json_of_very_many_values_is_400(value: str, f: Fleet) -> None:
    many = ",".join([value] * 1_000_001)
    response, answer = await f.post(io.BytesIO(b'{"messages":[],"a":[' + many.encode() + b"]}"))
    assert response.status == 400
    message = json.loads(answer)["error"]["message"]
    assert message == "The body has more than 1,000,000 commas, colons and brackets."


async def test_text_is_bounded_apart_from_media(f: Fleet) -> None:
    response, answer = await f.post(chat(user="- " * (9 * MIB)))
    assert response.status == 413
    assert "16 MiB without its base64" in json.loads(answer)["error"]["message"]


@dataclass
class Process:
    """A router as a process of its own, without a garbage collector, and its engines."""

    engines: dict[str, FakeEngine]
    url: str
    pid: int
    clients: AsyncExitStack
    """Each request has one of its own, whose connection is idle afterwards."""

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    async def post(self, body: Any) -> int:
        whole = json.dumps(body).encode() if isinstance(body, dict) else body
        content = io.BytesIO(whole) if isinstance(whole, bytes) else whole
        client = await self.clients.enter_async_context(aiohttp.ClientSession(headers=JSON))
        async with client.post(self.url + CHAT, data=content) as response:
            await response.read()
            return response.status

    async def keeps_nothing(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Check that memory is back when nothing is in flight; `ask` holds 4 MiB or more."""
        await ask()
        before = self.resident_bytes()
        for _ in range(3):
            await ask()
        # A connection that was cut short lets go of what it was sending a moment later.
        await until(lambda: self.resident_bytes() - before < 4 * MIB)


@pytest.fixture
async def router() -> AsyncIterator[Process]:
    """A router in front of an E, a P and a D, which takes media of 8 MiB and bodies of 16 MiB."""
    reserved = Port()  # as long as the process runs
    program = "import gc; gc.disable(); from ecshare.router.__main__ import main; main()"
    async with (
        FakeEngine(answers.encoded).serving() as e,
        FakeEngine(answers.prefilled).serving() as p,
        FakeEngine(answers.decoded).serving() as d,
        AsyncExitStack() as clients,
    ):
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, f"--port={reserved.number}"),
            *(f"--encoder={e.url}", f"--prefiller={p.url}", f"--decoder={d.url}"),
            *("--max-body-mb=16", "--max-media-mb=8", "--allow-media-network=127.0.0.0/8"),
            # What is freed goes back to the system: the process's size shows what is held.
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(256 * 1024)},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert running.stderr is not None
            async with asyncio.timeout(30):
                await running.stderr.readline()
            url = f"http://127.0.0.1:{reserved.number}"
            yield Process({"e": e, "p": p, "d": d}, url, running.pid, clients)
        finally:
            running.terminate()
            await running.communicate()


LARGE = random.Random(2).randbytes(3 * MIB)


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ({}, 200),
        ({"d": answers.failing(500)}, 500),
        ({"d": answers.hang_up}, 502),
        ({"e": answers.failing(400)}, 400),
        ({"e": answers.hang_up}, 200),
        ({"p": answers.failing(503)}, 200),
        ({"p": answers.hang_up, "d": answers.hang_up}, 502),
    ],
    ids=range(7),
)
async def test_requests_that_have_ended_keep_nothing(
    answers: dict[str, answers.Answer], status: int, router: Process
) -> None:
    for name, answer in answers.items():
        router.engines[name].answer = answer

    async def ask() -> None:
        assert await router.post(chat(picture(LARGE), picture(LARGE[1:]))) == status

    await router.keeps_nothing(ask)


@pytest.mark.parametrize(
    ("answers", "limits", "status"),
    [
        ({}, {}, 200),
        ({"d": answers.break_in_the_stream}, {}, 200),
        ({"d": answers.failing(404)}, {}, 404),
        ({"d": answers.hang_up}, {}, 502),
        ({"e": answers.hang_up, "p": answers.hang_up}, {}, 200),
        ({"p": Hanging()}, {"stage_timeout_s": 0.3}, 200),
        ({"d": Hanging()}, {"timeout_s": 0.5}, 504),
    ],
    ids=range(7),
)
async def test_no_cycle_keeps_a_request_or_its_answer(
    answers: dict[str, answers.Answer],
    limits: dict[str, Any],
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def kept() -> list[object]:
        return [each for each in gc.get_objects() if type(each) in (RequestContext, Payload)]

    caplog.set_level("CRITICAL", "ecshare")  # pytest keeps the errors in records
    async with fleet(**limits) as f:
        await f.post(chat(picture(bodies.PNG)))  # P is found to stream
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


async def test_bodies_that_are_refused_keep_nothing(router: Process) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * MIB

    broken = {"type": "image_url", "image_url": {"url": bodies.data_url(LARGE) + "===="}}

    async def ask() -> None:
        assert await router.post(chat(broken)) == 400
        assert await router.post(json.dumps(chat(picture(LARGE))).encode()[:-1]) == 400
        assert await router.post(endless()) == 413

    await router.keeps_nothing(ask)


async def test_clients_that_leave_keep_nothing(router: Process) -> None:
    async def ask() -> None:
        start = bodies.HEAD + b"Content-Length: %d\r\n\r\n" % (6 * MIB)
        async with connected(router.url, start) as (_, writer):
            for _ in range(5):
                writer.write(b" " * MIB)
                await writer.drain()
        router.engines["d"].answer = held = Held(answers.decoded)
        asking = asyncio.create_task(router.post(chat(picture(LARGE))))
        await held.asked.wait()
        asking.cancel()
        await held.left.wait()

    await router.keeps_nothing(ask)


@pytest.mark.parametrize(("num_mib", "breaks", "status"), [(9, False, 413), (6, True, 502)])
async def test_downloads_that_fail_keep_nothing(
    num_mib: int, breaks: bool, status: int, router: Process
) -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        for _ in range(num_mib):
            await response.write(b"x" * MIB)
        if breaks:
            assert http.transport is not None
            http.transport.abort()
        return response

    async def ask() -> None:
        assert await router.post(at(url + "/a")) == status

    async with media_server(serve) as url:
        await router.keeps_nothing(ask)
