# SPDX-License-Identifier: Apache-2.0
"""Routers that share what E has reported, in a folder that others may write to."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ecshare.store.config import StoreConfig
from ecshare.store.folder.store import DirectoryStore
from tests.ecshare.router.fake_engine import (
    PNG,
    PNG_2,
    Fleet,
    chat,
    decoded,
    failing,
    fleet,
    picture,
    prefilled,
)
from tests.ecshare.router.test_encoded import encodes, media_of
from tests.waiting import until

ALL = "encode,prefill,decode"
KEY = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
OTHER_KEY = KEY[::-1]


def config(root: Path, **options: Any) -> StoreConfig:
    return StoreConfig(url=str(root / "store"), **options)


def records(root: Path) -> list[Path]:
    found = (root / "store" / "router").rglob("*")
    return [path for path in found if path.is_file() and not path.name.startswith(".")]


@asynccontextmanager
async def stored(root: Path, number: int = 1, **options: Any) -> AsyncIterator[None]:
    """One router has stored what E reported; the block begins when it is there."""
    async with fleet(store=config(root, **options)) as f:
        await f.post(chat(*map(picture, (PNG, PNG_2)[:number])))
        assert len(f.e.bodies) == number
        await until(lambda: len(records(root)) >= number)
    yield


async def restored(root: Path, damage: bytes) -> None:
    """Return when the damaged record has been replaced."""
    await until(lambda: [path.read_bytes() for path in records(root)] != [damage])


async def ask(f: Fleet, *contents: bytes) -> web.StreamResponse | Any:
    response, _ = await f.post(chat(*map(picture, contents or (PNG,))))
    assert response.status == 200
    return response


@pytest.mark.parametrize("key", ["", KEY])
async def test_what_one_router_knows_another_one_does(tmp_path: Path, key: str) -> None:
    async with (
        stored(tmp_path, integrity_key=key),
        fleet(store=config(tmp_path, integrity_key=key)) as f,
    ):
        response = await ask(f)
        assert response.headers["x-ecshare-path"] == "prefill,decode"
        assert response.headers["x-ecshare-avoided"] == "encode"
        assert f.e.bodies == []
        assert media_of(f.d.bodies[0])[0]["type"] == "image_embeds"
        shutil.rmtree(tmp_path / "store")
        await ask(f)
        assert f.e.bodies == []
        status = await encodes(f)
        assert (status["asked"], status["avoided"], status["remembered"]) == (0, 2, 1)


async def test_another_epoch_is_another_fleet(tmp_path: Path) -> None:
    async with stored(tmp_path), fleet(store=config(tmp_path, epoch="2")) as f:
        assert (await ask(f)).headers["x-ecshare-path"] == ALL


async def test_without_the_option_nothing_is_shared(tmp_path: Path) -> None:
    async with stored(tmp_path), fleet() as f:
        assert (await ask(f)).headers["x-ecshare-path"] == ALL


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda body: json.dumps(json.loads(body) | fields).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: b"",
        lambda body: body[:-1],
        lambda body: b"\xff" + body,
        lambda body: b"[" * 60_000,
        lambda body: body + b" " * 70_000,
        changed(name="0" * 64),
        changed(more=1),
        changed(metadata={}),
        changed(metadata=None),
        changed(metadata={"image_grid_thw": "x"}),
        changed(metadata={"image_grid_thw": [[1]]}),
    ],
)
async def test_what_is_no_report_is_replaced(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    async with stored(tmp_path), fleet(store=config(tmp_path)) as f:
        (path,) = records(tmp_path)
        good, bad = path.read_bytes(), damage(path.read_bytes())
        path.chmod(0o600)
        path.write_bytes(bad)
        assert (await ask(f)).headers["x-ecshare-path"] == ALL
        await restored(tmp_path, bad)
        assert path.read_bytes() == good


@pytest.mark.parametrize(
    ("writer", "damage"),
    [
        (KEY, changed(metadata={"image_grid_thw": [1, 9, 9]})),
        (KEY, changed(mac="")),
        (OTHER_KEY, lambda body: body),
        ("", lambda body: body),
    ],
)
async def test_with_a_key_a_report_must_have_its_mac(
    tmp_path: Path, writer: str, damage: Callable[[bytes], bytes]
) -> None:
    async with (
        stored(tmp_path, integrity_key=writer),
        fleet(store=config(tmp_path, integrity_key=KEY)) as f,
    ):
        (path,) = records(tmp_path)
        path.chmod(0o600)
        path.write_bytes(damage(path.read_bytes()))
        assert (await ask(f)).headers["x-ecshare-path"] == ALL


async def test_one_pictures_report_is_not_another_ones(tmp_path: Path) -> None:
    async with (
        stored(tmp_path, 2, integrity_key=KEY),
        fleet(store=config(tmp_path, integrity_key=KEY)) as f,
    ):
        one, two = records(tmp_path)
        for path in (one, two):
            path.chmod(0o600)
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        await ask(f, PNG, PNG_2)
        assert len(f.e.bodies) == 2


@pytest.mark.parametrize("num_p", [0, 1])
async def test_a_client_does_not_suffer_from_a_report_that_engines_refuse(
    tmp_path: Path, num_p: int
) -> None:
    async with stored(tmp_path), fleet(num_p=num_p, store=config(tmp_path)) as f:
        (path,) = records(tmp_path)
        path.chmod(0o600)
        bad = changed(metadata={"no_such_field": [1]})(path.read_bytes())
        path.write_bytes(bad)

        async def strict(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            is_bad = "no_such_field" in media_of(body)[0].get("image_embeds", {})
            return await (failing(400) if is_bad else prefilled if num_p else decoded)(http, body)

        (f.p if num_p else f.d).answer = strict
        await ask(f)
        assert len(f.e.bodies) == 1
        await restored(tmp_path, bad)


async def test_a_report_that_served_is_believed(tmp_path: Path) -> None:
    async with stored(tmp_path), fleet(store=config(tmp_path), hand_over="after") as f:
        await ask(f)
        f.p.answer = failing(400)
        response, _ = await f.post(chat(picture(PNG), max_tokens=-1))
        assert response.status == 400
        assert f.e.bodies == [], "the client's own mistake"


async def test_of_what_is_gone_the_store_is_not_asked_again(tmp_path: Path) -> None:
    async with stored(tmp_path), fleet(store=config(tmp_path)) as f:

        async def lost(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            is_lean = media_of(body)[0]["type"] == "image_embeds"
            return await (failing(500) if is_lean and not f.e.bodies else decoded)(http, body)

        f.d.answer = lost
        assert (await ask(f)).headers["x-ecshare-path"] == ALL
        assert len(f.e.bodies) == 1


async def test_a_store_that_takes_no_reports_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang(*_: Any, **__: Any) -> bool:
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(DirectoryStore, "put", hang)
    async with fleet(store=config(tmp_path, io_timeout_s=0.05)) as f:
        await f.post(chat(picture(PNG)))
        await until(lambda: "cannot be written" in caplog.text)


async def test_a_store_that_fails_costs_nothing_but_hits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(store=config(tmp_path)) as f:
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").write_text("no folder")
        for content in (PNG, PNG_2):
            assert (await ask(f, content)).headers["x-ecshare-path"] == ALL
        (tmp_path / "store").unlink()
        (tmp_path / "store").mkdir(mode=0o700)
        f.clock.now_s += 10
        await ask(f, b"a third")
        await until(lambda: records(tmp_path))
    assert "--store: shared reports cannot be" in caplog.text
