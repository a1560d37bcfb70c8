# SPDX-License-Identifier: Apache-2.0
"""Packed bodies, and paths and headers that hold any bytes."""

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Callable

import pytest

from ecshare.router.app import CHAT
from tests.ecshare.router.fake_engine import Fleet, chat, fleet


def bare(content: bytes) -> bytes:
    """Deflate without the header that RFC 9110 asks for, as many clients send it."""
    packing = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packing.compress(content) + packing.flush()


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", bare),
        ("identity", bytes),
    ],
)
@pytest.mark.parametrize("size", [10, 300_000])
async def test_a_packed_body_is_unpacked(
    encoding: str, pack: Callable[[bytes], bytes], size: int
) -> None:
    body = chat(user=random.Random(1).randbytes(size).hex())
    async with fleet() as f:
        sent = pack(json.dumps(body).encode())
        assert (await f.post(sent, {"Content-Encoding": encoding}))[0].status == 200
        assert f.d.bodies[0]["user"] == body["user"]


async def test_content_encodings_that_are_not_what_they_say_are_400(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = json.dumps(chat()).encode()
    for encoding, sent in (
        ("gzip", body),
        ("gzip", gzip.compress(body)[:-12]),
        ("gzip", gzip.compress(body)[:20] + b"\0" * 20),
        ("gzip", gzip.compress(body) + b"more"),
        ("gzip", b""),
        ("deflate", body),
        ("deflate", zlib.compress(body)[:-6]),
        ("deflate", b"\x78\x9c" + b"\xff" * 30),
        ("identity", gzip.compress(body)),
        ("unheard-of", gzip.compress(body)),
        ("br", body),
        ("zstd", body),
    ):
        async with fleet() as f:
            response, answer = await f.post(sent, {"Content-Encoding": encoding})
            assert response.status == 400, (encoding, sent)
            assert json.loads(answer)["error"]["message"]
            assert f.p.bodies == []
    assert "Traceback" not in caplog.text


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


@pytest.mark.parametrize("name", [b"Authorization", b"traceparent", b"tracestate"])
async def test_headers_that_cannot_be_passed_on_are_400(name: bytes) -> None:
    async with fleet(0, 0) as f:
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % CHAT.encode()
        body = json.dumps(chat()).encode()
        length = b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        status, rest = await raw(f, head + name + b": a\xffb" + length + body)
        assert status == 400
        assert b"The header `%s` is not UTF-8 text." % name in rest
        assert f.d.bodies == []
        status, _ = await raw(f, head + name + ": ü".encode() + length + body)
        assert status == 200


@pytest.mark.parametrize(
    "name", [b"Accept", b"Cookie", b"Content-Type", b"Expect", b"Range", b"X-Request-Id"]
)
async def test_headers_that_nobody_needs_may_hold_anything(name: bytes) -> None:
    async with fleet(0, 0) as f:
        body = json.dumps(chat()).encode()
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % CHAT.encode()
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
