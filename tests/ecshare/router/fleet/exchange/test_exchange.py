# SPDX-License-Identifier: Apache-2.0
"""The HTTP client for engines, against servers that behave, misbehave and attack."""

import asyncio
import gc
import os
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web

from ecshare.router.fleet import exchange as module
from ecshare.router.fleet import messages
from ecshare.router.fleet.exchange import BrokenError, ConnectError, Connections, Exchange
from tests.ecshare.router.fleet.exchange.scripted_server import (
    Body,
    Visit,
    answer,
    answering,
    connections,
    fetch,
    serving,
)
from tests.waiting import until

SECOND = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen"
ON_ONE_LOOP = pytest.mark.asyncio(loop_factories=["uvloop"])
"""For what happens within the parser."""
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# What is sent


async def test_the_head_names_host_and_length_and_asks_for_plain_bytes() -> None:
    async with serving(answering(answer())) as server, connections() as client:
        given = {"X-Ä": "ü", "Content-Length": "99", "host": "other", "Transfer-Encoding": "x"}
        exchange = client.exchange("POST", server.url + "/v1/a?b=c", given, Body(b"{}"))
        await exchange.begin()
        exchange.close()
        host = server.url.removeprefix("http://")
        assert server.requests == [
            f"POST /v1/a?b=c HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n"
            "X-Ä: ü\r\nContent-Length: 2\r\n\r\n{}".encode()
        ]


async def test_without_a_body_there_is_no_length_and_no_path_is_the_root() -> None:
    async with serving(answering(answer())) as server, connections() as client:
        await fetch(client, server.url, method="GET")
        assert server.requests[0].startswith(b"GET / HTTP/1.1\r\n")
        assert b"Content-Length" not in server.requests[0]


