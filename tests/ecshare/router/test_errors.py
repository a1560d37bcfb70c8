# SPDX-License-Identifier: Apache-2.0
"""Every way in which a request can be refused or fail, on a real socket."""

import asyncio
import json
from ipaddress import ip_network
from typing import Any

import pytest
from aiohttp import web

from tests.ecshare.router.answers import EVENTS, failing, hang_up
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import LOOPBACK, Fleet, fleet, listening
from tests.ecshare.router.held import Hanging, soon
from tests.ecshare.router.media.fake_media import at, media_server, served
from tests.ecshare.router.media.fake_names import routers_ask

UNAVAILABLE = "The media cannot be fetched."
NOT_NOW = "The media cannot be fetched now."
NOT_PUBLIC = "The media's url is refused: its address is not public."
GONE = "http://127.0.0.1:9"
HERE = (*LOOPBACK, ip_network("::1"))


async def refusal(f: Fleet, body: object) -> tuple[int, dict[str, Any]]:
    response, answer = await f.post(body)
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, Any] = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return response.status, error


async def test_an_unknown_model_is_404(f: Fleet) -> None:
    status, error = await refusal(f, chat(model="other"))
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "`other`" in error["message"]
    assert f.p.bodies == f.d.bodies == []


@pytest.mark.parametrize("chunked", [False, True])
async def test_too_large_a_body_is_413(chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(8):
            yield b" " * 1024

    async with fleet(max_body_bytes=4096) as f:
        status, error = await refusal(f, pieces() if chunked else b" " * 8192)
        assert (status, error["code"]) == (413, "request_too_large")
        assert "0.00390625 MiB" in error["message"]


CODES = {400: "invalid_media", 413: "media_too_large"}
CODES |= dict.fromkeys((422, 502), "media_unavailable")


@pytest.mark.parametrize(
    ("url", "status"),
    [
        *((f"data:image/png{data}", 400) for data in (";base64,@@@@", ",abc")),
        *((url, 400) for url in ("file:///etc/passwd", "ftp://host/a.png", "a.png")),
        *((url, 400) for url in ("http://", "http://[")),
        *((f"http://{host}/a.png", 502) for host in ("127.0.0.1:9", "name.invalid")),
    ],
)
async def test_bad_media_names_the_item(url: str, status: int) -> None:
    async with fleet(allow_media_networks=LOOPBACK) as f:
        got, error = await refusal(f, at(url))
        assert (got, error["param"]) == (status, "messages[0].content[1]")
        assert error["code"] == CODES[status]
        assert f.e.bodies == f.d.bodies == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((f"/{status}", 422) for status in (304, 400, 403, 404, 410)),
        *((f"/{status}", 502) for status in (408, 425, 429, 500, 503)),
        *((path, 422) for path in ("/loop", "/to-file", "/nowhere", "/no-url", "/no-location")),
        *((path, 502) for path in ("/slow", "/hang-up", "/cut")),
        ("/large", 413),
        ("/empty", 400),
    ],
)
async def test_bad_downloads_name_the_item(path: str, status: int) -> None:
    """What may go well the next time is answered as clients try again: 502."""
    leads_to = {"/loop": "/loop", "/to-file": "file:///etc/passwd", "/no-location": None}
    leads_to |= {"/nowhere": "javascript:alert(1)", "/no-url": "http://["}

    async def serve(http: web.Request) -> web.StreamResponse:
        match http.path:
            case name if name[1:].isdigit():
                return web.Response(status=int(name[1:]))
            case name if name in leads_to:
                to = leads_to[name]
                return web.Response(status=302, headers={} if to is None else {"Location": to})
            case "/hang-up" | "/cut":
                if http.path == "/cut":
                    response = web.StreamResponse(headers={"Content-Length": "100"})
                    await response.prepare(http)
                    await response.write(b"x")
                return await hang_up(http, {})
            case "/large":
                return web.Response(body=bytes(2048))
            case "/slow":
                return await Hanging(start=b"x")(http, {})
            case _:
                return web.Response()

    async with served(serve, max_media_bytes=1024, media_timeout_s=0.3) as (f, url):
        response, answer = await f.post(at(url + path))
        error = json.loads(answer)["error"]
        assert (response.status, error["param"]) == (status, "messages[0].content[1]")
        assert error["code"] == CODES[status]
        assert response.headers.get("Retry-After") == ("2" if status == 502 else None)
        if path[1:].isdigit():
            assert (path[1:] in error["message"]) is (status == 422), "what may pass is not named"
        assert url not in error["message"]


