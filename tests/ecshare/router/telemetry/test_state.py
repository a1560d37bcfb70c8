# SPDX-License-Identifier: Apache-2.0
"""`/live`, `/ready` and `/status`, and how requests end when the router stops."""

import asyncio
import json
from typing import Any

import pytest

from ecshare.router.api.chat import CHAT
from tests.ecshare.router.fake_engine import (
    EVENTS,
    PNG,
    STATUS_KEY,
    Fleet,
    Hanging,
    Held,
    chat,
    decoded,
    failing,
    fleet,
    hang_up,
    picture,
)
from tests.waiting import until

SOON_S = 10.0
LONG_S = 600.0
WITH_KEY = {"Authorization": f"Bearer {STATUS_KEY}"}


async def ask(f: Fleet, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with f.client.get(f.url + path, headers=headers) as response:
        return response.status, await response.json()


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
    async with fleet(0, 0, 1, first_byte_timeout_s=0.1) as f:
        f.d.answer = Hanging()
        asked = asyncio.create_task(f.post(chat(stream=True)))
        await until(lambda: f.is_left_out(f.d))
        assert (await ask(f, "/ready"))[0] == 503, "whatever its /health says"
        (report,) = (await f.health())[1]["stages"]["decode"]
        assert (report["healthy"], report["state"]) == (False, "down")
        asked.cancel()


async def test_a_hung_decode_does_not_delay_what_another_answers() -> None:
    async with fleet(0, 0, 2) as f:
        f.d.health_answers = asyncio.Event()
        assert (await asyncio.wait_for(ask(f, "/ready"), SOON_S))[0] == 200


async def test_asking_often_asks_the_engines_no_more_often() -> None:
    async with fleet(0, 0, 1) as f:
        probes = []
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


async def test_status_is_for_those_who_have_the_key() -> None:
    async with fleet(num_p=2, num_d=2) as f:
        for headers in (None, {"Authorization": "Bearer wrong"}, {"Authorization": ""}):
            status, body = await ask(f, "/status", headers)
            assert (status, body["error"]["code"]) == (401, "status_key_needed")
            assert "127.0.0.1" not in json.dumps(body)
        f.p.answer, f.d.answer = hang_up, failing(500)
        for _ in range(2):
            assert (await f.post(chat()))[0].status == 200
        asked = []
        for engine in (f.e, *f.prefillers, *f.decoders):
            engine.on_health = lambda: asked.append(1)
        status, body = await ask(f, "/status", WITH_KEY)
        assert status == 200
        assert (body["draining"], body["in_flight"]) == (False, 0)
        states = {
            each["url"]: each["state"]
            for stage in body["stages"].values()
            for each in stage["engines"]
        }
        assert states[f.e.url] == "up"
        assert sorted(states[each.url] for each in f.prefillers) == ["down", "up"]
        assert body["retries"]["refused"] == 0
        assert body["retries"]["made"] >= 1
        assert sum(body["answered"].values()) == 2
        assert not asked


async def test_status_counts_the_requests_in_each_stage() -> None:
    async with fleet() as f:
        f.p.answer = held = Held(f.p.answer)
        asked = asyncio.create_task(f.post(chat(picture(PNG))))
        await asyncio.wait_for(held.asked.wait(), SOON_S)
        _, body = await ask(f, "/status", WITH_KEY)
        assert body["in_flight"] == 1
        inside = {stage: each["in_flight"] for stage, each in body["stages"].items()}
        assert inside == {"encode": 0, "prefill": 1, "decode": 1}
        held.let_go.set()
        await asked
        _, body = await ask(f, "/status", WITH_KEY)
        assert {each["in_flight"] for each in body["stages"].values()} == {0}


async def draining(f: Fleet, drain_s: float, hurry: asyncio.Event) -> asyncio.Task[None]:
    """Have the router stop; returns when it has begun to."""
    task = asyncio.create_task(f.router.in_flight.drain(drain_s, hurry))
    await until(lambda: f.router.in_flight.is_draining)
    return task


async def test_what_is_in_flight_ends_and_nothing_begins() -> None:
    async with fleet() as f:
        f.p.answer = held = Held(f.p.answer)
        asked = asyncio.create_task(f.post(chat(picture(PNG), stream=True)))
        await asyncio.wait_for(held.asked.wait(), SOON_S)
        drain = await draining(f, LONG_S, asyncio.Event())
        reason = "the router is shutting down"
        assert await ask(f, "/ready") == (503, {"status": "not ready", "reason": reason})
        assert (await ask(f, "/live"))[0] == 200
        assert (await ask(f, "/status", WITH_KEY))[1]["draining"] is True
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
        await asyncio.wait_for(hanging.left.wait(), SOON_S)


async def test_an_answer_that_must_end_is_an_error() -> None:
    async with fleet() as f:
        f.d.answer = hanging = Hanging()
        asked = asyncio.create_task(f.post(chat(picture(PNG))))
        await asyncio.wait_for(hanging.asked.wait(), SOON_S)
        await f.router.in_flight.drain(0.05, asyncio.Event())
        response, body = await asyncio.wait_for(asked, SOON_S)
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "shutting_down"
        await asyncio.wait_for(hanging.left.wait(), SOON_S)


async def test_a_late_answer_is_late_for_its_own_deadline_until_then() -> None:
    async with fleet(0, 0, timeout_s=0.2) as f:
        f.d.answer = Held(decoded)
        asked = asyncio.create_task(f.post(chat()))
        await f.d.answer.asked.wait()
        await asyncio.wait_for(f.router.in_flight.drain(LONG_S, asyncio.Event()), SOON_S)
        assert (await asked)[0].status == 504


async def test_the_head_of_a_health_answer_is_enough() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        await reader.read()  # until the router has gone
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with fleet(0, 0, 0, decoders_more=(url,)) as f, asyncio.timeout(1.5):
            assert (await f.health())[0] == 200