async def test_the_host_goes_without_its_default_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(answering(answer())) as server, connections() as client:
        port = int(server.url.rpartition(":")[2])
        monkeypatch.setitem(messages._DEFAULT_PORTS, "http", port)
        messages._place.cache_clear()
        await fetch(client, server.url)
        await fetch(client, "http://127.0.0.1")
        assert all(b"\r\nHost: 127.0.0.1\r\n" in each for each in server.requests)
        assert len(server.visits) == 1
    messages._place.cache_clear()


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (64 << 10) + 1, 256 << 10, 5_000_001])
async def test_a_body_arrives_as_it_is(size: int) -> None:
    data = os.urandom(size)
    cuts = [0, min(3, size), size // 3, size // 3, size]
    pieces = [memoryview(data)[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    async with serving(answering(answer())) as server, connections() as client:
        body = Body(*pieces[:2], bytes(pieces[2]), pieces[3])
        body.num_bytes = size
        for _ in range(2):
            assert (await fetch(client, server.url, body))[0] == 200
        assert [each.partition(b"\r\n\r\n")[2] == data for each in server.requests] == [True] * 2
        assert len(server.visits) == 1


ANSWERS_AT_ONCE = """
import socket, sys
size = 300_000
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
for number in range(1, 10):
    connection, _ = listening.accept()
    left = 0
    while data := connection.recv(1 << 20):
        left = (left or size + data.index(b"\\r\\n\\r\\n") + 4) - len(data)
        if not left:
            connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 1\\r\\n\\r\\n%d" % number)
"""


async def test_a_connection_is_kept_though_the_answer_comes_with_the_end_of_a_large_body() -> None:
    """The server is another process: its answer may be there before our loop looks again."""
    command = [sys.executable, "-c", ANSWERS_AT_ONCE]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            async with connections() as client:
                for _ in range(100):
                    assert (await fetch(client, url, Body(bytes(300_000))))[2] == b"1"
        finally:
            server.kill()


async def test_a_large_body_is_not_read_before_the_server_takes_it() -> None:
    taken = asyncio.Event()

    async def script(visit: Visit) -> None:
        await taken.wait()
        await visit.request()
        await visit.send(answer())

    body = Body(*[memoryview(bytes(1 << 20))] * 64)
    async with serving(script) as server, connections() as client:
        fetching = asyncio.create_task(fetch(client, server.url, body))
        await until(lambda: body.num_taken > 0)
        await asyncio.sleep(0.1)
        assert body.num_taken < 32
        taken.set()
        assert (await fetching)[0] == 200
        assert len(server.requests[0]) > 64 << 20


async def test_the_loop_has_its_turn_while_a_large_body_is_sent() -> None:
    steps = []

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(answer())

    async def others() -> None:
        while True:
            steps.append(body.num_taken)
            await asyncio.sleep(0)

    body = Body(*[memoryview(bytes(256 << 10))] * 64)
    async with serving(script) as server, connections() as client:
        running = asyncio.create_task(others())
        await fetch(client, server.url, body)
        running.cancel()
    assert max(after - before for before, after in zip(steps, steps[1:], strict=False)) <= 2


async def test_a_body_that_cannot_be_read_ends_the_exchange() -> None:
    class Cleared(Body):
        def pieces(self) -> Iterator[bytes | memoryview]:
            yield bytes(1 << 20)
            raise IndexError

    async def script(visit: Visit) -> None:
        await visit.end_of_client()

    async with serving(script) as server, connections() as client:
        with pytest.raises(IndexError):
            await fetch(client, server.url, Cleared(bytes(2 << 20)))
        await until(lambda: server.num_open == 0)


@pytest.mark.parametrize("large", [False, True])
async def test_an_answer_before_the_whole_body_is_heard_and_the_rest_not_sent(large: bool) -> None:
    async def script(visit: Visit) -> None:
        await visit.reader.readuntil(b"\r\n\r\n")
        await visit.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.sleep(0.05)
        await visit.end_of_client()

    body = Body(*[memoryview(bytes(1 << 20))] * (64 if large else 0), b"x")
    async with serving(script) as server, connections() as client:
        assert (await fetch(client, server.url, body))[::2] == (413, b"no")
        assert body.num_taken < 32
        if large:
            await until(lambda: server.num_open == 0)


async def test_a_server_that_only_stops_sending_ends_the_exchange() -> None:
    async def script(visit: Visit) -> None:
        await visit.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)  # until nothing more can be sent
        visit.writer.write_eof()
        await asyncio.sleep(60)

    async with serving(script) as server, connections() as client:
        with pytest.raises(BrokenError):
            await fetch(client, server.url, Body(memoryview(bytes(64 << 20))))


# What is received

ANSWERS: dict[str, tuple[bytes, str, int, bytes, bool]] = {
    "length": (answer(b"hello"), "POST", 200, b"hello", True),
    "no body": (answer(b""), "POST", 200, b"", True),
    "chunked": (CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", "POST", 200, b"abcde", True),
    "trailers": (CHUNKED + b"3\r\nabc\r\n0\r\nT: v\r\n\r\n", "POST", 200, b"abc", True),
    "preliminary": (
        b"HTTP/1.1 100 Continue\r\nX-A: 1\r\n\r\nHTTP/1.1 103 Early\r\nX-B: 1\r\n\r\n" + answer(),
        *("POST", 200, b"ok", True),
    ),
    "close": (answer(b"ok", b"Connection: close"), "POST", 200, b"ok", False),
    "1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "POST", 200, b"ok", False),
    "1.0 kept": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        *("POST", 200, b"ok", True),
    ),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", "POST", 204, b"", True),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", "GET", 304, b"", True),
    "HEAD": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "HEAD", 200, b"", False),
    "no reason": (b"HTTP/1.1 404\r\nContent-Length: 2\r\n\r\nno", "POST", 404, b"no", True),
    "second answer": (answer() + SECOND, "POST", 200, b"ok", False),
    "longer than its length": (answer() + b"more", "POST", 200, b"ok", False),
    "chunks and more": (CHUNKED + b"1\r\na\r\n0\r\n\r\n" + SECOND, "POST", 200, b"a", False),
    "a body where none can be": (
        b"HTTP/1.1 204 No Content\r\nContent-Length: 6\r\n\r\nstolen",
        *("POST", 204, b"", False),
    ),
}


@ON_ONE_LOOP
@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_of_each_form_are_read_to_their_end(name: str) -> None:
    data, method, status, body, is_kept = ANSWERS[name]
    for at_once in (True, False):
        script = answering(data, at_once=at_once)
        async with serving(script) as server, connections() as client:
            for _ in range(3):
                assert (await fetch(client, server.url, None, method))[::2] == (status, body)
            assert len(server.visits) == (1 if is_kept else 3)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK\r\nConnection: close"])
async def test_a_body_without_a_length_ends_with_the_connection(head: bytes) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(head + b"\r\n\r\nsome")
        await visit.send(b" more")

    async with serving(script) as server, connections() as client:
        assert (await fetch(client, server.url))[::2] == (200, b"some more")


