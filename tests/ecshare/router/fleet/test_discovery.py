# SPDX-License-Identifier: Apache-2.0
"""Engines that come and go while the router runs."""

import asyncio
import json
import logging
import socket
import weakref
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from ecshare.router.api.chat import CHAT
from ecshare.router.fleet import discovery as fleet_module
from ecshare.router.options.engines import read_engines
from ecshare.router.types import Stage
from tests.ecshare.router.answers import EVENTS, decoded, encoded, prefilled
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import FakeEngine, Fleet, fleet
from tests.ecshare.router.held import Hanging, Held, soon, streaming_until
from tests.waiting import until

SOON_S = 10.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fleet_module, "LOOK_EVERY_S", 0.02)
    caplog.set_level(logging.INFO, "ecshare.router")


def write(path: Path, **groups: list[Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(groups))
    new.rename(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engines.json"


def from_file(path: Path) -> AbstractAsyncContextManager[Fleet]:
    """Run a router over the engines that a file names."""
    urls = read_engines(path).urls
    return fleet(
        *(0, 0, 0, urls[Stage.ENCODE], urls[Stage.PREFILL], urls[Stage.DECODE]), engines_file=path
    )


def states(f: Fleet, stage: Stage = Stage.DECODE) -> dict[str, str]:
    """Return the states of a stage's engines that /status shows, by url."""
    told = f.router.known()["engines"][stage]
    return {each["url"]: each["state"] for each in told}


def engines(f: Fleet, stage: Stage = Stage.DECODE) -> list[str]:
    return list(states(f, stage))


async def test_engines_come_and_go_and_streams_run_on(path: Path) -> None:
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
                    assert (await f.post(chat()))[0].status == 200
                assert (len(old.bodies), len(new.bodies)) == (1, 3)
                let_go.set()
                assert await response.read() == EVENTS[-1]
            await until(lambda: states(f) == {new.url: "up"})
            write(path, decoders=[new.url, old.url + "/v1/"])
            await until(lambda: engines(f) == [new.url, old.url])
            await f.post(chat())
            await f.post(chat())
            assert len(old.bodies) == 2


async def test_whole_stages_come_and_go_and_a_prefill_that_goes_hands_over(path: Path) -> None:
    async with (
        FakeEngine(encoded).serving() as e,
        FakeEngine(prefilled).serving() as p,
        FakeEngine(decoded).serving() as d,
    ):
        write(path, decoders=[d.url])
        async with from_file(path) as f:
            assert (await f.post(chat(picture(PNG))))[0].status == 200
            write(path, encoders=[e.url], prefillers=[p.url], decoders=[d.url])
            await until(lambda: engines(f, Stage.PREFILL) == [p.url])
            p.answer = held = Held(prefilled)
            answer = asyncio.create_task(f.post(chat(picture(PNG))))
            await soon(held.asked)
            write(path, decoders=[d.url])
            await until(lambda: states(f, Stage.PREFILL) == {p.url: "draining"})
            held.let_go.set()
            assert (await answer)[0].status == 200
            assert d.bodies[1]["kv_transfer_params"] == {"kvshare": {"num_tokens": 7}}
            await until(lambda: engines(f, Stage.PREFILL) == engines(f, Stage.ENCODE) == [])
            assert (await f.post(chat(picture(PNG))))[0].status == 200
            assert (len(e.bodies), len(p.bodies), len(d.bodies)) == (1, 1, 3)


@pytest.mark.parametrize("content", [b"", b'{"decoders": ["http://', b'{"decoders": []}', None])
async def test_a_wrong_file_changes_nothing_and_is_told_once(
    content: bytes | None, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(decoded).serving() as old, FakeEngine(decoded).serving() as new:
        write(path, decoders=[old.url])
        async with from_file(path) as f:
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            await until(lambda: "the engines stay as they are: " + str(path) in caplog.text)
            for _ in range(3):
                await f.router._fleet.look()
            assert caplog.text.count("stay as they are") == 1
            assert engines(f) == [old.url]
            assert (await f.post(chat()))[0].status == 200
            write(path, decoders=[new.url])
            await until(lambda: engines(f) == [new.url])


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the one name that there is leads to; without any, it cannot be looked up."""
    found: list[str] = []

    async def resolve(loop: object, host: str, port: int, **options: Any) -> list[Any]:
        assert host == "decode.example"
        if not found:
            raise socket.gaierror("no such name")
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in found]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    return found


async def test_each_address_of_a_name_is_an_engine(
    addresses: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def at(*addresses: str) -> list[str]:
        return [f"http://{address}:9/base" for address in addresses]

    async with fleet(0, 0, 0, decoders_more=("dns+http://decode.example:9/base",)) as f:
        async with f.client.get(f.url + "/ready") as response:
            assert response.status == 503, "there is none yet"
        response, body = await f.post(chat())
        assert (response.status, json.loads(body)["error"]["code"]) == (503, "engine_unreachable")
        addresses[:] = ["127.0.0.3", "127.0.0.2"]
        await until(lambda: engines(f) == at("127.0.0.2", "127.0.0.3"))
        addresses.clear()
        caplog.clear()
        await until(lambda: "stay as they are: no such name" in caplog.text)
        assert engines(f) == at("127.0.0.2", "127.0.0.3")
        addresses[:] = [f"127.0.1.{number}" for number in range(300)]
        await until(lambda: len(engines(f)) == 256)


async def test_the_addresses_are_known_before_it_listens(addresses: list[str]) -> None:
    addresses.append("127.0.0.1")
    async with FakeEngine(decoded).serving() as d:
        name = d.url.replace("http://127.0.0.1", "dns+http://decode.example")
        async with fleet(0, 0, 0, decoders_more=(name,)) as f:
            assert (await f.post(chat()))[0].status == 200
            assert engines(f) == [d.url]


async def test_the_file_says_what_engines_are_used_for(path: Path, addresses: list[str]) -> None:
    addresses += ["127.0.0.2", "127.0.0.3"]

    def say(**models: list[str]) -> None:
        one = {"url": "http://127.0.0.1:9/v1", **models}
        write(path, decoders=[one, {"url": "dns+http://decode.example:9", "models": ["c"]}])

    def told() -> dict[str, Any]:
        return {each.url: each.models for each in f.router.pools[Stage.DECODE]}

    say(models=["b", "a"])
    async with from_file(path) as f:
        named = dict.fromkeys(("http://127.0.0.2:9", "http://127.0.0.3:9"), {"c"})
        assert told() == {"http://127.0.0.1:9": {"a", "b"}, **named}
        say()
        await until(lambda: told() == {"http://127.0.0.1:9": None, **named})


async def test_an_engine_that_hangs_and_goes_is_not_asked_for_its_health(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "ecshare.router")  # else pytest keeps the errors
    monkeypatch.setattr("ecshare.router.fleet.watch.POLL_EVERY_S", 0.02)
    async with (
        FakeEngine(Hanging(), healthy=False).serving() as hung,
        FakeEngine(decoded).serving() as well,
    ):
        write(path, decoders=[hung.url, well.url])
        async with from_file(path) as f:
            for _ in range(2):
                assert (await asyncio.wait_for(f.post(chat()), SOON_S))[0].status == 200
            write(path, decoders=[well.url])
            gone = [
                weakref.ref(each) for each in f.router.pools[Stage.DECODE] if each.health.is_hung
            ]
            await until(lambda: engines(f) == [well.url])
            await until(lambda: [ref() for ref in gone] == [None])
