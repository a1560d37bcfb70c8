# SPDX-License-Identifier: Apache-2.0
"""Clients that send much, slowly, or do not read: memory stays bounded, and others are served."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

from ecshare.router.options.values import MIB
from lab.completions import COMPLETIONS, NEW, TEXT, Requests
from lab.http_load import Client, Message, post
from lab.servers.router import RouterProcess
from lab.servers.stand_in import StandIn
from tests.waiting import until

PICTURE_BYTES = 20_000_000
LIMIT_MB = 256
SLACK_BYTES = 192 * MIB
"""More than the allocator and connections take beside what is counted. Bodies grow by an eighth."""
HANGS_S = 120.0


class Served:
    """A router in front of one engine, each a process, and a client."""

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self.client = Client(router.port.number)
        self.requests = Requests(1000)
        self._base_bytes = self.peak_bytes()

    def peak_bytes(self) -> int:
        """The most memory that the router ever had."""
        (process,) = self.router.processes()
        status = Path(f"/proc/{process}/status").read_text()
        (peak_kb,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
        return int(peak_kb) * 1024

    def check_memory(self, counted_bytes: int) -> None:
        taken = self.peak_bytes() - self._base_bytes
        assert taken < counted_bytes + SLACK_BYTES, f"{taken / MIB:.0f} MiB"

    async def answers(self, message: Message, status: int = 200) -> bool:
        return (await self.client.ask(message)).status == status

    async def serves(self, kind: str = TEXT) -> bool:
        return await self.answers(self.requests.next(kind))

    async def sending(
        self, message: bytes, stack: AsyncExitStack
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which this is sent; the stack closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.router.port.number)
        stack.callback(writer.close)
        writer.write(message)
        return reader, writer


@asynccontextmanager
async def served(folder: Path, *engine_options: str) -> AsyncIterator[Served]:
    with ExitStack() as stack:
        engine = stack.enter_context(StandIn("engine", folder, "decode", engine_options))
        limit = f"--max-in-flight-mb={LIMIT_MB}"
        router = RouterProcess("router", folder, {"decoder": [engine]}, [limit])
        async with asyncio.timeout(HANGS_S):
            serving = Served(stack.enter_context(router))
            assert await serving.serves()
            yield serving
            assert await serving.serves()


async def test_fifty_pictures_of_20_mb_at_once(tmp_path: Path) -> None:
    large = Requests(PICTURE_BYTES)
    async with served(tmp_path) as s:
        statuses: list[int] = []
        room, num_asking = asyncio.Semaphore(0), 0

        async def insist(message: Message) -> None:
            """Ask again after a 429, when another one has been answered, if any is under way."""
            nonlocal num_asking
            while True:
                client = Client(s.router.port.number)
                num_asking += 1
                status = (await client.ask(message)).status
                num_asking -= 1
                client.close()
                statuses.append(status)
                if status == 200:
                    room.release()
                    return
                if num_asking:
                    await room.acquire()

        asked = [asyncio.create_task(insist(large.next(NEW))) for _ in range(50)]
        num_beside = 0
        while not all(each.done() for each in asked):
            assert await s.serves(), "a question beside them"
            assert await s.serves(NEW), "a small picture beside them"
            num_beside += 1
        await asyncio.gather(*asked)
        assert set(statuses) == {200, 429}
        assert statuses.count(200) == 50
        assert num_beside > 1
        s.check_memory(LIMIT_MB * MIB)


async def test_large_bodies_that_do_not_come_keep_no_small_ones_out(tmp_path: Path) -> None:
    large = Requests(PICTURE_BYTES).next(NEW)
    whole, _ = post(COMPLETIONS, b" " * (LIMIT_MB * MIB // 16))  # 14 of these fill it
    async with served(tmp_path) as s, AsyncExitStack() as stack:
        for _ in range(14):
            await s.sending(whole + b"{", stack)
        assert await s.answers(large), "they have been said to come, no more"
        for _ in range(20):
            await s.sending(b"".join(large)[:15_000_000], stack)
        await until(lambda: s.answers(large, 429))
        for kind in (TEXT, NEW):
            assert await s.serves(kind)
        await stack.aclose()
        await until(lambda: s.answers(large))
        s.check_memory(LIMIT_MB * MIB)


async def test_clients_that_do_not_read_hold_little(tmp_path: Path) -> None:
    """What an engine streams to them waits at the engine."""
    stream = ("--tokens=200", f"--chars={64 * 1024}")
    async with served(tmp_path, *stream) as s, AsyncExitStack() as stack:
        message = b"".join(s.requests.next(TEXT, streams=True))
        for _ in range(50):
            reader, writer = await s.sending(message, stack)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        for kind in (TEXT, NEW):
            assert await s.serves(kind)
        s.check_memory(50 * MIB)
