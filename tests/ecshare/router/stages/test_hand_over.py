# SPDX-License-Identifier: Apache-2.0
"""D has its request while P computes: who is waited for, and what becomes of whose failure."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ecshare.router.api.chat import CHAT
from ecshare.router.stages import plan
from tests.ecshare.router import answers
from tests.ecshare.router.answers import DECODED, EVENTS, Answer, decoded, event, failing, prefilled
from tests.ecshare.router.bodies import PNG, chat, picture, text
from tests.ecshare.router.fake_engine import Asked, Fleet, fleet
from tests.ecshare.router.held import Hanging, Held, soon, streaming_until
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("short_is_long")
both_ways = pytest.mark.parametrize("stream", [False, True])

STREAMED_TOKENS = plan.STREAMED_TOKENS  # as users have it
STREAMED = {"kvshare": {"streamed": True}}
AFTER = {"kvshare": {"num_tokens": 7}}
ALL = "encode,prefill,decode"
no_hand_over = answers.answering(kv_transfer_params=None)


@asynccontextmanager
async def known(**options: Any) -> AsyncIterator[Fleet]:
    """A fleet whose P has shown that it hands over while it computes."""
    async with fleet(**options) as f:
        await f.post(chat())
        for engine in (f.e, f.p, f.d):
            engine.bodies.clear()
        yield f


@pytest.fixture
async def f(short_is_long: None) -> AsyncIterator[Fleet]:
    async with known() as made:
        yield made


async def both_asked(f: Fleet, p: Answer, d: Answer, **fields: Any) -> tuple[Asked, Held, Held]:
    """Ask about a picture; return when P and D have been asked both. Later D answers at once."""
    held = f.p.hold(p), f.d.hold(d)
    asked = f.start(chat(picture(PNG), **fields))
    await soon(*(each.asked for each in held))
    f.d.answer = decoded
    return asked, *held


async def test_p_is_waited_for_until_it_has_shown_that_it_hands_over() -> None:
    async with fleet() as f:
        assert [await f.way(chat()) for _ in range(3)] == ["prefill,decode"] * 3
        assert f.handed_over() == [AFTER, STREAMED, STREAMED]


async def test_p_is_waited_for_if_the_prompt_is_short(
    f: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed in one step: there is nothing to load meanwhile."""
    monkeypatch.setattr(plan, "STREAMED_TOKENS", STREAMED_TOKENS)
    for part in (picture(PNG), text(4 * STREAMED_TOKENS * "x")):
        await f.post(chat(part))
    assert f.handed_over() == [AFTER, STREAMED]


async def test_p_is_always_waited_for_where_the_operator_wants_that() -> None:
    async with known(hand_over="after") as f:
        await f.post(chat())
        assert f.handed_over() == [AFTER]


@both_ways
async def test_d_has_its_request_before_p_has_answered(f: Fleet, stream: bool) -> None:
    asked, p, d = await both_asked(f, prefilled, decoded, stream=stream)
    assert f.handed_over() == [STREAMED]
    p.let_go.set()
    await until(lambda: not f.in_flight("prefill"))
    d.let_go.set()
    response, body = await asked
    assert body == DECODED[stream]
    assert response.headers["x-ecshare-path"] == ALL
    timed = re.findall(r"(\w+);dur=[\d.]+", response.headers["Server-Timing"])
    assert timed == ["encode", "prefill", "decode"][: 2 if stream else 3]
    assert len(f.p.bodies) == len(f.d.bodies) == 1
    assert f.p.bodies[0]["messages"] == f.d.bodies[0]["messages"]
    assert f.router.counts()["fallbacks"] == 0


def telling(num_cached: int) -> Answer:
    """Answer as D does that had so much of its prompt."""
    usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": num_cached}}
    told = {"choices": [], "usage": usage}
    stream = answers.streaming(*EVENTS[:-1], event(told), EVENTS[-1])
    return answers.either(answers.answering(**told), stream)


@both_ways
@pytest.mark.parametrize(
    ("of_d", "path"),
    [(telling(992), "decode"), (telling(16), "prefill,decode"), (decoded, "prefill,decode")],
)
async def test_d_that_is_done_first_needs_no_p_again_if_it_had_the_prompt(
    f: Fleet, of_d: Answer, path: str, stream: bool
) -> None:
    asked, p, d = await both_asked(f, prefilled, of_d, stream=stream)
    d.let_go.set()
    response, _ = await asked
    assert (response.status, response.headers["x-ecshare-path"]) == (200, ALL)
    await soon(p.left)
    f.p.answer = prefilled
    assert await f.way(chat(picture(PNG), stream=stream)) == path


@both_ways
@pytest.mark.parametrize("who", ["p", "d"])
async def test_what_one_of_them_refuses_is_refused(f: Fleet, who: str, stream: bool) -> None:
    of_p, of_d = (failing(400) if who == each else decoded for each in "pd")
    asked, p, d = await both_asked(f, of_p, of_d, stream=stream)
    refusing, other = (p, d) if who == "p" else (d, p)
    refusing.let_go.set()
    response, body = await asked
    assert response.status == 400
    assert json.loads(body)["error"]["message"] == "engine says no"
    await soon(other.left)
    assert len(f.d.bodies) == 1