async def test_headers_are_found_by_lower_case_names_and_the_first_one_counts() -> None:
    data = answer(b"", b"X-A: 1", b"x-a: 2", b"X-B:  \xc3\xa4 ")
    async with serving(answering(data)) as server, connections() as client:
        headers = (await fetch(client, server.url))[1]
    assert headers == {"content-length": "0", "x-a": "1", "x-b": "ä"}


async def test_headers_of_preliminary_answers_and_trailers_are_dropped() -> None:
    data = b"HTTP/1.1 103 Early\r\nX-A: 1\r\n\r\n" + CHUNKED + b"1\r\na\r\n0\r\nX-B: 1\r\n\r\n"
    async with serving(answering(data)) as server, connections() as client:
        assert (await fetch(client, server.url))[1] == {"transfer-encoding": "chunked"}


async def test_parts_of_a_stream_are_returned_as_they_arrive() -> None:
    told = asyncio.Queue[bytes]()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(CHUNKED)
        while data := await told.get():
            await visit.send(b"%x\r\n%b\r\n" % (len(data), data))
        await visit.send(b"0\r\n\r\n")

    async with serving(script) as server, connections() as client:
        exchange = client.exchange("POST", server.url, {})
        await exchange.begin()
        for each in (b"data: 1\n\n", b"data: 2\n\n"):
            told.put_nowait(each)
            assert await exchange.chunk() == each
        told.put_nowait(b"")
        assert [await exchange.chunk(), await exchange.chunk()] == [b"", b""]
        exchange.close()


async def test_a_slow_reader_holds_up_the_server() -> None:
    num_sent = 0
    size = 1 << 26

    async def script(visit: Visit) -> None:
        nonlocal num_sent
        await visit.request()
        await visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            await visit.send(bytes(1 << 16))
            num_sent += 1 << 16

    async with serving(script) as server, connections() as client:
        exchange = client.exchange("POST", server.url, {})
        await exchange.begin()
        await asyncio.sleep(0.1)
        assert num_sent < size // 2
        assert 0 < len(await exchange.chunk()) <= 512 << 10
        num_read = 0
        while chunk := await exchange.chunk():
            assert len(chunk) <= 512 << 10
            num_read += len(chunk)
        exchange.close()
        assert num_read > size - (1 << 20)


@ON_ONE_LOOP
@pytest.mark.parametrize("name", ["length", "chunked", "trailers", "preliminary"])
async def test_an_answer_that_is_cut_short_anywhere_is_broken(name: str) -> None:
    data = ANSWERS[name][0]

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(data[: visit.number])

    async with serving(script) as server, connections() as client:
        for _ in range(len(data)):
            with pytest.raises(BrokenError):
                await fetch(client, server.url)
        assert (await fetch(client, server.url))[0] == 200
        assert len(server.requests) == len(data) + 1  # none was sent twice


async def test_a_reset_is_no_end_of_a_body_without_length() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await asyncio.sleep(0.02)
        reset(visit)

    async with serving(script) as server, connections() as client:
        with pytest.raises(BrokenError):
            await fetch(client, server.url)


def reset(visit: Visit) -> None:
    """Close a connection with a reset."""
    descriptor = visit.writer.get_extra_info("socket").fileno()
    with socket.socket(fileno=os.dup(descriptor)) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    visit.writer.transport.abort()


# Attacks

HOSTILE = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "another version": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "version 0.9": b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
    "no status": b"HTTP/1.1 abc OK\r\n\r\n",
    "status 0": b"HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n",
    "switched protocols": b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "switched without a name": b"HTTP/1.1 101 X\r\n\r\n",
    "two lengths": answer(b"ab", b"Content-Length: 1"),
    "the same length twice": answer(b"ab", b"Content-Length: 2"),
    "a list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nab",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "length and chunks": CHUNKED[:-2] + b"Content-Length: 1\r\n\r\n0\r\n\r\n",
    "chunks and length": answer(b"0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "another encoding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nab",
    "two encodings": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked not last": CHUNKED[:-2] + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "two encodings in two lines": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "a folded header": answer(b"ab", b"X: a\r\n b"),
    "a line break of its own": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "NUL": answer(b"ab", b"X: a\0b"),
    "no name": answer(b"ab", b": a"),
    "a space before the colon": answer(b"ab", b"Content-Length : 9"),
    "a chunk of 2^64": CHUNKED + b"10000000000000000\r\nab",
    "a chunk of no size": CHUNKED + b"\r\nab",
    "a chunk longer than its size": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "257 headers": answer(b"ab", *[b"X: 1"] * 256),
    "a long head": answer(b"ab", b"X: " + b"a" * 70_000),
    "a length in trailers": CHUNKED + b"0\r\nContent-Length: 6\r\n\r\nstolen",
}


