# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP is vLLM's own: types, encodings, headers, paths and methods."""

import gzip
import io
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.app import _READERS
from tests.ecshare.router.answers import EVENTS
from tests.ecshare.router.bodies import HEAD, PNG, chat, data_url
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.http.raw import BODY, CLOSE, connected, get, post, raw

PAGE = "https://chat.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}

# --- what a body is ---


@pytest.mark.parametrize(
    "given",
    [
        None, "text/plain", "text/plain; a=application/json", "application/octet-stream",
        "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp",
        "application/vnd.x+json", "",
    ],
)  # fmt: skip
async def test_a_body_of_another_type_is_refused(given: str | None, f: Fleet) -> None:
    headers = {} if given is None else {"Content-Type": given}
    async with aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as client:
        for path in _READERS:
            async with client.post(f.url + path, data=BODY, headers=headers) as response:
                assert response.status == 400, path
                assert b"`Content-Type: application/json`" in await response.read()
    assert f.d.bodies == []


@pytest.mark.parametrize(
    ("encoding", "headers"),
    [
        *((each, {}) for each in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")),
        ("utf-32-le", {"Content-Type": "application/json"}),
        ("utf-8", {"Content-Type": "Application/JSON; charset=utf-8"}),
        ("utf-8", {"Content-Type": "application/json;"}),
        ("utf-8", {"Content-Encoding": "Identity"}),
    ],
)
async def test_json_may_be_in_any_of_its_encodings(
    encoding: str, headers: dict[str, str], f: Fleet
) -> None:
    sent = chat({"type": "text", "text": "Grüße 😀"})
    response, _ = await f.post(json.dumps(sent, ensure_ascii=False).encode(encoding), headers)
    assert (response.status, f.d.bodies) == (200, [sent])


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "unheard-of", "gzip, gzip"])
async def test_packed_bodies_are_refused(encoding: str, f: Fleet) -> None:
    for named, status, said in ((encoding, 415, b"Content-Encoding"), ("identity", 400, b"")):
        response, answer = await f.post(gzip.compress(BODY), {"Content-Encoding": named})
        assert (response.status, f.d.bodies) == (status, [])
        assert said in answer


async def test_large_bodies_are_utf_8(f: Fleet) -> None:
    response, answer = await f.post(io.BytesIO((" " * (9 << 20)).encode("utf-16")))
    assert response.status == 413
    assert b"utf-16" in answer


async def test_an_empty_model_is_none(f: Fleet) -> None:
    assert (await f.post(chat(model="")))[0].status == 200
    assert f.d.bodies[0]["model"] == "m"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "text", "text": "a", "image_url": None}, ""),  # it says what it does not hold
        ({"image_url": None}, "is null"),  # vLLM would take it for media without data
        ({"image_pil": None}, "is null"),
        ({"text": "a", "video_url": None, "type": None}, "is null"),
        ({"type": "image_url", "image_url": {"url": "data:image/pngbase64,QUJD"}}, "TYPE;base64,D"),
        (
            {"type": "image_url", "image_url": {"url": "http://a/" + "a" * 50_000}},
            "url is too long",
        ),
    ],
    ids=range(6),
)
async def test_a_part_that_is_no_media_is_refused(part: Any, said: str, f: Fleet) -> None:
    response, answer = await f.post(chat(part))
    assert (response.status, len(f.d.bodies)) == ((400, 0) if said else (200, 1))
    if said:
        error = json.loads(answer)["error"]
        assert said in error["message"]
        assert error["param"] == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        *((each, 200) for each in ("IMAGE/PNG", "application/octet-stream", "png", "", None)),
        # They would change the url.
        *((each, 400) for each in ("image/png,", "image/png;base64", "a b", "x\ny", 5)),
    ],
)
async def test_messages_take_a_picture_of_any_type(media_type: Any, status: int) -> None:
    source = {"type": "base64", "media_type": media_type, "data": data_url(PNG).partition(",")[2]}
    content = [{"type": "image", "source": source}]
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    async with fleet() as f:
        assert (await f.post(body, path="/v1/messages"))[0].status == status
        got = [each["messages"] for each in f.d.bodies]
        assert got == ([body["messages"]] if status == 200 else [])


async def test_a_client_may_wait_for_leave_to_send_its_body(f: Fleet) -> None:
    async with f.client.post(f.url + CHAT, data=BODY, expect100=True) as response:
        assert response.status == 200


# --- headers ---