@both_ways
@pytest.mark.parametrize("answer", [*map(failing, (500, 503, 429)), answers.hang_up])
async def test_d_does_without_a_p_that_failed(answer: Answer, stream: bool) -> None:
    async with known(when_overloaded="decode") as f:
        asked, p, d = await both_asked(f, answer, decoded, stream=stream)
        p.let_go.set()
        response, body = await asked
        assert (body, response.headers["x-ecshare-path"]) == (DECODED[stream], "decode")
        await soon(d.left)
        assert f.handed_over() == [STREAMED, None]
        assert "image_url" in json.dumps(f.d.bodies[1]), "with its picture"
        assert f.router.counts()["fallbacks"] == 1


async def test_d_does_without_a_p_that_takes_too_long() -> None:
    async with known(stage_timeout_s=0.3) as f:
        asked, _, d = await both_asked(f, prefilled, decoded)
        response, _ = await asked
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        await soon(d.left)


async def test_an_answer_that_has_begun_goes_on_without_p(f: Fleet) -> None:
    held, second = f.p.hold(failing(500)), asyncio.Event()
    f.d.answer = streaming_until(second)
    async with f.client.post(f.url + CHAT, json=chat(stream=True)) as response:
        assert await response.content.readany() == EVENTS[0]
        held.let_go.set()
        await until(lambda: not f.in_flight("prefill"))
        second.set()
        assert await response.content.read() == EVENTS[-1]
    assert len(f.d.bodies) == 1


@pytest.mark.parametrize("hand_over", [None, {"other": 1}])
async def test_p_that_hands_nothing_over_is_not_waited_for_twice(
    f: Fleet, hand_over: dict[str, Any] | None
) -> None:
    asked, p, d = await both_asked(f, answers.answering(kv_transfer_params=hand_over), decoded)
    p.let_go.set()
    assert (await asked)[0].headers["x-ecshare-path"] == ALL
    await soon(d.left)
    f.p.answer = prefilled
    for _ in range(2):
        await f.post(chat())
    assert f.handed_over() == [STREAMED, hand_over, AFTER, STREAMED]
    assert f.router.counts()["fallbacks"] == 0


async def test_behind_other_requests_p_is_waited_for(f: Fleet) -> None:
    """D would hold room in its cache for what P has not begun."""
    asked, p, d = await both_asked(f, prefilled, decoded)
    f.p.answer = prefilled
    await f.post(chat())
    assert f.handed_over() == [STREAMED, AFTER]
    p.let_go.set()
    d.let_go.set()
    assert (await asked)[0].status == 200


async def test_p_is_free_for_one_of_those_that_come_at_the_same_moment(f: Fleet) -> None:
    """They have waited together, for the models that D serves."""
    f.clock.now_s += 60
    f.p.models = f.d.models = ("m", "new")
    f.d.lists = asyncio.Event()
    held = f.p.hold(), f.d.hold()
    asked = [f.start(chat() | {"model": "new"}) for _ in range(3)]
    await until(lambda: len(f.router.in_flight) == 3 and f.d.num_model_lists > 1)
    f.d.lists.set()
    await until(lambda: len(f.p.bodies) == 3)
    for each in held:
        each.let_go.set()
    assert [(await each)[0].status for each in asked] == [200] * 3
    assert sorted(f.handed_over(), key=str) == [AFTER, AFTER, STREAMED]


async def test_each_p_is_known_by_itself() -> None:
    async with fleet(num_p=2) as f:
        f.prefillers[1].answer = no_hand_over
        for _ in range(4):
            await f.post(chat())
        assert f.handed_over() == [AFTER, None, STREAMED, None]


@both_ways
async def test_d_that_fails_is_asked_once_more_with_pictures(f: Fleet, stream: bool) -> None:
    asked, p, d = await both_asked(f, prefilled, failing(500), stream=stream)
    d.let_go.set()
    response, _ = await asked
    assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
    await soon(p.left)
    assert f.handed_over() == [STREAMED, None]
    assert f.router.counts()["fallbacks"] == 1


async def test_nobody_works_for_a_client_that_left(f: Fleet) -> None:
    asked, p, d = await both_asked(f, prefilled, decoded)
    asked.cancel()
    await soon(p.left, d.left)
    await asyncio.wait([asked])
    assert not f.in_flight()


@both_ways
async def test_the_deadline_holds_for_both(stream: bool) -> None:
    async with known(timeout_s=0.5) as f:
        f.p.answer = p = Hanging()
        f.d.answer = d = Hanging(start=EVENTS[0] if stream else None)
        response, body = await f.post(chat(stream=stream))
        assert response.status == (200 if stream else 504)
        assert b"timeout" in body
        await soon(p.left, d.left)
