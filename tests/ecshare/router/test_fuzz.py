# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes a client sends, the client is at fault: while engines answer, nothing is a 5xx.

Bytes at random are in tests/fuzz.
"""

import asyncio
import gzip
import json

import msgspec
import pytest

from tests.ecshare.router.bodies import HEAD, PNG, chat, picture
from tests.ecshare.router.fake_engine import Fleet, fleet

VALID = json.dumps(chat(picture(PNG), temperature=0.5, stop=["\u00e9"])).encode()
TEXT = json.dumps(chat(x=1)).encode()


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
async def test_an_unreadable_body_is_400(f: Fleet, body: bytes) -> None:
    status, error = await f.error(body)
    assert (status, error["type"]) == (400, "invalid_request_error")
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
    async with fleet(num_p=0) as f:
        for depth in (100, *range(850, 1010, 3), 2000, 20_000):
            for body in (
                TEXT.replace(b": 1}", b": " + b"[" * depth + b"]" * depth + b"}"),
                VALID.replace(b"0.5", b'{"a":' * depth + b"1" + b"}" * depth),
            ):
                assert (await f.post(body))[0].status in (200, 400), depth
        for number in (b"1e308", b"9" * 4299, b"-" + b"9" * 400, b"0." + b"1" * 5000, b"1e-9999"):
            response, _ = await f.post(TEXT.replace(b": 1}", b": " + number + b"}"))
            assert response.status in (200, 400), number


HOST = b"GET /nothing HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "head",
    [
        *(b"GET /nothing HTTP/1.1\r\nHost: %s\r\n" % host for host in (b"\xff", b"[")),
        *(HOST + header for header in (b"x-request-id: \xff\x80\r\n", b"\xff: y\r\n")),
        HEAD + b"Content-Length: -1\r\n",
        HEAD + b"Transfer-Encoding: \xff\r\n",
        HEAD.replace(b"application/json", b"\xff; charset=\xff") + b"Content-Length: 0\r\n",
    ],
)
async def test_odd_heads_are_4xx(f: Fleet, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(f.url.rpartition(":")[2]))
    writer.write(head + b"Connection: close\r\n\r\n")
    status_line = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    assert status_line.split()[1][:1] == b"4", status_line