async def test_what_vllm_reads_from_clients_reaches_prefill_and_decode() -> None:
    vllms = {
        "x-session-id": "s", "x-vllm-priority": "5", "endpoint-load-metrics-format": "JSON",
        "baggage": "k=v",
    }  # fmt: skip
    others = {"x-data-parallel-rank": "1", "x-other": "t", "x-ecshare-router": "me"}
    async with fleet(forward_headers=("X-Tenant",)) as f:
        sent = vllms | {"x-tenant": "named by the operator"}
        assert (await f.post(chat(), {**sent, **others}))[0].status == 200
        for engine in (f.p, f.d):
            (got,) = engine.headers
            assert got.items() >= sent.items()
            assert not others.keys() & got.keys()
        several = post(BODY, CLOSE, b"baggage: a=1", b"baggage: b=2")
        assert (await raw(f, several))[0] == 200
        assert f.d.headers[1]["baggage"] == "a=1, b=2"


async def test_the_load_of_decode_reaches_the_client() -> None:
    async def loaded(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {"endpoint-load-metrics": "JSON {}", "X-Engine": "d"}
        return web.json_response({"choices": []}, headers=headers)

    async with fleet() as f:
        f.d.answer = loaded
        response, _ = await f.post(chat(), {"endpoint-load-metrics-format": "JSON"})
        assert response.headers["endpoint-load-metrics"] == "JSON {}"
        assert "X-Engine" not in response.headers


def many(number: int) -> list[bytes]:
    return [b"X-%d: a" % n for n in range(number)]


CREDENTIALS = [b"Authorization: Bearer a", b"authorization: Bearer b"]
PASSED_ON = (b"Authorization", b"traceparent", b"baggage")
NOT_NEEDED = (b"Accept", b"Cookie", b"Expect", b"Range", b"X-Request-Id")
HEADERS = {
    "two credentials": (CREDENTIALS, 400, b"several `Authorization`"),
    "one long": ([b"Cookie: " + b"a" * 40_000], 200, b""),
    "a long credential": ([b"Authorization: Bearer " + b"a" * 12_000], 200, b""),
    "many": (many(200), 200, b""),
    "one too long": ([b"Cookie: " + b"a" * 70_000], 431, b"A header is larger than 64 KiB."),
    "too many": (many(300), 431, b"There are more than 256 headers."),
    **{f"{name!r} in UTF-8": ([name + ": ü".encode()], 200, b"") for name in PASSED_ON},
    **{
        f"{name!r} of bytes": ([name + b": \xff"], 400, b"`%s` is not UTF-8 text." % name)
        for name in PASSED_ON
    },
    **{f"{name!r} of bytes": ([name + b": \xff"], 200, b"") for name in NOT_NEEDED},
}


@pytest.mark.parametrize(("headers", "status", "said"), HEADERS.values(), ids=HEADERS)
async def test_headers_are_bounded_and_those_that_are_passed_on_are_text(
    headers: Sequence[bytes], status: int, said: bytes, f: Fleet
) -> None:
    got, answer = await raw(f, post(BODY, CLOSE, *headers))
    assert (got, len(f.d.bodies)) == (status, int(status == 200))
    assert said in answer


async def test_all_headers_together_are_bounded(f: Fleet) -> None:
    """A head that never ends takes no more memory than that, whatever its parts are."""
    endless = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 60_000) for number in range(6))
    status, answer = await raw(f, HEAD + endless)
    assert status == 431
    assert b"All headers together are larger than 256 KiB." in answer


async def test_a_connection_serves_on_however_much_it_has_sent(f: Fleet) -> None:
    request = post(json.dumps(chat(user="a" * 300_000)).encode(), b"Cookie: " + b"a" * 50_000)
    async with connected(f.url) as (reader, writer):
        for _ in range(8):
            writer.write(request)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readexactly(len(b'{"choices":  []}'))


# --- web pages ---


ALLOWED = "Access-Control-Allow-Origin"


async def preflight(f: Fleet, **more: str) -> aiohttp.ClientResponse:
    async with f.client.options(f.url + CHAT, headers=PREFLIGHT | more) as response:
        return response


async def test_pages_may_not_ask_unless_the_operator_allows_it(f: Fleet) -> None:
    assert (await preflight(f)).status == 400
    response, _ = await f.post(chat(), {"Origin": PAGE})
    assert not any(name.startswith("Access-Control") for name in response.headers)
    assert "Vary" not in response.headers


async def test_pages_of_an_allowed_origin_may_ask_and_read() -> None:
    async with fleet(0, 0, allow_origins=(PAGE, "http://localhost:3000")) as f:
        wanted = {"Access-Control-Request-Headers": "authorization,content-type"}
        asked = await preflight(f, **wanted)
        assert (asked.status, asked.headers[ALLOWED]) == (200, PAGE)
        assert "POST" in asked.headers["Access-Control-Allow-Methods"]
        assert asked.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        for body in (chat(), chat(stream=True), b"{"):
            response, _ = await f.post(body, {"Origin": PAGE})
            assert (response.headers[ALLOWED], response.headers["Vary"]) == (PAGE, "Origin")
        evil = {"Origin": "https://evil.example"}
        refused = await preflight(f, **evil)
        assert refused.status == 400
        for response in (refused, (await f.post(chat(), evil))[0]):
            assert ALLOWED not in response.headers


