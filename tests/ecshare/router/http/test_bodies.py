# SPDX-License-Identifier: Apache-2.0
"""Packed bodies, and paths and headers that hold any bytes."""

import asyncio
import gzip
import json

import pytest

from ecshare.router.api.chat import CHAT
from tests.ecshare.router.fake_engine import HEAD, Fleet, chat, fleet


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "unheard-of", "gzip, gzip"])
async def test_packed_bodies_are_refused(encoding: str) -> None:
    async with fleet() as f:
        packed = gzip.compress(json.dumps(chat()).encode())
        response, answer = await f.post(packed, {"Content-Encoding": encoding})
        assert response.status == 415
        assert "Content-Encoding" in json.loads(answer)["error"]["message"]
        assert f.p.bodies == []


async def test_a_body_may_say_that_it_is_not_packed() -> None:
    async with fleet() as f:
        body = json.dumps(chat()).encode()
        assert (await f.post(body, {"Content-Encoding": "Identity"}))[0].status == 200
        response, _ = await f.post(gzip.compress(body), {"Content-Encoding": "identity"})
        assert response.status == 400


async def raw(f: Fleet, request: bytes) -> tuple[int, bytes]:
    """Send bytes as they are; returns the status and what comes after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(f.url.rpartition(":")[2]))
    try:
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    status, _, rest = answer.partition(b" ")[2].partition(b" ")
    return int(status), rest


@pytest.mark.parametrize(
    "start",
    [
        b"GET /\xff HTTP/1.1", b"GET /v1/\xf0\x28 HTTP/1.1", b"GET /%ff HTTP/1.1",
        b"GET /nothing?a=\xff HTTP/1.1", b"GET /nothing?a=%ff HTTP/1.1", b"GET /%00%0a HTTP/1.1",
        b"GET http://[ HTTP/1.1", b"\xff / HTTP/1.1", b"GET / HTTP/9.9", b"GET",
    ],
)  # fmt: skip
async def test_paths_that_are_no_text_are_4xx(start: bytes) -> None:
    async with fleet(0, 0) as f:
        status, _ = await raw(f, start + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert 400 <= status < 500


@pytest.mark.parametrize("name", [b"Authorization", b"traceparent", b"baggage"])
async def test_headers_that_cannot_be_passed_on_are_400(name: bytes) -> None:
    async with fleet(0, 0) as f:
        head = HEAD + b"Connection: close\r\n"
        body = json.dumps(chat()).encode()
        length = b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        status, rest = await raw(f, head + name + b": a\xffb" + length + body)
        assert status == 400
        assert b"The header `%s` is not UTF-8 text." % name in rest
        assert f.d.bodies == []
        status, _ = await raw(f, head + name + ": ü".encode() + length + body)
        assert status == 200


@pytest.mark.parametrize("name", [b"Accept", b"Cookie", b"Expect", b"Range", b"X-Request-Id"])
async def test_headers_that_nobody_needs_may_hold_anything(name: bytes) -> None:
    async with fleet(0, 0) as f:
        body = json.dumps(chat()).encode()
        head = HEAD + b"Connection: close\r\n"
        length = b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        assert (await raw(f, head + name + b": \xff" + length + body))[0] == 200


async def test_a_client_may_wait_for_leave_to_send_its_body() -> None:
    async with fleet(0, 0) as f:
        body = json.dumps(chat()).encode()
        async with f.client.post(f.url + CHAT, data=body, expect100=True) as response:
            assert response.status == 200


async def test_the_log_has_no_line_of_the_clients(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with fleet(0, 0, access_log=True) as f:
            await raw(f, b"GET /a%0aforged HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert "/a%0aforged 404" in caplog.text
