# SPDX-License-Identifier: Apache-2.0
"""Engines that accept requests and never answer: they are found, left out, and tried again."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.fleet import models, watch
from ecshare.router.types import Stage
from tests.ecshare.router.answers import EVENTS, Answer, decoded, failing, hang_up
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import FakeEngine, Fleet, asked, fleet
from tests.ecshare.router.held import Hanging, Held, soon, streaming_until
from tests.waiting import LoopClock, until

pytestmark = pytest.mark.usefixtures("polls_often")

SOON_S = 10.0
TICK_S = 0.02
LONG_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_is_lost(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No task dies of an error that nobody sees."""
    yield
    assert "never retrieved" not in caplog.text


@asynccontextmanager
async def one_hangs(*, healthy: bool, **options: Any) -> AsyncIterator[tuple[Fleet, FakeEngine]]:
    """Two decoders, of which the first will answer nobody; it is the next in turn."""
    async with fleet(0, 0, num_d=2, **options) as f:
        await f.post(chat())
        f.decoders.sort(key=lambda engine: not f.is_next(engine))
        bad = f.decoders[0]
        bad.answer = Hanging()
        bad.healthy = healthy
        for engine in f.decoders:
            engine.bodies.clear()
        yield f, bad


async def served(f: Fleet, number: int, **fields: Any) -> None:
    """Send requests one after the other. All are served."""
    for _ in range(number):
        response, body = await f.post(chat(**fields))
        assert response.status == 200
        assert body == (b"".join(EVENTS) if fields.get("stream") else b'{"choices":  []}')


def count_probes(engine: FakeEngine) -> Counter[str]:
    """Count from now on how often an engine is asked for its health."""
    probes: Counter[str] = Counter()
    engine.on_health = lambda: probes.update(["asked"])
    return probes


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_move_from_an_engine_that_answers_nothing_at_all(stream: bool) -> None:
    async with one_hangs(healthy=False) as (f, bad):
        await asyncio.gather(*(served(f, 1, stream=stream) for _ in range(6)))
        num_lost = len(bad.bodies)
        assert num_lost >= 1
        await served(f, 4, stream=stream)
        assert len(bad.bodies) == num_lost, "left out"
        assert {each["in_flight"] for each in (await f.health())[1]["stages"]["decode"]} == {0}


