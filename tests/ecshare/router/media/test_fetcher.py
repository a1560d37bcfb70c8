# SPDX-License-Identifier: Apache-2.0
"""What the router can fetch, and that those who name bad servers harm nobody else."""

import asyncio
import base64
import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from ipaddress import ip_network
from typing import Any

import pytest
from aiohttp import web

from ecshare import __version__
from ecshare.router.media import places
from ecshare.router.types import Stage
from tests.ecshare.router.bodies import PNG, chat, media_of, picture
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.media.fake_media import answering, at, served
from tests.ecshare.router.media.fake_names import SILENT, routers_ask
from tests.waiting import until

MIB = 1024 * 1024


def got(f: Fleet) -> bytes:
    """The bytes of the picture that D got last."""
    url: str = media_of(f.d.bodies[-1])[-1]["image_url"]["url"]
    return base64.b64decode(url.partition(",")[2])


def deflated(content: bytes, window: int) -> bytes:
    packer = zlib.compressobj(wbits=window)
    return packer.compress(content) + packer.flush()


GZIPPED = gzip.compress(PNG, mtime=0)
IN_TWO = gzip.compress(PNG[:5], mtime=0) + gzip.compress(PNG[5:], mtime=0)


@pytest.mark.parametrize(
    ("packing", "packed", "answered", "status"),
    [
        ("gzip", GZIPPED, 200, 200),
        ("GZip", GZIPPED, 200, 200),
        ("gzip", IN_TWO, 200, 200),
        ("deflate", deflated(PNG, 15), 200, 200),
        ("deflate", deflated(PNG, -15), 200, 200),
        *(("identity", PNG, answered, 200) for answered in (200, 201, 203, 206)),
        ("rot13", PNG, 200, 422),
        ("gzip", PNG, 200, 502),
    ],
)
async def test_every_success_is_one_and_what_is_packed_is_unpacked(
    packing: str, packed: bytes, answered: int, status: int
) -> None:
    serve = answering(packed, status=answered, headers={"Content-Encoding": packing})
    async with served(serve) as (f, url):
        assert (await f.post(at(url + "/a")))[0].status == status
        assert [got(f) for _ in f.d.bodies] == ([PNG] if status == 200 else [])


async def test_what_is_packed_counts_as_what_it_holds() -> None:
    """256 MiB of zeros, packed into a quarter of one."""
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(MIB)) for _ in range(256)) + packer.flush()
    most = 0

    async def watch(f: Fleet) -> None:
        nonlocal most
        while True:
            most = max(most, f.router.known()["memory"])
            await asyncio.sleep(0)

    serve = answering(bomb, headers={"Content-Encoding": "gzip"})
    async with served(serve, max_media_bytes=32 * MIB) as (f, url):
        beside = asyncio.create_task(watch(f))
        response, body = await f.post(at(url + "/a"))
        beside.cancel()
    assert (response.status, json.loads(body)["error"]["code"]) == (413, "media_too_large")
    assert not f.d.bodies
    assert 2 * MIB < most < 50 * MIB, "others had their turn meanwhile, and saw what it took"


@pytest.mark.parametrize(("number", "status"), [(0, 200), (4, 200), (10, 200), (11, 422)])
async def test_redirects_are_followed_as_far_as_vllm_does(number: int, status: int) -> None:
    agents = []

    async def serve(http: web.Request) -> web.StreamResponse:
        agents.append(http.headers["User-Agent"])
        left = int(http.match_info["name"])
        if left:
            raise web.HTTPFound(f"/{left - 1}")
        return web.Response(body=PNG)

    async with served(serve) as (f, url):
        assert (await f.post(at(f"{url}/{number}")))[0].status == status
    # The router names itself, and where to complain.
    assert re.fullmatch(rf"ecshare/{re.escape(__version__)} \(\+https://\S+\)", agents[-1])


class Silent:
    """Media whose server never answers, but for /picture."""

    def __init__(self) -> None:
        self.open: list[str] = []

    async def serve(self, http: web.Request) -> web.StreamResponse:
        if http.path.startswith("/picture"):
            return web.Response(body=PNG)
        self.open.append(http.path)
        try:
            await asyncio.Event().wait()
        finally:
            self.open.remove(http.path)
        raise AssertionError

    async def has(self, number: int) -> None:
        """Wait until so many downloads are under way."""
        await until(lambda: len(self.open) == number)


