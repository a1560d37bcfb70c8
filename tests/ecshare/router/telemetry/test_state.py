# SPDX-License-Identifier: Apache-2.0
"""`/live`, `/ready` and `/status`, and how requests end when the router stops."""

import asyncio
import json
from typing import Any

import pytest

from ecshare.router.api.chat import CHAT
from tests.ecshare.router import answers
from tests.ecshare.router.answers import EVENTS
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.held import Hanging, Held, soon
from tests.ecshare.router.telemetry.asking import SOON_S, get, on_its_way, told
from tests.waiting import until

LONG_S = 600.0


async def ask(f: Fleet, path: str) -> tuple[int, Any]:
    response, text = await get(f, path)
    return response.status, json.loads(text)


async def test_it_is_ready_as_long_as_one_decode_is() -> None:
    async with fleet(num_d=2) as f:
        f.e.healthy = f.p.healthy = f.d.healthy = False
        assert await ask(f, "/ready") == (200, {"status": "ready"})
        f.decoders[1].healthy = False
        f.clock.now_s = 1.0
        reason = "no decode engine is usable"
        assert await ask(f, "/ready") == (503, {"status": "not ready", "reason": reason})
        assert await ask(f, "/live") == (200, {"status": "live"})
        f.d.healthy = True
        f.clock.now_s = 2.0
        assert (await ask(f, "/ready"))[0] == 200


async def test_a_decode_that_hangs_is_neither_asked_nor_ready() -> None:
    async with fleet(0, 0, first_byte_timeout_s=0.1) as f:
        f.d.answer = hanging = Hanging()
        async with on_its_way(f, hanging, chat(stream=True)):
            await until(lambda: f.is_left_out(f.d))
            assert (await ask(f, "/ready"))[0] == 503, "whatever its /health says"
            (report,) = (await f.health())[1]["stages"]["decode"]
            assert (report["healthy"], report["state"]) == (False, "down")


async def test_a_hung_decode_does_not_delay_what_another_answers() -> None:
    async with fleet(0, 0, 2) as f:
        f.d.health_answers = asyncio.Event()
        assert (await asyncio.wait_for(ask(f, "/ready"), SOON_S))[0] == 200


async def test_asking_often_asks_the_engines_no_more_often() -> None:
    async with fleet(0, 0) as f:
        probes: list[int] = []
        f.d.on_health = lambda: probes.append(1)
        f.d.health_answers = asyncio.Event()
        asked = [asyncio.create_task(ask(f, "/ready")) for _ in range(20)]
        await until(lambda: probes)
        f.d.health_answers.set()
        assert [(await each)[0] for each in asked] == [200] * 20
        for _ in range(20):
            assert (await ask(f, "/ready"))[0] == (await ask(f, "/health"))[0] == 200
        assert len(probes) == 1
        f.d.healthy = False
        f.clock.now_s += 1.0
        assert (await ask(f, "/health"))[0] == (await ask(f, "/ready"))[0] == 503
        assert len(probes) == 2


async def test_status_tells_what_the_router_knows_and_asks_no_engine() -> None:
    async with fleet(num_p=2, num_d=2) as f:
        f.p.answer, f.d.answer = answers.hang_up, answers.failing(500)
        for _ in range(2):
            assert (await f.post(chat()))[0].status == 200
        asked: list[int] = []
        for engine in (f.e, *f.prefillers, *f.decoders):
            engine.on_health = lambda: asked.append(1)
        body = await told(f, "/status")
        assert (body["draining"], body["in_flight"]) == (False, 0)
        engines = [each for stage in body["stages"].values() for each in stage["engines"]]
        states = {each["url"]: each["state"] for each in engines}
        assert states[f.e.url] == "up"
        assert sorted(states[each.url] for each in f.prefillers) == ["down", "up"]
        assert body["retries"]["refused"] == 0
        assert body["retries"]["made"] >= 1
        assert sum(body["answered"].values()) == 2
        assert not asked


async def test_status_counts_the_requests_in_each_stage(f: Fleet) -> None:
    async def inside() -> list[int]:
        status = await told(f, "/status")
        return [status["in_flight"], *(each["in_flight"] for each in status["stages"].values())]

    f.p.answer = held = Held(f.p.answer)
    async with on_its_way(f, held, chat(picture(PNG))) as asked:
        assert await inside() == [1, 0, 1, 1]
        assert (await told(f, "/status"))["memory"] > 0
        held.let_go.set()
        await asked
    assert await inside() == [0, 0, 0, 0]


async def test_what_is_in_flight_ends_and_nothing_begins(f: Fleet) -> None:
    f.p.answer = held = Held(f.p.answer)
    async with on_its_way(f, held, chat(picture(PNG), stream=True)) as asked:
        drain = asyncio.create_task(f.router.in_flight.drain(LONG_S, asyncio.Event()))
        await until(lambda: f.router.in_flight.is_draining)
        reason = "the router is shutting down"
        assert await ask(f, "/ready") == (503, {"status": "not ready", "reason": reason})
        assert (await ask(f, "/live"))[0] == 200
        assert (await told(f, "/status"))["draining"] is True
        response, body = await f.post(chat())
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert response.headers["Connection"] == "close"
        assert json.loads(body)["error"]["code"] == "shutting_down"
        assert not drain.done()
        held.let_go.set()
        response, body = await asyncio.wait_for(asked, SOON_S)
        assert (response.status, body) == (200, b"".join(EVENTS))
        await asyncio.wait_for(drain, SOON_S)


@pytest.mark.parametrize("by", ["deadline", "second signal"])
async def test_a_stream_that_must_end_ends_with_an_error_event(by: str) -> None:
    async with fleet(0, 0) as f:
        f.d.answer = hanging = Hanging(start=EVENTS[0])
        async with f.client.post(f.url + CHAT, json=chat(stream=True)) as response:
            assert await response.content.readany() == EVENTS[0]
            hurry = asyncio.Event()
            if by == "second signal":
                hurry.set()
            drain_s = 0.05 if by == "deadline" else LONG_S
            await asyncio.wait_for(f.router.in_flight.drain(drain_s, hurry), SOON_S)
            rest = await asyncio.wait_for(response.read(), SOON_S)
        error = json.loads(rest.removeprefix(b"\n\ndata: "))["error"]
        assert (error["code"], error["type"]) == ("shutting_down", "server_error")
        await soon(hanging.left)


async def test_an_answer_that_must_end_is_an_error(f: Fleet) -> None:
    f.d.answer = hanging = Hanging()
    async with on_its_way(f, hanging, chat(picture(PNG))) as asked:
        await f.router.in_flight.drain(0.05, asyncio.Event())
        response, body = await asyncio.wait_for(asked, SOON_S)
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "shutting_down"
        await soon(hanging.left)


async def test_a_late_answer_is_late_for_its_own_deadline_until_then() -> None:
    async with fleet(0, 0, timeout_s=0.2) as f:
        f.d.answer = held = Held(answers.decoded)
        async with on_its_way(f, held, chat()) as asked:
            await asyncio.wait_for(f.router.in_flight.drain(LONG_S, asyncio.Event()), SOON_S)
            assert (await asked)[0].status == 504


async def test_the_head_of_a_health_answer_is_enough() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        await reader.read()  # until the router has gone
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with fleet(0, 0, 0, decoders_more=(url,)) as f, asyncio.timeout(1.5):
            assert (await f.health())[0] == 200
