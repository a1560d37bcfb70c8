# SPDX-License-Identifier: Apache-2.0
"""Engines that come and go while the router runs."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.app import Router, make_runner
from ecshare.router.fleet import discovery as fleet_module
from ecshare.router.fleet.discovery import FleetWatch
from ecshare.router.fleet.engines import EnginePool
from ecshare.router.options.config import RouterConfig
from ecshare.router.options.engines_file import read_engines
from ecshare.router.types import Stage, Work
from ecshare.store.errors import ConfigError
from tests.ecshare.router.fake_engine import (
    EVENTS,
    PNG,
    Clock,
    FakeEngine,
    Hanging,
    Held,
    chat,
    decoded,
    encoded,
    lease,
    picture,
    prefilled,
    streaming_until,
)
from tests.waiting import until

SOON_S = 10.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fleet_module, "LOOK_EVERY_S", 0.02)
    caplog.set_level(logging.INFO, "ecshare.router")


def write(path: Path, **groups: list[str]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(groups))
    new.rename(path)


class Running:
    """A router over engines that change."""

    def __init__(self, router: Router, url: str, client: aiohttp.ClientSession) -> None:
        self.router = router
        self.url = url
        self.client = client

    async def post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        async with self.client.post(self.url + CHAT, json=body) as response:
            return response.status, await response.read()

    def engines(self, stage: Stage) -> list[str]:
        return [each["url"] for each in self.router.status()["stages"][stage]["engines"]]


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Running]:
    config = RouterConfig(balance="load", **options)
    router = Router(config, Clock())
    runner = make_runner(router, config)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as client:
            yield Running(router, f"http://127.0.0.1:{runner.addresses[0][1]}", client)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def from_file(path: Path) -> AsyncIterator[Running]:
    urls = read_engines(path).urls
    async with running(
        encoders=urls[Stage.ENCODE],
        prefillers=urls[Stage.PREFILL],
        decoders=urls[Stage.DECODE],
        engines_file=path,
    ) as router:
        yield router


def states(f: Running, stage: Stage = Stage.DECODE) -> dict[str, str]:
    """Return the states of a stage's engines that /status shows, by url."""
    told = f.router.status()["stages"][stage]["engines"]
    return {each["url"]: each["state"] for each in told}


