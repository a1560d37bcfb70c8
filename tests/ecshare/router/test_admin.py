# SPDX-License-Identifier: Apache-2.0
"""The operator's port: who may use it, and what it does to the engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ecshare.router import fleet as fleet_module
from ecshare.router import models
from ecshare.router.admin import ENGINES, make_admin_runner
from ecshare.router.config import AdminConfig, RouterConfig
from ecshare.router.engines import Stage
from ecshare.router.fleet import read_engines
from ecshare.router.secret import Secret
from tests.ecshare.router.fake_engine import (
    EVENTS,
    LOOPBACK,
    PNG,
    FakeEngine,
    Fleet,
    Held,
    chat,
    data_url,
    decoded,
    encoded,
    fleet,
    listening,
    listening_on,
    picture,
    prefilled,
)
from tests.waiting import until

KEY = "the operators' own key"
BEARER = {"Authorization": f"Bearer {KEY}"}
SOON_S = 10.0


@pytest.fixture(autouse=True)
def _lists_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is."""
    monkeypatch.setattr(models, "MAX_WAIT_S", 60.0)


class Operator:
    """Asks the port of a fleet's router."""

    def __init__(self, f: Fleet, url: str) -> None:
        self.f = f
        self.url = url

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] = BEARER
    ) -> tuple[int, Any]:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        where = self.url + path
        async with self.f.client.request(method, where, data=content, headers=headers) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def change(self, what: str, **order: Any) -> dict[str, Any]:
        """Add, drain or remove an engine, and return what is said of it."""
        path = ENGINES if what == "add" else f"{ENGINES}/{what}"
        status, told = await self.ask("POST", path, order)
        assert status == 200, told
        said: dict[str, Any] = told
        return said

    async def states(self, stage: str) -> dict[str, str]:
        status, told = await self.ask("GET", ENGINES)
        assert status == 200
        return {each["url"]: each["state"] for each in told["engines"] if each["stage"] == stage}


@asynccontextmanager
async def administered(
    num_e: int = 1, num_p: int = 1, num_d: int = 1, **options: Any
) -> AsyncIterator[Operator]:
    """A fleet, and the operator's port of its router; arguments as for `fleet`."""
    async with fleet(num_e, num_p, num_d, **options) as f:
        own = AdminConfig("127.0.0.1", 1, Secret(KEY.encode()))
        config = RouterConfig(decoders=("http://d",))
        async with listening_on(make_admin_runner(f.router.admin, config, own)) as url:
            yield Operator(f, url)


# --- what it does ---


async def test_engines_are_listed_with_what_they_do() -> None:
    async with administered(1, 2, 1) as operator:
        await operator.f.post(chat())
        status, told = await operator.ask("GET", ENGINES)
        assert status == 200
        names = [engine["name"] for engine in told["engines"]]
        assert names == ["encode-1", "prefill-1", "prefill-2", "decode-1"]
        assert told["engines"][-1] == {
            "stage": "decode",
            "name": "decode-1",
            "url": operator.f.d.url,
            "state": "up",
            "models": ["m"],
            "in_flight": 0,
            "tokens": 0,
        }


async def test_engines_of_all_stages_are_added_and_removed() -> None:
    async with (
        administered(0, 0, 1) as operator,
        FakeEngine(encoded).serving() as e,
        FakeEngine(prefilled).serving() as p,
        FakeEngine(decoded).serving() as d,
    ):
        f = operator.f
        assert (await operator.change("add", stage="encode", url=e.url + "/v1/"))["url"] == e.url
        await operator.change("add", stage="prefill", url=p.url)
        assert (await operator.change("add", stage="decode", url=d.url))["name"] == "decode-2"
        for number in range(2):
            response, _ = await f.post(chat(picture(PNG + bytes([number]))))
            assert response.headers["x-ecshare-path"] == "encode,prefill,decode"
        assert [len(engine.bodies) for engine in (e, p, d, f.d)] == [2, 2, 1, 1]
        for engine in (e, p, d):
            told = await operator.change("remove", url=engine.url)
            assert (told["url"], told["state"]) == (engine.url, "removed")
        response, _ = await f.post(chat(picture(PNG)))
        assert response.headers["x-ecshare-path"] == "decode"
        assert await operator.states("encode") == await operator.states("prefill") == {}


