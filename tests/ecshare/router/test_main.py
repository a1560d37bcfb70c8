# SPDX-License-Identifier: Apache-2.0
"""`python -m ecshare.router` as a process."""

import asyncio
import signal
import subprocess
import sys

import aiohttp
import pytest
from aiohttp import web

from ecshare import __version__
from ecshare.router.api.chat import CHAT
from lab.servers.processes import Port
from tests.ecshare.router.fake_engine import (
    EVENTS,
    FakeEngine,
    chat,
    decoded,
    listening,
    streaming_until,
)


async def start(port: int, *engines: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ecshare.router", "--access-log"),
        *("--port", str(port), *engines),
        stderr=asyncio.subprocess.PIPE,
    )


RESERVED: list[Port] = []
"""No other program gets these while the tests run."""


def free_port() -> int:
    RESERVED.append(Port())
    return RESERVED[-1].number


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    port = free_port()
    async with FakeEngine(decoded).serving() as engine, aiohttp.ClientSession() as client:
        process = await start(port, "--decoder", engine.url)
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
            await ended(process)
        assert "GET /health 200" in rest
        assert "Traceback" not in rest


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_stream_runs_on_while_it_stops(signals: int) -> None:
    """To its end after one signal, to an error event after two."""
    let_go = asyncio.Event()
    url = f"http://127.0.0.1:{(port := free_port())}"
    async with (
        FakeEngine(streaming_until(let_go)).serving() as engine,
        aiohttp.ClientSession() as client,
    ):
        process = await start(port, "--decoder", engine.url)
        assert process.stderr is not None
        try:
            async with asyncio.timeout(40):
                assert b"listening" in await process.stderr.readline()
                async with client.post(url + CHAT, json=chat(stream=True)) as response:
                    assert await response.content.readany() == EVENTS[0]
                    process.terminate()
                    while b"stopping: 1 requests" not in await process.stderr.readline():
                        pass
                    async with client.get(url + "/ready") as ready:
                        assert ready.status == 503
                    if signals == 1:
                        let_go.set()
                    else:
                        process.terminate()
                    rest = await response.read()
                assert await process.wait() == 0
        finally:
            let_go.set()
            await ended(process)
        assert (rest == EVENTS[-1]) is (signals == 1)
        assert (b"shutting_down" in rest) is (signals == 2)


async def test_a_taken_port_is_one_sentence() -> None:
    async with listening(web.Application()) as taken:
        port = int(taken.rpartition(":")[2])
        process = await start(port, "--decoder", "http://127.0.0.1:9")
        _, said = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 1
        assert said.startswith(b"cannot listen on --host 127.0.0.1 --port ")
        assert said.count(b"\n") == 1


async def test_it_says_which_engines_do_not_answer_and_serves() -> None:
    port = free_port()
    sick = FakeEngine(decoded, healthy=False)
    async with (
        FakeEngine(decoded).serving() as engine,
        sick.serving(),
        aiohttp.ClientSession() as client,
    ):
        engines = ("--encoder", "http://127.0.0.1:9", "--prefiller", sick.url)
        process = await start(port, *engines, "--decoder", engine.url)
        assert process.stderr is not None
        try:
            async with asyncio.timeout(20):
                said = [(await process.stderr.readline()).decode() for _ in range(3)]
                assert "listening" in said[0]
                assert "the encode engine http://127.0.0.1:9 does not answer" in said[1]
                assert f"the prefill engine {sick.url} does not answer" in said[2]
                async with client.get(f"http://127.0.0.1:{port}/v1/models") as response:
                    assert response.status == 200
                process.terminate()
                rest = (await process.stderr.read()).decode()
                assert await process.wait() == 0
        finally:
            await ended(process)
        assert "answer" not in rest
        assert "Traceback" not in rest


async def test_it_says_when_all_engines_answer() -> None:
    async with FakeEngine(decoded).serving() as one, FakeEngine(decoded).serving() as two:
        process = await start(free_port(), "--decoder", one.url, "--decoder", two.url)
        assert process.stderr is not None
        try:
            async with asyncio.timeout(20):
                assert b"listening" in await process.stderr.readline()
                assert b"all 2 engines answer" in await process.stderr.readline()
        finally:
            await ended(process)


async def test_an_engine_that_hangs_holds_up_neither_start_nor_stop() -> None:
    asked = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(never, "127.0.0.1", 0) as deaf:
        where = f"http://127.0.0.1:{deaf.sockets[0].getsockname()[1]}"
        process = await start(free_port(), "--decoder", where)
        assert process.stderr is not None
        try:
            async with asyncio.timeout(20):
                assert b"listening" in await process.stderr.readline()
                await asked.wait()
                process.terminate()
                assert b"Traceback" not in await process.stderr.read()
                assert await process.wait() == 0
        finally:
            await ended(process)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_it_says_its_version() -> None:
    ran = run("-m", "ecshare.router", "--version")
    assert (ran.returncode, ran.stdout) == (0, f"ecshare {__version__}\n")


@pytest.mark.parametrize(
    "package",
    ["aiohttp", "httptools", "msgspec", "prometheus_client", "pybase64", "pycares", "yarl"],
)
def test_a_missing_extra_is_one_sentence(package: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; "
        "from ecshare.router.__main__ import main; main(['--decoder', 'http://127.0.0.1:9'])"
    )
    ran = run("-c", program)
    assert ran.returncode == 1
    assert ran.stderr == (
        f"ecshare router needs {package}: install ecshare with its extra [router] "
        "(pip install aiohttp httptools multidict prometheus_client pybase64 pycares yarl)\n"
    )


def test_it_goes_by_the_name_that_it_is_called_by() -> None:
    program = "from ecshare.router.__main__ import main; main(['--help'], prog='ecshare router')"
    assert run("-c", program).stdout.startswith("usage: ecshare router ")
