# SPDX-License-Identifier: Apache-2.0
"""The router as a process of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lab.servers.processes import Port

GIVE_UP_S = 30.0


@dataclass
class RouterProcess:
    """One that listens; `log` is whole when it has ended."""

    port: int
    log: str = ""


@asynccontextmanager
async def router_process(decoder: str, *before: str) -> AsyncIterator[RouterProcess]:
    """Run a router in front of the engine at the url `decoder`; it listens in the body.

    `before`: a command that runs the one behind it.
    """
    reserved = Port()  # as long as the process runs
    port = reserved.number
    process = await asyncio.create_subprocess_exec(
        *(*before, sys.executable, "-m", "ecshare.router"),
        *(f"--port={port}", f"--decoder={decoder}"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    router, said = RouterProcess(port), b""
    try:
        async with asyncio.timeout(GIVE_UP_S):
            while b"listening" not in said:
                said += await process.stderr.readline()
            yield router
    finally:
        process.terminate()
        _, rest = await process.communicate()
        router.log = (said + rest).decode()