@ON_ONE_LOOP
@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_no_answer_is_broken(name: str) -> None:
    data = HOSTILE[name]

    async def script(visit: Visit) -> None:
        await visit.request()
        for piece in [data] if visit.number == 0 else [bytes([byte]) for byte in data]:
            await visit.send(piece)
            await asyncio.sleep(0)
        if name != "chunked not last":  # the parser reads on; only the end of it is wrong
            await visit.end_of_client()

    async with serving(script) as server, connections() as client:
        for _ in range(2 if len(data) < 10_000 else 1):  # at once and byte by byte
            with pytest.raises(BrokenError):
                await fetch(client, server.url)
        await until(lambda: server.num_open == 0)


ENDLESS = {
    "a header": (b"HTTP/1.1 200 OK\r\nX: ", b"a" * 1000),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: a\r\n" * 10),
    "a reason": (b"HTTP/1.1 200 ", b"a" * 1000),
    "empty lines": (b"", b"\r\n" * 1000),
    "preliminary answers": (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 10),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"T: a\r\n" * 10),
    "a trailer": (CHUNKED + b"1\r\na\r\n0\r\nT: ", b"a" * 1000),
    "the extension of a chunk": (CHUNKED + b"1;", b"a" * 1000),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_what_never_ends_is_broken_after_a_while(name: str) -> None:
    num_sent = 0

    async def script(visit: Visit) -> None:
        nonlocal num_sent
        await visit.request()
        first, more = ENDLESS[name]
        await visit.send(first)
        while True:
            await visit.send(more)
            num_sent += len(more)
            await asyncio.sleep(0)

    async with serving(script) as server, connections() as client:
        with pytest.raises(BrokenError, match="too large"):
            await fetch(client, server.url)
        await until(lambda: server.num_open == 0)
    assert num_sent < 2_000_000


async def test_a_huge_chunk_is_read_as_it_arrives() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(CHUNKED + b"8000000000000000\r\nsome")
        await asyncio.sleep(0.02)

    async with serving(script) as server, connections() as client:
        exchange = client.exchange("POST", server.url, {})
        await exchange.begin()
        assert await exchange.chunk() == b"some"
        with pytest.raises(BrokenError):
            await exchange.chunk()
        exchange.close()


@pytest.mark.parametrize("wait_s", [0, 0.01])
async def test_an_answer_before_the_request_reaches_one_request_at_most(wait_s: float) -> None:
    async def script(visit: Visit) -> None:
        await asyncio.sleep(wait_s)
        await visit.send(SECOND + SECOND)
        await visit.end_of_client()

    async with serving(script) as server, connections() as client:
        for _ in range(5):
            with suppress(BrokenError):
                assert (await fetch(client, server.url))[2] == b"stolen"
        assert len(server.visits) == 5


@pytest.mark.parametrize("is_seen", [False, True])
async def test_an_answer_that_nobody_asked_for_never_reaches_the_next_request(
    is_seen: bool,
) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with connections() as client:
            first = asyncio.create_task(fetch(client, url))
            with (await loop.sock_accept(listener))[0] as served:
                await loop.sock_recv(served, 1000)
                served.send(answer())
                assert (await first)[2] == b"ok"
                served.send(SECOND)
                if is_seen:
                    await asyncio.sleep(0.02)
                # Otherwise it waits in the kernel at the moment when the next request begins.
                second = client.exchange("POST", url, {})
                beginning = asyncio.create_task(second.begin())
                with (await loop.sock_accept(listener))[0] as other:
                    await loop.sock_recv(other, 1000)
                    other.send(answer(b"mine"))
                    await beginning
                    assert await second.chunk() == b"mine"
                    second.close()


# Kept connections


@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("size", [10, 3_000_000])
async def test_a_kept_connection_that_ends_at_once_is_tried_again(
    size: int, with_reset: bool
) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(answer(b"%d" % visit.number))
        await visit.reader.readexactly(1)
        if with_reset:
            reset(visit)
        else:
            await visit.reader.readuntil(b"\r\n\r\n")

    body = Body(memoryview(os.urandom(size)))
    async with serving(script) as server, connections() as client:
        assert (await fetch(client, server.url))[2] == b"0"
        assert (await fetch(client, server.url, body))[2] == b"1"
        assert server.requests[1].endswith(bytes(next(body.pieces())))
        assert len(server.visits) == 2


