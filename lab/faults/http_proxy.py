# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of an S3 server that injects faults of networks and servers.

    with FaultProxy("127.0.0.1", 8333) as proxy:        # a thread of this process
        client = connect(proxy.url)
        proxy.fail(Fault.answer(503), on="GET")         # from here on, for every GET
        proxy.fail(Fault.cut(5000), on="GET", key="ec/")    # ...of these objects; the latest wins
        proxy.heal()

It parses HTTP/1.1 and forwards every message unchanged, so that signatures stay valid, except those
that a fault applies to. `num_hits` counts the requests that a fault has affected.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from lab.faults.http1 import HEAD_LIMIT_BYTES, Head, answer_body, read_head, request_body
from lab.faults.kinds import Fault, FaultKind, Side, error_answer, with_fault
from lab.servers.processes import LOOPBACK, Port

Method = Literal["any", "GET", "PUT", "HEAD", "DELETE", "POST"]

_CALL_TIMEOUT_S = 10.0
# The kernel then drops unsent bytes and sends a reset instead of an orderly end.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class _Rule:
    fault: Fault
    on: Method
    key: str

    def is_for(self, request: Head) -> bool:
        method, target, _ = request.line
        return self.on in ("any", method) and self.key in target


class FaultProxy:
    """Forwards HTTP requests to `host`:`port`, unless a fault applies; see the module.

    Ownership: `_rules`, `_open` and the listening socket belong to the proxy's thread. The public
    methods may be called from any other thread, and return when the work is done.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._port = Port()  # reserved also while the proxy refuses connections
        self._rules: list[_Rule] = []
        self._open: set[StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._num_hits = 0
        self._counted = threading.Condition()  # guards `_num_hits`
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faults", daemon=True)

    @property
    def url(self) -> str:
        """Return `http://host:port` of the proxy itself."""
        return f"http://{LOOPBACK}:{self._port.number}"

    @property
    def num_hits(self) -> int:
        """Return the number of requests affected so far, without refused connections."""
        with self._counted:
            return self._num_hits

    def wait_hit(self, num_hits: int, timeout_s: float) -> None:
        """Block until faults have affected `num_hits` requests.

        Raises:
            TimeoutError: it took longer.
        """
        with self._counted:
            if not self._counted.wait_for(lambda: self._num_hits >= num_hits, timeout_s):
                raise TimeoutError(f"{self._num_hits} requests met a fault, not {num_hits}")

    def fail(self, fault: Fault, on: Method = "any", key: str = "") -> None:
        """From now on apply `fault` to each `on` request whose target contains `key`.

        Raises:
            ValueError: refused connections cannot be selected by request.
        """
        if fault.kind is FaultKind.REFUSE and (on != "any" or key):
            raise ValueError("a refused connection has no request to select by")
        self._do(self._add(_Rule(fault, on, key)))

    def heal(self) -> None:
        """Remove all faults, and let held-back messages continue."""
        self._do(self._clear_rules())

    def disconnect(self) -> None:
        """Reset all open connections, and drop the data that they hold back."""
        self._do(self._reset_all())

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._port.release()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

    # --- the proxy's thread ---

    async def _start(self) -> None:
        self._healed = asyncio.Event()
        await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, LOOPBACK, self._port.number, limit=HEAD_LIMIT_BYTES
        )

    async def _add(self, rule: _Rule) -> None:
        self._rules.insert(0, rule)
        if rule.fault.kind is FaultKind.REFUSE:
            self._server.close()
            await self._reset_all()

    async def _clear_rules(self) -> None:
        self._rules.clear()
        self._healed.set()  # for requests that are waiting
        self._healed = asyncio.Event()
        if not self._server.is_serving():
            await self._listen()

    async def _reset_all(self) -> None:
        for writer in tuple(self._open):
            _reset(writer)
        for task in tuple(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _stop(self) -> None:
        # Before the server is closed: asyncio loses connections that a closed server just accepted.
        while len(asyncio.all_tasks()) > 1:  # this task is one
            await self._reset_all()
            await asyncio.sleep(0)
        self._server.close()

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._open.add(writer)  # also if its task is cancelled before it begins
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Forward the requests of one connection until either side ends it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._opened(writer))
            far: tuple[StreamReader, StreamWriter] | None = None
            try:
                while (head := await read_head(reader)) is not None:
                    fault = next((rule.fault for rule in self._rules if rule.is_for(head)), None)
                    if fault is not None and fault.kind is FaultKind.ANSWER:
                        goes_on = await self._answer(fault, head, reader, writer)
                    else:
                        # A restarted server has closed its earlier connections.
                        if far is None or far[0].at_eof() or far[1].is_closing():
                            far = await asyncio.open_connection(*self._target)
                            stack.enter_context(self._opened(far[1]))
                        goes_on = await self._exchange(head, fault, (reader, writer), far)
                    if not goes_on:
                        break
            except EOFError:
                pass  # leaving the block closes both ends
            except OSError:
                for end in (writer, *(far or ())[1:]):
                    _reset(end)

    @contextlib.contextmanager
    def _opened(self, writer: StreamWriter) -> Iterator[None]:
        # So that `drain` waits until the kernel has everything.
        writer.transport.set_write_buffer_limits(0)
        self._open.add(writer)
        try:
            yield
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(
        self, fault: Fault, head: Head, reader: StreamReader, writer: StreamWriter
    ) -> bool:
        """Answer instead of the server. Returns whether the connection can be used again."""
        is_uploaded = "expect" not in head.fields
        if is_uploaded:
            async for _ in request_body(reader, head):
                pass
        self._count_hit()
        writer.write(error_answer(fault, head, keep_alive=is_uploaded))
        await writer.drain()
        return is_uploaded

    async def _exchange(
        self,
        head: Head,
        fault: Fault | None,
        near: tuple[StreamReader, StreamWriter],
        far: tuple[StreamReader, StreamWriter],
    ) -> bool:
        """Forward one request and its answer. Returns whether the connections can be used again."""
        far[1].write(head.raw)
        # Concurrently: a server may answer before it has the whole body, or ask for it first.
        up = self._loop.create_task(self._pass_on(head, fault, near[0], far[1]))
        back = self._loop.create_task(self._pass_back(head, fault, far[0], near[1]))
        try:
            _, answer = await asyncio.gather(up, back)
        finally:
            up.cancel()
            back.cancel()
        return not (head.ends_connection or answer.ends_connection)

    async def _pass_on(
        self, head: Head, fault: Fault | None, reader: StreamReader, writer: StreamWriter
    ) -> None:
        async for piece in self._with_fault(request_body(reader, head), fault, "upload"):
            # A server that stops reading gives the reason in its answer. The other task reads that.
            with contextlib.suppress(ConnectionError):
                writer.write(piece)
                await writer.drain()

    async def _pass_back(
        self, request: Head, fault: Fault | None, reader: StreamReader, writer: StreamWriter
    ) -> Head:
        """Forward the answer to `request`, and return its head."""
        while (head := await read_head(reader)) is not None and head.is_interim:
            writer.write(head.raw)
        if head is None:
            raise EOFError("no answer")
        if fault is not None and fault.kind is FaultKind.SLOW:
            self._count_hit()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._healed.wait(), fault.seconds)
        writer.write(head.raw)
        body = answer_body(reader, head, request.line[0])
        async for piece in self._with_fault(body, fault, "answer"):
            writer.write(piece)
            await writer.drain()
        await writer.drain()
        return head

    def _with_fault(
        self, body: AsyncIterator[bytes], fault: Fault | None, side: Side
    ) -> AsyncIterator[bytes]:
        if fault is None or fault.kind is FaultKind.SLOW or fault.side != side:
            return body
        return with_fault(body, fault, self._count_hit, self._healed)

    def _count_hit(self) -> None:
        with self._counted:
            self._num_hits += 1
            self._counted.notify_all()


def _reset(writer: StreamWriter) -> None:
    """Reset a connection at once."""
    end: socket.socket | None = writer.get_extra_info("socket")
    if end is not None:
        with contextlib.suppress(OSError):  # closed already
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
