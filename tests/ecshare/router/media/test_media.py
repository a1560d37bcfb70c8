# SPDX-License-Identifier: Apache-2.0
"""Media at urls: fetched once at a time, and again only if they have changed or are needed."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.api.client_request import MediaItem
from ecshare.router.http.bodies import Blobs, MemoryBudget, Reservation
from ecshare.router.media import loader as media_module
from ecshare.router.media.identity import identity
from ecshare.router.options.config import RouterConfig
from tests.ecshare.router.fake_engine import (
    LOOPBACK,
    PNG,
    PNG_2,
    Fleet,
    chat,
    data_url,
    decoded,
    failing,
    fleet,
    hang_up,
    picture,
)
from tests.ecshare.router.media.fake_media import media_server
from tests.ecshare.router.stages.test_encoded import media_of
from tests.waiting import until

ALL = "encode,prefill,decode"
ETAG = {"ETag": '"one"'}
OLD = {"Last-Modified": "Mon, 03 Nov 2025 10:00:00 GMT", "Date": "Mon, 03 Nov 2025 10:01:00 GMT"}


@dataclass
class Host:
    """A server of one picture; `asked` holds the headers that it was sent."""

    moved_to: str = ""
    """Where /picture redirects to, if it does."""
    content: bytes = PNG
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[dict[str, str]] = field(default_factory=list)
    is_unchanged: bool = False
    """It answers 304 to whoever asks for changes."""
    let_go: asyncio.Event | None = None
    url: str = ""

    async def serve(self, http: web.Request) -> web.StreamResponse:
        self.asked.append(dict(http.headers))
        if http.path == "/moved":
            raise web.HTTPFound("/picture")
        if http.path == "/picture" and self.moved_to:
            raise web.HTTPFound(self.moved_to)
        if self.let_go is not None:
            await self.let_go.wait()
        if self.is_unchanged and {"If-None-Match", "If-Modified-Since"} & http.headers.keys():
            return web.Response(status=304)
        return web.Response(body=self.content, headers=self.headers)

    @property
    def conditions(self) -> list[str | None]:
        return [each.get("If-None-Match") or each.get("If-Modified-Since") for each in self.asked]

    def body(self, text: str = "", path: str = "/picture") -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": self.url + path}}
        return chat({"type": "text", "text": text}, part)


@asynccontextmanager
async def known() -> AsyncIterator[tuple[Fleet, Host]]:
    """A picture that the router has fetched once, and that has not changed since."""
    async with hosted(headers=ETAG) as (f, host):
        await f.post(host.body())
        host.is_unchanged = True
        yield f, host


@asynccontextmanager
async def hosted(**options: Any) -> AsyncIterator[tuple[Fleet, Host]]:
    host = Host(headers=options.pop("headers", {}))
    async with (
        media_server(host.serve) as host.url,
        fleet(allow_media_networks=LOOPBACK, hand_over="after", **options) as f,
    ):
        yield f, host


async def downloads(f: Fleet) -> dict[str, int]:
    status: dict[str, int] = (await f.health())[1]["downloads"]
    return status


@pytest.mark.parametrize("headers", [ETAG, ETAG | OLD])
async def test_what_has_not_changed_is_not_fetched(headers: dict[str, str]) -> None:
    async with hosted(headers=headers) as (f, host):
        await f.post(host.body())
        host.is_unchanged = True
        response, _ = await f.post(host.body("and now?"))
        assert response.headers["x-ecshare-path"] == "prefill,decode"
        assert response.headers["x-ecshare-avoided"] == "encode"
        assert host.conditions == [None, '"one"']
        assert media_of(f.d.bodies[1])[-1] == media_of(f.d.bodies[0])[-1]
        status = await downloads(f)
        assert (status["fetched"], status["unchanged"]) == (1, 1)


async def test_a_validator_is_not_kept_of_where_a_url_leads() -> None:
    """The url may lead elsewhere the next time, to something with the same validator."""
    async with hosted(headers=ETAG) as (f, host):
        await f.post(host.body(path="/moved"))
        host.is_unchanged, host.content = True, PNG_2
        await f.post(host.body(path="/moved"))
        assert media_of(f.d.bodies[-1])[-1]["uuid"] == identity("image", data_url(PNG_2))
        assert host.conditions == [None] * 4


async def test_a_validator_is_not_sent_to_where_a_url_leads() -> None:
    async with known() as (f, host):
        host.content, host.moved_to = PNG_2, "/other"
        await f.post(host.body())
        assert media_of(f.d.bodies[-1])[-1]["uuid"] == identity("image", data_url(PNG_2))
        assert host.conditions == [None, '"one"', None]


async def test_what_has_changed_is_another_picture() -> None:
    async with hosted(headers=ETAG) as (f, host):
        await f.post(host.body())
        host.content, host.headers = PNG_2, {"ETag": '"two"'}
        for _ in range(2):
            response, _ = await f.post(host.body())
            assert media_of(f.d.bodies[-1])[-1]["uuid"] == identity("image", data_url(PNG_2))
            host.is_unchanged = True
        assert response.headers["x-ecshare-avoided"] == "encode"
        assert host.conditions == [None, '"one"', '"two"']
        assert len(f.e.bodies) == 2


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"ETag": 'W/"one"'},
        {"ETag": '"' + "x" * 300 + '"'},
        {"ETag": "one"},
        {"ETag": '"'},
        OLD,  # an older file may take its place
    ],
)
async def test_without_a_sure_sign_of_change_the_bytes_are_fetched(headers: dict[str, str]) -> None:
    async with hosted(headers=headers) as (f, host):
        for _ in range(2):
            response, _ = await f.post(host.body())
        assert response.headers["x-ecshare-avoided"] == "encode"
        assert host.conditions == [None, None]


async def test_bytes_that_e_needs_are_fetched_without_a_condition() -> None:
    async with hosted(headers=ETAG) as (f, host):
        f.e.answer = failing(500)
        await f.post(host.body())
        await f.post(host.body())
        assert host.conditions == [None, None]


async def test_beside_a_new_picture_a_known_one_may_go_without_bytes() -> None:
    async with known() as (f, host):
        both = host.body()
        both["messages"][0]["content"].append(picture(PNG_2))
        response, _ = await f.post(both)
        assert (response.status, response.headers["x-ecshare-path"]) == (200, ALL)
        assert [part["type"] for part in media_of(f.d.bodies[1])] == ["image_embeds"] * 2
        assert len(f.e.bodies) == 2


async def test_bytes_are_fetched_when_the_embedding_is_gone() -> None:
    async with known() as (f, host):

        async def lost(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (failing(500) if len(f.e.bodies) < 2 else decoded)(http, body)

        f.d.answer = lost
        response, _ = await f.post(host.body())
        assert (response.status, response.headers["x-ecshare-path"]) == (200, ALL)
        assert host.conditions == [None, '"one"', None]
        assert media_of(f.e.bodies[1])[0]["image_url"] == {
            "url": data_url(PNG, "application/octet-stream")
        }


@pytest.mark.parametrize("content", [PNG, PNG_2])
async def test_bytes_are_fetched_when_decode_answers_alone(content: bytes) -> None:
    async with known() as (f, host):
        host.content = content
        f.p.answer = hang_up
        response, _ = await f.post(host.body())
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        part = media_of(f.d.bodies[-1])[-1]
        assert part["uuid"] == identity("image", data_url(content)), "of what was sent"
        assert part["image_url"]["url"] == data_url(content, "application/octet-stream")


async def test_bytes_that_are_gone_when_they_are_needed_are_named() -> None:
    async with known() as (f, host):
        f.p.answer = hang_up
        host.content = b""
        response, body = await f.post(host.body())
        assert response.status == 400
        assert b"messages[0].content[2]" in body


async def are_waiting(f: Fleet, number: int) -> bool:
    return bool((await downloads(f))["waiting"] >= number)


@asynccontextmanager
async def at_the_same_moment(
    f: Fleet, host: Host, number: int
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Ask several times about one url; the block begins when all wait for the first."""
    host.let_go = asyncio.Event()
    asked = [asyncio.create_task(f.post(host.body("0")))]
    await until(lambda: host.asked)
    asked += [asyncio.create_task(f.post(host.body(str(n)))) for n in range(1, number)]
    await until(lambda: are_waiting(f, number - 1))
    yield asked