async def test_an_engine_is_added_for_some_models() -> None:
    async with (
        administered(0, 0, 1) as operator,
        FakeEngine(decoded, models=("m", "n")).serving() as new,
    ):
        told = await operator.change("add", stage="decode", url=new.url, models=["n"])
        assert told["models"] == ["n"]
        for model in ("m", "m", "n"):
            assert (await operator.f.post(chat() | {"model": model}))[0].status == 200
        assert [body["model"] for body in new.bodies] == ["n"]


async def test_a_drained_engine_finishes_what_it_has_and_gets_no_more() -> None:
    async with administered(0, 0, 2) as operator:
        f = operator.f
        f.d.answer = held = Held(decoded)
        asked = asyncio.create_task(f.post(chat(stream=True)))
        await asyncio.wait_for(held.asked.wait(), SOON_S)
        told = await operator.change("drain", url=f.d.url)
        assert (told["state"], told["in_flight"]) == ("draining", 1)
        with f.busy(f.decoders[1]):
            for _ in range(3):
                assert (await f.post(chat()))[0].status == 200
        assert [len(engine.bodies) for engine in f.decoders] == [1, 3]
        assert (await operator.states("decode"))[f.d.url] == "draining"
        held.let_go.set()
        assert (await asked)[1] == b"".join(EVENTS)
        await until(lambda: not f.in_flight("decode"))
        assert (await operator.states("decode"))[f.d.url] == "drained"
        await operator.change("add", stage="decode", url=f.d.url)
        f.d.answer = decoded
        for _ in range(2):
            await f.post(chat())
        assert len(f.d.bodies) == 2


async def test_a_stage_whose_engines_all_drain_is_left_out() -> None:
    async with administered() as operator:
        f = operator.f
        for engine in (f.e, f.p):
            await operator.change("drain", url=engine.url)
            engine.healthy = False
        response, _ = await f.post(chat(picture(PNG)))
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        status, health = await f.health()
        assert (status, health["status"], health["fallbacks"]) == (200, "ok", 0)
        assert health["stages"]["encode"][0]["state"] == "drained"


async def test_a_picture_that_was_known_is_fetched_when_its_encoder_is_gone() -> None:
    fetched = []

    async def serve(http: web.Request) -> web.Response:
        fetched.append(http.headers.get("If-None-Match"))
        if fetched[-1] is None:
            return web.Response(body=PNG, headers={"ETag": '"1"'})
        return web.Response(status=304)

    media = web.Application()
    media.router.add_get("/a.png", serve)
    options: Any = {"allow_media_networks": LOOPBACK}
    async with listening(media) as url, administered(**options) as operator:
        f = operator.f
        body = chat({"type": "image_url", "image_url": {"url": url + "/a.png"}})
        for _ in range(2):
            assert (await f.post(body))[0].status == 200
        assert (fetched, len(f.e.bodies)) == ([None, '"1"'], 1)
        await operator.change("drain", url=f.e.url)
        response, _ = await f.post(body)
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "prefill,decode")
        assert data_url(PNG, "application/octet-stream") in json.dumps(f.d.bodies[-1])


async def test_a_drained_engine_does_not_make_the_router_ready() -> None:
    async with administered(0, 0, 2) as operator:
        f = operator.f
        await operator.change("drain", url=f.d.url)
        f.decoders[1].healthy = False
        async with f.client.get(f.url + "/ready") as response:
            assert response.status == 503


async def test_what_is_changed_stays_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "LOOK_EVERY_S", 0.02)
    path = tmp_path / "engines.json"

    def write(*decoders: str) -> None:
        path.with_suffix(".new").write_text(json.dumps({"decoders": decoders}))
        path.with_suffix(".new").rename(path)

    write("http://a", "http://b", "http://c")
    urls = read_engines(path).urls
    more = {"decoders_more": urls[Stage.DECODE], "engines_file": path}
    async with administered(0, 0, 0, **more) as operator:
        await operator.change("add", stage="decode", url="http://x")
        await operator.change("drain", url="http://a")
        await operator.change("remove", url="http://b")
        write("http://a", "http://b", "http://new")
        pool = operator.f.router.pools[Stage.DECODE]
        await until(lambda: "http://new" in {engine.url for engine in pool})
        assert await operator.states("decode") == {
            "http://a": "drained",
            "http://new": "up",
            "http://x": "up",
        }


