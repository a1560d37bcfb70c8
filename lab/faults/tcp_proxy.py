# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that adds latency, and can fall silent.

    with Proxy("127.0.0.1", 8333, round_trip_s=0.02) as proxy:     # a thread of this process
        client = connect(proxy.url)                                # http://127.0.0.1:<its port>
        proxy.stall()                                              # a black hole from here on

Each direction is delayed by half the round trip. Any number of bytes may be in flight, so bandwidth
is unlimited, unless `bytes_per_s` limits each direction of each connection, as object stores do.
The first bytes of a new connection wait for one more round trip, as for a handshake. While the
proxy is stalled, it accepts connections and reads bytes, but sends none; `resume` delivers them.

`ProxyProcess` is the same in a process of its own, for measurements that must not share the
interpreter with it; `python -m lab.faults.tcp_proxy HOST PORT ROUND_TRIP_S BYTES_PER_S` runs it.
"""

import asyncio
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

from lab.servers.processes import LOOPBACK

# The bytes that one direction may queue before its sender is paused: far more than bandwidth x
# delay on loopback, far less than memory.
_QUEUE_BYTES = 256 << 20
_READY_WITHIN_S = 10.0


class _Endpoint(asyncio.Protocol):
    """One end of a proxied connection. Data that it receives leaves, later, through `other`."""

    transport: asyncio.Transport

    def __init__(self, proxy: "Proxy", other: "_Endpoint | None" = None) -> None:
        """`other`: for a far end, the near one; that has itself until the far one is connected."""
        self.other = other or self
        self._proxy = proxy
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[float, bytes]] = deque()  # (due time, data); b"" is end of file
        self._queued_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_full = False
        self._has_ended = False
        self._busy_until_s = 0.0  # its link carries earlier data until then

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._opened_s = self._loop.time()
        self._proxy.ends.add(self)
        if self.other is self:
            transport.pause_reading()
            self._proxy.connect(self)

    def data_received(self, data: bytes) -> None:
        round_trip_s = self._proxy.round_trip_s
        sent_s = max(self._loop.time(), self._opened_s + round_trip_s)
        self._busy_until_s = max(sent_s, self._busy_until_s) + self._proxy.seconds_of(len(data))
        self._queue.append((self._busy_until_s + round_trip_s / 2, data))
        self._queued_bytes += len(data)
        if self._queued_bytes > _QUEUE_BYTES:
            self.transport.pause_reading()
        self.deliver()

    def eof_received(self) -> bool:
        self.data_received(b"")
        return True  # the other direction may still send

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self.other.deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.ends.discard(self)
        self._queue.clear()
        if not (self._has_ended and self.other._has_ended):
            self.other.transport.abort()  # otherwise it closes after its last bytes

    def deliver(self) -> None:
        """Send the data that is due, and schedule the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue and not self._proxy.is_stalled and not self.other._is_full:
            due_s, data = self._queue[0]
            if due_s > self._loop.time():
                self._timer = self._loop.call_at(due_s, self.deliver)
                break
            self._queue.popleft()
            self._queued_bytes -= len(data)
            self._send(data)
        if self._queued_bytes <= _QUEUE_BYTES and not self.transport.is_closing():
            self.transport.resume_reading()

    def _send(self, data: bytes) -> None:
        if data:
            self.other.transport.write(data)
            return
        self._has_ended = True
        if self.other._has_ended:
            self.transport.close()
            self.other.transport.close()
        elif self.other.transport.can_write_eof():
            self.other.transport.write_eof()


class Proxy:
    """Forwards TCP connections to `host`:`port` with a delay; see the module. Runs one thread.

    Ownership: `ends` and `is_stalled` belong to that thread. Any thread may set `round_trip_s`.
    """

    def __init__(
        self, host: str, port: int, round_trip_s: float = 0.0, bytes_per_s: float = 0.0
    ) -> None:
        """`bytes_per_s`: of each connection, in each direction; 0: unlimited."""
        self.round_trip_s = round_trip_s
        self.bytes_per_s = bytes_per_s
        self.is_stalled = False
        self.ends: set[_Endpoint] = set()
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        """Return `http://host:port` of the proxy itself."""
        return f"http://{LOOPBACK}:{self.port}"

    def seconds_of(self, num_bytes: int) -> float:
        """Return how long one connection takes to carry `num_bytes`."""
        return num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def stall(self) -> None:
        """Stop forwarding."""
        self._do(self._set_stalled, True)

    def resume(self) -> None:
        """Forward the data that was held back, and all that follows."""
        self._do(self._set_stalled, False)

    def __enter__(self) -> Self:
        self._thread.start()
        accepting = self._loop.create_server(lambda: _Endpoint(self), LOOPBACK, 0)
        self._server = asyncio.run_coroutine_threadsafe(accepting, self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exc: object) -> None:
        ended = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        ended.result(_READY_WITHIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, call: Callable[..., None], *args: object) -> None:
        """Run `call` on the proxy's thread and wait for it."""
        done: Future[None] = Future()

        def run() -> None:
            call(*args)
            done.set_result(None)

        self._loop.call_soon_threadsafe(run)
        done.result(_READY_WITHIN_S)

    def _set_stalled(self, is_stalled: bool) -> None:
        self.is_stalled = is_stalled
        for end in tuple(self.ends):
            end.deliver()

    def connect(self, near: _Endpoint) -> None:
        """Connect an accepted connection to the target. Runs on the proxy's thread."""
        opening = self._loop.create_task(self._connect(near))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _connect(self, near: _Endpoint) -> None:
        try:
            _, far = await self._loop.create_connection(
                lambda: _Endpoint(self, near), *self._target
            )
        except OSError:
            near.transport.abort()  # the target does not listen
            return
        near.other = far
        near.transport.resume_reading()

    async def _close(self) -> None:
        """End all connections, including those that are being accepted or opened.

        Call it before the server is closed: asyncio loses connections that a closed server just
        accepted.
        """
        while self.ends or len(asyncio.all_tasks()) > 1:  # this task is one
            for opening in self._opening:
                opening.cancel()
            for end in tuple(self.ends):
                end.transport.abort()
            await asyncio.sleep(0)
        self._server.close()


class ProxyProcess:
    """A Proxy in a process of its own, which ends with this one."""

    def __init__(
        self, host: str, port: int, round_trip_s: float = 0.0, bytes_per_s: float = 0.0
    ) -> None:
        words = (host, port, round_trip_s, bytes_per_s)
        self._command = [sys.executable, "-m", __name__, *map(str, words)]

    @property
    def url(self) -> str:
        """Return `http://host:port` of the proxy itself."""
        return f"http://{LOOPBACK}:{self.port}"

    def stall(self) -> None:
        """Stop forwarding."""
        self._send_command("stall")

    def resume(self) -> None:
        """Forward the data that was held back, and all that follows."""
        self._send_command("resume")

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, text=True, bufsize=1, start_new_session=True
        )
        self.port = int(self._read_reply())
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate(timeout=_READY_WITHIN_S)  # it stops at end of file

    def _send_command(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._read_reply()

    def _read_reply(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxy ended with status {self._process.wait()}")
        return line


def main() -> None:
    """Print the port, then obey `stall` and `resume`, one a line, until end of file."""
    host, port, round_trip_s, bytes_per_s = sys.argv[1:]
    with Proxy(host, int(port), float(round_trip_s), float(bytes_per_s)) as proxy:
        print(proxy.port, flush=True)
        for line in sys.stdin:
            {"stall": proxy.stall, "resume": proxy.resume}[line.strip()]()
            print("done", flush=True)


if __name__ == "__main__":
    main()
