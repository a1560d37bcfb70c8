# SPDX-License-Identifier: Apache-2.0
"""What the router can fetch, and that those who name bad servers harm nobody else."""

import asyncio
import base64
import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from typing import Any

import pytest
from aiohttp import web

from ecshare import __version__
from ecshare.router.media import places
from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import (
    PNG,
    Fleet,
    chat,
    fleet,
    picture,
)
from tests.ecshare.router.media.fake_media import at, served
from tests.ecshare.router.media.fake_names import SILENT, routers_ask
from tests.ecshare.router.stages.test_encoded import media_of
from tests.waiting import until

MIB = 1024 * 1024


def got(f: Fleet) -> bytes:
    """The bytes of the picture that D got last."""
    url: str = media_of(f.d.bodies[-1])[-1]["image_url"]["url"]
    return base64.b64decode(url.partition(",")[2])


async def test_the_router_names_itself_and_where_to_complain() -> None:
    seen = []

    async def serve(http: web.Request) -> web.StreamResponse:
        seen.append(http.headers["User-Agent"])
        return web.Response(body=PNG)

    async with served(serve) as (f, url):
        assert (await f.post(at(url + "/a")))[0].status == 200
    (agent,) = seen
    assert re.fullmatch(rf"ecshare/{re.escape(__version__)} \(\+https://\S+\)", agent)


def deflated(content: bytes, window: int) -> bytes:
    packer = zlib.compressobj(wbits=window)
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize(
    ("packing", "packed"),
    [
        ("gzip", gzip.compress(PNG, mtime=0)),
        ("GZip", gzip.compress(PNG, mtime=0)),
        ("gzip", gzip.compress(PNG[:5], mtime=0) + gzip.compress(PNG[5:], mtime=0)),
        ("deflate", deflated(PNG, 15)),
        ("deflate", deflated(PNG, -15)),
        ("identity", PNG),
    ],
)
async def test_what_is_packed_is_unpacked(packing: str, packed: bytes) -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": packing})

    async with served(serve) as (f, url):
        assert (await f.post(at(url + "/a")))[0].status == 200
        assert got(f) == PNG


async def test_what_cannot_be_unpacked_does_not_reach_an_engine() -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        return web.Response(body=PNG, headers={"Content-Encoding": http.match_info["name"]})

    async with served(serve) as (f, url):
        assert (await f.post(at(url + "/rot13")))[0].status == 422
        assert (await f.post(at(url + "/gzip")))[0].status == 502
        assert not f.d.bodies


async def test_what_is_packed_counts_as_what_it_holds() -> None:
    """256 MiB of zeros, packed into a quarter of one."""
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(MIB)) for _ in range(256)) + packer.flush()
    most = 0

    async def serve(http: web.Request) -> web.StreamResponse:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async def watch(f: Fleet) -> None:
        nonlocal most
        while True:
            most = max(most, f.router.known()["memory"])
            await asyncio.sleep(0)

    async with served(serve, max_media_bytes=32 * MIB) as (f, url):
        beside = asyncio.create_task(watch(f))
        response, body = await f.post(at(url + "/a"))
        beside.cancel()
        assert response.status == 413
        assert json.loads(body)["error"]["code"] == "media_too_large"
        assert not f.d.bodies
    assert 2 * MIB < most < 50 * MIB, "others had their turn meanwhile, and saw what it took"


@pytest.mark.parametrize(("number", "status"), [(0, 200), (4, 200), (10, 200), (11, 422)])
async def test_redirects_are_followed_as_far_as_vllm_does(number: int, status: int) -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        left = int(http.match_info["name"])
        if left:
            raise web.HTTPFound(f"/{left - 1}")
        return web.Response(body=PNG)

    async with served(serve) as (f, url):
        assert (await f.post(at(f"{url}/{number}")))[0].status == status


@pytest.mark.parametrize("status", [200, 201, 203, 206])
async def test_every_success_with_a_body_is_one(status: int) -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=PNG)

    async with served(serve) as (f, url):
        assert (await f.post(at(url + "/a")))[0].status == 200
        assert got(f) == PNG


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


async def test_a_host_leaves_half_of_what_is_free_to_others() -> None:
    """The one that is beyond is told so; those before it go on."""
    silent = Silent()
    # 16 places: two requests take eight of them.
    async with (
        served(silent.serve, max_connections=16) as (f, url),
        in_the_way(f, at(*urls(url, 4, "a")), at(*urls(url, 4, "b"))) as asked,
    ):
        await until(lambda: len(silent.open) == 8)
        response, body = await f.post(at(url + "/picture"))
        assert (response.status, response.headers["Retry-After"]) == (429, "2")
        assert json.loads(body)["error"]["code"] == "too_many_downloads"
        other = url.replace("127.0.0.1", "localhost")
        assert (await f.post(at(other + "/picture")))[0].status == 200
        assert (await f.post(at(other + "/picture")))[0].status == 200
        assert (await f.post(chat(picture(PNG))))[0].status == 200
        assert not any(each.done() for each in asked)
        assert len(silent.open) == 8
        assert (await f.health())[1]["downloads"]["refused"] == 1


async def test_a_place_is_free_when_its_request_ends() -> None:
    silent = Silent()
    async with served(silent.serve, max_connections=16) as (f, url):
        for _ in range(3):
            async with in_the_way(f, at(*urls(url, 64))):
                await until(lambda: len(silent.open) == 8)
            await until(lambda: not silent.open)
        assert (await f.post(at(url + "/picture")))[0].status == 200


