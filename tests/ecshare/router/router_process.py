# SPDX-License-Identifier: Apache-2.0
"""The router as a process of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from lab.servers.processes import Port

GIVE_UP_S = 60.0


@dataclass
class RouterProcess:
    """One that runs, and what it has logged as far as it was read: all when it has ended."""

    process: asyncio.subprocess.Process
    port: int
    log: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def logged(self, words: str) -> None:
        """Wait until the log has a line with these words."""
        assert self.process.stderr is not None
        line = ""
        async with asyncio.timeout(GIVE_UP_S):
            while words not in line:
                line = (await self.process.stderr.readline()).decode()
                assert line, self.log
                self.log += line

    async def ended(self) -> int:
        """Wait for its end, and return its exit status."""
        assert self.process.stderr is not None
        async with asyncio.timeout(GIVE_UP_S):
            self.log += (await self.process.stderr.read()).decode()
            return await self.process.wait()


@asynccontextmanager
async def started(
    *arguments: str, before: Sequence[str] = (), port: int | None = None, **options: Any
) -> AsyncIterator[RouterProcess]:
    """Run a router as long as the block; `before`: a command that runs the one behind it."""
    reserved = Port()  # as long as the process runs
    port = port or reserved.number
    process = await asyncio.create_subprocess_exec(
        *(*before, sys.executable, "-m", "ecshare.router", f"--port={port}", *arguments),
        **{"stderr": asyncio.subprocess.PIPE, **options},
    )
    router = RouterProcess(process, port)
    try:
        async with asyncio.timeout(GIVE_UP_S):
            yield router
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await router.ended()
            finally:
                if process.returncode is None:
                    process.kill()


@asynccontextmanager
async def router_process(decoder: str, *before: str) -> AsyncIterator[RouterProcess]:
    """Run a router in front of the engine at the url `decoder`; it listens in the body."""
    async with started(f"--decoder={decoder}", before=before) as router:
        await router.logged("listening")
        yield router