async def test_a_request_is_never_sent_three_times() -> None:
    heads = []

    async def script(visit: Visit) -> None:
        if visit.number == 0:
            await visit.request()
            await visit.send(answer())
        heads.append(await visit.reader.readuntil(b"\r\n\r\n"))

    async with serving(script) as server, connections() as client:
        await fetch(client, server.url)
        with pytest.raises(BrokenError):
            await fetch(client, server.url)
        assert len(heads) == 2


async def test_a_kept_connection_that_ends_within_the_answer_is_not_tried_again() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(answer())
        await visit.request()
        await visit.send(b"H")

    async with serving(script) as server, connections() as client:
        await fetch(client, server.url)
        with pytest.raises(BrokenError):
            await fetch(client, server.url)
        assert len(server.visits) == 1


async def test_a_new_connection_that_ends_is_not_tried_again() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()

    async with serving(script) as server, connections() as client:
        with pytest.raises(BrokenError):
            await fetch(client, server.url)
        assert len(server.requests) == 1


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(answer())

    async with serving(script) as server, connections() as client:
        for number in range(3):
            await fetch(client, server.url)
            await until(lambda: server.num_open == 0)
            assert len(server.visits) == number + 1


async def test_idle_connections_are_closed_after_a_while() -> None:
    async with serving(answering(answer())) as server, connections(keep_idle_s=0.05) as client:
        await asyncio.gather(*(fetch(client, server.url) for _ in range(3)))
        assert server.num_open == 3
        await asyncio.sleep(0.03)
        await fetch(client, server.url)
        await until(lambda: server.num_open == 1)
        await until(lambda: server.num_open == 0)


async def test_a_connection_that_was_idle_for_too_long_is_not_used_before_it_is_closed() -> None:
    async with serving(answering(answer())) as server, connections(keep_idle_s=0.0) as client:
        await fetch(client, server.url)
        await fetch(client, server.url)
        assert len(server.visits) == 2


async def test_an_answer_that_has_arrived_unread_leaves_a_clean_connection() -> None:
    async with serving(answering(answer())) as server, connections() as client:
        exchange = client.exchange("GET", server.url, {})
        await exchange.begin()
        exchange.close()
        exchange.close()
        assert (await fetch(client, server.url))[2] == b"ok"
        assert len(server.visits) == 1


async def test_connections_to_other_hosts_and_ports_are_not_mixed_up() -> None:
    async with (
        serving(answering(answer(b"a"))) as a,
        serving(answering(answer(b"b"))) as b,
        connections() as client,
    ):
        for _ in range(2):
            assert (await fetch(client, a.url))[2] == b"a"
            assert (await fetch(client, b.url))[2] == b"b"
        await fetch(client, a.url.replace("127.0.0.1", "localhost"))
        assert (len(a.visits), len(b.visits)) == (2, 1)


async def test_as_many_connections_are_used_at_once_as_there_may_be_in_order() -> None:
    order, released = [], asyncio.Event()

    async def script(visit: Visit) -> None:
        while True:
            order.append((await visit.request()).split()[1])
            if len(order) > 2:
                await asyncio.sleep(0.005)
            await released.wait()
            await visit.send(answer())

    async with serving(script) as server, connections(2) as client:
        fetching = [asyncio.create_task(fetch(client, f"{server.url}/{n}")) for n in range(8)]
        await until(lambda: len(order) == 2)
        await asyncio.sleep(0.02)
        assert len(order) == 2
        fetching[4].cancel()
        waiting = client.exchange("GET", server.url, {}, limit_s=0.01)
        with pytest.raises(TimeoutError):
            await waiting.begin()
        waiting.close()
        released.set()
        await asyncio.gather(*fetching, return_exceptions=True)
        assert sorted(order[:2]) == [b"/0", b"/1"]
        assert sorted(order[2:4]) == [b"/2", b"/3"]
        assert sorted(order[4:6]) == [b"/5", b"/6"]
        assert order[6:] == [b"/7"]
        assert len(server.visits) == 2


