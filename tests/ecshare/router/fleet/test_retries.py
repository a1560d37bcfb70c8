# SPDX-License-Identifier: Apache-2.0
"""Another engine of a stage is asked before D does everything, within a budget; D does not get the
work of stages that have too much of it."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.fleet.retries import RetryBudget
from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import (
    EVENTS,
    PNG,
    PNG_2,
    Answer,
    Clock,
    First,
    Fleet,
    Hanging,
    answer_all,
    asked,
    chat,
    decoded,
    encoded,
    failing,
    fleet,
    hang_up,
    picture,
    prefilled,
)
from tests.waiting import LoopClock

SOON_S = 10.0
FULL_PATH = "encode,prefill,decode"


async def overloaded(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": "busy"}, status=429, headers={"Retry-After": "17"})


async def streaming_p(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    params = {"kvshare": {"streamed": True, "num_tokens": 7}}
    return web.json_response({"kv_transfer_params": params})


async def fallbacks(f: Fleet) -> int:
    number: int = (await f.health())[1]["fallbacks"]
    return number


@pytest.mark.parametrize(
    "failure", [hang_up, failing(500), failing(503), failing(429), failing(408)]
)
async def test_another_encode_and_another_prefill_are_asked(failure: Answer) -> None:
    async with fleet(num_e=2, num_p=2) as f:
        answer_all(f.encoders, First(failure, encoded))
        answer_all(f.prefillers, First(failure, prefilled))
        response, _ = await f.post(chat(picture(PNG)))
        assert (response.status, response.headers["x-ecshare-path"]) == (200, FULL_PATH)
        assert asked(f.encoders) == asked(f.prefillers) == [1, 1]
        assert f.d.bodies[0]["kv_transfer_params"] == {"kvshare": {"num_tokens": 7}}
        assert await fallbacks(f) == 0


@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize("stream", [False, True])
async def test_another_prefill_is_asked_while_decode_waits(stream: bool) -> None:
    """D has its request already; it gets it again, for the other one's KV."""
    async with fleet(0, num_p=2, prefill="always") as f:
        answer_all(f.prefillers, streaming_p)
        for _ in range(2):
            await f.post(chat())
        for engine in (*f.prefillers, f.d):
            engine.bodies.clear()
        f.d.answer = waiting = Hanging()

        async def fail(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await waiting.asked.wait()
            f.d.answer = decoded
            return await hang_up(http, body)

        answer_all(f.prefillers, First(fail, streaming_p))
        response, body = await asyncio.wait_for(f.post(chat(stream=stream)), SOON_S)
        assert body == (b"".join(EVENTS) if stream else b'{"choices":  []}')
        assert response.headers["x-ecshare-path"] == "prefill,decode"
        assert asked(f.prefillers) == [1, 1]
        await asyncio.wait_for(waiting.left.wait(), SOON_S)
        assert [sent["kv_transfer_params"] for sent in f.d.bodies] == [
            {"kvshare": {"streamed": True}},
            {"kvshare": {"streamed": True}},
        ]


@pytest.mark.parametrize(
    ("failure", "parts"),
    [(failure, [picture(PNG)]) for failure in (hang_up, failing(502), failing(429))]
    # Of a text nothing can be lost.
    + [(failure, []) for failure in (failing(500), failing(503))],
)
async def test_another_decode_gets_what_prefill_has_handed_over(
    failure: Answer, parts: list[object]
) -> None:
    async with fleet(num_d=2) as f:
        answer_all(f.decoders, First(failure, decoded))
        response, _ = await f.post(chat(*parts))
        path = FULL_PATH if parts else "prefill,decode"
        assert (response.status, response.headers["x-ecshare-path"]) == (200, path)
        one, two = (engine.bodies for engine in f.decoders)
        assert one == two
        assert "kv_transfer_params" in one[0]
        assert await fallbacks(f) == 0


@pytest.mark.parametrize("failure", [failing(500), failing(503)])
async def test_what_may_be_lost_is_asked_of_no_other_decode(failure: Answer) -> None:
    async with fleet(num_d=2) as f:
        answer_all(f.decoders, First(failure, decoded))
        response, _ = await f.post(chat(picture(PNG)))
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        sent = [body for engine in f.decoders for body in engine.bodies]
        assert sorted("image_url" in json.dumps(body) for body in sent) == [False, True]


async def test_decode_alone_comes_after_three() -> None:
    async with fleet(num_p=4) as f:
        answer_all(f.prefillers, failing(500))
        response, _ = await f.post(chat())
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        assert asked(f.prefillers) == [0, 1, 1, 1]
        assert await fallbacks(f) == 1


@pytest.mark.parametrize("stage", ["encoders", "prefillers", "decoders"])
async def test_without_a_budget_no_other_engine_is_asked(stage: str) -> None:
    async with fleet(2, 2, 2, retry_share=0.0) as f:
        answer_all(getattr(f, stage), failing(502))
        response, _ = await f.post(chat(picture(PNG)))
        assert response.status == (502 if stage == "decoders" else 200)
        # One more is asked for all the work, which is no retry.
        assert asked(getattr(f, stage)) == ([1, 1] if stage == "decoders" else [0, 1])


async def test_an_outage_is_not_answered_by_twice_the_load() -> None:
    async with fleet(0, num_p=2, retry_share=0.1, cool_down_s=0.001) as f:
        answer_all(f.prefillers, failing(500))
        for _ in range(300):
            assert (await f.post(chat()))[0].status == 200
        assert 300 + 100 < sum(asked(f.prefillers)) <= 300 + 100 + 30


async def test_an_outage_is_no_reason_to_encode_all_again() -> None:
    async with fleet(retry_share=0.1, cool_down_s=0.001, hand_over="after") as f:
        await f.post(chat(picture(PNG)))
        f.p.answer = failing(500)
        for _ in range(200):
            assert (await f.post(chat(picture(PNG))))[0].headers["x-ecshare-path"] == "decode"
        assert 100 < len(f.e.bodies) - 1 <= 100 + 20
        f.p.answer, num_before = prefilled, len(f.e.bodies)
        await f.post(chat(picture(PNG)))
        assert len(f.e.bodies) == num_before, "it is known as before"


async def test_what_encode_cannot_report_again_stays_known() -> None:
    async with fleet(hand_over="after") as f:
        await f.post(chat(picture(PNG)))
        f.e.answer = f.p.answer = failing(500)
        assert (await f.post(chat(picture(PNG))))[0].headers["x-ecshare-path"] == "decode"
        assert len(f.e.bodies) == 2
        f.p.answer = prefilled
        await f.post(chat(picture(PNG)))
        assert len(f.e.bodies) == 2


def test_a_budget_is_a_share_of_requests_and_a_little() -> None:
    clock = Clock()
    whole = RetryBudget(0.5, clock)
    budget = whole.after(500)
    while budget.spend():
        pass
    assert (budget.num_spent, budget.num_refused) == (100, 1)
    whole.note_request()
    assert not budget.has_any
    whole.note_request()
    assert budget.spend()
    assert not budget.spend()
    clock.now_s = 2.0
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    clock.now_s = 1e6
    while budget.spend():
        pass
    assert budget.num_spent == 203


def test_a_budget_for_what_requests_may_cause_is_apart() -> None:
    budget = RetryBudget(0.5, Clock())
    for status in (500, 429, 404):
        while budget.after(status).spend():
            pass
    assert budget.status() == {"made": 100, "refused": 3}
    for gone in (None, 502, 503, 504):
        assert budget.after(gone).spend()
    budget.note_request()
    budget.note_request()
    assert budget.after(500).spend()
    assert not budget.after(500).spend()


async def by_content(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await (failing(500) if "poison" in json.dumps(body) else decoded)(http, body)


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_fail_everywhere_use_up_no_retries_of_others(stream: bool) -> None:
    """Otherwise clients would notice that an engine is gone."""
    async with fleet(0, 0, num_d=3) as f:
        answer_all(f.decoders, by_content)
        for _ in range(130):
            status = (await f.post(chat({"type": "text", "text": "poison"}, stream=stream)))[0]
            assert status.status == 500
        made = (await f.health())[1]["retries"]["made"]
        assert 100 <= made <= 130, "bounded as well"
        f.decoders[0].answer = hang_up
        asked = [f.post(chat(stream=stream)) for _ in range(60)]
        assert {response.status for response, _ in await asyncio.gather(*asked)} == {200}
        assert (await f.health())[1]["retries"]["made"] > made


async def test_an_engine_that_fails_quickly_does_not_attract_requests() -> None:
    async with fleet(0, 0, num_d=2, cool_down_s=5.0) as f:
        await f.post(chat())
        bad = next(engine for engine in f.decoders if f.is_next(engine))
        bad.answer = failing(500)
        for now_s, number in ((0.0, 1), (4.9, 1), (5.0, 2)):
            f.clock.now_s = now_s
            for _ in range(3):
                assert (await f.post(chat()))[0].status == 200
            assert len(bad.bodies) == number
        bad.answer = decoded
        f.clock.now_s = 10.0
        for _ in range(4):
            await f.post(chat())
        assert len(bad.bodies) >= 4, "it takes turns again"


async def test_requests_that_fail_everywhere_take_no_engine_away() -> None:
    async with fleet(0, 0, num_d=2) as f:
        answer_all(f.decoders, by_content)
        for _ in range(3):
            assert (await f.post(chat({"type": "text", "text": "poison"})))[0].status == 500
        assert asked(f.decoders) == [3, 3]
        for now_s in (0.0, 5.0):
            f.clock.now_s = now_s
            for _ in range(4):
                assert (await f.post(chat()))[0].status == 200
        assert min(asked(f.decoders)) >= 3 + 2


@pytest.mark.parametrize(("option", "status"), [("refuse", 429), ("decode", 200)])
@pytest.mark.parametrize("stage", ["e", "p"])
async def test_the_work_of_an_overloaded_stage_is_put_on_decode_only_if_an_option_says_so(
    stage: str, option: str, status: int
) -> None:
    async with fleet(when_overloaded=option) as f:
        getattr(f, stage).answer = overloaded
        response, body = await f.post(chat(picture(PNG)))
        assert (response.status, len(f.d.bodies)) == (status, int(option == "decode"))
        if option == "refuse":
            assert response.headers["Retry-After"] == "17"
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")


@pytest.mark.parametrize("value", ["soon", "-5", "1e3", "99999999", "\u00b2", ""])
async def test_what_is_no_number_of_seconds_is_not_passed_on(value: str) -> None:
    async def busy(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({}, status=429, headers={"Retry-After": value})

    async with fleet() as f:
        f.p.answer = busy
        response, _ = await f.post(chat())
        assert (response.status, response.headers["Retry-After"]) == (429, "2")


@pytest.mark.parametrize("option", ["refuse", "decode"])
async def test_a_decode_that_is_full_is_not_asked_for_more(option: str) -> None:
    async with fleet(when_overloaded=option) as f:
        f.d.answer = overloaded
        response, _ = await f.post(chat(picture(PNG)))
        assert (response.status, response.headers["Retry-After"]) == (429, "17")
        assert len(f.d.bodies) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_connection_that_ends_says_nothing_of_the_engine(stream: bool) -> None:
    """The request is sent once more, to the same engine."""
    async with fleet(prefill="always", hand_over="after", retry_share=0.0) as f:
        for number in range(4):
            response, body = await f.post(chat(picture(PNG + bytes([number])), stream=stream))
            assert body == (b"".join(EVENTS) if stream else b'{"choices":  []}')
            assert response.headers["x-ecshare-path"] == FULL_PATH
            for engine in (f.e, f.p, f.d):
                engine.keeps_connections = True
                engine.resets_reused = number > 0
        for engine in (f.e, f.p, f.d):
            assert (engine.num_resets > 0, len(engine.bodies)) == (True, 4)
        assert {each.state for pool in f.router.pools.values() for each in pool} == {"up"}
        _, health = await f.health()
        assert (health["fallbacks"], health["retries"]) == (0, {"made": 0, "refused": 0})


@dataclass
class SlowForOne:
    """Never answers requests that say `slow`, all others at once."""

    otherwise: Answer
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "slow" not in json.dumps(body):
            return await self.otherwise(http, body)
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(("option", "status"), [("refuse", 429), ("decode", 200)])
async def test_a_prefill_that_works_but_is_slow(
    option: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LoopClock(monkeypatch)
    async with fleet(stage_timeout_s=60, when_overloaded=option) as f:
        f.p.answer = slow = SlowForOne(prefilled)
        long = asyncio.create_task(f.post(chat({"type": "text", "text": "slow"})))
        await asyncio.wait_for(slow.asked.wait(), SOON_S)
        await f.post(chat(picture(PNG_2)))  # it answers somebody meanwhile
        clock.forward(60)
        assert (await asyncio.wait_for(long, SOON_S))[0].status == status
        assert not f.is_left_out(f.p)
        assert (await f.post(chat()))[0].headers["x-ecshare-path"] == "prefill,decode"


async def _stream_of_an_error(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    event = b'data: {"error": {"code": 500}}\n\n'
    return web.Response(body=event, content_type="text/event-stream")


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (failing(502), "down"),
        (failing(503), "down"),
        (failing(504), "down"),
        (hang_up, "down"),
        (failing(500), "failing"),
        (failing(429), "failing"),
        (_stream_of_an_error, "failing"),
        (failing(400), "up"),
        (decoded, "up"),
    ],
)
async def test_an_answer_tells_how_the_engine_is(answer: Answer, state: str) -> None:
    async with fleet(0, 0, 1) as f:
        pool = f.router.pools[Stage.DECODE]
        (engine,) = pool
        engine.health.note_failure()
        f.d.answer = answer
        await f.post(chat(stream=True))
        assert engine.state == state
