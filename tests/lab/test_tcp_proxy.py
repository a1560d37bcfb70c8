# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of a real echo server."""

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lab.faults.tcp_proxy import Proxy, ProxyProcess

HOST = "127.0.0.1"


@pytest.fixture
def echo_port() -> Iterator[int]:
    """Start a server that echoes, and closes after the client did."""
    server = socket.create_server((HOST, 0))

    def echo(connection: socket.socket) -> None:
        with connection:
            while received := connection.recv(1 << 20):
                connection.sendall(received)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    serving.join()


def connect(proxy: Proxy | ProxyProcess) -> socket.socket:
    return socket.create_connection((HOST, proxy.port), timeout=20)


def read_to_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def test_all_bytes_and_end_of_stream_pass_both_ways(echo_port: int) -> None:
    sent = bytes(range(256)) * (1 << 14)
    with Proxy(HOST, echo_port, round_trip_s=0.01) as proxy, connect(proxy) as client:

        def send() -> None:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        assert read_to_end(client) == sent
        sender.join()


def test_buffered_bytes_are_delivered_after_the_sender_closed(echo_port: int) -> None:
    sent = bytes(1 << 20)
    with Proxy(HOST, echo_port) as proxy, socket.socket() as client:
        # Small socket buffers make the rest wait in the proxy.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((HOST, proxy.port))
        client.sendall(sent[:1])
        assert client.recv(1)
        for end in proxy.ends:
            own_socket = end.transport.get_extra_info("socket")
            own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert len(read_to_end(client)) == len(sent)


def test_each_round_trip_takes_round_trip_s(echo_port: int) -> None:
    with Proxy(HOST, echo_port, round_trip_s=0.1) as proxy, connect(proxy) as client:
        for least_s in (0.2, 0.1):  # the first one after a connect includes the handshake
            started_s = time.monotonic()
            client.sendall(b"ping")
            assert client.recv(4) == b"ping"
            # asyncio's clock and timers may be early by the clock's resolution.
            assert time.monotonic() - started_s > least_s - 0.001


def test_connection_is_limited_to_bytes_per_s(echo_port: int) -> None:
    sent = bytes(400_000)
    with (
        Proxy(HOST, echo_port, bytes_per_s=2e6) as proxy,
        connect(proxy) as one,
        connect(proxy) as other,
    ):
        started_s = time.monotonic()
        for client in (one, other):
            threading.Thread(target=client.sendall, args=(sent,)).start()
        for client in (one, other):
            with client.makefile("rb") as received:
                assert received.read(len(sent)) == sent
        assert time.monotonic() - started_s > len(sent) / 2e6 - 0.001


@pytest.mark.parametrize("kind", [Proxy, ProxyProcess])
def test_stalled_proxy_keeps_bytes_until_resumed(
    echo_port: int, kind: type[Proxy] | type[ProxyProcess]
) -> None:
    with kind(HOST, echo_port) as proxy, connect(proxy) as old:
        old.sendall(b"before")
        assert old.recv(6) == b"before"
        proxy.stall()
        with connect(proxy) as new:
            for client in (old, new):
                client.settimeout(0.2)
                client.sendall(b"during")
                with pytest.raises(TimeoutError):
                    client.recv(6)
            proxy.resume()
            for client in (old, new):
                client.settimeout(20)
                assert client.recv(6) == b"during"


def test_proxy_without_a_server_closes_the_client() -> None:
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    with Proxy(HOST, port) as proxy, connect(proxy) as client:
        assert client.recv(1) == b""


def test_closing_the_proxy_closes_its_connections(echo_port: int) -> None:
    with Proxy(HOST, echo_port) as proxy:
        client = connect(proxy)
        client.sendall(b"x")
        assert client.recv(1) == b"x"
    with client:
        assert client.recv(1) == b""


@pytest.mark.parametrize("num_turns", range(4))
def test_closing_the_proxy_ends_connections_being_opened(echo_port: int, num_turns: int) -> None:
    """The proxy is left at different stages; pytest fails tests that leak tasks or sockets."""
    with Proxy(HOST, echo_port) as proxy:
        clients = [connect(proxy) for _ in range(20)]
        for _ in range(num_turns):
            proxy.resume()
    for client in clients:
        client.close()
    assert not asyncio.all_tasks(proxy._loop)
    assert not proxy.ends
    gc.collect()