async def test_closing_the_client_ends_all_exchanges_and_connections() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        if visit.number == 0:
            await visit.send(answer())
        await visit.end_of_client()

    async with serving(script) as server, connections(2) as client:
        idle = client.exchange("GET", server.url, {})
        await idle.begin()
        using = asyncio.create_task(fetch(client, server.url.replace("127.0.0.1", "localhost")))
        await until(lambda: len(server.requests) == 2)
        waiting = asyncio.create_task(fetch(client, server.url))
        await asyncio.sleep(0)
        idle_closed = asyncio.create_task(client.close())
        ended = await asyncio.gather(using, waiting, idle_closed, return_exceptions=True)
        assert [type(each) for each in ended] == [BrokenError, BrokenError, type(None)]
        idle.close()
        with pytest.raises(ConnectError):
            await fetch(client, server.url)
        await until(lambda: server.num_open == 0)


# Connecting


@pytest.mark.parametrize(
    "url",
    [
        "http://no-such-name.invalid/",
        "http://a..b/",
        f"http://{'a' * 64}.invalid/",
        "http://127.0.0.1:99999/",
        "http://user@127.0.0.1/",
        "http://user:password@127.0.0.1:1/",
        "http://127.0.0.1\r\n:1/",
        "http://[::1/",
        "http://[v1.x]/",
        "ftp://127.0.0.1/",
        "//127.0.0.1/",
        "http:///path",
        "http://127.0.0.1:1/a b",
        "http://127.0.0.1:1/a\r\nX: y",
        "http://127.0.0.1:1/a\0",
        "http://127.0.0.1:1/ä",
        "http://127.0.0.1:1/",  # nobody listens
        "",
    ],
)
async def test_a_url_that_leads_nowhere_is_no_connection(url: str) -> None:
    async with connections(1) as client:
        for _ in range(2):
            with pytest.raises(ConnectError) as raised:
                await fetch(client, url)
            assert str(raised.value)
            before = num_descriptors()
        assert num_descriptors() <= before


@pytest.mark.parametrize("value", ["a\rb", "a\nb", "a\r\nb: c", "a\0b", "\udcff"])
async def test_a_header_that_would_be_two_is_refused(value: str) -> None:
    async with serving(answering(answer())) as server, connections() as client:
        for headers in ({"X-A": value}, {f"X-{value}": "a"}):
            exchange = client.exchange("GET", server.url, headers)
            with pytest.raises(ConnectError):
                await exchange.begin()
            exchange.close()
        assert not server.visits


async def test_all_addresses_of_a_name_are_tried() -> None:
    async with serving(answering(answer())) as server, connections() as client:
        loop = asyncio.get_running_loop()
        port = int(server.url.rpartition(":")[2])
        found = await loop.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)
        if len(found) < 2:
            pytest.skip("localhost has one address here")
        assert (await fetch(client, server.url.replace("127.0.0.1", "localhost")))[0] == 200


async def test_a_host_may_be_an_ipv6_address() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("there is no IPv6 here")
    async with serving(answering(answer()), host="::1") as server, connections() as client:
        assert (await fetch(client, server.url))[0] == 200
        assert f"Host: {server.url.removeprefix('http://')}".encode() in server.requests[0]


def test_the_zone_of_an_address_is_for_this_host_alone() -> None:
    origin, head = messages.Request("GET", "http://[fe80::1%eth0]:8000/x", {}, None).head()
    assert (origin.host, origin.port) == ("fe80::1%eth0", 8000)
    assert b"\r\nHost: [fe80::1]:8000\r\n" in head


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 9"
    options = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = subprocess.run(
        [*command.split(), *options, "-keyout", "-"], check=True, capture_output=True
    )
    path.write_bytes(made.stdout)
    return path


