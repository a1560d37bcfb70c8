# SPDX-License-Identifier: Apache-2.0
"""The bare router for comparison asks the same engines as ecshare's router."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from lab.completions import NEW, TEXT, Requests
from lab.http_load import Client, Message
from lab.servers.bare_router import BareRouterProcess
from lab.servers.processes import Server
from lab.servers.router import RouterProcess
from lab.servers.stand_in_server import ANSWERS
from tests.ecshare.router.fake_engine import FakeEngine

PICTURE_BYTES = 20_000
STAGES = ("encode", "prefill", "decode")


def our_router(folder: Path, engines: Sequence[Any]) -> Server:
    stages = zip(("encoder", "prefiller", "decoder"), engines, strict=True)
    each_in_turn = ["--hand-over=after"]  # so that prefill has answered when the test looks
    return RouterProcess("router", folder, {stage: [each] for stage, each in stages}, each_in_turn)


ROUTERS: dict[str, Callable[[Path, Sequence[Any]], Server]] = {
    "bare": BareRouterProcess,
    "ours": our_router,
}


class Engine(NamedTuple):
    base_url: str


class Asked(NamedTuple):
    stage: str
    with_pixels: bool


ENCODE, PREFILL, DECODE = Asked("encode", True), Asked("prefill", False), Asked("decode", False)


def stand_in(stage: str) -> FakeEngine:
    """Make an engine as in the benchmark that records its requests."""

    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=ANSWERS[stage], content_type="application/json")

    return FakeEngine(answer, models=("stand-in",))


@pytest.mark.parametrize("router", ROUTERS)
async def test_each_stage_is_asked_only_if_needed(router: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = {
            stage: await stack.enter_async_context(stand_in(stage).serving()) for stage in STAGES
        }
        front = ROUTERS[router](tmp_path, [Engine(each.url) for each in engines.values()])
        stack.callback(front.stop)
        front.start()
        await asyncio.to_thread(front.wait_ready)
        client = Client(front.port.number)

        async def asked_for(message: Message) -> set[Asked]:
            for engine in engines.values():
                engine.bodies.clear()
            reply = await client.ask(message)
            assert (reply.status, reply.body) == (200, ANSWERS["decode"])
            asked = [
                Asked(stage, len(json.dumps(body)) > PICTURE_BYTES)
                for stage, engine in engines.items()
                for body in engine.bodies
            ]
            assert len(asked) == len(set(asked))
            return set(asked)

        new, text = Requests(PICTURE_BYTES).next(NEW), Requests(PICTURE_BYTES).next(TEXT)
        another = [piece.replace(b"Question", b"Question".swapcase()) for piece in new]
        assert await asked_for(text) == {PREFILL, DECODE}
        assert await asked_for(new) == {ENCODE, PREFILL, DECODE}
        assert await asked_for(another) == {PREFILL, DECODE}
        assert await asked_for(new) == await asked_for(another) == {DECODE}
        client.close()
