# SPDX-License-Identifier: Apache-2.0
"""Engines that compute nothing, and the client for them."""

import asyncio
import json
from pathlib import Path

import pytest

from lab.completions import KINDS, NEW, TEXT, Requests, num_lost
from lab.http_load import LOST, Client, at_rate, by_clients, post
from lab.servers.stand_in import StandIn

WITHIN_S = 30.0


@pytest.mark.parametrize(
    ("stage", "field"),
    [
        ("encode", "ec_transfer_params"),
        ("prefill", "kv_transfer_params"),
        ("decode", "choices"),
    ],
)
async def test_each_stage_responds_with_its_field(stage: str, field: str, tmp_path: Path) -> None:
    requests = Requests(300_000)
    with StandIn("engine", tmp_path, stage) as engine:
        client = Client(engine.port.number)
        asked = [requests.next(kind) for kind in KINDS]
        for replies in (
            await by_clients(client.ask, asked, 2),
            await at_rate(client.ask, asked, 1000),
        ):
            assert num_lost(replies) == 0
            assert all(field in json.loads(reply.body) for reply in replies)
            assert all(0 < reply.first_byte_s <= reply.end_s for reply in replies)
        client.close()


async def test_held_stream_ends_after_release(tmp_path: Path) -> None:
    options = ("--holds", "--tokens=2", "--chars=4")
    with StandIn("engine", tmp_path, "decode", options) as engine:
        client, begun = Client(engine.port.number), asyncio.Event()
        message = Requests(10).next(TEXT, streams=True)
        stream = asyncio.create_task(client.ask(message, begun))
        async with asyncio.timeout(WITHIN_S):
            await begun.wait()
            assert (await client.ask(post("/release"))).status == 200
            body = (await stream).body
        assert body.count(b'"content":"aaaa"') == 2
        assert b"[DONE]" in body
        client.close()


async def test_killed_engine_loses_its_requests_and_can_restart(tmp_path: Path) -> None:
    with StandIn("engine", tmp_path, "decode", ("--holds",)) as engine:
        client, begun = Client(engine.port.number), asyncio.Event()
        message = Requests(10).next(NEW, streams=True)
        stream = asyncio.create_task(client.ask(message, begun))
        async with asyncio.timeout(WITHIN_S):
            await begun.wait()
            engine.kill()
            assert (await stream).status == 0
            assert await client.ask(message) == LOST
        engine.start()
        engine.wait_ready()
        assert (await client.ask(Requests(10).next(NEW))).status == 200
        client.close()
