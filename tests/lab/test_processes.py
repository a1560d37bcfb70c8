# SPDX-License-Identifier: Apache-2.0
"""Start, stop and pause of servers, and errors that name the log."""

import socket
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from lab.servers.processes import LOOPBACK, Port, Server, ServerFailed, program

ANSWERING = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["SAID"].encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Program(Server):
    """A Python program as a server."""

    def __init__(self, source: str, log_dir: Path) -> None:
        super().__init__("program", log_dir)
        self.source = source

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.source, str(self.port.number)]

    def environment(self) -> Mapping[str, str]:
        return {"SAID": "here I am"}


def test_server_runs_exactly_during_its_block(tmp_path: Path) -> None:
    with Program(ANSWERING, tmp_path) as server:
        with urllib.request.urlopen(server.base_url) as reply:
            assert reply.read() == b"here I am"
        assert server.is_running()
    assert not server.is_running()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, server.port.number))


BUSY = ANSWERING.replace(
    "http.server.HTTPServer",
    """
import threading
def work():
    while True:
        pass
for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
http.server.HTTPServer""".strip(),
)


def test_paused_server_uses_no_cpu_time(tmp_path: Path) -> None:
    with Program(BUSY, tmp_path) as server:
        for _ in range(20):
            server.pause()
            used_s = cpu_s(server)
            time.sleep(0.02)
            assert cpu_s(server) == used_s
            server.resume()
        urllib.request.urlopen(server.base_url).close()


def cpu_s(server: Server) -> list[str]:
    """Return the CPU time of all its threads, at the kernel's finest resolution."""
    threads = (each for id in server.processes() for each in Path(f"/proc/{id}/task").iterdir())
    return sorted((thread / "schedstat").read_text() for thread in threads)


def test_server_restarts_on_the_same_port(tmp_path: Path) -> None:
    server = Program(ANSWERING, tmp_path)
    for _ in range(2):
        with server:
            urllib.request.urlopen(server.base_url).close()


def test_server_that_exits_at_start_raises_with_its_log(tmp_path: Path) -> None:
    server = Program("raise SystemExit('no room in the ark')", tmp_path)
    with pytest.raises(ServerFailed) as failed, server:
        pass
    assert "program ended while starting" in str(failed.value)
    assert "no room in the ark" in str(failed.value)
    assert str(server.log_path) in str(failed.value)


def test_server_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    server = Program("import time; time.sleep(600)", tmp_path)
    server.ready_within_s = 0.0
    with pytest.raises(ServerFailed, match="program was not ready within 0 s"), server:
        pass
    assert not server.is_running()


def test_held_port_is_free_only_for_a_server() -> None:
    held = Port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((LOOPBACK, held.number))  # without SO_REUSEADDR, as a client asks
    with socket.create_server((LOOPBACK, held.number)):  # with it, as a server does
        pass
    held.release()
    with socket.socket() as other:
        other.bind((LOOPBACK, held.number))


def test_program_is_found_beside_python_or_a_fix_is_named() -> None:
    assert Path(program("ruff")).parent == Path(sys.executable).parent
    with pytest.raises(FileNotFoundError, match=r"pip install \S+ \(ecshare's extra \[dev\]\)"):
        program("no-such-program")