async def test_engines_come_and_go_and_streams_run_on(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    async with FakeEngine(decoded).serving() as old, FakeEngine(decoded).serving() as new:
        write(path, decoders=[old.url])
        async with from_file(path) as f:
            let_go = asyncio.Event()

            old.answer = streaming_until(let_go)
            async with f.client.post(f.url + CHAT, json=chat(stream=True)) as response:
                assert await response.content.readany() == EVENTS[0]
                write(path, decoders=[new.url])
                await until(lambda: states(f) == {new.url: "up", old.url: "draining"})
                for _ in range(3):
                    assert (await f.post(chat()))[0] == 200
                assert (len(old.bodies), len(new.bodies)) == (1, 3)
                let_go.set()
                assert await response.read() == EVENTS[-1]
            await until(lambda: states(f) == {new.url: "up"})
            write(path, decoders=[new.url, old.url + "/v1/"])
            await until(lambda: f.engines(Stage.DECODE) == [new.url, old.url])
            await f.post(chat())
            await f.post(chat())
            assert len(old.bodies) == 2


async def test_whole_stages_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    async with (
        FakeEngine(encoded).serving() as e,
        FakeEngine(prefilled).serving() as p,
        FakeEngine(decoded).serving() as d,
    ):
        write(path, decoders=[d.url])
        async with from_file(path) as f:
            assert (await f.post(chat(picture(PNG))))[0] == 200
            write(path, encoders=[e.url], prefillers=[p.url], decoders=[d.url])
            await until(lambda: f.engines(Stage.PREFILL) == [p.url])
            assert (await f.post(chat(picture(PNG))))[0] == 200
            assert (len(e.bodies), len(p.bodies)) == (1, 1)
            write(path, decoders=[d.url])
            await until(lambda: f.engines(Stage.PREFILL) == f.engines(Stage.ENCODE) == [])
            assert (await f.post(chat(picture(PNG))))[0] == 200
            assert (len(e.bodies), len(p.bodies), len(d.bodies)) == (1, 1, 3)


WRONG = [b"", b'{"decoders": ["http://', b'{"decoders": []}', None]


def spoil(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize("content", WRONG)
async def test_a_wrong_file_changes_nothing(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.json"
    async with FakeEngine(decoded).serving() as old, FakeEngine(decoded).serving() as new:
        write(path, decoders=[old.url])
        async with from_file(path) as f:
            spoil(path, content)
            await until(lambda: "the engines stay as they are: " + str(path) in caplog.text)
            assert f.engines(Stage.DECODE) == [old.url]
            assert (await f.post(chat()))[0] == 200
            write(path, decoders=[new.url])
            await until(lambda: f.engines(Stage.DECODE) == [new.url])


@pytest.mark.parametrize("content", WRONG)
async def test_a_wrong_file_is_told_once(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.json"
    write(path, decoders=["http://d"])
    urls = read_engines(path).urls
    pools = {stage: EnginePool(stage, group, 5.0, Clock()) for stage, group in urls.items()}
    watch = FleetWatch(pools, urls, path)
    spoil(path, content)
    for _ in range(3):
        await watch.look()
    assert caplog.text.count("stay as they are") == 1
    assert [engine.url for engine in pools[Stage.DECODE]] == ["http://d"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "engines.json: Input data was truncated"),
        ("[]", "engines.json: Expected `object`, got `array`"),
        ('{"decoders": ["http://d"], "decoder": []}', "unknown field `decoder`"),
        ('{"encoders": ["http://e"]}', "missing required field `decoders`"),
        ('{"decoders": [5]}', "Expected `str | object`, got `int` - at `$.decoders[0]`"),
        ('{"decoders": ["d:3"]}', "'d:3' must look like http://host:port"),
        ('{"decoders": ["dns+https://d"]}', "'https://d' must look like http://host:port"),
        ('{"decoders": [{"models": ["m"]}]}', "missing required field `url` - at `$.decoders[0]`"),
        (
            '{"decoders": [{"url": "http://d", "models": []}]}',
            "Expected `array` of length >= 1 - at `$.decoders[0].models`",
        ),
        (
            '{"decoders": [{"url": "http://d", "model": "m"}]}',
            "unknown field `model` - at `$.decoders[0]`",
        ),
        (
            '{"decoders": ["http://d"], "encoders": [{"url": "http://d/v1"}]}',
            "decoders: http://d is already in encoders",
        ),
        ('{"decoders": ["' + "x" * 1024 * 1024 + '"]}', "it is larger than 1048576 bytes"),
        ("[" * 100_000, "engines.json: "),
        ('{"decoders": ["\udcff"]}', "engines.json: "),
    ],
)
def test_the_message_names_what_is_wrong(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as error:
        read_engines(path)
    assert message in str(error.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_engines(tmp_path)


@asynccontextmanager
async def everywhere() -> AsyncIterator[tuple[int, list[str]]]:
    """A decode engine on each address of this host; yields its port and who was asked."""
    asked: list[str] = []

    async def answer(http: web.Request) -> web.Response:
        assert http.transport is not None
        asked.append(http.transport.get_extra_info("sockname")[0])
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_post(CHAT, answer)

    async def health(http: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/health", health)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", 0).start()
        yield runner.addresses[0][1], asked
    finally:
        await runner.cleanup()


async def test_each_address_of_a_name_is_an_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer: list[str] | OSError = ["127.0.0.3", "127.0.0.2"]

    async def resolve(host: str, port: int, **options: Any) -> list[Any]:
        assert host == "decode.example"
        if isinstance(answer, OSError):
            raise answer
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    async with everywhere() as (port, asked):

        def at(*addresses: str) -> list[str]:
            return [f"http://{address}:{port}/base" for address in addresses]

        name = f"dns+http://decode.example:{port}/base"
        async with running(decoders=(name,)) as f:
            assert f.engines(Stage.DECODE) == at("127.0.0.2", "127.0.0.3"), "before it listens"
            answer = ["127.0.0.3", "127.0.0.4"]
            await until(lambda: f.engines(Stage.DECODE) == at("127.0.0.3", "127.0.0.4"))
            answer = socket.gaierror("no such name")
            await until(lambda: "stay as they are: no such name" in caplog.text)
            assert f.engines(Stage.DECODE) == at("127.0.0.3", "127.0.0.4")
            answer = [f"127.0.1.{number}" for number in range(300)]
            await until(lambda: len(f.engines(Stage.DECODE)) == 256)
        async with running(decoders=(name.removesuffix("/base"),)) as f:
            for _ in range(3):
                assert (await f.post(chat()))[0] == 200
            assert len(set(asked)) == 3


async def test_the_file_says_what_engines_are_used_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(host: str, port: int, **options: Any) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in ("127.0.0.2", "127.0.0.3")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    path = tmp_path / "engines.json"

    def say(**models: list[str]) -> None:
        one = {"url": "http://127.0.0.1:9/v1", **models}
        several = {"url": "dns+http://decode.example:9", "models": ["c"]}
        write(path, decoders=[one, several])  # type: ignore[list-item]

    def told() -> dict[str, Any]:
        return {
            each["url"]: each["models"] for each in f.router.status()["stages"]["decode"]["engines"]
        }

    say(models=["b", "a"])
    async with from_file(path) as f:
        named = {"http://127.0.0.2:9": ["c"], "http://127.0.0.3:9": ["c"]}
        assert told() == {"http://127.0.0.1:9": ["a", "b"], **named}
        say()
        await until(lambda: told() == {"http://127.0.0.1:9": None, **named})


async def test_a_name_without_addresses_at_start_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolve(host: str, port: int, **options: Any) -> list[Any]:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    async with running(decoders=("dns+http://decode.example",)) as f:
        async with f.client.get(f.url + "/ready") as response:
            assert response.status == 503
        status, body = await f.post(chat())
        assert (status, json.loads(body)["error"]["code"]) == (503, "engine_unreachable")


async def test_an_engine_that_hangs_and_goes_is_not_asked_for_its_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecshare.router.fleet.watch.POLL_EVERY_S", 0.02)
    path = tmp_path / "engines.json"
    async with (
        FakeEngine(Hanging(), healthy=False).serving() as hung,
        FakeEngine(decoded).serving() as well,
    ):
        write(path, decoders=[hung.url, well.url])
        async with from_file(path) as f:
            for _ in range(2):
                assert (await asyncio.wait_for(f.post(chat()), SOON_S))[0] == 200
            write(path, decoders=[well.url])
            await until(lambda: f.engines(Stage.DECODE) == [well.url])
            await until(lambda: not f.router.client.watch.watched)


async def test_a_prefill_that_is_removed_while_it_works_hands_over(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    held = Held(prefilled)
    async with FakeEngine(held).serving() as p, FakeEngine(decoded).serving() as d:
        write(path, prefillers=[p.url], decoders=[d.url])
        async with from_file(path) as f:
            asked = asyncio.create_task(f.post(chat()))
            await asyncio.wait_for(held.asked.wait(), SOON_S)
            write(path, decoders=[d.url])
            await until(lambda: states(f, Stage.PREFILL) == {p.url: "draining"})
            held.let_go.set()
            assert (await asked)[0] == 200
            assert d.bodies[0]["kv_transfer_params"] == {"kvshare": {"num_tokens": 7}}


def test_engines_that_stay_keep_their_state() -> None:
    pool = EnginePool(Stage.DECODE, "ab", 5.0, Clock())
    a, b = pool
    a.health.note_poll(is_healthy=False, silent_s=1.0)
    with lease(pool, b, 100):
        pool.update("ca")
        c, still = pool
        assert still is a
        assert c.url == "c"
        assert pool.leaving == [b]
        assert pool.choose() is c
        pool.update("b")
        assert list(pool) == [b], "it is the one that still has work"
        assert b.tokens == 100
    assert b.tokens == 0


def test_only_the_share_of_an_engine_that_comes_moves() -> None:
    pool = EnginePool(Stage.DECODE, "abc", 5.0, Clock())
    keys = [f"{number}".encode() for number in range(200)]
    before = {key: pool.choose(work=Work(key, 1)) for key in keys}
    pool.update("abcd")
    after = {key: pool.choose(work=Work(key, 1)) for key in keys}
    moved = [after[key] for key in keys if after[key] is not before[key]]
    assert {engine.url for engine in moved if engine} == {"d"}
    assert 25 < len(moved) < 80
