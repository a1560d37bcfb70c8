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
from tests.ecshare.router.answers import EVENTS, decoded
from tests.ecshare.router.bodies import chat
from tests.ecshare.router.fake_engine import FakeEngine, listening
from tests.ecshare.router.held import soon, streaming_until
from tests.ecshare.router.router_process import started


async def status_of(url: str) -> int:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        return response.status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    async with (
        FakeEngine(decoded).serving() as engine,
        started("--access-log", f"--decoder={engine.url}") as f,
    ):
        await f.logged(f"listening on {f.url}")
        assert await status_of(f.url + "/health") == 200
        f.process.send_signal(number)
        assert await f.ended() == 0
        assert "GET /health 200" in f.log
        assert "Traceback" not in f.log


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_stream_runs_on_while_it_stops(signals: int) -> None:
    """To its end after one signal, to an error event after two."""
    async with (
        FakeEngine(streaming_until(let_go := asyncio.Event())).serving() as engine,
        started(f"--decoder={engine.url}", "--drain-s=600") as f,
        aiohttp.ClientSession() as client,
    ):
        await f.logged("listening")
        async with client.post(f.url + CHAT, json=chat(stream=True)) as response:
            assert await response.content.readany() == EVENTS[0]
            f.process.terminate()
            await f.logged("stopping: 1 requests")
            assert await status_of(f.url + "/ready") == 503
            if signals == 1:
                let_go.set()
            else:
                f.process.terminate()
            rest = await response.read()
        assert await f.ended() == 0
        assert (rest == EVENTS[-1]) is (signals == 1)
        assert (b"shutting_down" in rest) is (signals == 2)


async def test_a_taken_port_is_one_sentence() -> None:
    async with listening(web.Application()) as taken:
        port = int(taken.rpartition(":")[2])
        async with started("--decoder=http://127.0.0.1:9", port=port) as f:
            assert await f.ended() == 1
            assert f.log.startswith("cannot listen on --host 127.0.0.1 --port ")
            assert f.log.count("\n") == 1


async def test_it_says_which_engines_do_not_answer_and_serves() -> None:
    async with (
        FakeEngine(decoded).serving() as engine,
        FakeEngine(decoded, healthy=False).serving() as sick,
        started(
            "--encoder=http://127.0.0.1:9", f"--prefiller={sick.url}", f"--decoder={engine.url}"
        ) as f,
    ):
        await f.logged("listening")
        await f.logged("the encode engine http://127.0.0.1:9 does not answer")
        await f.logged(f"the prefill engine {sick.url} does not answer")
        assert await status_of(f.url + "/v1/models") == 200
        f.process.terminate()
        assert await f.ended() == 0
        assert f.log.count("answer") == 2
        assert "Traceback" not in f.log


async def test_it_says_when_all_engines_answer() -> None:
    async with (
        FakeEngine(decoded).serving() as one,
        FakeEngine(decoded).serving() as two,
        started(f"--decoder={one.url}", f"--decoder={two.url}") as f,
    ):
        await f.logged("listening")
        await f.logged("all 2 engines answer")


async def test_an_engine_that_hangs_holds_up_neither_start_nor_stop() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    asked = asyncio.Event()
    async with await asyncio.start_server(never, "127.0.0.1", 0) as deaf:
        port = deaf.sockets[0].getsockname()[1]
        async with started(f"--decoder=http://127.0.0.1:{port}") as f:
            await f.logged("listening")
            await soon(asked)
            f.process.terminate()
            assert await f.ended() == 0
            assert "Traceback" not in f.log


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
