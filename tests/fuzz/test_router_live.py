# SPDX-License-Identifier: Apache-2.0
"""Malformed requests to a router on a socket: none gets a 5xx except for media that cannot be
fetched, no smuggled header is forwarded, no file is read, and the router still works afterwards."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.logs import OneLineFormatter
from tests.ecshare.router.answers import decoded
from tests.ecshare.router.bodies import chat
from tests.ecshare.router.fake_engine import FakeEngine, Fleet, fleet
from tests.fuzz.running import cases, dice
from tests.fuzz.values import ODD_NUMBERS, ODD_TEXT, Path, paths, written

pytestmark = pytest.mark.fuzz

PIXELS = "data:image/png;base64,iVBORw0KGgo="
VALID = chat({"type": "image_url", "image_url": {"url": PIXELS}}, stream=False, max_tokens=3)
HANGS_S = 60.0
PATIENCE_S = 0.2
TOGETHER = 16
HEADERS = [
    *(
        b"Authorization: Bearer \xff\xfe",
        b"Authorization: a\x00b",
        b"Authorization: " + b"A" * 7000,
    ),
    *(b"traceparent: x\ty", b"X-Request-Id: a\xc3\xa9", b"X-Request-Id: " + b"r" * 128),
    *(b"Authorization: x\r\nX-Evil: 1", b"Authorization: x\nX-Evil: 1", b"X-Request-Id: ../../x"),
    *(b"Authorization: x\rX-Evil: 1", b"Transfer-Encoding: chunked", b"Content-Length: 5"),
    *(b"Expect: 100-continue", b"Upgrade: websocket", b"Content-Encoding: gzip", b": x", b"A B: x"),
    *(b"Content-Encoding: br", b"Content-Type: application/json; charset=utf-16", b"Host: evil"),
    *(b"Authorization : x", b"X: " + b"y" * 9000, b"Cookie: a=b", b"Authorization: \xed\xa0\x80"),
    *(b"tracestate: \x7f", b"Authorization: \xe9", b"Range: bytes=0-1", b"\xff: y"),
]
METHODS = [b"GET", b"POST", b"PUT", b"OPTIONS", b"HEAD", b"TRACE", b"CONNECT", b"X" * 300, b"\xff"]
TARGETS = [
    *(b"/", b"/health", b"/v1/models", b"/v1/models/../../x", b"/%2e%2e/%2e%2e/etc/passwd", b"//x"),
    *(
        b"http://127.0.0.1:1/v1/chat/completions",
        b"/v1/chat/completions?x=" + b"a" * 9000,
        b"/\xff",
    ),
    *(b"/%00", b"/\x00", b"*", b"/v1/chat/completions/", b"/v1/completions", b"/x%0a%1b[31m"),
]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"x"]
URLS = [
    *("http://127.0.0.1:1/x", "http://[::1]:1/", "http://2130706433:1/", "http://127.1:1/"),
    *("http://0x7f.1:1/", "http://user:pw@127.0.0.1:1/", "http://127.0.0.1:99999/", "http://["),
    *("http://127.0.0.1:-1/", "http://a\x00b/", "http://" + "a" * 300 + "/", "http://xn--/"),
    *(
        "http://\udcff/",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http:///x",
    ),
    *("gopher://127.0.0.1:1/_x", "http:127.0.0.1", "//127.0.0.1/", "http://127.0.0.1:1/\r\nX: y"),
    *("http://127.0.0.1:1\r\nX: y/", "http://127.0.0.1:1/#@evil", "javascript:1", "data:,x"),
    *("data:image/png;base64,", "DATA:IMAGE/PNG;BASE64,AAAA", "http://127.0.0.1:1/%0d%0aX:%20y"),
]


class Deaf(FakeEngine):
    """Accepts every request, so that the router has to refuse unreadable ones."""

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        await http.read()
        self.headers.append(dict(http.headers))
        return await self.answer(http, {})


def message(
    body: bytes,
    *headers: bytes,
    start: bytes = b"POST " + CHAT.encode() + b" HTTP/1.1",
    length: int | None = None,
    is_chunked: bool = False,
) -> bytes:
    lines = [start, b"Host: x", b"Content-Type: application/json", b"Connection: close", *headers]
    if is_chunked:
        lines.append(b"Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        lines.append(b"Content-Length: %d" % (len(body) if length is None else length))
    return b"\r\n".join([*lines, b"", body])


def odd_json(chance: Random) -> bytes:
    value = json.loads(json.dumps(VALID))
    for _ in range(chance.choice([1, 1, 2, 3])):
        at: Path = chance.choice(paths(value) or [()])
        if not at:
            break
        parent = value
        for name in at[:-1]:
            parent = parent[name]
        odd: list[object] = [*ODD_NUMBERS, *ODD_TEXT, None, True, [], {}, [[]], {"url": 1}]
        parent[at[-1]] = chance.choice(odd)
    body = written(value, ascii_only=chance.random() < 0.5)
    if chance.random() < 0.2:
        at_byte = chance.randrange(len(body))
        body = body[:at_byte] + chance.randbytes(2) + body[at_byte + 1 :]
    return message(body, is_chunked=chance.random() < 0.2)


def odd_headers(chance: Random) -> bytes:
    return message(written(VALID), *chance.sample(HEADERS, chance.choice([1, 1, 1, 2, 3])))


def odd_length(chance: Random) -> bytes:
    body = written(VALID)
    lengths = [0, 1, len(body) - 1, len(body) + 1, 2**31, 2**63, 2**64]
    return message(body, length=chance.choice(lengths))


def odd_start(chance: Random) -> bytes:
    words = (chance.choice(METHODS), chance.choice(TARGETS), chance.choice(VERSIONS))
    return message(written(VALID), start=b" ".join(words))


def odd_bytes(chance: Random) -> bytes:
    sent = message(written(VALID))
    at = chance.randrange(len(sent))
    return sent[:at] + chance.randbytes(chance.randrange(1, 5)) + sent[at + chance.randrange(3) :]


def odd_chunks(chance: Random) -> bytes:
    body = written(VALID)
    size = b"%x" % len(body)
    odd = [b"-1", b"f" * 16, b"0", b"zz", size + b";ext=1", b"1", b"%x" % (len(body) + 5), b""]
    return message(body, is_chunked=True).replace(
        b"\r\n\r\n" + size, b"\r\n\r\n" + chance.choice(odd), 1
    )


def odd_media(chance: Random) -> bytes:
    part = {"type": "image_url", "image_url": {"url": chance.choice(URLS)}}
    return message(written(chat(part)))


KINDS: list[Callable[[Random], bytes]] = [
    odd_json, odd_json, odd_headers, odd_headers, odd_length, odd_start, odd_bytes, odd_chunks,
    odd_media,
]  # fmt: skip
ANSWERED = (odd_json, odd_media)
"""The kinds that are well-formed HTTP: they must be answered, in JSON."""


async def send(port: int, sent: bytes, *, is_whole: bool) -> bytes:
    """Send a request and return the answer; wait only briefly if it may be incomplete."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), HANGS_S if is_whole else PATIENCE_S)
    except (ConnectionError, TimeoutError):
        if is_whole:
            raise
        return b""
    finally:
        writer.close()


