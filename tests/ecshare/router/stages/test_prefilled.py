# SPDX-License-Identifier: Apache-2.0
"""P is asked only if there is something to prefill."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.ecshare.router.fake_engine import (
    EVENTS,
    PNG,
    PNG_2,
    STATUS_KEY,
    Fleet,
    Held,
    chat,
    decoded,
    failing,
    fleet,
    hang_up,
    picture,
)
from tests.waiting import until

ALL = "encode,prefill,decode"
TOKENS = 100
KEY = {"Authorization": f"Bearer {STATUS_KEY}"}
HAND_OVER = {"kvshare": {"num_tokens": TOKENS - 1, "size": 1}}


def stored(num_tokens: int = TOKENS - 1, **more: Any) -> Any:
    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = {"kvshare": {"num_tokens": num_tokens, "size": 1}, **more}
        usage = {"prompt_tokens": TOKENS}
        return web.json_response({"kv_transfer_params": params, "usage": usage})

    return answer


def known(**options: Any) -> Any:
    return fleet(hand_over="after", **options)


def talk(*said: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
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


@pytest.mark.parametrize("parts", [[], [picture(PNG)]])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_stored_goes_straight_to_decode(parts: list[Any], stream: bool) -> None:
    async with known() as f:
        f.p.answer = stored()
        assert await ask(f, chat(*parts))
        assert not await ask(f, chat(*parts, temperature=1, max_tokens=7, stream=stream, n=2))
        assert f.d.bodies[1]["kv_transfer_params"] == HAND_OVER
        assert f.d.bodies[1]["messages"] == f.d.bodies[0]["messages"]
        status = (await f.health())[1]["prefills"]
        assert (status["asked"], status["avoided"], status["remembered"]) == (1, 1, 1)


async def test_what_must_have_arrived_is_not_waited_for() -> None:
    async with known() as f:
        f.p.answer = stored()
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
async def test_whatever_may_decide_tokens_makes_another_prompt(other: dict[str, Any]) -> None:
    async with known() as f:
        f.p.answer = stored()
        f.e.models = f.p.models = f.d.models = ("m", "n")
        for fields in ({}, other):
            assert await ask(f, talk("a question") | fields)
            assert not await ask(f, talk("a question") | fields)


async def test_another_text_or_picture_is_another_prompt() -> None:
    async with known(num_e=0) as f:
        f.p.answer = stored()
        for body in (
            talk("one"),
            talk("two"),
            chat(picture(PNG)),
            chat(picture(PNG_2)),
            chat(picture(PNG), picture(PNG)),
            chat({"type": "text", "text": "and"}, picture(PNG)),
        ):
            assert await ask(f, body)
            assert not await ask(f, body)


@pytest.mark.parametrize(
    "answer",
    [
        stored(0),
        stored(TOKENS),
        stored(True),
        stored(TOKENS - 2),
    ],
)
async def test_what_p_has_not_stored_whole_is_prefilled_again(answer: Any) -> None:
    async with known(max_new_tokens=0) as f:
        f.p.answer = answer
        assert await ask(f, chat())
        assert await ask(f, chat())


async def test_decode_computes_the_few_tokens_that_p_has_not_stored() -> None:
    async with known(max_new_tokens=25) as f:
        f.p.answer = stored(TOKENS - 1 - 25)
        await ask(f, talk("one"))
        assert not await ask(f, talk("one"))
        f.p.answer = stored(TOKENS - 1 - 26)
        await ask(f, talk("two"))
        assert await ask(f, talk("two"))


async def test_a_short_next_turn_goes_straight_to_decode() -> None:
    async with known(max_new_tokens=100) as f:
        f.p.answer = stored()
        await ask(f, talk("a long question " * 100))
        said = ["a long question " * 100]
        for n in range(2):
            said += [f"answer {n}", f"question {n}"]
            assert not await ask(f, talk(*said))
            assert "kv_transfer_params" not in f.d.bodies[-1]
        assert not await ask(f, talk(*said)), "the same again"
        assert await ask(f, talk(*said, "answer", "long " * 60)), "all that is new adds up"
        assert not await ask(f, talk(*said, "answer", "long " * 60, "b", "c"))


async def test_a_long_next_turn_and_one_with_a_picture_are_prefilled() -> None:
    async with known(max_new_tokens=100) as f:
        f.p.answer = stored()
        await ask(f, talk("one"))
        assert await ask(f, talk("one", "a", "long " * 100))
        pictured = talk("one", "a")
        pictured["messages"] += [{"role": "user", "content": [picture(PNG)]}]
        assert await ask(f, pictured)
        assert not await ask(f, pictured)


async def test_no_new_text_goes_past_prefill_where_none_may() -> None:
    async with known(max_new_tokens=0) as f:
        f.p.answer = stored()
        await ask(f, talk("one"))
        assert await ask(f, talk("one", "a", "b"))
        assert not await ask(f, talk("one"))


def answering(text: str, cached: int | None, details: str = "prompt_tokens_details") -> Any:
    """Answer as D does, and tell how much of the prompt it had or loaded, unless that is None."""
    usage = {
        "prompt_tokens": TOKENS,
        details: cached if cached is None else {"cached_tokens": cached},
    }
    choice = {"message": {"role": "assistant", "content": text}}

    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return web.json_response({"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        event = json.dumps({"choices": [], "usage": usage}).encode()
        for each in (*EVENTS[:-1], b"data: " + event + b"\n\n", EVENTS[-1]):
            await response.write(each)
        return response

    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_decode_has_computed_is_prefilled_again(stream: bool) -> None:
    """The store has lost it, or D finds that it is too slow to load from."""
    async with known(max_new_tokens=25) as f:
        f.p.answer = stored()
        await ask(f, talk("one", stream=stream))
        f.clock.now_s += 60
        f.d.answer = answering("well", TOKENS // 3)
        assert not await ask(f, talk("one", stream=stream))
        assert (await f.health())[1]["prefills"]["lost"] == 1
        assert await ask(f, talk("one", stream=stream))
        async with f.client.get(f.url + "/metrics", headers=KEY) as answer:
            assert 'ecshare_router_prefills_total{event="lost"} 1.0' in await answer.text()


@pytest.mark.parametrize(("cached", "max_new_tokens"), [(TOKENS - 32, 0), (0, 100), (None, 0)])
async def test_a_prompt_that_decode_has_loaded_stays_known(
    cached: int | None, max_new_tokens: int
) -> None:
    """What D computes of the last block, or may compute, is no loss. Nor is what nobody knows."""
    async with known(max_new_tokens=max_new_tokens) as f:
        f.p.answer = stored()
        await ask(f, talk("one"))
        f.d.answer = answering("well", cached)
        for _ in range(2):
            assert not await ask(f, talk("one"))


@pytest.mark.parametrize("stream", [False, True])
async def test_decodes_own_answer_is_no_new_text(stream: bool) -> None:
    long = "well " * 100
    async with known(max_new_tokens=25) as f:
        f.p.answer, f.d.answer = stored(), answering(long, None)
        if stream:
            f.d.answer = streaming(long)
        await ask(f, talk("one", stream=stream))
        assert await ask(f, talk("one", long * 50, "why?")), "longer than what D has said"
        assert not await ask(f, talk("one", long, "why?"))
        assert not await ask(f, talk("one", long, "why?", long, "so?")), "nor is the next one"
        assert await ask(f, talk("one", long, "why? " * 30))


def streaming(text: str) -> Any:
    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for word in text.split():
            event = {"choices": [{"delta": {"content": word + " "}}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        return response

    return answer


async def test_messages_reach_all_engines_as_the_client_wrote_them() -> None:
    """Chat templates may show an object as it is, in the order of its fields."""
    told = {"role": "tool", "content": "ü", "z": {"b": 1, "a": [None, 1e30]}, "name": "x"}
    body = chat(picture(PNG))
    body["messages"] += [told, {"content": "and?", "role": "user"}]
    async with known(num_e=0) as f:
        f.p.answer = stored()
        await ask(f, body)
        for sent in (*f.p.bodies, *f.d.bodies):
            assert json.dumps(sent["messages"][1:]) == json.dumps(body["messages"][1:])
            assert sent["messages"][0]["content"][1].items() >= picture(PNG).items()


async def test_p_is_always_asked_where_the_operator_wants_that() -> None:
    async with known(prefill="always") as f:
        f.p.answer = stored()
        assert await ask(f, chat())
        assert await ask(f, chat())


@pytest.mark.parametrize("answer", [failing(500), hang_up])
async def test_decode_that_fails_has_p_asked_again(answer: Any) -> None:
    async with known(num_d=2) as f:
        f.p.answer = stored()
        for _ in range(2):  # whichever decode it was
            await f.post(chat())
        f.d.answer = f.decoders[1].answer = answer
        assert (await f.post(chat()))[0].status in (500, 502)
        f.clock.now_s += 20
        f.d.answer = f.decoders[1].answer = decoded
        assert await ask(f, chat())


async def test_lost_media_of_a_stored_prompt_go_through_all_stages() -> None:
    async with known() as f:
        f.p.answer = stored()
        await ask(f, chat(picture(PNG)))

        async def lost(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (failing(500) if len(f.e.bodies) < 2 else decoded)(http, body)

        f.d.answer = lost
        response, body = await f.post(chat(picture(PNG), stream=True))
        assert (response.status, response.headers["x-ecshare-path"]) == (200, ALL)
        assert body == b"".join(EVENTS)


async def test_what_p_stores_beside_decode_is_known_too() -> None:
    async with fleet() as f:
        f.p.answer = stored()
        await ask(f, talk("one"))
        f.d.answer = held = Held(decoded)
        asked = asyncio.create_task(f.post(talk("two")))
        await asyncio.wait_for(held.asked.wait(), 5)

        async def are_remembered() -> bool:
            return bool((await f.health())[1]["prefills"]["remembered"] >= 2)

        await until(are_remembered)
        held.let_go.set()
        assert (await asked)[0].status == 200
        assert not await ask(f, talk("two"))