def tls_of(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def test_https_is_spoken_with_a_server_that_is_trusted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    data = os.urandom(3_000_000)
    script = answering(answer(data))
    async with serving(script, tls_of(certificate)) as server, connections() as client:
        for _ in range(2):
            assert (await fetch(client, server.url, Body(memoryview(data))))[2] == data
        assert len(server.visits) == 1
        assert all(each.endswith(data) for each in server.requests)


async def test_a_body_over_tls_may_end_with_the_connection(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(b"HTTP/1.1 200 OK\r\n\r\nsome")

    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with serving(script, tls_of(certificate)) as server, connections() as client:
        assert (await fetch(client, server.url))[2] == b"some"


async def test_a_server_that_is_not_trusted_is_no_connection(certificate: Path) -> None:
    async with serving(answering(answer()), tls_of(certificate)) as server:
        async with connections() as client:
            with pytest.raises(ConnectError, match="certificate"):
                await fetch(client, server.url)
        assert not server.requests


async def test_a_server_that_never_shakes_hands_is_no_connection() -> None:
    async def script(visit: Visit) -> None:
        await visit.end_of_client()

    async with serving(script) as server, connections(connect_timeout_s=0.05) as client:
        for _ in range(2):
            with pytest.raises(ConnectError, match="in time"):
                await fetch(client, server.url.replace("http", "https"))
            await until(lambda: server.num_open == 0)


# Ending early


class Halted:
    """An exchange with a server that stands still at a stage."""

    STAGES = ("queued", "connecting", "sending", "head", "body", "unread")

    def __init__(self, client: Connections, url: str, stage: str) -> None:
        self.stage = stage
        if stage == "connecting":
            url = url.replace("http", "https")
        body = Body(*[memoryview(bytes(1 << 20))] * 32) if stage == "sending" else None
        self.exchange = client.exchange("POST", url, {}, body)
        self.blocking = client.exchange("POST", url, {})

    async def run(self) -> None:
        """Get there and wait, then close the exchange."""
        if self.stage == "queued":
            self.blocking._connections.enter(self.blocking)
        try:
            await self.exchange.begin()
            while self.stage == "unread":
                await asyncio.sleep(0.001)
                if self.exchange._reason is not None:
                    break
            while await self.exchange.chunk():
                pass
        finally:
            self.exchange.close()
            self.blocking.close()


@pytest.mark.parametrize("by_cancelling", [False, True])
@pytest.mark.parametrize("stage", Halted.STAGES)
async def test_an_exchange_can_be_ended_at_each_stage(stage: str, by_cancelling: bool) -> None:
    sent = {"head": b"HTTP/1.1 2", "body": answer()[:-1], "unread": answer()[:-1]}.get(stage, b"")
    is_there = asyncio.Event()

    async def script(visit: Visit) -> None:
        if stage not in ("connecting", "sending"):
            first = await visit.request()
            if b"/last" in first:
                await visit.send(answer())
                return
        await visit.send(sent)
        is_there.set()
        if stage == "sending":
            await asyncio.sleep(60)
        await visit.end_of_client()

    async with serving(script) as server, connections(1) as client:
        halted = Halted(client, server.url, stage)
        running = asyncio.create_task(halted.run())
        if stage != "queued":
            await is_there.wait()
        await asyncio.sleep(0.02)
        assert not running.done()
        reason = RuntimeError("enough")
        if by_cancelling:
            running.cancel()
        else:
            halted.exchange.abort(reason)
            halted.exchange.abort(RuntimeError("too late"))
        with pytest.raises((RuntimeError, asyncio.CancelledError)) as raised:
            await running
        assert by_cancelling or raised.value is reason
        with pytest.raises(BrokenError):
            await halted.exchange.chunk()
        if stage == "sending":
            server.visits[0].writer.transport.abort()
        elif stage != "queued":
            await until(lambda: server.num_open == 0)
        if stage not in ("connecting", "sending"):
            assert (await fetch(client, server.url + "/last"))[0] == 200  # the one place is free


@pytest.mark.parametrize("by_cancelling", [False, True])
async def test_an_exchange_can_be_ended_at_each_step_of_the_loop(by_cancelling: bool) -> None:
    async def script(visit: Visit) -> None:
        await visit.end_of_client()

    async with serving(script) as server, connections(1) as client:
        for num_steps in range(16):
            exchange = client.exchange("GET", server.url, {})
            running = asyncio.create_task(exchange.begin())
            for _ in range(num_steps):
                await asyncio.sleep(0)
            if by_cancelling:
                running.cancel()
            else:
                exchange.abort(RuntimeError())
            with pytest.raises((RuntimeError, asyncio.CancelledError)):
                await running
            exchange.close()
        await until(lambda: server.num_open == 0)


async def test_an_abort_before_the_beginning_sends_nothing() -> None:
    async with serving(answering(answer())) as server, connections() as client:
        exchange = client.exchange("GET", server.url, {})
        exchange.abort(reason := RuntimeError())
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                await exchange.begin()
            assert raised.value is reason
        exchange.close()
        assert not server.visits


async def test_all_later_calls_raise_the_reason_of_an_abort() -> None:
    async with serving(answering(answer())) as server, connections() as client:
        exchange = client.exchange("GET", server.url, {})
        await exchange.begin()
        exchange.abort(reason := RuntimeError())
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                await exchange.chunk()
            assert raised.value is reason
        exchange.close()
        await until(lambda: server.num_open == 0)


async def test_an_abort_after_the_end_has_no_effect() -> None:
    async with serving(answering(answer())) as server, connections() as client:
        exchange = client.exchange("GET", server.url, {})
        await exchange.begin()
        while await exchange.chunk():
            pass
        exchange.abort(RuntimeError())
        assert await exchange.chunk() == b""
        exchange.close()
        exchange.abort(RuntimeError())
        await fetch(client, server.url)
        assert len(server.visits) == 1


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 2", answer()[:-1]])
async def test_the_time_limit_is_for_the_whole_exchange(sent: bytes) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(sent)
        await visit.end_of_client()

    async with serving(script) as server, connections() as client:
        with pytest.raises(TimeoutError):
            await fetch(client, server.url, limit_s=0.03)
        await until(lambda: server.num_open == 0)


async def test_a_time_limit_does_not_outlive_its_exchange() -> None:
    async with serving(answering(answer())) as server, connections() as client:
        await fetch(client, server.url, limit_s=0.03)
        slow = client.exchange("GET", server.url, {})
        await slow.begin()
        await asyncio.sleep(0.05)
        assert await slow.chunk() == b"ok"
        slow.close()
        assert len(server.visits) == 1


# What is left behind


async def ended(client: Connections, url: str, body: Body, how: str) -> None:
    exchange = client.exchange("POST", url, {}, body, 0.02 if how == "late" else 600)
    try:
        if how == "aborted":
            asyncio.get_running_loop().call_later(0.01, exchange.abort, RuntimeError())
        await exchange.begin()
        while await exchange.chunk():
            pass
    except (OSError, RuntimeError):
        pass
    finally:
        exchange.close()


HOW: dict[str, bytes] = {
    "read": answer(),
    "broken": b"broken",
    "cut": answer()[:-1],
    "aborted": b"",
    "late": b"",
    "cancelled": b"",
    "refused": b"",
}


def num_objects() -> Counter[type]:
    """Count connections, answers and exchanges. Earlier tests may have left some."""
    counted = (module._Connection, messages.Answer, Exchange)
    return Counter(type(each) for each in gc.get_objects() if type(each) in counted)


async def test_no_cycle_keeps_the_memory_of_a_request() -> None:
    async def script(visit: Visit) -> None:
        how = (await visit.request()).split()[1].decode()[1:]
        await visit.send(HOW[how])
        if how != "cut":
            await visit.end_of_client()

    async with serving(script) as server, connections() as client:
        gc.collect()
        gc.disable()
        before = num_objects()
        try:
            for how in reversed(HOW):
                url = "http://127.0.0.1:1" if how == "refused" else f"{server.url}/{how}"
                body = Body(b"x", memoryview(bytes(200_000)))
                left = weakref.ref(body)
                running = asyncio.create_task(ended(client, url, body, how))
                del body
                if how == "cancelled":
                    await until(lambda: server.requests)
                    running.cancel()
                await asyncio.wait([running])
                del running
                await asyncio.sleep(0.01)
                assert left() is None, how
            # The connection that is kept, and its parser.
            assert num_objects() - before == {module._Connection: 1, messages.Answer: 1}
        finally:
            gc.enable()


class _Quick(asyncio.Protocol):
    """A server of little cost."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(answer())


async def test_thousands_of_exchanges_leave_nothing_behind() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Quick, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    is_quick = isinstance(loop, uvloop.Loop)
    async with connections(4) as client:

        async def many(number: int) -> None:
            for _ in range(number):
                await fetch(client, url, Body(b"x"), limit_s=600)

        async def rounds(number: int) -> tuple[int, int]:
            await asyncio.gather(*(many(number // 8) for _ in range(8)))
            gc.collect()
            return num_descriptors(), len(gc.get_objects())

        before = await rounds(400)
        after = await rounds(10_000 if is_quick else 2000)
        assert after[0] == before[0]
        assert after[1] < before[1] + 400
    server.close()


async def test_a_real_server_is_understood() -> None:
    async def whole(request: web.Request) -> web.Response:
        return web.json_response({"length": len(await request.read())})

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(5):
            await response.write(b"data: %d\n\n" % number)
        return response

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/whole", whole), web.post("/stream", stream)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with connections() as client:
            for size in (0, 500, 3_000_000):
                got = await fetch(client, url + "/whole", Body(memoryview(bytes(size))))
                assert got[2] == b'{"length": %d}' % size
            streamed = (await fetch(client, url + "/stream", Body(b"{}")))[2]
            assert streamed == b"".join(b"data: %d\n\n" % number for number in range(5))
            assert (await fetch(client, url + "/none"))[0] == 404
    finally:
        await runner.cleanup()