async def test_a_url_is_fetched_once_for_all_who_name_it() -> None:
    async with hosted() as (f, host), at_the_same_moment(f, host, 4) as asked:
        assert host.let_go is not None
        host.let_go.set()
        for each in asked:
            assert (await each)[0].status == 200
        assert len(host.asked) == 1
        assert len(f.e.bodies) == 1
        assert (await downloads(f))["shared"] == 3


async def test_a_client_that_leaves_takes_no_download_from_the_others() -> None:
    async with hosted() as (f, host), at_the_same_moment(f, host, 3) as asked:
        asked[0].cancel()
        await until(lambda: len(host.asked) >= 2)
        assert host.let_go is not None
        host.let_go.set()
        for each in asked[1:]:
            assert (await each)[0].status == 200
        assert len(host.asked) == 2


async def test_a_shared_download_counts_for_each_request() -> None:
    async with hosted(num_e=0, num_p=0, max_media_bytes=20) as (f, host):
        host.let_go = asyncio.Event()
        first = asyncio.create_task(f.post(host.body()))
        await until(lambda: host.asked)
        both = host.body()
        other = {"type": "image_url", "image_url": {"url": host.url + "/other"}}
        both["messages"][0]["content"].append(other)
        second = asyncio.create_task(f.post(both))
        await until(lambda: are_waiting(f, 1))
        host.let_go.set()
        assert (await first)[0].status == 200
        assert (await second)[0].status == 413


@pytest.mark.parametrize(
    ("num_bytes", "on_the_loop"), [(5000, True), (200_000, True), (1_000_000, False)]
)
async def test_large_inline_media_are_hashed_off_the_event_loop(
    num_bytes: int, on_the_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(*args: Any) -> str:
        threads.append(threading.current_thread())
        return identity(*args)

    monkeypatch.setattr(media_module, "identity", noted)
    async with fleet() as f:
        response, _ = await f.post(chat(picture(b"x" * num_bytes)))
        assert response.status == 200
    assert threads
    assert (threading.main_thread() in threads) is on_the_loop


async def test_others_go_on_while_many_small_media_are_hashed() -> None:
    class Others:
        """Counts how often the event loop gets to others."""

        turns = 0

        async def go_on(self) -> None:
            while True:
                self.turns += 1
                await asyncio.sleep(0)

    number = 32
    url = data_url(bytes(300_000))
    items = [
        MediaItem(("messages", 0, n), "image_url", url + "A" * 4 * n, "image")
        for n in range(number)
    ]
    others, memory = Others(), MemoryBudget(2**30)
    loader = media_module.MediaLoader(RouterConfig(decoders=()))
    beside = asyncio.create_task(others.go_on())
    loaded = await loader.load(items, Blobs(), Reservation(memory))
    beside.cancel()
    await loader.close()
    assert len({held.uuid for held in loaded}) == number
    assert others.turns >= number - 1
