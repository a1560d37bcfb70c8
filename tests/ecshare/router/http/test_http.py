# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP is vLLM's own: types, encodings, headers, paths and methods."""

import asyncio
import io
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.app import _READERS
from ecshare.router.options.arguments import parse_arguments
from tests.ecshare.router.fake_engine import (
    EVENTS,
    HEAD,
    PNG,
    Fleet,
    chat,
    data_url,
    decoded,
    fleet,
)
from tests.ecshare.router.http.test_bodies import raw

PAGE = "https://chat.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


def bare(body: bytes, *headers: bytes) -> bytes:
    lines = [HEAD.rstrip(b"\r\n"), b"Connection: close", b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*lines, *headers, b"", body])


# --- what a body is ---


@pytest.mark.parametrize(
    "given",
    [
        None, "text/plain", "text/plain; a=application/json", "application/octet-stream",
        "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp",
        "application/vnd.x+json", "",
    ],
)  # fmt: skip
async def test_a_body_of_another_type_is_refused(given: str | None) -> None:
    headers = {} if given is None else {"Content-Type": given}
    async with fleet() as f, aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as client:
        for path in _READERS:
            async with client.post(
                f.url + path, data=json.dumps(chat()).encode(), headers=headers
            ) as response:
                assert response.status == 400, path
                error = (await response.json())["error"]
                assert "`Content-Type: application/json`" in error["message"]
        assert f.p.bodies == f.d.bodies == []


@pytest.mark.parametrize(
    "given", ["application/json", "Application/JSON; charset=utf-8", "application/json;"]
)
async def test_a_type_may_have_parameters(given: str) -> None:
    async with fleet(0, 0) as f:
        assert (await f.post(chat(), {"Content-Type": given}))[0].status == 200


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"]
)
async def test_json_may_be_in_any_of_its_encodings(encoding: str) -> None:
    sent = chat({"type": "text", "text": "Grüße 😀"})
    async with fleet(0, 0) as f:
        response, _ = await f.post(json.dumps(sent, ensure_ascii=False).encode(encoding))
        assert response.status == 200
        assert f.d.bodies == [sent]


async def test_large_bodies_are_utf_8() -> None:
    async with fleet(0, 0) as f:
        response, answer = await f.post(io.BytesIO((" " * (9 << 20)).encode("utf-16")))
        assert response.status == 413
        assert b"utf-16" in answer


async def test_an_empty_model_is_none() -> None:
    async with fleet(0, 0) as f:
        assert (await f.post(chat(model="")))[0].status == 200
        assert f.d.bodies[0]["model"] == "m"


@pytest.mark.parametrize(
    "part",
    [{"image_url": None}, {"image_pil": None}, {"text": "a", "video_url": None, "type": None}],
)
async def test_a_part_that_vllm_would_take_for_media_without_data_is_refused(
    part: dict[str, Any],
) -> None:
    async with fleet() as f:
        response, answer = await f.post(chat(part))
        assert response.status == 400
        error = json.loads(answer)["error"]
        assert "is null" in error["message"]
        assert error["param"] == "messages[0].content[1]"
        assert f.d.bodies == []


async def test_a_part_may_say_what_it_does_not_hold() -> None:
    async with fleet(0, 0) as f:
        response, _ = await f.post(chat({"type": "text", "text": "a", "image_url": None}))
        assert response.status == 200


@pytest.mark.parametrize("media_type", ["IMAGE/PNG", "application/octet-stream", "png", "", None])
async def test_messages_take_a_picture_of_any_type(media_type: str | None) -> None:
    source = {"type": "base64", "media_type": media_type, "data": data_url(PNG).partition(",")[2]}
    content = [{"type": "image", "source": source}]
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    async with fleet() as f:
        assert (await f.post(body, path="/v1/messages"))[0].status == 200
        assert f.d.bodies[0]["messages"] == body["messages"]


@pytest.mark.parametrize("media_type", ["image/png,", "image/png;base64", "a b", "x\ny", 5])
async def test_a_type_that_would_change_the_url_is_refused(media_type: Any) -> None:
    source = {"type": "base64", "media_type": media_type, "data": data_url(PNG).partition(",")[2]}
    content = [{"type": "image", "source": source}]
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    async with fleet() as f:
        assert (await f.post(body, path="/v1/messages"))[0].status == 400


async def test_a_data_url_needs_its_semicolon() -> None:
    async with fleet() as f:
        url = data_url(PNG).replace("image/png;", "")
        response, answer = await f.post(chat({"type": "image_url", "image_url": {"url": url}}))
        assert (response.status, f.d.bodies) == (400, [])
        assert b"data:TYPE;base64,DATA" in answer


# --- headers ---