async def test_any_origin_may_be_allowed() -> None:
    async with fleet(0, 0, allow_origins=("*",)) as f:
        response, body = await f.post(chat(stream=True), {"Origin": PAGE})
        assert (response.headers[ALLOWED], body) == ("*", b"".join(EVENTS))
        assert "Vary" not in response.headers, "a cache may keep one answer for all"
        assert (await preflight(f)).headers[ALLOWED] == "*"
        assert ALLOWED not in (await f.post(chat()))[0].headers


# --- paths and methods ---


@pytest.mark.parametrize(
    "start",
    [
        b"GET /\xff HTTP/1.1", b"GET /v1/\xf0\x28 HTTP/1.1", b"GET /%ff HTTP/1.1",
        b"GET /nothing?a=\xff HTTP/1.1", b"GET /nothing?a=%ff HTTP/1.1", b"GET /%00%0a HTTP/1.1",
        b"GET http://[ HTTP/1.1",
    ],
)  # fmt: skip
async def test_paths_that_are_no_text_are_4xx(start: bytes, f: Fleet) -> None:
    status, _ = await raw(f, start + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert 400 <= status < 500


async def test_a_path_that_is_too_long_is_414(f: Fleet) -> None:
    assert (await raw(f, get(b"/v1/models?" + b"a" * 15_000, CLOSE)))[0] == 200
    status, answer = await raw(f, get(b"/v1/models?" + b"a" * 20_000, CLOSE))
    assert status == 414
    assert b"longer than 16 KiB" in answer


@pytest.mark.parametrize("expected", [b"100-continue", b"200-maybe", b"\xff", b""])
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        (b"GET", b"/nothing", 404, "unknown_url"),
        (b"PUT", b"/v1/models", 405, "wrong_method"),
        (b"POST", b"/v1/embeddings", 400, None),
    ],
)
async def test_any_expect_is_taken_at_any_path(
    method: bytes, path: bytes, status: int, code: str | None, expected: bytes, f: Fleet
) -> None:
    head = get(path, CLOSE, b"Content-Type: application/json", b"Expect: " + expected)
    got, rest = await raw(f, head.replace(b"GET", method, 1))
    if expected == b"100-continue":
        assert got == 100
        answer = rest.partition(b"HTTP/1.1 ")[2]
        assert answer.count(b"HTTP/1.1") == 0
        got, rest = int(answer[:3]), answer
    assert got == status
    assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == code


async def test_leave_to_send_a_body_comes_in_turn_and_never_to_older_clients(f: Fleet) -> None:
    """Of pipelined requests the second one waits for the answer to the first."""
    second = get(b"/live", CLOSE, b"Expect: 100-Continue")
    got, rest = await raw(f, get(b"/live") + second)
    assert [got, *(int(each[:3]) for each in rest.split(b"HTTP/1.1 ")[1:])] == [200, 100, 200]
    got, rest = await raw(f, second.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert got == 200
    assert b"HTTP/1" not in rest


async def test_a_slash_at_the_end_leads_to_the_path_without(f: Fleet) -> None:
    async def redirected(method: str, path: str) -> tuple[int, str | None]:
        url = f.url + path
        async with f.client.request(method, url, allow_redirects=False) as response:
            return response.status, response.headers.get("Location")

    for method, path in (("GET", "/v1/models"), ("POST", CHAT)):
        assert await redirected(method, path + "/?a=b%20c") == (307, path + "?a=b%20c")
    assert (await f.post(BODY, path=CHAT + "/"))[0].status == 200
    assert (await raw(f, get(b"/live/", CLOSE, b"Expect: \xff")))[0] == 307
    for path in ("/nothing/", "/", "//evil.example/", CHAT + "//"):
        assert await redirected("GET", path) == (404, None), path


@pytest.mark.parametrize(
    ("path", "status"),
    [(b"/%6cive", 200), (b"/%6cive/", 307), (b"/live%2f", 404), (b"/live%0a", 404)],
)
async def test_escapes_in_a_path_are_read(path: bytes, status: int, f: Fleet) -> None:
    assert (await raw(f, get(path, CLOSE)))[0] == status


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", CHAT, "POST"), ("POST", "/v1/models", "GET,HEAD")]
)
async def test_405_says_what_is_allowed(method: str, path: str, allowed: str, f: Fleet) -> None:
    async with f.client.request(method, f.url + path) as response:
        assert (response.status, response.headers["Allow"]) == (405, allowed)


async def test_the_log_has_no_line_of_the_clients(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with fleet(0, 0, access_log=True) as f:
            await raw(f, get(b"/a%0aforged", CLOSE))
    assert "/a%0aforged 404" in caplog.text
