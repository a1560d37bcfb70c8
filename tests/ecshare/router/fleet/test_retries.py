# SPDX-License-Identifier: Apache-2.0
"""Another engine of a stage is asked before D does everything, within a budget; D does not get the
work of stages that have too much of it."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.fleet.retries import RetryBudget
from ecshare.router.types import Stage
from tests.ecshare.router.answers import (
    EVENTS,
    Answer,
    First,
    decoded,
    encoded,
    failing,
    hang_up,
    prefilled,
)
from tests.ecshare.router.bodies import PNG, PNG_2, chat, picture
from tests.ecshare.router.fake_engine import Clock, answer_all, asked, fleet
from tests.ecshare.router.held import Hanging, soon
from tests.waiting import LoopClock

SOON_S = 10.0
FULL_PATH = "encode,prefill,decode"


def overloaded(retry_after: str) -> Answer:
    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {"Retry-After": retry_after}
        return web.json_response({"error": "busy"}, status=429, headers=headers)

    return answer


async def streaming_p(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    params = {"kvshare": {"streamed": True, "num_tokens": 7}}
    return web.json_response({"kv_transfer_params": params})


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
        assert (await f.health())[1]["fallbacks"] == 0


@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize("stream", [False, True])
async def test_another_prefill_is_asked_while_decode_waits(stream: bool) -> None:
    """D has its request already; it gets it again, for the other one's KV."""
    async with fleet(0, num_p=2, prefill="always") as f:
        answer_all(f.prefillers, streaming_p)
        await f.post(chat())
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
        await soon(waiting.left)
        sent = [body["kv_transfer_params"] for body in f.d.bodies]
        assert sent == [{"kvshare": {"streamed": True}}] * 2


@pytest.mark.parametrize(
    ("failure", "parts", "path"),
    [
        *((gone, [picture(PNG)], FULL_PATH) for gone in (hang_up, failing(502), failing(429))),
        # Of a text nothing can be lost. A picture may be: no other D is asked for its embedding.
        *((failing(status), [], "prefill,decode") for status in (500, 503)),
        *((failing(status), [picture(PNG)], "decode") for status in (500, 503)),
    ],
)
async def test_another_decode_gets_what_prefill_has_handed_over_unless_it_may_be_lost(
    failure: Answer, parts: list[object], path: str
) -> None:
    async with fleet(num_d=2) as f:
        answer_all(f.decoders, First(failure, decoded))
        response, _ = await f.post(chat(*parts))
        assert (response.status, response.headers["x-ecshare-path"]) == (200, path)
        one, two = (body for engine in f.decoders for body in engine.bodies)
        if path == "decode":
            assert ("image_url" in json.dumps(one)) != ("image_url" in json.dumps(two))
        else:
            assert one == two
            assert "kv_transfer_params" in one
        assert (await f.health())[1]["fallbacks"] == (path == "decode")


async def test_decode_alone_comes_after_three() -> None:
    async with fleet(num_p=4) as f:
        answer_all(f.prefillers, failing(500))
        response, _ = await f.post(chat())
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        assert asked(f.prefillers) == [0, 1, 1, 1]


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


@pytest.mark.parametrize(
    ("stage", "option", "retry_after", "told"),
    [
        *((stage, "refuse", "17", "17") for stage in "epd"),
        *((stage, "decode", "17", None) for stage in "ep"),
        ("d", "decode", "17", "17"),
        # What is no number of seconds is not passed on.
        *(("p", "refuse", value, "2") for value in ("soon", "-5", "1e3", "99999999", "\u00b2", "")),
    ],
)
async def test_the_work_of_an_overloaded_stage_is_put_on_decode_only_if_an_option_says_so(
    stage: str, option: str, retry_after: str, told: str | None
) -> None:
    async with fleet(when_overloaded=option) as f:
        getattr(f, stage).answer = overloaded(retry_after)
        response, body = await f.post(chat(picture(PNG)))
        assert response.status == (200 if told is None else 429)
        assert response.headers.get("Retry-After") == told
        assert len(f.d.bodies) == (stage == "d" or told is None)
        if told is not None:
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")


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


@pytest.mark.parametrize(("option", "status"), [("refuse", 429), ("decode", 200)])
async def test_a_prefill_that_works_but_is_slow(
    option: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LoopClock(monkeypatch)
    async with fleet(stage_timeout_s=60, when_overloaded=option) as f:
        f.p.answer = First(slow := Hanging(), prefilled)
        long = asyncio.create_task(f.post(chat({"type": "text", "text": "slow"})))
        await soon(slow.asked)
        await f.post(chat(picture(PNG_2)))  # it answers somebody meanwhile
        clock.forward(60)
        assert (await asyncio.wait_for(long, SOON_S))[0].status == status
        assert not f.is_left_out(f.p)
        assert (await f.post(chat()))[0].headers["x-ecshare-path"] == "prefill,decode"


async def _stream_of_an_error(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    event = b'data: {"error": {"code": 500}}\n\n'
    return web.Response(body=event, content_type="text/event-stream")


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(
    ("answer", "state"),
    [
        *((answer, "down") for answer in (failing(502), failing(503), failing(504), hang_up)),
        *((answer, "failing") for answer in (failing(500), failing(429), _stream_of_an_error)),
        *((answer, "up") for answer in (failing(400), decoded)),
    ],
)
async def test_an_answer_tells_how_the_engine_is(answer: Answer, state: str, is_last: bool) -> None:
    async with fleet(0, 0, 1 if is_last else 2) as f:
        engine = f.router.pools[Stage.DECODE].choose()
        assert engine is not None
        if is_last:  # which counts as failing until it serves
            engine.health.note_failure()
        answer_all(f.decoders, First(answer, decoded))
        await f.post(chat(stream=True))
        assert engine.state == state