async def test_what_vllm_reads_from_clients_reaches_prefill_and_decode() -> None:
    sent = {
        "X-Session-ID": "s", "X-Vllm-Priority": "5", "endpoint-load-metrics-format": "JSON",
        "baggage": "k=v", "X-data-parallel-rank": "1", "x-tenant": "t", "x-ecshare-router": "me",
    }  # fmt: skip
    async with fleet() as f:
        assert (await f.post(chat(), sent))[0].status == 200
        for engine in (f.p, f.d):
            (got,) = engine.headers
            for name in ("x-session-id", "x-vllm-priority", "endpoint-load-metrics-format"):
                assert got[name]
            assert got["baggage"] == "k=v"
            assert not {"x-data-parallel-rank", "x-tenant", "x-ecshare-router"} & got.keys()


async def test_operators_name_further_headers() -> None:
    async with fleet(0, 0, forward_headers=("X-Tenant",)) as f:
        await f.post(chat(), {"x-tenant": "t"})
        assert f.d.headers[0]["x-tenant"] == "t"


@pytest.mark.parametrize(
    "name", ["Host", "content-length", "X-ECShare-Router", "Connection", "a b", "a:", ""]
)
def test_headers_of_the_connection_are_not_forwarded(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--decoder=http://a:1", f"--forward-header={name}"])
    assert "does not belong to the connection" in capsys.readouterr().err


async def test_two_credentials_are_refused_and_lists_are_joined() -> None:
    body = json.dumps(chat()).encode()
    async with fleet(0, 0) as f:
        twice = bare(body, b"Authorization: Bearer a", b"authorization: Bearer b")
        status, answer = await raw(f, twice)
        assert status == 400
        assert b"several `Authorization`" in answer
        assert f.d.bodies == []
        assert (await raw(f, bare(body, b"baggage: a=1", b"baggage: b=2")))[0] == 200
        assert f.d.headers[0]["baggage"] == "a=1, b=2"


async def test_the_load_of_decode_reaches_the_client() -> None:
    async def loaded(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {"endpoint-load-metrics": "JSON {}", "X-Engine": "d"}
        return web.json_response({"choices": []}, headers=headers)

    async with fleet() as f:
        f.d.answer = loaded
        response, _ = await f.post(chat(), {"endpoint-load-metrics-format": "JSON"})
        assert response.headers["endpoint-load-metrics"] == "JSON {}"
        assert "X-Engine" not in response.headers


LONG = b"Cookie: " + b"a" * 40_000
MANY = [b"X-%d: a" % number for number in range(200)]


@pytest.mark.parametrize("headers", [[LONG], MANY, [b"Authorization: Bearer " + b"a" * 12_000]])
async def test_heads_may_be_large(headers: Sequence[bytes]) -> None:
    async with fleet(0, 0) as f:
        assert (await raw(f, bare(json.dumps(chat()).encode(), *headers)))[0] == 200


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([b"Cookie: " + b"a" * 70_000], b"A header is larger than 64 KiB."),
        ([b"X-%d: a" % number for number in range(300)], b"There are more than 256 headers."),
    ],
)
async def test_a_head_that_is_too_large_is_431(headers: Sequence[bytes], said: bytes) -> None:
    async with fleet(0, 0) as f:
        status, answer = await raw(f, bare(json.dumps(chat()).encode(), *headers))
        assert (status, f.d.bodies) == (431, [])
        assert said in answer


async def test_a_path_that_is_too_long_is_414() -> None:
    async with fleet(0, 0) as f:
        request = b"GET /v1/models?%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        status, answer = await raw(f, request % (b"a" * 15_000))
        assert status == 200
        status, answer = await raw(f, request % (b"a" * 20_000))
        assert status == 414
        assert b"longer than 16 KiB" in answer


async def test_all_headers_together_are_bounded() -> None:
    """A head that never ends takes no more memory than that, whatever its parts are."""
    async with fleet(0, 0) as f:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(f.url.rpartition(":")[2]))
        writer.write(HEAD)
        for number in range(6):
            writer.write(b"X-%d: %s\r\n" % (number, b"a" * 60_000))
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"All headers together are larger than 256 KiB." in answer
        writer.close()


async def test_a_connection_serves_on_however_much_it_has_sent() -> None:
    async with fleet(0, 0) as f:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(f.url.rpartition(":")[2]))
        body = json.dumps(chat(user="a" * 300_000)).encode()
        for padding in (b"a" * 50_000,) * 8:
            more = b"Cookie: %s\r\nContent-Length: %d\r\n\r\n" % (padding, len(body))
            writer.write(HEAD + more + body)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert head.startswith(b"HTTP/1.1 200 ")
            await reader.readexactly(len(b'{"choices":  []}'))
        writer.close()


# --- web pages ---


