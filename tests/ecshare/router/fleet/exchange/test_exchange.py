# SPDX-License-Identifier: Apache-2.0
"""The HTTP client for engines, against servers that behave, misbehave and attack."""

import asyncio
import gc
import os
import shutil
import socket
import ssl
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count, pairwise
from pathlib import Path

import pytest
import uvloop

from ecshare.router.fleet import exchange as module
from ecshare.router.fleet import messages
from ecshare.router.fleet.exchange import BrokenError, ConnectError, Connections, Exchange
from tests.ecshare.router.fleet.exchange.scripted_server import (
    Body,
    Server,
    Step,
    Visit,
    answer,
    answering,
    pause,
    serving,
    steps,
)
from tests.waiting import until

SECOND = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen"
ON_ONE_LOOP = pytest.mark.asyncio(loop_factories=["uvloop"])
"""For what happens within the parser."""
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EARLY = b"HTTP/1.1 103 Early\r\nX-B: 1\r\n\r\n"
NO_LENGTH = b"HTTP/1.1 200 OK\r\n\r\n"


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# What is sent


async def test_heads_name_host_and_length_and_ask_for_plain_bytes(server: Server) -> None:
    given = {"X-Ä": "ü", "Content-Length": "99", "host": "other", "Transfer-Encoding": "x"}
    await server.fetch(Body(b"{}"), url=server.url + "/v1/a?b=c", headers=given)
    await server.fetch(method="GET", headers={})
    host = server.url.removeprefix("http://")
    to_host = f"HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n"
    assert server.requests == [
        f"POST /v1/a?b=c {to_host}X-Ä: ü\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
        f"GET / {to_host}\r\n".encode(),
    ]