async def test_slow_downloads_end_where_others_need_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many silent servers as there are places; their requests may be tried again."""
    silent = Silent()
    hosts = [f"h{n}.example" for n in range(17)]
    async with (
        routers_ask(monkeypatch, {host: ["127.0.0.1"] for host in hosts}),
        served(silent.serve, max_connections=16) as (f, url),
    ):
        *bad, good = (url.replace("127.0.0.1", host) for host in hosts)
        several, *single = [at(*(each + "/silent" for each in bad[:8]))] + [
            at(each + "/silent") for each in bad[8:]
        ]
        async with in_the_way(f, several) as first:
            await until(lambda: len(silent.open) == 8)
            async with in_the_way(f, *single) as others:
                await until(lambda: len(silent.open) == 16)
                assert (await f.post(at(good + "/picture")))[0].status == 429
                monkeypatch.setattr(places, "_SLOW_S", 0.0)  # two seconds later, so to say
                assert (await f.post(at(good + "/picture")))[0].status == 200
                response, _ = await first[0]
                assert (response.status, response.headers["Retry-After"]) == (502, "2")
                assert not any(each.done() for each in others)
                await until(lambda: len(silent.open) == 8)


async def test_beside_silent_names_all_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, pictures in the request, and pictures of other names."""
    silent = Silent()
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


async def test_engines_names_need_no_thread_that_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What clients send is hashed in threads of its own."""
    loop = asyncio.get_running_loop()
    used = []

    def noted(executor: object, *args: Any) -> Any:
        used.append(executor)
        return type(loop).run_in_executor(loop, executor, *args)  # type: ignore[arg-type]

    async with fleet(0, 0) as f:
        monkeypatch.setattr(loop, "run_in_executor", noted)
        assert (await f.post(chat(picture(bytes(1_000_000)))))[0].status == 200
    assert used
    assert None not in used, "the loop's own, which looks engines up and reads --engines"


class Forward:
    """A proxy on this host, which answers by itself."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.heads: list[str] = []
        self.hello = b""
        """What came after a CONNECT."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.partition("\r\n")[0])
        self.heads.append(head)
        if head.startswith("CONNECT"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            self.hello = await reader.read(4096)
        else:
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(PNG)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + PNG)
        writer.close()


@asynccontextmanager
async def proxied(
    monkeypatch: pytest.MonkeyPatch, login: str = "", **options: Any
) -> AsyncIterator[tuple[Fleet, Forward]]:
    """A router whose environment names a proxy; media may come from 192.0.2.0/24 alone."""
    forward = Forward()
    async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
        url = f"http://{login}127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.delenv(name.upper(), raising=False)
            monkeypatch.setenv(name, url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.setenv("no_proxy", "direct.example")
        known = {
            "a.example": ["192.0.2.7"],
            "private.example": ["10.0.0.1"],
            "direct.example": ["127.0.0.1"],
        }
        async with (
            routers_ask(monkeypatch, known),
            fleet(0, 0, **{"allow_media_networks": (ip_network("192.0.2.0/24"),), **options}) as f,
        ):
            yield f, forward


async def test_proxies_of_the_environment_are_used_and_told_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with proxied(monkeypatch, "me:secret@") as (f, forward):
        assert (await f.post(at("http://a.example:81/b")))[0].status == 200
        assert got(f) == PNG
        assert forward.asked == ["GET http://192.0.2.7:81/b HTTP/1.1"]
        (head,) = forward.heads
        assert "\r\nHost: a.example:81\r\n" in head
        login = base64.b64encode(b"me:secret").decode()
        assert f"\r\nProxy-Authorization: Basic {login}\r\n" in head
        assert (await f.post(at("https://a.example/b")))[0].status == 502
        assert forward.asked[1] == "CONNECT 192.0.2.7:443 HTTP/1.1"
        assert f"\r\nProxy-Authorization: Basic {login}\r\n" in forward.heads[1]
        assert b"a.example" in forward.hello, "whose certificate it must be"


@pytest.mark.parametrize("resolves", [False, True])
@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("http://127.0.0.1/", 400),
        ("http://10.0.0.1/", 400),
        ("http://[::1]/", 400),
        ("http://2130706433/", 400),
        ("http://127.1/", 400),
        ("http://0x7f000001/", 400),
        ("http://direct.example/", 502),
    ],
)
async def test_no_proxy_leads_to_an_address_that_is_not_allowed(
    url: str, status: int, resolves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(monkeypatch, media_proxy_resolves=resolves) as (f, forward):
        assert (await f.post(at(url)))[0].status == status
        assert not forward.asked


async def test_a_proxy_gets_names_only_if_the_operator_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = "http://unknown.example/a"
    async with proxied(monkeypatch) as (f, forward):
        for url in (unknown, "http://private.example/a"):
            assert (await f.post(at(url)))[0].status == 502
        assert not forward.asked
    async with proxied(monkeypatch, media_proxy_resolves=True) as (f, forward):
        assert (await f.post(at(unknown)))[0].status == 200
        assert forward.asked == ["GET http://unknown.example/a HTTP/1.1"]


async def test_engines_are_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxied(monkeypatch) as (f, forward):
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