def check(answer: bytes, *, is_whole: bool) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\nX-Evil" not in head
    assert b"root:" not in body
    if not is_whole and not answer:
        return "closed"
    status = head.split()[1].decode()
    assert status < "500" or (status == "502" and b'"media_unavailable"' in body), answer[:2000]
    if is_whole and status != "200":
        assert json.loads(body)["error"]["message"]
    return status


async def test_malformed_requests_get_no_5xx(caplog: pytest.LogCaptureFixture) -> None:
    chance, seen = dice("router"), Counter[str]()
    async with (
        Deaf(decoded).serving() as e,
        Deaf(decoded).serving() as d,
        fleet(
            num_e=0,
            num_p=0,
            num_d=0,
            encoders_more=(e.url,),
            decoders_more=(d.url,),
            access_log=True,
        ) as f,
    ):
        port = int(f.url.rpartition(":")[2])

        async def one() -> None:
            kind = chance.choice(KINDS)
            sent, is_whole = kind(chance), kind in ANSWERED
            answer = await send(port, sent, is_whole=is_whole)
            seen[check(answer, is_whole=is_whole)] += 1

        for _ in range(cases(25)):
            await asyncio.gather(*(one() for _ in range(TOGETHER)))
        await check_still_works(f)
        for engine in (e, d):
            assert not any("X-Evil" in headers for headers in engine.headers)
    assert seen["200"]
    assert seen["400"]
    for record in caplog.records:
        if record.name.startswith("ecshare"):
            assert record.exc_info is None, record.getMessage()
            assert OneLineFormatter().format(record).isprintable()


async def check_still_works(f: Fleet) -> None:
    response, _ = await f.post(VALID)
    assert response.status == 200


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ecshare")
