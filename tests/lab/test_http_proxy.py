# SPDX-License-Identifier: Apache-2.0
"""The fault proxy in front of real servers: the effects on client and server."""

import asyncio
import contextlib
import gc
import http.client
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.exceptions import BaseError, PermissionDeniedError
from obstore.store import S3Store

from lab.faults.http_proxy import FaultProxy, Method
from lab.faults.kinds import Fault
from lab.servers.processes import LOOPBACK
from lab.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedFS
from tests.waiting import wait_until

BODY = bytes(range(256)) * 1024
FAR = 3600.0


class Server(http.server.ThreadingHTTPServer):
    """Responds to every GET with BODY, and records every PUT."""

    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0), Exchange)
        self.asked: list[str] = []
        self.taken = b""
        self.took = threading.Event()


class Exchange(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self.server.asked.append(self.command)
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()

    def do_GET(self) -> None:
        self.server.asked.append(self.command)
        self.send_response(200)
        match self.path:
            case "/chunked":
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for piece in (BODY[:1000], BODY[1000:], b""):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            case "/to-the-end":
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(BODY)
            case _:
                self.send_header("Content-Length", str(len(BODY)))
                self.end_headers()
                self.wfile.write(BODY)

    def do_PUT(self) -> None:
        self.server.asked.append(self.command)
        try:
            self.server.taken = self.rfile.read(int(self.headers["Content-Length"]))
        except ConnectionError:
            self.server.taken = b"reset"
        self.server.took.set()
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(LOOPBACK, server.server_port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[http.client.HTTPConnection]:
    connection = connect(proxy)
    yield connection
    connection.close()


def connect(proxy: FaultProxy, timeout_s: float = 20.0) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=timeout_s)


def ask(
    client: http.client.HTTPConnection,
    method: str = "GET",
    target: str = "/object",
    body: bytes | None = None,
) -> tuple[int, bytes]:
    client.request(method, target, body)
    with client.getresponse() as answer:
        return answer.status, answer.read()


def test_messages_pass_unchanged_without_a_fault(
    client: http.client.HTTPConnection, server: Server, proxy: FaultProxy
) -> None:
    """Requests follow each other on one connection, with any way to mark a body's end."""
    for target in ("/object", "/chunked", "/object"):
        assert ask(client, "GET", target) == (200, BODY)
    assert ask(client, "HEAD") == (200, b"")
    assert ask(client, "PUT", "/object", BODY) == (201, b"")
    assert server.taken == BODY
    assert ask(client, "PUT", "/object", b"") == (201, b"")
    assert ask(client, "GET", "/to-the-end") == (200, BODY)
    assert proxy.num_hits == 0


def test_client_gets_100_continue(client: http.client.HTTPConnection, server: Server) -> None:
    client.putrequest("PUT", "/object")
    client.putheader("Content-Length", str(len(BODY)))
    client.putheader("Expect", "100-continue")
    client.endheaders()
    assert client.sock.recv(100).startswith(b"HTTP/1.1 100 ")
    client.send(BODY)
    with client.getresponse() as answer:
        assert answer.status == 201
    assert server.taken == BODY


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
def test_answer_fault_does_not_reach_the_server(
    client: http.client.HTTPConnection, proxy: FaultProxy, server: Server, method: Method
) -> None:
    body = BODY if method == "PUT" else None
    proxy.fail(Fault.answer(503), on=method)
    for _ in range(2):  # the connection stays usable
        status, said = ask(client, method, "/object?x=<", body)
        assert status == 503
        assert method == "HEAD" or b"<Code>SlowDown</Code>" in said
    assert server.asked == []
    assert proxy.num_hits == 2
    proxy.heal()
    assert ask(client, method, "/object", body)[0] < 300
    assert server.asked == [method]


def test_fault_affects_only_the_selected_requests(
    client: http.client.HTTPConnection, proxy: FaultProxy
) -> None:
    proxy.fail(Fault.answer(404), on="GET", key="/poor")
    proxy.fail(Fault.answer(403, "RequestTimeTooSkewed"), on="GET", key="/poor/late")
    assert ask(client, "GET", "/rich") == (200, BODY)
    assert ask(client, "HEAD", "/poor")[0] == 200
    status, said = ask(client, "GET", "/poor/one")
    assert (status, b"NoSuchKey" in said) == (404, True)
    status, said = ask(client, "GET", "/poor/late")
    assert (status, b"RequestTimeTooSkewed" in said) == (403, True)
    assert proxy.num_hits == 2


def test_slow_fault_delays_a_response_until_healed(
    client: http.client.HTTPConnection, proxy: FaultProxy, server: Server
) -> None:
    proxy.fail(Fault.slow(0.01))
    assert ask(client) == (200, BODY)
    proxy.fail(Fault.slow(FAR))
    client.request("GET", "/object")
    proxy.wait_hit(2, 20)
    assert server.asked == ["GET", "GET"]  # it has received both requests
    client.sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.sock.recv(1)
    client.sock.settimeout(20)
    proxy.heal()
    with client.getresponse() as answer:
        assert answer.read() == BODY


def test_cut_fault_truncates_the_response_body(
    client: http.client.HTTPConnection, proxy: FaultProxy
) -> None:
    proxy.fail(Fault.cut(100_000), on="GET")
    client.request("GET", "/object")
    with client.getresponse() as answer, pytest.raises(http.client.IncompleteRead) as short:
        answer.read()
    assert short.value.partial == BODY[:100_000]
    assert answer.getheader("Content-Length") == str(len(BODY))
    client.close()
    assert ask(client, "PUT", "/object", BODY)[0] == 201


def test_body_shorter_than_the_fault_offset_is_unchanged(
    client: http.client.HTTPConnection, proxy: FaultProxy
) -> None:
    proxy.fail(Fault.cut(len(BODY)))
    assert ask(client) == (200, BODY)
    assert proxy.num_hits == 0


def test_cut_fault_truncates_an_upload(
    client: http.client.HTTPConnection, proxy: FaultProxy, server: Server
) -> None:
    proxy.fail(Fault.cut(1000, "upload"), on="PUT")
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask(client, "PUT", "/object", BODY)
    assert server.took.wait(20)
    assert server.taken == BODY[:1000]


def test_reset_fault_resets_the_connection_on_both_sides(
    client: http.client.HTTPConnection, proxy: FaultProxy, server: Server
) -> None:
    proxy.fail(Fault.reset(1000), on="GET")
    client.request("GET", "/object")
    with pytest.raises(ConnectionResetError), client.getresponse() as answer:
        answer.read()
    client.close()
    proxy.fail(Fault.reset(1000, "upload"), on="PUT")
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        ask(client, "PUT", "/object", BODY)
    assert server.took.wait(20)
    assert server.taken == b"reset"


def test_stalled_response_continues_when_healed(
    client: http.client.HTTPConnection, proxy: FaultProxy
) -> None:
    proxy.fail(Fault.stall(1000), on="GET")
    client.request("GET", "/object")
    with client.getresponse() as answer:
        assert answer.read(1000) == BODY[:1000]
        client.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.sock.recv(1)
        client.sock.settimeout(20)
        proxy.heal()
        assert answer.read() == BODY[1000:]


def test_stalled_upload_is_lost_when_disconnected(
    client: http.client.HTTPConnection, proxy: FaultProxy, server: Server
) -> None:
    proxy.fail(Fault.stall(1000, "upload"), on="PUT")
    client.request("PUT", "/object", BODY)
    proxy.wait_hit(1, 20)
    assert not server.taken
    proxy.disconnect()
    proxy.heal()
    assert server.took.wait(20)
    assert server.taken in (b"reset", BODY[:1000])
    client.close()
    assert ask(client, "PUT", "/object", BODY)[0] == 201
    assert server.taken == BODY


def test_flip_fault_changes_one_bit(
    client: http.client.HTTPConnection, proxy: FaultProxy, server: Server
) -> None:
    proxy.fail(Fault.flip(70_001), on="GET")
    proxy.fail(Fault.flip(70_002, "upload"), on="PUT")
    answered = ask(client)[1]
    ask(client, "PUT", "/object", BODY)
    for got, place in ((answered, 70_001), (server.taken, 70_002)):
        wrong = [(n, a ^ b) for n, (a, b) in enumerate(zip(got, BODY, strict=True)) if a != b]
        assert wrong == [(place, 1)]


def test_refuse_fault_closes_and_refuses_connections_until_healed(
    client: http.client.HTTPConnection, proxy: FaultProxy
) -> None:
    ask(client)
    proxy.fail(Fault.refuse())
    with pytest.raises(ConnectionResetError):
        client.sock.recv(1)
    client.close()
    with pytest.raises(ConnectionRefusedError):
        ask(client)
    client.close()
    proxy.heal()
    assert ask(client) == (200, BODY)
    with pytest.raises(ValueError, match="no request to select"):
        proxy.fail(Fault.refuse(), on="GET")


def test_proxy_without_a_server_resets_the_client(server: Server) -> None:
    server.server_close()
    with FaultProxy(LOOPBACK, server.server_port) as proxy:
        client = connect(proxy)
        with pytest.raises(ConnectionResetError):
            ask(client)
        client.close()


def test_wait_hit_times_out(proxy: FaultProxy) -> None:
    with pytest.raises(TimeoutError, match="0 requests met a fault, not 1"):
        proxy.wait_hit(1, 0.01)


# --- a real S3 server and a real client, which signs ---


def s3(proxy: FaultProxy) -> S3Store:
    return S3Store(
        BUCKET,
        prefix="faultproxy",
        endpoint=proxy.url,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


@pytest.mark.s3
def test_s3_client_gets_the_matching_error_for_each_fault(seaweed: SeaweedFS) -> None:
    with FaultProxy(LOOPBACK, seaweed.port.number) as proxy:
        store = s3(proxy)
        store.put("one", BODY)
        assert store.get("one").bytes() == BODY
        expected = {503: BaseError, 403: PermissionDeniedError, 404: FileNotFoundError}
        for status, error in expected.items():
            proxy.fail(Fault.answer(status))
            with pytest.raises(error):
                store.get("one")
            with pytest.raises(error):
                store.head("one")
            with pytest.raises(error):
                store.put("two", BODY)
            proxy.heal()
        for fault in (Fault.cut(1000), Fault.reset(1000)):
            proxy.fail(fault, on="GET")
            with pytest.raises(BaseError):
                store.get("one").bytes()
            proxy.heal()
        for fault in (Fault.cut(1000, "upload"), Fault.reset(1000, "upload")):
            proxy.fail(fault, on="PUT")
            with pytest.raises(BaseError):
                store.put("two", BODY)
            proxy.heal()
        with pytest.raises(FileNotFoundError):
            store.get("two")
        proxy.fail(Fault.flip(1000), on="GET")
        assert store.get("one").bytes() == BODY[:1000] + bytes([BODY[1000] ^ 1]) + BODY[1001:]


def read_once_it_can(store: S3Store) -> bytes:
    """Return the object once all parts of a newly started server are connected."""
    found = []

    def is_found() -> bool:
        with contextlib.suppress(BaseError):
            found.append(bytes(store.get("one").bytes()))
        return bool(found)

    wait_until(is_found, otherwise="the server does not find its object again", pause_s=0.1)
    return found[0]


@pytest.mark.s3
def test_killed_s3_server_keeps_its_objects(tmp_path: Path) -> None:
    with SeaweedFS(tmp_path) as server, FaultProxy(LOOPBACK, server.port.number) as proxy:
        store = s3(proxy)
        store.put("one", BODY)
        server.kill()
        assert not server.is_running()
        with pytest.raises(BaseError):
            store.get("one")
        server.start()
        server.wait_ready()
        assert read_once_it_can(store) == BODY
        server.pause()
        client = connect(proxy, 0.2)
        with pytest.raises(TimeoutError):
            ask(client)
        client.close()
        server.resume()
        assert store.get("one").bytes() == BODY


@pytest.mark.parametrize("num_turns", range(4))
def test_closing_the_proxy_ends_connections_being_accepted(server: Server, num_turns: int) -> None:
    """The proxy is left at different stages; pytest fails tests that leak tasks or sockets."""
    with FaultProxy(LOOPBACK, server.server_port) as proxy:
        clients = [connect(proxy) for _ in range(20)]
        for client in clients:
            client.connect()
        for _ in range(num_turns):
            proxy.heal()
    for client in clients:
        client.close()
    assert not asyncio.all_tasks(proxy._loop)
    gc.collect()
