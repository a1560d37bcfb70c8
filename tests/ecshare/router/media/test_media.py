# SPDX-License-Identifier: Apache-2.0
"""Media at urls: fetched once at a time, and again only if they have changed or are needed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.client_request import MediaItem
from ecshare.router.http.bodies import Blobs, MemoryBudget, Reservation
from ecshare.router.media import loader as media_module
from ecshare.router.media.identity import identity
from ecshare.router.options.config import RouterConfig
from tests.ecshare.router import answers, fake_engine
from tests.ecshare.router.bodies import PNG, PNG_2, chat, data_url, media_of, picture
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.held import soon
from tests.ecshare.router.media.fake_media import media_server
from tests.waiting import until

ALL = "encode,prefill,decode"
ETAG = {"ETag": '"one"'}
OLD = {"Last-Modified": "Mon, 03 Nov 2025 10:00:00 GMT", "Date": "Mon, 03 Nov 2025 10:01:00 GMT"}


@dataclass
class Host:
    """A server of one picture, and a fleet; `asked` holds the headers that it was sent."""

    headers: dict[str, str] = field(default_factory=dict)
    moved_to: str = ""
    """Where /picture redirects to, if it does."""
    content: bytes = PNG
    asked: list[dict[str, str]] = field(default_factory=list)
    is_unchanged: bool = False
    """It answers 304 to whoever asks for changes."""
    let_go: asyncio.Event | None = None
    url: str = ""
    f: Fleet = field(init=False)

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

    @property
    def sent(self) -> dict[str, Any]:
        """What D got last for the picture."""
        part: dict[str, Any] = media_of(self.f.d.bodies[-1])[-1]
        return part

    async def ask(
        self, *more: object, path: str = "/picture"
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Have the router answer about the picture, and about more."""
        return await self.f.post(
            chat({"type": "image_url", "image_url": {"url": self.url + path}}, *more)
        )

    async def downloads(self) -> dict[str, int]:
        status: dict[str, int] = (await self.f.health())[1]["downloads"]
        return status

    async def are_waiting(self, number: int) -> bool:
        return (await self.downloads())["waiting"] >= number

    async def at_once(self, number: int) -> list[asyncio.Task[Any]]:
        """Ask several times; returns when all wait for the first, which the host holds."""
        self.let_go = asyncio.Event()
        asked = [asyncio.create_task(self.ask())]
        await until(lambda: self.asked)
        others = [{"type": "text", "text": str(n)} for n in range(1, number)]
        asked += [asyncio.create_task(self.ask(each)) for each in others]
        await until(lambda: self.are_waiting(number - 1))
        return asked


@asynccontextmanager
async def hosted(headers: dict[str, str], **options: Any) -> AsyncIterator[Host]:
    host = Host(headers)
    async with (
        media_server(host.serve) as host.url,
        fleet(allow_media_networks=fake_engine.LOOPBACK, hand_over="after", **options) as host.f,
    ):
        yield host


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    """A picture with a validator."""
    async with hosted(ETAG) as host:
        yield host


@pytest.fixture
async def known(host: Host) -> Host:
    """A picture that the router has fetched once, and that has not changed since."""
    await host.ask()
    host.is_unchanged = True
    return host


def uuid(content: bytes) -> str:
    return identity("image", data_url(content))


@pytest.mark.parametrize("headers", [ETAG, ETAG | OLD])
async def test_what_has_not_changed_is_not_fetched(headers: dict[str, str]) -> None:
    async with hosted(headers) as host:
        await host.ask()
        first, host.is_unchanged = host.sent, True
        response, _ = await host.ask({"type": "text", "text": "and now?"})
        assert response.headers["x-ecshare-path"] == "prefill,decode"
        assert response.headers["x-ecshare-avoided"] == "encode"
        assert host.conditions == [None, '"one"']
        assert host.sent == first
        status = await host.downloads()
        assert (status["fetched"], status["unchanged"]) == (1, 1)


async def test_a_validator_is_not_kept_of_where_a_url_leads(host: Host) -> None:
    """The url may lead elsewhere the next time, to something with the same validator."""
    await host.ask(path="/moved")
    host.is_unchanged, host.content = True, PNG_2
    await host.ask(path="/moved")
    assert host.sent["uuid"] == uuid(PNG_2)
    assert host.conditions == [None] * 4


async def test_a_validator_is_not_sent_to_where_a_url_leads(known: Host) -> None:
    known.content, known.moved_to = PNG_2, "/other"
    await known.ask()
    assert known.sent["uuid"] == uuid(PNG_2)
    assert known.conditions == [None, '"one"', None]


async def test_what_has_changed_is_another_picture(host: Host) -> None:
    await host.ask()
    host.content, host.headers = PNG_2, {"ETag": '"two"'}
    for _ in range(2):
        response, _ = await host.ask()
        assert host.sent["uuid"] == uuid(PNG_2)
        host.is_unchanged = True
    assert response.headers["x-ecshare-avoided"] == "encode"
    assert host.conditions == [None, '"one"', '"two"']
    assert len(host.f.e.bodies) == 2


async def test_a_validator_goes_with_the_bytes_that_it_stood_for(known: Host) -> None:
    known.is_unchanged, known.content, known.headers = False, PNG_2, {}
    await known.ask()
    known.is_unchanged = True
    await known.ask()
    assert known.sent["uuid"] == uuid(PNG_2)
    assert known.conditions == [None, '"one"', None]