async def test_a_default_port_is_not_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(messages._DEFAULT_PORTS, "http", int(server.url.rpartition(":")[2]))
    messages._place.cache_clear()
    await server.fetch()
    await server.fetch(url="http://127.0.0.1")
    messages._place.cache_clear()
    assert all(b"\r\nHost: 127.0.0.1\r\n" in each for each in server.requests)
    assert len(server.visits) == 1


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (64 << 10) + 1, 256 << 10, 5_000_001])
async def test_a_body_arrives_as_it_is(size: int, server: Server) -> None:
    data = os.urandom(size)
    cuts = sorted([0, min(3, size), size // 3, size // 3, size])
    first, second, empty, last = (memoryview(data)[start:end] for start, end in pairwise(cuts))
    for _ in range(2):
        body = Body(first, second, bytes(empty), last)
        assert (await server.fetch(body))[0] == 200
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


async def test_a_connection_is_kept_if_an_answer_comes_as_a_body_ends(server: Server) -> None:
    """The server is another process: its answer may be there before our loop looks again."""
    command = [sys.executable, "-c", ANSWERS_AT_ONCE]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        try:
            for _ in range(100):
                assert (await server.fetch(Body(bytes(300_000)), url=url))[2] == b"1"
        finally:
            process.kill()


async def test_a_large_body_is_not_read_before_the_server_takes_it() -> None:
    taken = asyncio.Event()
    body = Body(*[memoryview(bytes(1 << 20))] * 64)
    async with serving(steps(lambda _: taken.wait(), Visit.request, answer())) as server:
        fetching = asyncio.create_task(server.fetch(body))
        await until(lambda: body.num_taken > 0)
        await asyncio.sleep(0.1)
        assert body.num_taken < 32
        taken.set()
        assert (await fetching)[0] == 200
        assert len(server.requests[0]) > 64 << 20


async def test_the_loop_has_its_turn_while_a_large_body_is_sent(server: Server) -> None:
    steps = []

    async def others() -> None:
        while True:
            steps.append(body.num_taken)
            await asyncio.sleep(0)

    body = Body(*[memoryview(bytes(256 << 10))] * 64)
    running = asyncio.create_task(others())
    await server.fetch(body)
    running.cancel()
    assert max(after - before for before, after in pairwise(steps)) <= 2


async def test_a_body_that_cannot_be_read_ends_the_exchange(server: Server) -> None:
    class Cleared(Body):
        def pieces(self) -> Iterator[bytes | memoryview]:
            yield bytes(1 << 20)
            raise IndexError

    with pytest.raises(IndexError):
        await server.fetch(Cleared(bytes(2 << 20)))
    await until(lambda: server.num_open == 0)


@pytest.mark.parametrize("large", [False, True])
async def test_an_answer_before_the_whole_body_is_heard_and_the_rest_not_sent(large: bool) -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    script = steps(Visit.head, refusal, pause(0.05), Visit.end_of_client)
    body = Body(*[memoryview(bytes(1 << 20))] * (64 if large else 0), b"x")
    async with serving(script) as server:
        assert (await server.fetch(body))[::2] == (413, b"no")
        assert body.num_taken < 32
        if large:
            await until(lambda: server.num_open == 0)


async def test_a_server_that_only_stops_sending_ends_the_exchange() -> None:
    async def end_writing(visit: Visit) -> None:
        await asyncio.sleep(0.1)  # until nothing more can be sent
        visit.writer.write_eof()

    async with serving(steps(Visit.head, end_writing, pause(60))) as server:
        with pytest.raises(BrokenError):
            await server.fetch(Body(memoryview(bytes(64 << 20))))


# What is received

ANSWERS: dict[str, tuple[bytes, int, bytes, bool]] = {
    "length": (answer(b"hello"), 200, b"hello", True),
    "no body": (answer(b""), 200, b"", True),
    "chunked": (CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", 200, b"abcde", True),
    "trailers": (CHUNKED + b"3\r\nabc\r\n0\r\nT: v\r\n\r\n", 200, b"abc", True),
    "preliminary": (b"HTTP/1.1 100 Continue\r\n\r\n" + EARLY + answer(), 200, b"ok", True),
    "close": (answer(b"ok", b"Connection: close"), 200, b"ok", False),
    "1.0": (answer().replace(b"1.1", b"1.0"), 200, b"ok", False),
    "1.0 kept": (
        answer(b"ok", b"Connection: keep-alive").replace(b"1.1", b"1.0"),
        200,
        b"ok",
        True,
    ),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, b"", True),
    "HEAD": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", 200, b"", False),
    "no reason": (b"HTTP/1.1 404\r\nContent-Length: 2\r\n\r\nno", 404, b"no", True),
    "second answer": (answer() + SECOND, 200, b"ok", False),
    "longer than its length": (answer() + b"more", 200, b"ok", False),
    "chunks and more": (CHUNKED + b"1\r\na\r\n0\r\n\r\n" + SECOND, 200, b"a", False),
    "a body where none can be": (SECOND.replace(b"200 OK", b"204 No Content"), 204, b"", False),
}
"""An answer, its status and body, and whether the connection is kept."""


@ON_ONE_LOOP
@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_of_each_form_are_read_to_their_end(name: str) -> None:
    data, status, body, is_kept = ANSWERS[name]
    method = {"HEAD": "HEAD", "304": "GET"}.get(name, "POST")
    for at_once in (True, False):
        script = answering(data, at_once=at_once)
        async with serving(script) as server:
            for _ in range(3):
                assert (await server.fetch(method=method))[::2] == (status, body)
            assert len(server.visits) == (1 if is_kept else 3)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK\r\nConnection: close"])
async def test_a_body_without_a_length_ends_with_the_connection(head: bytes) -> None:
    async with serving(steps(Visit.request, head + b"\r\n\r\nsome", b" more")) as server:
        assert (await server.fetch())[::2] == (200, b"some more")


async def test_headers_are_found_by_lower_case_names_and_the_first_one_counts() -> None:
    data = answer(b"", b"X-A: 1", b"x-a: 2", b"X-B:  \xc3\xa4 ")
    async with serving(steps(Visit.request, data)) as server:
        headers = (await server.fetch())[1]
    assert headers == {"content-length": "0", "x-a": "1", "x-b": "ä"}


async def test_headers_of_preliminary_answers_and_trailers_are_dropped() -> None:
    data = EARLY + CHUNKED + b"1\r\na\r\n0\r\nX-B: 1\r\n\r\n"
    async with serving(steps(Visit.request, data)) as server:
        assert (await server.fetch())[1] == {"transfer-encoding": "chunked"}


async def test_parts_of_a_stream_are_returned_as_they_arrive() -> None:
    told = asyncio.Queue[bytes]()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(CHUNKED)
        while data := await told.get():
            await visit.send(b"%x\r\n%b\r\n" % (len(data), data))
        await visit.send(b"0\r\n\r\n")

    async with serving(script) as server, server.begun() as exchange:
        for each in (b"data: 1\n\n", b"data: 2\n\n"):
            told.put_nowait(each)
            assert await exchange.chunk() == each
        told.put_nowait(b"")
        assert [await exchange.chunk(), await exchange.chunk()] == [b"", b""]


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

    async with serving(script) as server, server.begun() as exchange:
        await asyncio.sleep(0.1)
        assert num_sent < size // 2
        num_read = 0
        while chunk := await exchange.chunk():
            assert len(chunk) <= 512 << 10
            num_read += len(chunk)
        assert num_read == size


@ON_ONE_LOOP
@pytest.mark.parametrize("name", ["length", "chunked", "trailers", "preliminary"])
async def test_an_answer_that_is_cut_short_anywhere_is_broken(name: str) -> None:
    data = ANSWERS[name][0]
    pieces = (data[:length] for length in count())
    script = steps(Visit.request, lambda visit: visit.send(next(pieces)))
    async with serving(script) as server:
        for _ in range(len(data)):
            with pytest.raises(BrokenError):
                await server.fetch()
        assert (await server.fetch())[0] == 200
        assert len(server.requests) == len(data) + 1  # none was sent twice


@pytest.mark.parametrize(
    ("start", "end"),
    [(NO_LENGTH, Visit.reset), (CHUNKED + b"8000000000000000\r\n", pause(0))],
    ids=["a reset is no end of a body without length", "a huge chunk"],
)
async def test_what_has_arrived_of_a_body_is_read_before_it_ends(start: bytes, end: Step) -> None:
    is_read = asyncio.Event()
    script = steps(Visit.request, start + b"some", lambda _: is_read.wait(), end)
    async with serving(script) as server, server.begun() as exchange:
        assert await exchange.chunk() == b"some"
        is_read.set()
        with pytest.raises(BrokenError):
            await exchange.chunk()


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

    async with serving(script) as server:
        for _ in range(2 if len(data) < 10_000 else 1):  # at once and byte by byte
            with pytest.raises(BrokenError):
                await server.fetch()
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
    first, more = ENDLESS[name]

    async def script(visit: Visit) -> None:
        nonlocal num_sent
        await visit.request()
        await visit.send(first)
        while True:
            await visit.send(more)
            num_sent += len(more)
            await asyncio.sleep(0)

    async with serving(script) as server:
        with pytest.raises(BrokenError, match="too large"):
            await server.fetch()
        await until(lambda: server.num_open == 0)
    assert num_sent < 2_000_000


@pytest.mark.parametrize("wait_s", [0, 0.01])
async def test_an_answer_before_the_request_reaches_one_request_at_most(wait_s: float) -> None:
    script = steps(pause(wait_s), SECOND + SECOND, Visit.end_of_client)
    async with serving(script) as server:
        for _ in range(5):
            with suppress(BrokenError):
                assert (await server.fetch())[2] == b"stolen"
        assert len(server.visits) == 5


@pytest.mark.parametrize("is_seen", [False, True])
async def test_an_answer_nobody_asked_for_reaches_no_request(is_seen: bool, server: Server) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        first = asyncio.create_task(server.fetch(url=url))
        with (await loop.sock_accept(listener))[0] as served:
            await loop.sock_recv(served, 1000)
            served.send(answer())
            assert (await first)[2] == b"ok"
            served.send(SECOND)
            if is_seen:
                await asyncio.sleep(0.02)
            # Otherwise it waits in the kernel at the moment when the next request begins.
            second = asyncio.create_task(server.fetch(url=url))
            with (await loop.sock_accept(listener))[0] as other:
                await loop.sock_recv(other, 1000)
                other.send(answer(b"mine"))
                assert (await second)[2] == b"mine"


# Kept connections


@pytest.mark.parametrize("end", [Visit.reset, Visit.head])
@pytest.mark.parametrize("size", [10, 3_000_000])
async def test_a_kept_connection_that_ends_at_once_is_tried_again(size: int, end: Step) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(answer(b"%d" % visit.number))
        await visit.reader.readexactly(1)
        await end(visit)

    body = Body(memoryview(os.urandom(size)))
    async with serving(script) as server:
        assert (await server.fetch())[2] == b"0"
        assert (await server.fetch(body))[2] == b"1"
        assert server.requests[1].endswith(bytes(next(body.pieces())))
        assert len(server.visits) == 2


@pytest.mark.parametrize(
    ("last", "num_sent"), [(b"", 2), (b"H", 1)], ids=["at once", "within the answer"]
)
async def test_a_request_is_sent_twice_at_most_before_an_answer(last: bytes, num_sent: int) -> None:
    async def script(visit: Visit) -> None:
        first = (Visit.request, answer()) if visit.number == 0 else ()
        await steps(*first, Visit.request, last)(visit)

    async with serving(script) as server:
        await server.fetch()
        with pytest.raises(BrokenError):
            await server.fetch()
        assert (len(server.requests), len(server.visits)) == (1 + num_sent, num_sent)


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    async with serving(steps(Visit.request, answer())) as server:
        for number in range(3):
            await server.fetch()
            await until(lambda: server.num_open == 0)
            assert len(server.visits) == number + 1


async def test_idle_connections_are_closed_after_a_while() -> None:
    async with serving(answering(answer()), keep_idle_s=0.05) as server:
        await asyncio.gather(*(server.fetch() for _ in range(3)))
        assert server.num_open == 3
        await asyncio.sleep(0.03)
        await server.fetch()
        await until(lambda: server.num_open == 1)
        await until(lambda: server.num_open == 0)


async def test_a_connection_that_was_idle_for_too_long_is_not_used_before_it_is_closed() -> None:
    async with serving(answering(answer()), keep_idle_s=0.0) as server:
        await server.fetch()
        await server.fetch()
        assert len(server.visits) == 2


async def test_an_answer_that_has_arrived_unread_leaves_a_clean_connection(server: Server) -> None:
    async with server.begun() as exchange:
        exchange.close()
    assert (await server.fetch())[2] == b"ok"
    assert len(server.visits) == 1


async def test_connections_to_other_hosts_and_ports_are_not_mixed_up() -> None:
    async with serving(answering(answer(b"a"))) as a, serving(answering(answer(b"b"))) as b:
        for _ in range(2):
            assert (await a.fetch())[2] == b"a"
            assert (await a.fetch(url=b.url))[2] == b"b"
        # Where this name has an IPv6 address besides, all its addresses are tried.
        await a.fetch(url=a.url.replace("127.0.0.1", "localhost"))
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

    async with serving(script, most=2) as server:
        fetching = [asyncio.create_task(server.fetch(url=f"{server.url}/{n}")) for n in range(8)]
        await until(lambda: len(order) == 2)
        await asyncio.sleep(0.02)
        assert len(order) == 2
        fetching[4].cancel()
        with pytest.raises(TimeoutError):
            await server.fetch(limit_s=0.01)
        released.set()
        await asyncio.gather(*fetching, return_exceptions=True)
        pairs = [sorted(order[at : at + 2]) for at in range(0, len(order), 2)]
        assert pairs == [[b"/0", b"/1"], [b"/2", b"/3"], [b"/5", b"/6"], [b"/7"]]
        assert len(server.visits) == 2


async def test_closing_the_client_ends_all_exchanges_and_connections() -> None:
    async def script(visit: Visit) -> None:
        data = answer() if visit.number == 0 else b""
        await steps(Visit.request, data, Visit.end_of_client)(visit)

    async with serving(script, most=2) as server:
        async with server.begun():
            using = asyncio.create_task(
                server.fetch(url=server.url.replace("127.0.0.1", "localhost"))
            )
            await until(lambda: len(server.requests) == 2)
            waiting = asyncio.create_task(server.fetch())
            await asyncio.sleep(0)
            closing = asyncio.create_task(server.client.close())
            ended = await asyncio.gather(using, waiting, closing, return_exceptions=True)
            assert [type(each) for each in ended] == [BrokenError, BrokenError, type(None)]
        with pytest.raises(ConnectError):
            await server.fetch()
        await until(lambda: server.num_open == 0)


# Connecting


@pytest.mark.parametrize(
    "url",
    [
        *(f"http://{name}/" for name in ("no-such-name.invalid", "a..b", f"{'a' * 64}.invalid")),
        *(f"http://{place}/" for place in ("127.0.0.1:99999", "127.0.0.1\r\n:1", "[::1", "[v1.x]")),
        *(f"http://{user}@127.0.0.1:1/" for user in ("user", "user:password")),
        *("ftp://127.0.0.1/", "//127.0.0.1/", "http:///path"),
        *(f"http://127.0.0.1:1/{path}" for path in ("a b", "a\r\nX: y", "a\0", "ä")),
        "http://127.0.0.1:1/",  # nobody listens
        "",
    ],
)
async def test_a_url_that_leads_nowhere_is_no_connection(url: str) -> None:
    async with serving(answering(answer()), most=1) as server:
        for _ in range(2):
            with pytest.raises(ConnectError) as raised:
                await server.fetch(url=url)
            assert str(raised.value)
            before = num_descriptors()
        assert num_descriptors() <= before


@pytest.mark.parametrize("value", ["a\rb", "a\nb", "a\r\nb: c", "a\0b", "\udcff"])
async def test_a_header_that_would_be_two_is_refused(value: str, server: Server) -> None:
    for headers in ({"X-A": value}, {f"X-{value}": "a"}):
        with pytest.raises(ConnectError):
            await server.fetch(headers=headers)
    assert not server.visits


async def test_a_host_may_be_an_ipv6_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    async with serving(answering(answer()), host="::1") as server:
        assert (await server.fetch())[0] == 200
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


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    """Those of a server that has this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def _is_trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


@pytest.mark.usefixtures("_is_trusted")
async def test_https_is_spoken_with_a_server_that_is_trusted(tls: ssl.SSLContext) -> None:
    data = os.urandom(3_000_000)
    async with serving(answering(answer(data)), tls) as server:
        for _ in range(2):
            assert (await server.fetch(Body(memoryview(data))))[2] == data
        assert len(server.visits) == 1
        assert all(each.endswith(data) for each in server.requests)


@pytest.mark.usefixtures("_is_trusted")
async def test_a_body_over_tls_may_end_with_the_connection(tls: ssl.SSLContext) -> None:
    async with serving(steps(Visit.request, NO_LENGTH + b"some"), tls) as server:
        assert (await server.fetch())[2] == b"some"


async def test_a_server_that_is_not_trusted_is_no_connection(tls: ssl.SSLContext) -> None:
    async with serving(answering(answer()), tls) as server:
        with pytest.raises(ConnectError, match="certificate"):
            await server.fetch()
        assert not server.requests


async def test_a_server_that_never_shakes_hands_is_no_connection() -> None:
    async with serving(Visit.end_of_client, connect_timeout_s=0.05) as server:
        for _ in range(2):
            with pytest.raises(ConnectError, match="in time"):
                await server.fetch(url=server.url.replace("http", "https"))
            await until(lambda: server.num_open == 0)


# Ending early


async def wait_at(exchange: Exchange, stage: str) -> None:
    """Take an exchange with a halted server as far as it goes; close it when it ends."""
    with closing(exchange):
        await exchange.begin()
        while stage == "unread" and exchange._reason is None:
            await asyncio.sleep(0.001)
        while await exchange.chunk():
            pass


@pytest.mark.parametrize("by_cancelling", [False, True])
@pytest.mark.parametrize("stage", ["queued", "connecting", "sending", "head", "body", "unread"])
async def test_an_exchange_can_be_ended_at_each_stage(stage: str, by_cancelling: bool) -> None:
    sent = {"head": b"HTTP/1.1 2", "body": answer()[:-1], "unread": answer()[:-1]}.get(stage, b"")
    reads_requests = stage not in ("connecting", "sending")
    is_there = asyncio.Event()

    async def script(visit: Visit) -> None:
        if reads_requests and b"/last" in await visit.request():
            await visit.send(answer())
            return
        await visit.send(sent)
        is_there.set()
        if stage == "sending":
            await asyncio.sleep(60)
        await visit.end_of_client()

    async with serving(script, most=1) as server:
        url = server.url.replace("http", "https" if stage == "connecting" else "http")
        body = Body(*[memoryview(bytes(1 << 20))] * 32) if stage == "sending" else None
        exchange, blocking = (server.client.exchange("POST", url, {}, body) for _ in range(2))
        if stage == "queued":
            server.client.enter(blocking)
        running = asyncio.create_task(wait_at(exchange, stage))
        if stage != "queued":
            await is_there.wait()
        await asyncio.sleep(0.02)
        assert not running.done()
        reason = RuntimeError("enough")
        if by_cancelling:
            running.cancel()
        else:
            exchange.abort(reason)
            exchange.abort(RuntimeError("too late"))
        with pytest.raises((RuntimeError, asyncio.CancelledError)) as raised:
            await running
        blocking.close()
        assert by_cancelling or raised.value is reason
        with pytest.raises(BrokenError):
            await exchange.chunk()
        if stage == "sending":
            server.visits[0].writer.transport.abort()
        elif stage != "queued":
            await until(lambda: server.num_open == 0)
        if reads_requests:
            assert (await server.fetch(url=server.url + "/last"))[0] == 200  # the one place is free


@pytest.mark.parametrize("by_cancelling", [False, True])
async def test_an_exchange_can_be_ended_at_each_step_of_the_loop(by_cancelling: bool) -> None:
    async with serving(Visit.end_of_client, most=1) as server:
        for num_steps in range(16):
            with closing(server.client.exchange("GET", server.url, {})) as exchange:
                running = asyncio.create_task(exchange.begin())
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                if by_cancelling:
                    running.cancel()
                else:
                    exchange.abort(RuntimeError())
                with pytest.raises((RuntimeError, asyncio.CancelledError)):
                    await running
        await until(lambda: server.num_open == 0)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_all_calls_after_an_abort_raise_its_reason(has_begun: bool, server: Server) -> None:
    with closing(server.client.exchange("GET", server.url, {})) as exchange:
        if has_begun:
            await exchange.begin()
        exchange.abort(reason := RuntimeError())
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                await (exchange.chunk() if has_begun else exchange.begin())
            assert raised.value is reason
    await until(lambda: server.num_open == 0)
    assert len(server.visits) == has_begun


async def test_an_abort_after_the_end_has_no_effect(server: Server) -> None:
    async with server.begun() as exchange:
        while await exchange.chunk():
            pass
        exchange.abort(RuntimeError())
        assert await exchange.chunk() == b""
    exchange.abort(RuntimeError())
    await server.fetch()
    assert len(server.visits) == 1


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 2", answer()[:-1]])
async def test_the_time_limit_is_for_the_whole_exchange(sent: bytes) -> None:
    async with serving(steps(Visit.request, sent, Visit.end_of_client)) as server:
        with pytest.raises(TimeoutError):
            await server.fetch(limit_s=0.03)
        await until(lambda: server.num_open == 0)


async def test_a_time_limit_does_not_outlive_its_exchange(server: Server) -> None:
    await server.fetch(limit_s=0.03)
    async with server.begun(limit_s=None) as slow:
        await asyncio.sleep(0.05)
        assert await slow.chunk() == b"ok"
    assert len(server.visits) == 1


# What is left behind


async def end(client: Connections, url: str, body: Body, how: str) -> None:
    """Take a request to its end."""
    limit_s = 0.02 if how == "late" else 600
    with (
        suppress(OSError, RuntimeError),
        closing(client.exchange("POST", url, {}, body, limit_s)) as exchange,
    ):
        if how == "aborted":
            asyncio.get_running_loop().call_later(0.01, exchange.abort, RuntimeError())
        await exchange.begin()
        while await exchange.chunk():
            pass


SENT = {"read": answer(), "broken": b"broken", "cut": answer()[:-1]}
"""What the server sends, by how a request ends."""


def num_objects() -> Counter[type]:
    """Count connections, answers and exchanges. Earlier tests may have left some."""
    counted = (module._Connection, messages.Answer, Exchange)
    return Counter(type(each) for each in gc.get_objects() if type(each) in counted)


async def test_no_cycle_keeps_the_memory_of_a_request() -> None:
    async def script(visit: Visit) -> None:
        how = (await visit.request()).split()[1].decode()[1:]
        await visit.send(SENT.get(how, b""))
        if how != "cut":
            await visit.end_of_client()

    async with serving(script) as server:
        gc.collect()
        gc.disable()
        before = num_objects()
        try:
            for how in ("refused", "cancelled", "late", "aborted", *reversed(SENT)):
                url = "http://127.0.0.1:1" if how == "refused" else f"{server.url}/{how}"
                body = Body(b"x", memoryview(bytes(200_000)))
                left = weakref.ref(body)
                running = asyncio.create_task(end(server.client, url, body, how))
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


async def test_thousands_of_exchanges_leave_nothing_behind() -> None:
    is_quick = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    async with serving(answering(answer()), most=4) as server:

        async def many(number: int) -> None:
            for _ in range(number):
                await server.fetch(Body(b"x"), limit_s=600)

        async def rounds(number: int) -> tuple[int, int]:
            await asyncio.gather(*(many(number // 8) for _ in range(8)))
            gc.collect()
            return num_descriptors(), len(gc.get_objects())

        before = await rounds(400)
        after = await rounds(10_000 if is_quick else 2000)
        assert after[0] == before[0]
        assert after[1] < before[1] + 400