@pytest.mark.parametrize(
    "start",
    [None, b"", b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'],
    ids=["nothing", "the head of a stream", "who speaks"],
)
async def test_a_stream_moves_from_a_healthy_engine_after_the_time_out(
    start: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that hangs does not keep vLLM's API server from answering."""
    clock = LoopClock(monkeypatch)
    async with one_hangs(healthy=True, first_byte_timeout_s=LONG_S) as (f, bad):
        bad.answer = Hanging(start=start)
        answer = asyncio.create_task(served(f, 1, stream=True))
        await until(lambda: bool(bad.bodies))
        clock.forward(LONG_S)
        await answer
        await served(f, 2, stream=True)
        assert len(bad.bodies) == 1
        report = (await f.health())[1]["stages"]["decode"]
        assert [each["healthy"] for each in report if each["url"] == bad.url] == [False]


async def test_a_whole_answer_may_take_its_time_at_a_healthy_engine() -> None:
    async with one_hangs(healthy=True, first_byte_timeout_s=0.05) as (f, slow):
        slow.answer = held = Held(decoded)
        probes = count_probes(slow)
        answer = asyncio.create_task(served(f, 1))
        await until(lambda: probes["asked"] >= 10)
        held.let_go.set()
        await answer
        assert asked(f.decoders) == [0, 1]


async def test_a_stream_that_has_begun_is_not_cut_short() -> None:
    async with one_hangs(healthy=True, first_byte_timeout_s=0.05) as (f, slow):
        let_go = asyncio.Event()
        slow.answer, slow.healthy = streaming_until(let_go), False
        probes = count_probes(slow)
        async with f.client.post(f.url + CHAT, data=json.dumps(chat(stream=True))) as response:
            assert await response.content.readany() == EVENTS[0]
            slow.answer = Hanging()
            with f.busy(f.decoders[1]):
                await f.post(chat(stream=True))
            assert f.is_left_out(slow)
            seen = probes["asked"]
            await until(lambda: probes["asked"] >= seen + 3)
            let_go.set()
            assert await response.content.readany() == EVENTS[-1]


async def test_one_that_answers_others_is_slow_and_does_not_hang(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes to another one, and the engine keeps its place."""
    clock = LoopClock(monkeypatch)
    async with one_hangs(healthy=True, first_byte_timeout_s=LONG_S) as (f, busy):

        async def some(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (Hanging() if body.get("seed") else decoded)(http, body)

        busy.answer = some
        answer = asyncio.create_task(served(f, 1, stream=True, seed=1))
        await until(lambda: bool(busy.bodies))
        with f.busy(f.decoders[1]):
            while not answer.done():
                clock.forward(1)  # less than a request, or the question for its health, may take
                await f.post(chat(stream=True))
        await answer
        assert len(busy.bodies) > 3
        assert "left out" not in caplog.text
        assert all(each["healthy"] for each in (await f.health())[1]["stages"]["decode"])


@pytest.mark.parametrize("num_p", [0, 1])
@pytest.mark.parametrize("healthy", [False, True])
async def test_a_single_engine_is_waited_for(healthy: bool, num_p: int) -> None:
    """There is nobody else to ask: a long queue must not become an error."""
    async with fleet(0, num_p, first_byte_timeout_s=0.05) as f:
        f.d.answer, f.d.healthy = held, _ = Held(decoded), healthy
        probes = count_probes(f.d)
        answer = asyncio.create_task(served(f, 1, stream=True))
        await until(lambda: probes["asked"] >= 10)
        assert len(f.d.bodies) == 1
        held.let_go.set()
        await answer
        f.d.healthy = True
        assert (await f.health())[0] == 200, "alive again with the first byte"


async def test_one_impatient_client_is_evidence_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the engine has answered somebody else a moment before."""
    monkeypatch.setattr(watch, "POLL_EVERY_S", 0.2)
    async with one_hangs(healthy=False) as (f, bad):
        with f.busy(f.decoders[1]):
            bad.answer = decoded
            await f.post(chat())
            await give_up(f, bad)
        await until(lambda: f.is_left_out(bad))


async def test_an_answer_counts_for_more_than_a_late_health() -> None:
    async with one_hangs(healthy=False) as (f, slow):
        slow.answer = held = Held(decoded)
        slow.health_answers = asyncio.Event()
        probes = count_probes(slow)
        answer = asyncio.create_task(f.post(chat()))
        await until(lambda: probes["asked"] == 1)
        held.let_go.set()
        await answer
        slow.health_answers.set()
        await until(lambda: not f.is_watched(slow))
        assert not f.is_left_out(slow)


async def give_up(f: Fleet, engine: FakeEngine, num_probes: int = 0, **fields: Any) -> Counter[str]:
    """Ask `engine`, and leave once it has been asked for its health so often, or is left out.

    Returns how often it has been asked since.
    """
    engine.answer = hanging = Hanging()
    answer = asyncio.create_task(f.post(chat(**fields)))
    await soon(hanging.asked)
    probes = count_probes(engine)
    await until(lambda: probes["asked"] >= num_probes or f.is_left_out(engine))
    answer.cancel()
    await soon(hanging.left)
    return probes


async def test_impatient_clients_do_not_hide_a_gpu_that_hangs() -> None:
    """One after the other leaves long before the time-out, and its /health answers.

    Were their waits not added up, this would not end.
    """
    async with one_hangs(healthy=True, first_byte_timeout_s=20 * TICK_S) as (f, bad):
        with f.busy(f.decoders[1]):
            async with asyncio.timeout(LONG_S):
                while not f.is_left_out(bad):
                    await give_up(f, bad, num_probes=2, stream=True)
        num_lost = len(bad.bodies)
        await served(f, 4, stream=True)
        assert len(bad.bodies) == num_lost


async def test_a_healthy_engine_that_clients_leave_is_not_left_out() -> None:
    async with one_hangs(healthy=True) as (f, well):
        probes = await give_up(f, well)
        await until(lambda: probes["asked"] >= 1)
        await until(lambda: not f.is_watched(well))
        well.answer = decoded
        well.bodies.clear()
        await served(f, 4)
        assert len(well.bodies) == 2


async def test_one_that_hangs_is_no_second_choice() -> None:
    async with one_hangs(healthy=False) as (f, bad):
        await f.post(chat())
        f.decoders[1].answer = hang_up
        assert (await asyncio.wait_for(f.post(chat()), SOON_S))[0].status == 502
        assert len(bad.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "num_more"),
    [(decoded, 2), (failing(503), 1)],
    ids=["it serves again", "a proxy answers for it, which is no sign of life"],
)
async def test_it_is_tried_when_its_health_answers_again(answer: Answer, num_more: int) -> None:
    async with one_hangs(healthy=False, cool_down_s=5.0) as (f, bad):
        await served(f, 1)
        probes = count_probes(bad)
        f.clock.now_s += 1000  # a cool-down alone brings it no request
        await until(lambda: probes["asked"] >= 3)
        await served(f, 4)
        assert len(bad.bodies) == 1
        bad.healthy, bad.answer = True, answer
        await until(lambda: not f.is_left_out(bad))
        await served(f, 4)
        assert len(bad.bodies) == 1 + num_more
        f.clock.now_s += 5
        (engine,) = (each for each in f.router.pools[Stage.DECODE] if each.url == bad.url)
        is_on_probation = not engine.health.takes_one_more(in_flight=1)
        assert is_on_probation == (answer is not decoded)


@pytest.mark.parametrize("healthy", [False, True])
@pytest.mark.parametrize("stage", ["e", "p"])
async def test_encode_and_prefill_engines_are_left_out_alike(stage: str, healthy: bool) -> None:
    async with fleet(stage_timeout_s=0.2 if healthy else LONG_S, cool_down_s=0.001) as f:
        bad: FakeEngine = getattr(f, stage)
        bad.answer, bad.healthy = Hanging(), healthy
        for _ in range(3):
            response, _ = await asyncio.wait_for(f.post(chat(picture(PNG))), SOON_S)
            assert response.status == 200
            assert response.headers["x-ecshare-path"] == "decode"
        assert len(bad.bodies) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_breaks_off_rests_and_does_not_hang(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_EVERY_S", 1.0)  # not while it has the request
    async with one_hangs(healthy=False) as (f, gone):
        gone.answer = hang_up
        await served(f, 3, stream=stream)
        assert len(gone.bodies) == 1
        await until(lambda: not f.is_watched(gone))
        assert not f.is_left_out(gone)


async def test_a_hung_engine_holds_up_no_list_nor_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "HEDGE_S", TICK_S)
    monkeypatch.setattr(models, "TIMEOUT_S", LONG_S)  # would be seen
    async with fleet(0, 0, num_d=2) as f:
        hung = f.decoders[0]
        hung.answer, hung.healthy, hung.lists = Hanging(), False, asyncio.Event()
        for patience_s in (TICK_S, LONG_S):  # nobody waits for one that was waited for in vain
            monkeypatch.setattr(models, "MAX_WAIT_S", patience_s)
            answer, _ = await asyncio.wait_for(f.post(chat() | {"model": "other"}), SOON_S)
            assert answer.status == 404, "the other one has said so"
        assert hung.num_model_lists <= 2, "for its models, and for the client"
        for _ in range(2):
            get = f.client.get(f.url + "/v1/models", timeout=aiohttp.ClientTimeout(SOON_S))
            async with get as response:
                assert (await response.json())["data"] == [{"id": "m"}]