@pytest.mark.parametrize(
    "headers",
    [
        *({}, {"ETag": 'W/"one"'}, {"ETag": '"' + "x" * 300 + '"'}, {"ETag": "one"}, {"ETag": '"'}),
        OLD,  # an older file may take its place
    ],
)
async def test_without_a_sure_sign_of_change_the_bytes_are_fetched(headers: dict[str, str]) -> None:
    async with hosted(headers) as host:
        for _ in range(2):
            response, _ = await host.ask()
        assert response.headers["x-ecshare-avoided"] == "encode"
        assert host.conditions == [None, None]


async def test_bytes_that_e_needs_are_fetched_without_a_condition(host: Host) -> None:
    host.f.e.answer = answers.failing(500)
    for _ in range(2):
        await host.ask()
    assert host.conditions == [None, None]


async def test_beside_a_new_picture_a_known_one_may_go_without_bytes(known: Host) -> None:
    response, _ = await known.ask(picture(PNG_2))
    assert (response.status, response.headers["x-ecshare-path"]) == (200, ALL)
    assert [part["type"] for part in media_of(known.f.d.bodies[1])] == ["image_embeds"] * 2
    assert len(known.f.e.bodies) == 2


async def test_bytes_are_fetched_when_the_embedding_is_gone(known: Host) -> None:
    f = known.f

    async def lost(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (answers.failing(500) if len(f.e.bodies) < 2 else answers.decoded)(http, body)

    f.d.answer = lost
    response, _ = await known.ask()
    assert (response.status, response.headers["x-ecshare-path"]) == (200, ALL)
    assert known.conditions == [None, '"one"', None]
    url = data_url(PNG, "application/octet-stream")
    assert media_of(f.e.bodies[1])[0]["image_url"] == {"url": url}


async def test_what_another_request_brings_back_meanwhile_is_not_encoded_once_more(
    known: Host,
) -> None:
    f = known.f

    async def lost(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_lean = media_of(body)[-1]["type"] == "image_embeds"
        return await (answers.failing(500) if is_lean else answers.decoded)(http, body)

    held, known.let_go = f.d.hold(lost), asyncio.Event()
    known.let_go.set()
    asked = asyncio.create_task(known.ask())
    await soon(held.asked)
    known.let_go.clear()
    held.let_go.set()
    await until(lambda: len(known.asked) == 3)
    assert await f.way(chat(picture(PNG))) == "decode"
    known.let_go.set()
    assert (await asked)[0].headers["x-ecshare-path"] == "decode"
    assert (len(f.e.bodies), f.count("encodes", "repeated")) == (2, 1)


@pytest.mark.parametrize("content", [PNG, PNG_2])
async def test_bytes_are_fetched_when_decode_answers_alone(content: bytes, known: Host) -> None:
    known.content = content
    known.f.p.answer = answers.hang_up
    response, _ = await known.ask()
    assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
    assert known.sent["uuid"] == uuid(content), "of what was sent"
    assert known.sent["image_url"]["url"] == data_url(content, "application/octet-stream")


async def test_bytes_that_are_gone_when_they_are_needed_are_named(known: Host) -> None:
    known.f.p.answer = answers.hang_up
    known.content = b""
    response, body = await known.ask()
    assert response.status == 400
    assert b"messages[0].content[1]" in body


async def test_a_url_is_fetched_once_for_all_who_name_it(host: Host) -> None:
    asked = await host.at_once(4)
    assert host.let_go is not None
    host.let_go.set()
    assert [(await each)[0].status for each in asked] == [200] * 4
    assert len(host.asked) == len(host.f.e.bodies) == 1
    assert (await host.downloads())["shared"] == 3


async def test_a_client_that_leaves_takes_no_download_from_the_others(host: Host) -> None:
    gone, *asked = await host.at_once(3)
    gone.cancel()
    await until(lambda: len(host.asked) >= 2)
    assert host.let_go is not None
    host.let_go.set()
    assert [(await each)[0].status for each in asked] == [200] * 2
    assert len(host.asked) == 2


async def test_a_shared_download_counts_for_each_request() -> None:
    async with hosted({}, num_e=0, num_p=0, max_media_bytes=20) as host:
        (first,) = await host.at_once(1)
        other = {"type": "image_url", "image_url": {"url": host.url + "/other"}}
        second = asyncio.create_task(host.ask(other))
        await until(lambda: host.are_waiting(1))
        assert host.let_go is not None
        host.let_go.set()
        assert [(await each)[0].status for each in (first, second)] == [200, 413]


@pytest.mark.parametrize(
    ("num_bytes", "on_the_loop"), [(5000, True), (200_000, True), (1_000_000, False)]
)
async def test_large_inline_media_are_hashed_in_threads_of_their_own(
    num_bytes: int, on_the_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    used = []

    def noted(executor: object, *args: Any) -> Any:
        used.append(executor)
        return type(loop).run_in_executor(loop, executor, *args)  # type: ignore[arg-type]

    async with fleet() as f:
        monkeypatch.setattr(loop, "run_in_executor", noted)
        assert (await f.post(chat(picture(b"x" * num_bytes))))[0].status == 200
    assert (not used) is on_the_loop
    assert None not in used, "the loop's own, which looks engines up and reads --engines"


async def test_others_go_on_while_many_small_media_are_hashed() -> None:
    num_turns = 0

    async def go_on() -> None:
        """Count how often the event loop gets to others."""
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    number = 32
    urls = [data_url(bytes(300_000)) + "A" * 4 * n for n in range(number)]
    items = [MediaItem(("messages", 0, n), "image_url", url, "image") for n, url in enumerate(urls)]
    loader = media_module.MediaLoader(RouterConfig(decoders=()))
    beside = asyncio.create_task(go_on())
    loaded = await loader.load(items, Blobs(), Reservation(MemoryBudget(2**30)))
    beside.cancel()
    await loader.close()
    assert len({held.uuid for held in loaded}) == number
    assert num_turns >= number - 1
