# SPDX-License-Identifier: Apache-2.0
"""Several router processes that serve one port (`--workers`)."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ecshare.router.api.chat import CHAT
from ecshare.router.workers import listening
from lab.servers.processes import Port
from tests.ecshare.router.answers import EVENTS, decoded, encoded, stored
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import FakeEngine
from tests.ecshare.router.held import streaming_until
from tests.ecshare.router.router_process import GIVE_UP_S, RouterProcess, started
from tests.waiting import until

KEY = "the status key of this test, with 32 bytes or more"
SERIES = re.compile(
    r'ecshare_router_answers_total\{worker="(\d)",route="(.*?)",status="2xx"\} (.*)'
)


class Workers(RouterProcess):
    """A router of two workers."""

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def post(self, body: dict[str, Any], by: int | None = None) -> bytes:
        """Send a request, by a connection of its own; `by`: until this worker has answered it."""
        while True:
            before = await self.num_answers()
            async with (
                aiohttp.ClientSession() as client,
                client.post(self.url + CHAT, json=body) as response,
            ):
                assert response.status == 200
                answer = await response.read()
            if by is None or (await self.num_answers())[by] > before[by]:
                return answer

    async def get(self, path: str) -> bytes:
        async with (
            aiohttp.ClientSession() as client,
            client.get(self.url + path, headers={"Authorization": f"Bearer {KEY}"}) as response,
        ):
            assert response.status == 200
            return await response.read()

    async def json(self, path: str) -> Any:
        return json.loads(await self.get(path))

    async def num_answers(self) -> list[int]:
        """Return how many completions each worker has answered; waits until both tell."""
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                series = SERIES.findall((await self.get("/metrics")).decode())
                found = {
                    int(worker): float(number) for worker, path, number in series if path == CHAT
                }
                if len(found) == 2:
                    return [int(found[0]), int(found[1])]


@asynccontextmanager
async def workers(folder: Path, *arguments: str) -> AsyncIterator[Workers]:
    (folder / "key").write_text(KEY)
    async with started(
        *("--workers=2", "--drain-s=600", f"--status-key=file:{folder / 'key'}", *arguments),
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    ) as router:
        await router.logged("listening on")
        yield Workers(**vars(router))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for those of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
async def d() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(decoded).serving() as engine:
        yield engine


@pytest.fixture
async def f(folder: Path, d: FakeEngine) -> AsyncIterator[Workers]:
    """Two workers in front of `d`."""
    async with workers(folder, f"--decoder={d.url}") as router:
        yield router


async def test_both_answer_and_are_shown_as_one_router(
    folder: Path, d: FakeEngine, f: Workers
) -> None:
    await f.post(chat(), by=0)
    await f.post(chat(), by=1)
    number = sum(await f.num_answers())
    status, shown = await f.json("/status"), await f.json("/dashboard/data")
    health = await f.json("/health")
    assert status["answered"] == shown["counts"]["answered"] == {"decode": number}
    assert health["answered"] == {"decode": number}
    assert len(shown["requests"]) == number
    ((engine,),) = (stage["engines"] for stage in status["stages"].values() if stage["engines"])
    assert (engine["url"], engine["in_flight"]) == (d.url, 0)
    assert [each["healthy"] for each in shown["stages"]["decode"]] == [True]
    f.process.terminate()
    assert await f.ended() == 0
    assert "Traceback" not in f.log
    assert list(folder.glob("ecshare-router-*")) == []


async def test_what_one_remembers_the_other_knows(folder: Path, d: FakeEngine) -> None:
    async with (
        FakeEngine(encoded).serving() as e,
        FakeEngine(stored()).serving() as p,
        workers(folder, f"--encoder={e.url}", f"--prefiller={p.url}", f"--decoder={d.url}") as f,
    ):
        await f.post(chat(picture(PNG)))
        (other,) = (n for n, number in enumerate(await f.num_answers()) if not number)
        await f.post(chat(picture(PNG)), by=other)
        assert (len(e.bodies), len(p.bodies)) == (1, 1)


async def test_temporary_files_may_have_long_paths(tmp_path: Path, d: FakeEngine) -> None:
    (deep := tmp_path / ("x" * 90)).mkdir()
    async with workers(deep, f"--decoder={d.url}") as f:
        assert len(await f.num_answers()) == 2
        assert [each.name for each in deep.iterdir()] == ["key"]


async def test_one_that_dies_is_started_again(f: Workers) -> None:
    first, second = f.children()
    os.kill(first, signal.SIGKILL)
    await f.logged("has ended with status -9: it is started again")
    await until(lambda: len(f.children()) == 2)
    assert second in f.children()
    assert first not in f.children()
    await f.post(chat(), by=0)
    await f.post(chat(), by=1)


@pytest.mark.parametrize("signals", ["one", "one to each process", "two"])
async def test_a_stream_runs_on_while_it_stops(d: FakeEngine, f: Workers, signals: str) -> None:
    """To its end, also where each process gets the signal, and to an error after a second one."""
    d.answer = streaming_until(let_go := asyncio.Event())
    async with (
        asyncio.timeout(GIVE_UP_S),
        aiohttp.ClientSession() as client,
        client.post(f.url + CHAT, json=chat(stream=True)) as response,
    ):
        assert await response.content.readany() == EVENTS[0]
        if signals == "one to each process":
            os.killpg(f.process.pid, signal.SIGTERM)
        else:
            f.process.terminate()
        await f.logged("stopping: 1 requests")
        if signals == "two":
            f.process.terminate()
            assert b"shutting_down" in await response.read()
        else:
            await until(lambda: len(f.children()) == 1)
            async with aiohttp.ClientSession() as other, other.get(f.url + "/ready") as ready:
                assert ready.status == 503
            let_go.set()
            assert await response.read() == EVENTS[-1]
        assert await f.ended() == 0


async def test_none_is_left_if_the_first_process_is_killed(f: Workers) -> None:
    pids = f.children()
    f.process.kill()
    await f.ended()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


async def test_a_port_that_other_workers_have_is_one_sentence(f: Workers) -> None:
    async with started("--workers=2", "--decoder=http://x:1", port=f.port) as second:
        assert await second.ended() == 1
        assert second.log.startswith("cannot listen on --host 127.0.0.1 --port ")
        assert second.log.count("\n") == 1


def test_one_that_cannot_start_ends_all(folder: Path) -> None:
    """A worker that ends before it is ready: the others are stopped, and its status is returned."""
    program = (
        "import sys, time; from ecshare.router.workers import listening, run_workers\n"
        "worker = run_workers(listening('127.0.0.1', 0, 2), lambda: print('ready'))\n"
        "if isinstance(worker, int): sys.exit(worker)\n"
        "if worker.number: sys.exit(3)\n"
        "sys.exit(worker.parent.recv(1) != b's')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "", "")
    assert list(folder.iterdir()) == []


def test_all_addresses_of_a_host_are_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,), (other,) = listening("127.0.0.1", (port := Port()).number, 2)
    with one, other:
        assert one.getsockname() == other.getsockname() == ("127.0.0.1", port.number)