async def preflight(f: Fleet, **more: str) -> aiohttp.ClientResponse:
    async with f.client.options(f.url + CHAT, headers=PREFLIGHT | more) as response:
        return response


async def test_pages_may_not_ask_unless_the_operator_allows_it() -> None:
    async with fleet(0, 0) as f:
        assert (await preflight(f)).status == 400
        response, _ = await f.post(chat(), {"Origin": PAGE})
        assert not any(name.startswith("Access-Control") for name in response.headers)
        assert "Vary" not in response.headers


async def test_pages_of_an_allowed_origin_may_ask_and_read() -> None:
    async with fleet(0, 0, allow_origins=(PAGE, "http://localhost:3000")) as f:
        wanted = {"Access-Control-Request-Headers": "authorization,content-type"}
        asked = await preflight(f, **wanted)
        assert asked.status == 200
        assert asked.headers["Access-Control-Allow-Origin"] == PAGE
        assert "POST" in asked.headers["Access-Control-Allow-Methods"]
        assert asked.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        for body in (chat(), chat(stream=True), b"{"):
            response, _ = await f.post(body, {"Origin": PAGE})
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Vary"] == "Origin"
        refused = await preflight(f, Origin="https://evil.example")
        assert refused.status == 400
        assert "Access-Control-Allow-Origin" not in refused.headers
        response, _ = await f.post(chat(), {"Origin": "https://evil.example"})
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_any_origin_may_be_allowed() -> None:
    async with fleet(0, 0, allow_origins=("*",)) as f:
        assert (await preflight(f)).headers["Access-Control-Allow-Origin"] == "*"
        response, body = await f.post(chat(stream=True), {"Origin": PAGE})
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert body == b"".join(EVENTS)
        assert "Access-Control-Allow-Origin" not in (await f.post(chat()))[0].headers


@pytest.mark.parametrize("origin", ["chat.example", "https://a/b", "https://", "https://a, *"])
def test_an_origin_is_one(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--decoder=http://a:1", f"--allow-origin={origin}"])
    assert "must look like https://chat.example" in capsys.readouterr().err


# --- paths and methods ---


@pytest.mark.parametrize("expected", [b"100-continue", b"200-maybe", b"\xff", b""])
@pytest.mark.parametrize(
    ("start", "status", "code"),
    [
        (b"GET /nothing", 404, "unknown_url"),
        (b"PUT /v1/models", 405, "wrong_method"),
        (b"POST /v1/embeddings", 400, None),
    ],
)
async def test_any_expect_is_taken_at_any_path(
    start: bytes, status: int, code: str | None, expected: bytes
) -> None:
    async with fleet(0, 0) as f:
        lines = b"Host: x", b"Connection: close", b"Content-Type: application/json"
        head = b"\r\n".join((start + b" HTTP/1.1", *lines, b"Expect: " + expected, b"", b""))
        got, rest = await raw(f, head)
        if expected == b"100-continue":
            assert got == 100
            answer = rest.partition(b"HTTP/1.1 ")[2]
            assert answer.count(b"HTTP/1.1") == 0
            got, rest = int(answer[:3]), answer
        assert got == status
        assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == code


async def test_leave_to_send_a_body_comes_in_turn_and_never_to_older_clients() -> None:
    """Of pipelined requests the second one waits for the answer to the first."""
    async with fleet(0, 0) as f:
        first = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
        second = (
            b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-Continue\r\n\r\n"
        )
        got, rest = await raw(f, first + second)
        assert [got, *(int(each[:3]) for each in rest.split(b"HTTP/1.1 ")[1:])] == [200, 100, 200]
        got, rest = await raw(f, second.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert got == 200
        assert b"HTTP/1" not in rest


async def test_a_slash_at_the_end_leads_to_the_path_without() -> None:
    async with fleet(0, 0) as f:
        for method, path in (("GET", "/v1/models"), ("POST", CHAT)):
            async with f.client.request(
                method, f.url + path + "/?a=b%20c", allow_redirects=False
            ) as response:
                assert response.status == 307
                assert response.headers["Location"] == path + "?a=b%20c"
        response, _ = await f.post(json.dumps(chat()).encode(), path=CHAT + "/")
        assert response.status == 200
        head = b"GET /live/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: \xff\r\n\r\n"
        assert (await raw(f, head))[0] == 307
        for path in ("/nothing/", "/", "//evil.example/", CHAT + "//"):
            async with f.client.get(f.url + path, allow_redirects=False) as response:
                assert response.status == 404, path


async def test_405_says_what_is_allowed() -> None:
    async with fleet(0, 0) as f:
        async with f.client.get(f.url + CHAT) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        f.d.answer = decoded
        async with f.client.post(f.url + "/v1/models") as response:
            assert (response.status, response.headers["Allow"]) == (405, "GET,HEAD")
