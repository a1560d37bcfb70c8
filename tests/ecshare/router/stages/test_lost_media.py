# SPDX-License-Identifier: Apache-2.0
"""An embedding is gone that E had stored: the request goes to E again, unseen by its client."""

from typing import Any

import pytest
from aiohttp import web

from ecshare.router.api.client_request import EC_PARAMS
from tests.ecshare.router import answers
from tests.ecshare.router.answers import (
    DECODED,
    EVENTS,
    Answer,
    decoded,
    encoded,
    event,
    failing,
    prefilled,
)
from tests.ecshare.router.api.test_answer import ERROR, ROLE
from tests.ecshare.router.bodies import PNG, PNG_2, chat, media_of, picture
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.held import Hanging, soon

ALL = "encode,prefill,decode"
SEEN = chat(picture(PNG))
ERROR_EVENTS = (event(ROLE), event(ERROR), b"data: [DONE]\n\n")
error_event = answers.either(failing(500), answers.streaming(*ERROR_EVENTS))
"""Answer as vLLM does: 200, the role, and then the error."""
both_ways = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
async def seen(f: Fleet) -> Fleet:
    """A fleet in which E has reported a picture."""
    await f.post(SEEN)
    return f


def without(f: Fleet, num_encoded: int, answer: Answer, failure: Answer) -> Answer:
    """Return an engine's answer: it fails without pixels until E was asked so often."""

    async def lost(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_lean = media_of(body)[-1]["type"] == "image_embeds"
        is_lost = is_lean and len(f.e.bodies) < num_encoded
        return await (failure if is_lost else answer)(http, body)

    return lost


@both_ways
@pytest.mark.parametrize("stage", ["p", "d"])
@pytest.mark.parametrize("hand_over", ["streamed", "after"])
async def test_what_is_gone_is_encoded_again(stage: str, stream: bool, hand_over: str) -> None:
    async with fleet(hand_over=hand_over) as f:
        await f.post(SEEN)
        if stage == "p":
            f.p.answer = without(f, 2, prefilled, failing(500))
        f.d.answer = without(f, 2, decoded, error_event)
        response, body = await f.post(SEEN | {"stream": stream})
        assert (response.status, response.headers["x-ecshare-path"]) == (200, ALL)
        assert "x-ecshare-avoided" not in response.headers
        assert body == DECODED[stream]
        assert len(f.e.bodies) == 2
        assert media_of(f.e.bodies[1])[0]["type"] == "image_url"
        assert (f.router.counts()["fallbacks"], f.count("encodes", "repeated")) == (0, 1)
        response, _ = await f.post(SEEN)
        assert response.headers["x-ecshare-avoided"] == "encode"


async def test_nobody_waits_for_what_was_stored_long_ago() -> None:
    """Only what E has reported just now may be on its way: the params say so of the rest."""
    names_all = {"ecshare": {"names_all": True}}

    async def told(*pictures: bytes) -> tuple[Any, Any]:
        await f.post(chat(*map(picture, pictures)))
        return f.p.bodies[-1].get(EC_PARAMS), f.d.bodies[-1].get(EC_PARAMS)

    async with fleet(hand_over="after", prefill="always") as f:
        assert await told(PNG) == (None, None), "E has just been asked"
        f.clock.now_s += 9
        assert await told(PNG) == (None, None), "it may be on its way"
        f.clock.now_s += 1
        assert await told(PNG) == (names_all, names_all)
        params, _ = await told(PNG, PNG_2)
        assert params == {media_of(f.e.bodies[-1])[0]["uuid"]: {}} | names_all
        assert await told(PNG, PNG_2) == (None, None), "the second may be on its way"
        f.clock.now_s += 3600
        num_asked = len(f.e.bodies)
        await told(PNG)
        assert len(f.e.bodies) == num_asked + 1, "the store may have lost it by now"


@pytest.mark.parametrize(
    ("of_e", "told"), [(failing(500), {"ecshare": {"names_all": True}}), (encoded, None)]
)
async def test_a_report_stays_as_old_as_it_is_unless_e_repeats_it(of_e: Answer, told: Any) -> None:
    async with fleet(hand_over="after", prefill="always") as f:
        await f.post(SEEN)
        f.clock.now_s += 60
        f.p.answer, f.e.answer = failing(500), of_e
        await f.post(SEEN)
        f.p.answer = prefilled
        assert await f.way(SEEN) == "prefill,decode"
        assert f.p.bodies[-1].get(EC_PARAMS) == told


async def test_all_that_the_request_brings_goes_to_e_again(f: Fleet) -> None:
    await f.post(chat(picture(PNG), picture(PNG_2)))
    f.d.answer = without(f, 4, decoded, failing(500))
    assert await f.way(chat(picture(PNG), picture(PNG_2))) == ALL
    assert len(f.e.bodies) == 4


@both_ways
async def test_what_e_does_not_bring_back_is_left_to_decode(seen: Fleet, stream: bool) -> None:
    seen.d.answer = without(seen, 99, decoded, error_event)
    response, body = await seen.post(SEEN | {"stream": stream})
    assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
    assert body == DECODED[stream]
    assert len(seen.e.bodies) == 2, "once"
    assert seen.count("encodes", "remembered") == 1, "something else may have failed"


async def test_what_e_has_just_reported_is_not_encoded_twice(f: Fleet) -> None:
    f.d.answer = without(f, 99, decoded, failing(500))
    assert await f.way(SEEN) == "decode"
    assert len(f.e.bodies) == 1
    assert [media_of(sent)[0]["type"] for sent in f.d.bodies] == ["image_embeds", "image_url"]
    assert f.count("encodes", "remembered") == 1, "something else may have failed"


@pytest.mark.parametrize("answer", [answers.hang_up, failing(429), Hanging()])
async def test_an_engine_that_is_down_says_nothing_of_embeddings(answer: Answer) -> None:
    options: Any = {"hand_over": "after", "when_overloaded": "decode"}
    async with fleet(stage_timeout_s=0.3, **options) as f:
        await f.post(SEEN)
        f.p.answer = answer
        assert await f.way(SEEN) == "decode"
        assert len(f.e.bodies) == 1
        assert f.count("encodes", "remembered") == 1
        assert media_of(f.d.bodies[-1])[0]["uuid"] == media_of(f.e.bodies[0])[0]["uuid"]


@pytest.mark.parametrize("is_e_down", [False, True])
async def test_bytes_of_lost_media_go_to_decode_under_a_name_of_their_own(
    seen: Fleet, is_e_down: bool
) -> None:
    """vLLM's cache of inputs may have the item without its bytes under the other name."""
    without_bytes: set[str] = set()

    async def with_cache_of_inputs(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        (item,) = media_of(body)
        if item["type"] == "image_embeds":
            without_bytes.add(item["uuid"])
        return await (failing(500) if item["uuid"] in without_bytes else decoded)(http, body)

    seen.d.answer = with_cache_of_inputs
    if is_e_down:
        seen.e.answer = answers.hang_up
    names = set()
    for _ in range(2):
        assert await seen.way(SEEN) == "decode"
        (item,) = media_of(seen.d.bodies[-1])
        assert item["type"] == "image_url"
        names.add(item["uuid"])
    assert len(names) == 1, "what D stores under it can be used again"


async def test_an_error_behind_a_token_is_the_clients(seen: Fleet) -> None:
    seen.d.answer = answers.streaming(EVENTS[0], event(ERROR))
    _, body = await seen.post(SEEN | {"stream": True})
    assert body == EVENTS[0] + event(ERROR)
    assert (len(seen.e.bodies), len(seen.d.bodies)) == (1, 2)


async def test_the_last_decodes_error_is_passed_on() -> None:
    async with fleet(0, 0) as f:
        f.d.answer = error_event
        response, body = await f.post(chat(stream=True))
        assert (response.status, body) == (200, b"".join(ERROR_EVENTS))
        assert len(f.d.bodies) == 1


async def test_another_decode_answers_instead_of_an_error_event() -> None:
    async with fleet(0, 0, num_d=2) as f:
        f.d.answer = error_event
        for _ in range(2):
            assert (await f.post(chat(stream=True)))[1] == DECODED[True]


async def test_a_client_that_leaves_meanwhile_is_not_worked_for(seen: Fleet) -> None:
    seen.d.answer = without(seen, 99, decoded, failing(500))
    seen.e.answer = hanging = Hanging()
    asked = seen.start(SEEN)
    await soon(hanging.asked)
    asked.cancel()
    await soon(hanging.left)