# --- who may use it, and how ---


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer no"}, {"Authorization": KEY}])
@pytest.mark.parametrize("path", [ENGINES, "/else"])
async def test_without_the_key_nothing_is_told_or_done(path: str, headers: dict[str, str]) -> None:
    async with administered(0, 0, 2) as operator:
        for method in ("GET", "POST"):
            where = operator.url + path
            async with operator.f.client.request(method, where, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                error = (await response.json())["error"]
                assert (error["code"], error["type"]) == (
                    "admin_key_needed",
                    "invalid_request_error",
                )
        status, _ = await operator.ask(
            "POST", ENGINES + "/drain", {"url": operator.f.d.url}, headers
        )
        assert status == 401
        assert set((await operator.states("decode")).values()) == {"up"}


async def test_the_clients_port_has_none_of_it() -> None:
    async with administered() as operator:
        response = await operator.f.client.get(operator.f.url + ENGINES, headers=BEARER)
        assert response.status == 404


D = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("", b"{", 400, None, "The body is not an order: Input data was truncated."),
        ("", b"[" * 60_000, 400, None, "The body is not an order: "),
        ("", b"\xff", 400, None, "The body is not an order: "),
        ("", {"url": D}, 400, None, "missing required field `stage`"),
        ("", {"stage": "d", "url": D}, 400, None, "Invalid enum value 'd' - at `$.stage`"),
        ("", {"stage": "decode", "url": 5}, 400, None, "Expected `str`, got `int` - at `$.url`"),
        ("", {"stage": "decode", "url": D, "x": 1}, 400, None, "unknown field `x`"),
        ("", {"stage": "decode", "url": D, "models": []}, 400, None, "- at `$.models`"),
        ("", {"stage": "decode", "url": "d:3"}, 400, "url", "'d:3' must look like http://host"),
        ("", {"stage": "decode", "url": "http://u:p@d"}, 400, "url", "takes no user"),
        ("", {"stage": "decode", "url": "dns+http://d"}, 400, "url", "for the command line"),
        ("", {"stage": "prefill", "url": D}, 409, "url", "already an engine of the decode stage"),
        ("", {"stage": "decode", "url": D, "models": ["m"]}, 409, "models", "was given this"),
        ("/drain", {"url": "http://x"}, 404, "url", "there is no engine http://x"),
        ("/remove", {"url": "http://x"}, 404, "url", "there is no engine http://x"),
        ("/drain", {"url": D + "/v1"}, 409, "url", "the last decode engine: add another one"),
        ("/remove", {"url": D}, 409, "url", "the last decode engine: add another one"),
        ("/remove", {"url": "D"}, 400, "url", "'D' must look like http://host"),
        ("/pause", {"url": D}, 404, None, "There is no /engines/pause."),
        ("", b"x" * 70_000, 413, None, "The body is larger than 0.0625 MiB."),
    ],
)
async def test_an_order_that_cannot_be_is_refused_with_the_reason(
    path: str, body: object, status: int, param: str | None, message: str
) -> None:
    async with administered(0, 0, 0, decoders_more=(D,)) as operator:
        got, told = await operator.ask("POST", ENGINES + path, body)
        error = told["error"]
        assert (got, error["param"], error["type"]) == (status, param, "invalid_request_error")
        assert message in error["message"]
        assert await operator.states("decode") == {D: "up"}
        assert await operator.states("encode") == await operator.states("prefill") == {}


async def test_any_expect_is_taken() -> None:
    async with administered(0, 0, 1) as operator:
        for path, status in ((ENGINES, 200), ("/nothing", 404)):
            told = await operator.ask("GET", path, headers=BEARER | {"Expect": "200-maybe"})
            assert told[0] == status


async def test_a_wrong_method_is_refused() -> None:
    async with administered(0, 0, 1) as operator:
        status, told = await operator.ask("DELETE", ENGINES)
        assert (status, told["error"]["code"]) == (405, "wrong_method")