async def test_the_download_limit_is_for_all_items_together() -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        return web.Response(body=http.path.encode() * 100)

    async with served(serve, max_media_bytes=300) as (f, url):
        assert (await f.post(at(url + "/a")))[0].status == 200
        status, error = await refusal(f, at(url + "/a", url + "/b"))
        assert (status, error["code"]) == (413, "media_too_large")


async def test_media_hosts_can_be_limited() -> None:
    async def redirect(http: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("http://elsewhere.invalid/a.png")

    async with served(redirect, allow_media_domains=("127.0.0.1",)) as (f, url):
        status, error = await refusal(f, at("http://elsewhere.invalid/a.png"))
        assert (status, error["code"]) == (400, "invalid_media")
        assert "its host is not one" in error["message"]
        _, error = await refusal(f, at(url + "/a.png"))
        assert (error["code"], error["message"]) == ("media_unavailable", UNAVAILABLE)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]",
        "2130706433", "0x7f000001", "0x7f.1", "017700000001", "0177.0.0.1", "127.1", "127.0.0.1.",
        "%31%32%37.0.0.1", "\uff11\uff12\uff17.0.0.1", "127\u30020.0.1", "user@127.0.0.1",
        "168.63.129.16", "192.0.0.192",
    ],
)  # fmt: skip
async def test_media_are_not_fetched_from_private_addresses(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(http: web.Request) -> web.StreamResponse:
        raise AssertionError("asked")

    async with served(serve, allow_media_networks=()) as (f, url):
        port = url.rpartition(":")[2]
        status, error = await refusal(f, at(f"http://{host}:{port}/a.png"))
        assert (status, error["param"]) == (400, "messages[0].content[1]")
        assert (error["code"], error["message"]) == ("invalid_media", NOT_PUBLIC)
    assert "--allow-media-network" in caplog.text


async def test_what_a_private_name_leads_to_is_in_the_log_alone(
    f: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    status, error = await refusal(f, at("http://localhost:9/a.png"))
    assert (status, error["code"], error["message"]) == (502, "media_unavailable", NOT_NOW)
    assert "--allow-media-network" in caplog.text
    assert "messages[0].content[1]" in caplog.text


async def test_what_a_client_named_is_one_short_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet(allow_media_domains=("a.example",)) as f:
        for host in ("x%0aERROR%0dforged", "a" * 10_000, "a." * 5_000, "[" + "a\n" * 5_000):
            caplog.clear()
            assert (await refusal(f, at(f"http://{host}/")))[0] == 400
            (said,) = [each.getMessage() for each in caplog.records]
            assert len(said.splitlines()) == 1
            assert len(said) < 500


async def test_a_redirect_leads_to_allowed_networks_only() -> None:
    asked = []

    async def serve(http: web.Request) -> web.StreamResponse:
        asked.append(http.path)
        raise web.HTTPFound(f"http://{http.query['to']}:{port}/moved")

    async with served(serve, allow_media_networks=(ip_network("127.0.0.1"),)) as (f, url):
        port = url.rpartition(":")[2]
        for to in ("127.0.0.2", "127.1", "[::1]"):
            status, error = await refusal(f, at(f"{url}/a.png?to={to}"))
            assert (status, error["code"]) == (422, "media_unavailable")
            assert error["message"] == UNAVAILABLE
        assert asked == ["/a.png"] * 3


@pytest.mark.parametrize("public_first", [True, False])
async def test_of_a_names_addresses_only_public_ones_are_connected_to(
    public_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here 127.0.0.2 plays the public one, as an allowed network."""
    asked = []

    async def serve(http: web.Request) -> web.StreamResponse:
        assert http.transport is not None
        asked.append(http.transport.get_extra_info("sockname")[0])
        return web.Response(body=PNG)

    media = web.Application()
    media.router.add_get("/{name}", serve)
    several = ["127.0.0.2", "127.0.0.1"][:: 1 if public_first else -1]
    known = {"several.example": several, "private.example": ["127.0.0.1"]}
    async with (
        listening(media, "0.0.0.0") as url,
        routers_ask(monkeypatch, known),
        fleet(allow_media_networks=(ip_network("127.0.0.2"),)) as f,
    ):
        port = url.rpartition(":")[2]
        await f.way(at(f"http://several.example:{port}/a.png"))
        _, error = await refusal(f, at(f"http://private.example:{port}/a.png"))
        assert error["message"] == NOT_NOW
        assert asked == ["127.0.0.2"]


async def test_an_allowed_domain_alone_opens_no_network_and_the_other_way_round() -> None:
    here, there, none = ("localhost",), ("elsewhere.invalid",), ()
    async with media_server() as url:
        by_name = url.replace("127.0.0.1", "localhost") + "/a.png"
        for domains, networks, status in ((here, none, 502), (there, HERE, 400), (here, HERE, 200)):
            async with fleet(allow_media_domains=domains, allow_media_networks=networks) as f:
                assert (await f.post(at(by_name)))[0].status == status


async def test_an_open_port_is_told_like_a_closed_one() -> None:
    async def not_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    async with await asyncio.start_server(not_http, "127.0.0.1", 0) as server:
        mail = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with (
            listening(web.Application()) as no_such_path,
            fleet(allow_media_networks=LOOPBACK) as f,
        ):
            urls = (mail, "http://127.0.0.1:9", "http://name.invalid")
            told = [await refusal(f, at(f"{url}/a.png")) for url in urls]
            assert (await refusal(f, at(no_such_path + "/a.png")))[0] == 422
        async with fleet() as f:  # what may not be connected to at all is told alike
            names = [url.replace("127.0.0.1", "localhost") for url in (no_such_path, *urls)]
            told += [await refusal(f, at(f"{url}/a.png")) for url in names]
            addresses = [await refusal(f, at(f"{url}/a.png")) for url in (no_such_path, *urls[:2])]
        assert told == [told[0]] * len(told)
        assert (told[0][0], told[0][1]["message"]) == (502, NOT_NOW)
        assert addresses == [addresses[0]] * len(addresses)
        assert addresses[0][1]["message"] == NOT_PUBLIC


@pytest.mark.parametrize(
    ("stage", "status", "num_asked"),
    [("e", 422, 0), ("p", 422, 0), ("d", 422, 1), ("d", 500, 2)],
)
async def test_an_engines_error_is_passed_on_as_it_came(
    f: Fleet, stage: str, status: int, num_asked: int
) -> None:
    """Of D that fails on the pictures the second."""
    getattr(f, stage).answer = failing(status)
    response, body = await f.post(chat(picture(PNG)))
    assert (response.status, body) == (status, b'{"error": {"message": "engine says no"}}')
    assert len(f.d.bodies) == num_asked
    assert f.router.counts()["fallbacks"] == (status == 500)


@pytest.mark.parametrize("url", [GONE, "http://a..b:8003", f"http://{'a' * 64}:8003"])
async def test_unreachable_decode_is_503_with_retry_after(url: str) -> None:
    """Also one whose host is no name. No model is refused while D cannot list any."""
    async with fleet(0, 0, 0, decoders_more=(url,), cool_down_s=7.0) as f:
        for model in ("m", "other"):  # also while it cools down
            response, body = await f.post(chat(model=model))
            assert (response.status, response.headers["Retry-After"]) == (503, "7")
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_unreachable")
            assert url not in error["message"]


async def test_decode_that_hangs_up_is_502_with_retry_after() -> None:
    async with fleet(0, 0) as f:
        f.d.answer = hang_up
        response, body = await f.post(chat())
        assert response.status == 502
        assert "Retry-After" in response.headers
        assert json.loads(body)["error"]["code"] == "engine_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_is_504(stream: bool) -> None:
    async with fleet(timeout_s=1.0) as f:  # D must have been asked by then
        f.d.answer = hanging = Hanging(start=EVENTS[0] if stream else None)
        response, body = await f.post(chat(picture(PNG), stream=stream))
        if stream:
            assert body.startswith(EVENTS[0] + b"\n\ndata: ")
            body = body.split(b"data: ")[-1]
        else:
            assert response.status == 504
        assert json.loads(body)["error"]["code"] == "timeout"
        await soon(hanging.left)


async def test_no_models_are_listed_while_no_decode_can_be_reached() -> None:
    async with (
        fleet(0, 1, 0, decoders_more=(GONE,)) as f,
        f.client.get(f.url + "/v1/models") as response,
    ):
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "engine_unreachable"
