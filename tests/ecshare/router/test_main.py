# SPDX-License-Identifier: Apache-2.0
"""`python -m ecshare.router` as a process."""

import asyncio
import signal
import socket
import sys

import aiohttp
import pytest
from aiohttp import web

from tests.ecshare.router.fake_engine import FakeEngine, decoded, listening


async def start(port: int, decoder: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ecshare.router", "--access-log"),
        *("--port", str(port), "--decoder", decoder),
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    async with FakeEngine(decoded).serving() as engine, aiohttp.ClientSession() as client:
        process = await start(port, engine.url)
        assert process.stderr is not None
        try:
            async with asyncio.timeout(20):
                first = await process.stderr.readline()
                assert f"listening on http://127.0.0.1:{port}".encode() in first
                async with client.get(f"http://127.0.0.1:{port}/health") as response:
                    assert response.status == 200
                process.send_signal(number)
                assert await process.wait() == 0
                rest = (await process.stderr.read()).decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert "GET /health 200" in rest
        assert "Traceback" not in rest


async def test_a_taken_port_is_one_sentence() -> None:
    async with listening(web.Application()) as taken:
        process = await start(int(taken.rpartition(":")[2]), "http://127.0.0.1:9")
        _, said = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 1
        assert said.startswith(b"cannot listen on --host 127.0.0.1 --port ")
        assert said.count(b"\n") == 1
