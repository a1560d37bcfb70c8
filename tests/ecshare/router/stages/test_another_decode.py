# SPDX-License-Identifier: Apache-2.0
"""Where one D fails another is asked, as long as the client has seen nothing of an answer."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.ecshare.router import answers
from tests.ecshare.router.answers import (
    DECODED,
    EVENTS,
    Answer,
    First,
    decoded,
    event,
    failing,
    hang_up,
)
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import FakeEngine, Fleet, answer_all, asked, fleet

both_ways = pytest.mark.parametrize("stream", [False, True])
break_before_a_byte = answers.streaming(breaks=True)
break_in_the_body = answers.streaming(b'{"choices"', breaks=True, content_type="application/json")


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    """A router over two D alone."""
    async with fleet(0, 0, num_d=2) as two:
        yield two


@both_ways
@pytest.mark.parametrize(
    "failure",
    [*map(failing, (500, 502, 503, 429, 408)), hang_up, break_before_a_byte, break_in_the_body],
)
async def test_another_is_asked(f: Fleet, failure: Answer, stream: bool) -> None:
    answer_all(f.decoders, First(failure, decoded))
    response, body = await f.post(chat(stream=stream))
    assert (response.status, body) == (200, DECODED[stream])
    assert response.headers["x-ecshare-path"] == "decode"
    assert asked(f.decoders) == [1, 1]
    assert f.router.counts()["answered"] == {"decode": 1}
    assert not f.in_flight()


async def test_another_is_asked_where_one_cannot_be_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncExitStack() as stack:
        async with FakeEngine(decoded).serving() as gone:
            f = await stack.enter_async_context(fleet(0, 0, 1, decoders_more=(gone.url,)))
            for _ in range(2):
                await f.post(chat())
        for _ in range(2):
            await f.way(chat())
        assert (len(f.d.bodies), len(gone.bodies)) == (3, 1)
    assert caplog.text.count("tries another decode") == 1


@pytest.mark.parametrize(
    ("body", "of_p", "num_failures"),
    [(chat(picture(PNG)), failing(500), 1), (chat(), answers.prefilled, 2)],
    ids=["P has failed", "both D have failed behind P"],
)
async def test_another_is_asked_for_all_the_work(
    body: dict[str, Any], of_p: Answer, num_failures: int
) -> None:
    async with fleet(num_d=2) as f:
        f.p.answer = of_p
        answer_all(f.decoders, First(failing(500), decoded, num_failures))
        assert await f.way(body) == "decode"
        assert asked(f.decoders) == [1, num_failures]
        assert f.router.counts()["fallbacks"] == 1


@pytest.mark.parametrize(
    ("parts", "failure", "path"),
    [
        ([], failing(500), "prefill,decode"),
        ([picture(PNG)], failing(502), "encode,prefill,decode"),
        ([picture(PNG)], hang_up, "encode,prefill,decode"),
        *(([picture(PNG)], failing(status), "decode") for status in (500, 503)),
    ],
)
async def test_another_is_asked_behind_prefill_unless_an_embedding_may_be_lost(
    parts: list[Any], failure: Answer, path: str
) -> None:
    async with fleet(num_d=2) as f:
        answer_all(f.decoders, First(failure, decoded))
        assert await f.way(chat(*parts)) == path
        assert asked(f.decoders) == [1, 1]


async def test_three_are_asked_at_most_and_each_once() -> None:
    async with fleet(0, 0, num_d=4) as f:
        answer_all(f.decoders, failing(500))
        status, error = await f.error(chat())
        assert (status, error["message"]) == (500, "engine says no")
        assert asked(f.decoders) == [0, 1, 1, 1]


async def test_each_is_asked_once_even_if_all_cool_down(f: Fleet) -> None:
    answer_all(f.decoders, hang_up)
    for number in (1, 2):
        assert (await f.error(chat()))[0] == 502
        assert asked(f.decoders) == [number, number]


async def test_one_that_cools_down_is_not_asked_for_a_better_answer(f: Fleet) -> None:
    answer_all(f.decoders, First(hang_up, decoded))
    await f.way(chat())
    answer_all(f.decoders, failing(500))
    status, error = await f.error(chat())
    assert (status, error["message"]) == (500, "engine says no")
    assert sum(asked(f.decoders)) == 3


@pytest.mark.parametrize("num_d", [1, 2])
async def test_the_last_ones_overload_is_passed_on(num_d: int) -> None:
    async with fleet(0, 0, num_d) as f:
        answer_all(f.decoders, answers.answering(429, {"Retry-After": "17"}, error="busy"))
        response, body = await f.post(chat())
        assert (response.status, body) == (429, b'{"error": "busy"}')
        assert response.headers["Retry-After"] == "17"
        assert asked(f.decoders) == [1] * num_d


@pytest.mark.parametrize("status", [400, 422])
async def test_a_refusal_is_no_failure(f: Fleet, status: int) -> None:
    answer_all(f.decoders, failing(status))
    assert (await f.error(chat()))[0] == status
    assert asked(f.decoders) == [0, 1]


async def test_one_that_has_not_got_the_model_is_not_the_last(f: Fleet) -> None:
    f.d.answer = failing(404)
    for _ in range(2):
        await f.way(chat())
    assert asked(f.decoders) == [1, 2]
    f.decoders[1].answer = failing(404)
    assert (await f.error(chat()))[0] == 404


async def test_never_after_the_first_byte(f: Fleet) -> None:
    answer_all(f.decoders, answers.break_in_the_stream)
    response, body = await f.post(chat(stream=True))
    assert response.status == 200
    assert body.startswith(EVENTS[0])
    assert json.loads(body.rpartition(b"data: ")[2])["error"]["code"] == "engine_failed"
    assert asked(f.decoders) == [0, 1]


@pytest.mark.parametrize(
    "events",
    [
        (),  # nothing is an answer
        (EVENTS[0], EVENTS[-1].rstrip()),  # a line without an end
        (event({"error": {"message": "no", "code": 400}}),),  # a refusal is no failure
    ],
)
async def test_whatever_a_stream_is_it_is_passed_on_whole(f: Fleet, events: list[bytes]) -> None:
    answer_all(f.decoders, answers.streaming(*events))
    response, body = await f.post(chat(stream=True))
    assert (response.status, body) == (200, b"".join(events))
    assert asked(f.decoders) == [0, 1]


@both_ways
async def test_one_that_rests_is_asked_where_no_other_is_left(f: Fleet, stream: bool) -> None:
    """It may be back: engines start again sooner than they have rested."""
    for _ in range(2):
        answer_all(f.decoders, First(hang_up, decoded))
        await f.way(chat(stream=stream))
    assert asked(f.decoders) == [2, 2]
