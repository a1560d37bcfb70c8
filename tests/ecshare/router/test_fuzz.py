# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes a client sends, the client is at fault: while engines answer, nothing is a 5xx.

Bytes at random are in tests/fuzz.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from tests.ecshare.router.fake_engine import (
    PNG,
    FakeEngine,
    Fleet,
    chat,
    decoded,
    fleet,
    picture,
)

VALID = json.dumps(chat(picture(PNG), temperature=0.5, stop=["\u00e9"])).encode()
TEXT = json.dumps(chat(x=1)).encode()


class Deaf(FakeEngine):
    """Answers whatever it is sent: what is found unreadable, the router has to find."""

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        await http.read()
        return await self.answer(http, {})


@asynccontextmanager
async def deaf_fleet() -> AsyncIterator[Fleet]:
    async with (
        Deaf(decoded).serving() as engine,
        fleet(num_d=0, num_p=0, decoders_more=(engine.url,)) as f,
    ):
        yield f


def with_text(text: bytes) -> bytes:
    return TEXT.replace(b"what is this?", text)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\x00", b"[]", b"null", b"hello", b"NaN"),
        *map(with_text, (b"\xff", b"\xed\xa0\x80", b"\xc3", b"\x00")),
        *map(with_text, (b"\\ud800", b"\\udc00\\ud800", b"\\")),
        TEXT.replace(b'"model"', b'"mod\xffel"'),
        TEXT.replace(b": 1}", b": 1e999}"),
        TEXT.replace(b": 1}", b": " + b"9" * 5000 + b"}"),
        TEXT.replace(b": 1}", b": Infinity}"),
        TEXT.replace(b": 1}", b": " + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        TEXT.decode().encode("utf-16")[:-1],
        TEXT.decode().encode("utf-32") + b"\xff\xff\xff\xff",
        gzip.compress(TEXT, mtime=0),
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_an_unreadable_body_is_400(body: bytes) -> None:
    async with fleet() as f:
        response, answer = await f.post(body)
        assert response.status == 400
        error = json.loads(answer)["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert not f.d.bodies


def readable_depth() -> int:
    """How deep a body may be nested, about; it depends on Python's version."""
    low, high = 1, 10_000_000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            msgspec.json.decode(b"[" * middle + b"]" * middle)
        except RecursionError:
            high = middle
        else:
            low = middle
    return low


async def test_what_can_be_read_but_not_written_again_is_400() -> None:
    """What E is sent lies deeper than what the client has sent."""
    limit = readable_depth()
    async with fleet(num_p=0) as f:
        statuses = set()
        for depth in range(limit - 120, limit + 10):
            deep = b'{"a":' * depth + b"1" + b"}" * depth
            body = VALID.replace(b'"temperature": 0.5', b'"mm_processor_kwargs": ' + deep)
            response, _ = await f.post(body)
            statuses.add(response.status)
        assert statuses <= {200, 400}
        assert 400 in statuses


async def test_numbers_and_depth_at_the_edge_of_what_can_be_read() -> None:
    async with deaf_fleet() as f:
        for depth in (100, *range(850, 1010, 3), 2000, 20_000):
            for body in (
                TEXT.replace(b": 1}", b": " + b"[" * depth + b"]" * depth + b"}"),
                VALID.replace(b"0.5", b'{"a":' * depth + b"1" + b"}" * depth),
            ):
                assert (await f.post(body))[0].status in (200, 400), depth
        for number in (b"1e308", b"9" * 4299, b"-" + b"9" * 400, b"0." + b"1" * 5000, b"1e-9999"):
            response, _ = await f.post(TEXT.replace(b": 1}", b": " + number + b"}"))
            assert response.status in (200, 400), number


@pytest.mark.parametrize(
    "head",
    [
        *(
            b"GET /nothing HTTP/1.1\r\n%s\r\n" % headers
            for headers in (b"Host: \xff", b"Host: [", b"Host: x\r\nx-request-id: \xff\x80")
        ),
        b"GET /nothing HTTP/1.1\r\nHost: x\r\n\xff: y\r\n",
        *(
            b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (CHAT.encode(), headers)
            for headers in (
                b"Content-Length: -1",
                b"Transfer-Encoding: \xff",
                b"Content-Type: \xff; charset=\xff\r\nContent-Length: 0",
            )
        ),
    ],
)
async def test_odd_heads_are_4xx(head: bytes) -> None:
    async with fleet() as f:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(f.url.rpartition(":")[2]))
        writer.write(head + b"Connection: close\r\n\r\n")
        status_line = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert status_line.split()[1][:1] == b"4", status_line