@pytest.fixture
def silent() -> Silent:
    return Silent()


def urls(host: str, number: int, name: str = "") -> list[str]:
    return [f"{host}/silent{name}-{n}" for n in range(number)]


@asynccontextmanager
async def in_the_way(f: Fleet, *bodies: dict[str, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Requests that are under way as long as the block."""
    asked = [asyncio.create_task(f.post(body)) for body in bodies]
    try:
        yield asked
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_host_leaves_half_of_what_is_free_to_others(silent: Silent) -> None:
    """The one that is beyond is told so; those before it go on."""
    # 16 places: two requests take eight of them.
    async with (
        served(silent.serve, max_connections=16) as (f, url),
        in_the_way(f, at(*urls(url, 4, "a")), at(*urls(url, 4, "b"))) as asked,
    ):
        await silent.has(8)
        response, body = await f.post(at(url + "/picture"))
        assert (response.status, response.headers["Retry-After"]) == (429, "2")
        assert json.loads(body)["error"]["code"] == "too_many_downloads"
        other = at(url.replace("127.0.0.1", "localhost") + "/picture")
        for served_all_the_same in (other, other, chat(picture(PNG))):
            assert (await f.post(served_all_the_same))[0].status == 200
        assert not any(each.done() for each in asked)
        assert len(silent.open) == 8
        assert (await f.health())[1]["downloads"]["refused"] == 1


async def test_a_place_is_free_when_its_request_ends(silent: Silent) -> None:
    async with served(silent.serve, max_connections=16) as (f, url):
        for _ in range(3):
            async with in_the_way(f, at(*urls(url, 64))):
                await silent.has(8)
            await silent.has(0)
        assert (await f.post(at(url + "/picture")))[0].status == 200


async def test_slow_downloads_end_where_others_need_their_places(
    silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many silent servers as there are places; their requests may be tried again."""
    hosts = [f"h{n}.example" for n in range(17)]
    async with (
        routers_ask(monkeypatch, {host: ["127.0.0.1"] for host in hosts}),
        served(silent.serve, max_connections=16) as (f, url),
    ):
        *bad, good = (url.replace("127.0.0.1", host) for host in hosts)
        several = at(*(each + "/silent" for each in bad[:8]))
        single = [at(each + "/silent") for each in bad[8:]]
        async with in_the_way(f, several) as first:
            await silent.has(8)
            async with in_the_way(f, *single) as others:
                await silent.has(16)
                assert (await f.post(at(good + "/picture")))[0].status == 429
                monkeypatch.setattr(places, "_SLOW_S", 0.0)  # two seconds later, so to say
                assert (await f.post(at(good + "/picture")))[0].status == 200
                response, _ = await first[0]
                assert (response.status, response.headers["Retry-After"]) == (502, "2")
                assert not any(each.done() for each in others)
                await until(lambda: len(silent.open) == 8)


async def test_beside_silent_names_all_others_are_served(
    silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, pictures in the request, and pictures of other names."""
    names = [f"http://h{n}.{SILENT}/a" for n in range(64)]
    async with (
        routers_ask(monkeypatch, {"a.example": ["127.0.0.1"]}) as server,
        served(silent.serve) as (f, url),
        in_the_way(f, at(*names)) as asked,
    ):
        await until(lambda: len(set(server.asked)) >= 8)
        named = url.replace("127.0.0.1", "a.example") + "/picture"
        large = picture(bytes(1_000_000))
        for body in (chat(), chat(large), at(named), at(url + "/picture")):
            assert (await f.post(body))[0].status == 200
        assert not asked[0].done()
        assert len({name for name in server.asked if name.endswith(SILENT)}) == 8


async def test_no_name_leads_to_an_address_that_is_not_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        routers_ask(monkeypatch, {"a.example": ["127.0.0.1"]}),
        served(allow_media_networks=()) as (f, url),
    ):
        status, error = await f.error(at(url.replace("127.0.0.1", "a.example") + "/a"))
        assert (status, error["code"]) == (502, "media_unavailable")
        assert not f.d.bodies


class Forward:
    """A proxy on this host, which answers by itself."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.hello = b""
        """What came after a CONNECT."""

    @property
    def asked(self) -> list[str]:
        return [head.partition("\r\n")[0] for head in self.heads]

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("CONNECT"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            self.hello = await reader.read(4096)
        else:
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(PNG)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + PNG)
        writer.close()


ADDRESSES = {
    "a.example": ["192.0.2.7"],
    "private.example": ["10.0.0.1"],
    "direct.example": ["127.0.0.1"],
}
Proxied = Callable[..., AbstractAsyncContextManager[tuple[Fleet, Forward]]]


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Proxied:
    """A router whose environment names a proxy; media may come from 192.0.2.0/24 alone."""

    @asynccontextmanager
    async def proxied(login: str = "", **options: Any) -> AsyncIterator[tuple[Fleet, Forward]]:
        forward, allowed = Forward(), (ip_network("192.0.2.0/24"),)
        async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
            url = f"http://{login}127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for name, value in (("http", url), ("https", url), ("no", "direct.example")):
                monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)
                monkeypatch.setenv(f"{name}_proxy", value)
            async with (
                routers_ask(monkeypatch, ADDRESSES),
                fleet(0, 0, allow_media_networks=allowed, **options) as f,
            ):
                yield f, forward

    return proxied


async def test_proxies_of_the_environment_are_used_and_told_addresses(proxied: Proxied) -> None:
    async with proxied("me:secret@") as (f, forward):
        assert (await f.post(at("http://a.example:81/b")))[0].status == 200
        assert got(f) == PNG
        assert (await f.post(at("https://a.example/b")))[0].status == 502
    get, connect = "GET http://192.0.2.7:81/b HTTP/1.1", "CONNECT 192.0.2.7:443 HTTP/1.1"
    assert forward.asked == [get, connect]
    assert "\r\nHost: a.example:81\r\n" in forward.heads[0]
    login = base64.b64encode(b"me:secret").decode()
    for head in forward.heads:
        assert f"\r\nProxy-Authorization: Basic {login}\r\n" in head
    assert b"a.example" in forward.hello, "whose certificate it must be"


LOCAL = ("127.0.0.1", "10.0.0.1", "[::1]", "2130706433", "127.1", "0x7f000001")


@pytest.mark.parametrize("resolves", [False, True])
@pytest.mark.parametrize(
    ("host", "status"), [*((host, 400) for host in LOCAL), ("direct.example", 502)]
)
async def test_no_proxy_leads_to_an_address_that_is_not_allowed(
    host: str, status: int, resolves: bool, proxied: Proxied
) -> None:
    async with proxied(media_proxy_resolves=resolves) as (f, forward):
        assert (await f.post(at(f"http://{host}/")))[0].status == status
        assert not forward.asked


@pytest.mark.parametrize(
    ("host", "resolves", "status"),
    [
        ("unknown.example", False, 502),
        ("private.example", False, 502),
        ("unknown.example", True, 200),
    ],
)
async def test_a_proxy_gets_names_only_if_the_operator_says_so(
    host: str, resolves: bool, status: int, proxied: Proxied
) -> None:
    async with proxied(media_proxy_resolves=resolves) as (f, forward):
        assert (await f.post(at(f"http://{host}/a")))[0].status == status
        assert forward.asked == ([f"GET http://{host}/a HTTP/1.1"] if resolves else [])


async def test_engines_are_asked_without_a_proxy(proxied: Proxied) -> None:
    async with proxied() as (f, forward):
        assert (await f.post(chat()))[0].status == 200
        assert await f.router.client.is_healthy(next(iter(f.router.pools[Stage.DECODE])), 2.0)
        assert not forward.asked


@pytest.mark.parametrize("proxy", ["socks5://me:secret@127.0.0.1:1", "http://", "http://["])
async def test_a_proxy_of_another_kind_is_ignored_in_one_line_of_the_log(
    proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    async with served() as (f, url):
        assert (await f.post(at(url + "/a")))[0].status == 200
    assert "http_proxy is ignored" in caplog.text
    assert "secret" not in caplog.text
