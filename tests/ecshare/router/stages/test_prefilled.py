# SPDX-License-Identifier: Apache-2.0
"""P is asked only if there is something to prefill."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.ecshare.router import answers
from tests.ecshare.router.answers import DECODED, EVENTS, Answer, decoded, event, failing, stored
from tests.ecshare.router.bodies import PNG, PNG_2, chat, picture, text
from tests.ecshare.router.fake_engine import KEY, Fleet, answer_all, fleet
from tests.ecshare.router.held import soon
from tests.waiting import until

TOKENS = 100
HAND_OVER = {"kvshare": {"num_tokens": TOKENS - 1, "size": 1}}
both_ways = pytest.mark.parametrize("stream", [False, True])


@asynccontextmanager
async def known(of_p: Answer | None = None, **options: Any) -> AsyncIterator[Fleet]:
    """A fleet whose P stores prompts, whole unless it answers otherwise."""
    async with fleet(**{"hand_over": "after", **options}) as f:
        f.p.answer = of_p or stored()
        yield f


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    async with known() as made:
        yield made


def talk(*said: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": each} for role, each in zip(roles, said, strict=False)]
    return {"model": "m", "messages": messages, **fields}


async def ask(f: Fleet, body: dict[str, Any]) -> bool:
    """Ask, and return whether P was asked."""
    num_before = len(f.p.bodies)
    response, _ = await f.post(body)
    assert response.status == 200
    was_asked = len(f.p.bodies) > num_before
    assert ("prefill" in response.headers["x-ecshare-path"]) is was_asked
    assert ("prefill" in response.headers.get("x-ecshare-avoided", "")) is not was_asked
    return was_asked


async def check_asked_once(f: Fleet, *bodies: dict[str, Any]) -> None:
    """Check that P is asked for each of them, and not for the same again."""
    for body in bodies:
        assert [await ask(f, body) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("parts", [[], [picture(PNG)]])
@both_ways
async def test_what_is_stored_goes_straight_to_decode(
    f: Fleet, parts: list[Any], stream: bool
) -> None:
    assert await ask(f, chat(*parts))
    assert not await ask(f, chat(*parts, temperature=1, max_tokens=7, stream=stream, n=2, user="u"))
    assert f.d.bodies[1]["kv_transfer_params"] == HAND_OVER
    assert f.d.bodies[1]["messages"] == f.d.bodies[0]["messages"]
    status = f.router.counts()["prefills"]
    assert (status["asked"], status["avoided"], status["remembered"]) == (1, 1, 1)


async def test_what_must_have_arrived_is_not_waited_for(f: Fleet) -> None:
    await ask(f, chat())
    f.clock.now_s += 60
    assert not await ask(f, chat())
    assert "kv_transfer_params" not in f.d.bodies[1]
    f.clock.now_s += 3600
    assert await ask(f, chat())


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "tenant"},
        {"model": "n"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"response_format": {"type": "json_object"}},
        {"mm_processor_kwargs": {"max_pixels": 4096}},
        {"unheard_of": 1},
    ],
)
async def test_whatever_may_decide_tokens_makes_another_prompt(
    f: Fleet, other: dict[str, Any]
) -> None:
    f.e.models = f.p.models = f.d.models = ("m", "n")
    await check_asked_once(f, talk("a question"), talk("a question") | other)


async def test_another_text_or_picture_is_another_prompt() -> None:
    async with known(num_e=0) as f:
        parts = [(PNG,), (PNG_2,), (PNG, PNG)]
        pictured = [chat(*map(picture, contents)) for contents in parts]
        pictured.append(chat(text("and"), picture(PNG)))
        await check_asked_once(f, talk("one"), talk("two"), *pictured)


@pytest.mark.parametrize("num_tokens", [0, TOKENS, True, TOKENS - 2])
async def test_what_p_has_not_stored_whole_is_prefilled_again(num_tokens: int) -> None:
    async with known(stored(num_tokens), max_new_tokens=0) as f:
        assert [await ask(f, chat()) for _ in range(2)] == [True, True]


async def test_decode_computes_the_few_tokens_that_p_has_not_stored() -> None:
    async with known(stored(TOKENS - 1 - 25), max_new_tokens=25) as f:
        await check_asked_once(f, talk("one"))
        f.p.answer = stored(TOKENS - 1 - 26)
        assert [await ask(f, talk("two")) for _ in range(2)] == [True, True]


async def test_a_short_next_turn_goes_straight_to_decode() -> None:
    async with known(max_new_tokens=100) as f:
        said = ["a long question " * 100]
        await ask(f, talk(*said))
        for n in range(2):
            said += [f"answer {n}", f"question {n}"]
            assert not await ask(f, talk(*said))
            assert "kv_transfer_params" not in f.d.bodies[-1]
        assert not await ask(f, talk(*said)), "the same again"
        assert await ask(f, talk(*said, "answer", "long " * 60)), "all that is new adds up"
        assert not await ask(f, talk(*said, "answer", "long " * 60, "b", "c"))


async def test_a_long_next_turn_and_one_with_a_picture_are_prefilled() -> None:
    async with known(max_new_tokens=100) as f:
        await ask(f, talk("one"))
        assert await ask(f, talk("one", "a", "long " * 100))
        pictured = talk("one", "a")
        pictured["messages"] += [{"role": "user", "content": [picture(PNG)]}]
        await check_asked_once(f, pictured)


async def test_no_new_text_goes_past_prefill_where_none_may() -> None:
    async with known(max_new_tokens=0) as f:
        await ask(f, talk("one"))
        assert await ask(f, talk("one", "a", "b"))
        assert not await ask(f, talk("one"))


def telling(said: str, cached: int | None) -> Answer:
    """Answer as D does, and tell how much of the prompt it had or loaded, unless that is None."""
    details = cached if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": TOKENS, "prompt_tokens_details": details}
    last = event({"choices": [], "usage": usage})
    choice = {"message": {"role": "assistant", "content": said}}
    whole = answers.answering(choices=[choice], usage=usage)
    return answers.either(whole, answers.streaming(*EVENTS[:-1], last, EVENTS[-1]))


@both_ways
async def test_a_prompt_that_decode_has_computed_is_prefilled_again(stream: bool) -> None:
    """The store has lost it, or D finds that it is too slow to load from."""
    async with known(max_new_tokens=25) as f:
        await ask(f, talk("one", stream=stream))
        f.clock.now_s += 60
        f.d.answer = telling("well", TOKENS // 3)
        assert not await ask(f, talk("one", stream=stream))
        assert f.count("prefills", "lost") == 1
        assert await ask(f, talk("one", stream=stream))
        async with f.client.get(f.url + "/metrics", headers=KEY) as answer:
            assert 'ecshare_router_prefills_total{event="lost"} 1.0' in await answer.text()


@pytest.mark.parametrize(("cached", "max_new_tokens"), [(TOKENS - 32, 0), (0, 100), (None, 0)])
async def test_a_prompt_that_decode_has_loaded_stays_known(
    cached: int | None, max_new_tokens: int
) -> None:
    """What D computes of the last block, or may compute, is no loss. Nor is what nobody knows."""
    async with known(max_new_tokens=max_new_tokens) as f:
        await ask(f, talk("one"))
        f.d.answer = telling("well", cached)
        assert [await ask(f, talk("one")) for _ in range(2)] == [False, False]


@both_ways
async def test_decodes_own_answer_is_no_new_text(stream: bool) -> None:
    long = "well " * 100
    events = [event({"choices": [{"delta": {"content": f"{word} "}}]}) for word in long.split()]
    stream_of_it = answers.streaming(*events)
    async with known(max_new_tokens=25) as f:
        f.d.answer = stream_of_it if stream else telling(long, None)
        await ask(f, talk("one", stream=stream))
        assert await ask(f, talk("one", long * 50, "why?")), "longer than what D has said"
        assert not await ask(f, talk("one", long, "why?"))
        assert not await ask(f, talk("one", long, "why?", long, "so?")), "nor is the next one"
        assert await ask(f, talk("one", long, "why? " * 30))


async def test_messages_reach_all_engines_as_the_client_wrote_them() -> None:
    """Chat templates may show an object as it is, in the order of its fields."""
    told = {"role": "tool", "content": "ü", "z": {"b": 1, "a": [None, 1e30]}, "name": "x"}
    body = chat(picture(PNG))
    body["messages"] += [told, {"content": "and?", "role": "user"}]
    async with known(num_e=0) as f:
        await ask(f, body)
        for sent in (*f.p.bodies, *f.d.bodies):
            assert json.dumps(sent["messages"][1:]) == json.dumps(body["messages"][1:])
            assert sent["messages"][0]["content"][1].items() >= picture(PNG).items()


async def test_p_is_always_asked_where_the_operator_wants_that() -> None:
    async with known(prefill="always") as f:
        assert [await ask(f, chat()) for _ in range(2)] == [True, True]


@pytest.mark.parametrize("answer", [failing(500), answers.hang_up])
async def test_decode_that_fails_has_p_asked_again(answer: Answer) -> None:
    async with known(num_d=2) as f:
        for _ in range(2):  # whichever decode it was
            await f.post(chat())
        answer_all(f.decoders, answer)
        assert (await f.post(chat()))[0].status in (500, 502)
        f.clock.now_s += 20
        answer_all(f.decoders, decoded)
        assert await ask(f, chat())


async def test_lost_media_of_a_stored_prompt_go_through_all_stages(f: Fleet) -> None:
    async def lost(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (failing(500) if len(f.e.bodies) < 2 else decoded)(http, body)

    await ask(f, chat(picture(PNG)))
    f.d.answer = lost
    response, body = await f.post(chat(picture(PNG), stream=True))
    assert (response.status, body) == (200, DECODED[True])
    assert response.headers["x-ecshare-path"] == "encode,prefill,decode"


async def test_what_p_stores_beside_decode_is_known_too() -> None:
    async with known(hand_over="streamed") as f:
        await ask(f, talk("one"))
        held = f.d.hold()
        asked = f.start(talk("two"))
        await soon(held.asked)
        await until(lambda: f.count("prefills", "remembered") >= 2)
        held.let_go.set()
        assert (await asked)[0].status == 200
        assert not await ask(f, talk("two"))
