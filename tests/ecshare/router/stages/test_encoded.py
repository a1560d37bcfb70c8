# SPDX-License-Identifier: Apache-2.0
"""E is asked once for a picture, whoever sends it and when."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.reuse import SingleFlight
from ecshare.router.siblings import Siblings
from ecshare.router.stages.encode import EncodedMedia, Reports
from ecshare.router.stages.plan import Metadata
from tests.ecshare.router.answers import Answer, answering, encoded, failing, hang_up
from tests.ecshare.router.bodies import PNG, PNG_2, chat, data_url, media_of, picture, text
from tests.ecshare.router.fake_engine import Asked, Fleet, fleet
from tests.ecshare.router.held import Held, soon
from tests.waiting import until

ALL = "encode,prefill,decode"
no_report = answering(ec_transfer_params=None)


async def test_p_is_told_which_pictures_no_store_had() -> None:
    """P then need not look for KV of what follows them."""
    said: dict[bytes, Any] = {PNG: {"stored": False}, PNG_2: {"stored": True}}

    async def encodes_and_tells(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        (part,) = body["messages"][0]["content"]
        url = part["image_url"]["url"]
        (tells,) = (tells for content, tells in said.items() if url == data_url(content))
        report = {"metadata": {"image_grid_thw": [1, 2, 2]}, "item_indices": [0]}
        return web.json_response({"ec_transfer_params": {part["uuid"]: report | tells}})

    async with fleet(hand_over="after") as f:
        f.e.answer = encodes_and_tells
        await f.post(chat(picture(PNG), picture(PNG_2)))
        await f.post(chat(text("and now?"), picture(PNG)))  # E is not asked for it
        said[b"another"] = {"stored": 0}
        await f.post(chat(picture(b"another")))
        new = media_of(f.p.bodies[0])[0]["uuid"]
        assert [body["kv_transfer_params"] for body in f.p.bodies] == [
            {"kvshare": {"for_decode": True, "new_media": [new]}},
            *[{"kvshare": {"for_decode": True}}] * 2,
        ]
        assert all("new_media" not in str(body) for body in f.d.bodies)


async def test_a_known_picture_goes_on_without_pixels_and_without_e(f: Fleet) -> None:
    response, _ = await f.post(chat(picture(PNG)))
    assert response.headers["x-ecshare-path"] == ALL
    assert "x-ecshare-avoided" not in response.headers
    response, _ = await f.post(chat(text("and now?"), picture(PNG), temperature=1))
    assert response.headers["x-ecshare-path"] == "prefill,decode"
    assert response.headers["x-ecshare-avoided"] == "encode"
    assert len(f.e.bodies) == 1
    (lean,) = media_of(f.d.bodies[0])
    assert lean["image_embeds"] == {"image_grid_thw": [1, 2, len(data_url(PNG))]}
    for engine in (f.p, f.d):
        assert media_of(engine.bodies[1])[-1] == lean
    status = f.router.counts()["encodes"]
    assert (status["asked"], status["avoided"], status["remembered"]) == (1, 1, 1)
    assert 0 < status["memory"] < 1000


async def test_of_a_known_and_a_new_picture_e_gets_the_new_one(f: Fleet) -> None:
    await f.post(chat(picture(PNG)))
    assert await f.way(chat(picture(PNG), picture(PNG_2), picture(PNG))) == ALL
    assert [media_of(body) for body in f.e.bodies[1:]] == [
        [picture(PNG_2) | {"uuid": media_of(f.d.bodies[1])[1]["uuid"]}]
    ]
    assert [part["type"] for part in media_of(f.d.bodies[1])] == ["image_embeds"] * 3
    assert (f.count("encodes", "asked"), f.count("encodes", "avoided")) == (2, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"mm_processor_kwargs": {"max_pixels": 4096}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
    ],
)
async def test_what_changes_an_embedding_has_it_encoded_apart(
    f: Fleet, other: dict[str, Any]
) -> None:
    f.e.models = f.p.models = f.d.models = ("m", "n")
    for fields in ({}, other, {}, other):
        await f.way(chat(picture(PNG)) | fields)
    assert [body.items() >= other.items() for body in f.e.bodies] == [False, True]


async def test_a_picture_is_not_a_video(f: Fleet) -> None:
    f.e.answer = no_report
    for part in (picture(PNG), {"type": "video_url", "video_url": {"url": data_url(PNG)}}):
        await f.post(chat(part))
    assert len({media_of(body)[0]["uuid"] for body in f.e.bodies}) == 2


async def test_a_report_that_comes_while_another_request_looks_is_used() -> None:
    media = EncodedMedia(1 << 20, 5.0, Siblings(), time.monotonic)
    answers, num_asked = asyncio.Event(), 0

    async def ask() -> Metadata:
        nonlocal num_asked
        num_asked += 1
        await answers.wait()
        return {"image_grid_thw": [1, 2, 3]}

    async def reports() -> Reports:
        return await media.reports({"one": b"1", "two": b"2"}, {"one": ask, "two": ask})

    first = asyncio.create_task(reports())
    await until(lambda: num_asked == 2)
    second = asyncio.create_task(reports())  # it looks at the index before E's answer is there
    answers.set()
    assert (await second).metadata == (await first).metadata
    assert (await second).known == {"one", "two"}
    assert num_asked == 2


@pytest.mark.parametrize("answer", [no_report, failing(500), failing(422)])
async def test_e_is_asked_again_for_what_it_did_not_report(f: Fleet, answer: Answer) -> None:
    f.e.answer = answer
    await f.post(chat(picture(PNG)))
    f.e.answer = encoded
    assert await f.way(chat(picture(PNG))) == ALL
    assert media_of(f.d.bodies[-1])[0]["type"] == "image_embeds"
    assert len(f.e.bodies) == 2


async def test_the_index_is_bounded() -> None:
    async with fleet(max_index_bytes=1200) as f:
        for content in (PNG, PNG_2, b"a third", PNG):
            await f.post(chat(picture(content)))
        assert len(f.e.bodies) == 4
        assert f.count("encodes", "remembered") == 2
        assert f.count("encodes", "memory") <= 1200


@pytest.mark.parametrize("stage", ["p", "d"])
async def test_what_could_not_be_used_is_encoded_again(f: Fleet, stage: str) -> None:
    async def fails_without_pixels(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_lost = media_of(body)[0]["type"] == "image_embeds" and len(f.e.bodies) < 2
        return await (failing(500) if is_lost else answer)(http, body)

    answer = getattr(f, stage).answer
    getattr(f, stage).answer = fails_without_pixels
    assert await f.way(chat(picture(PNG))) == "decode"
    assert await f.way(chat(picture(PNG))) == ALL
    assert len(f.e.bodies) == 2


# --- at the same moment ---


@asynccontextmanager
async def at_the_same_moment(f: Fleet, held: Held, number: int) -> AsyncIterator[list[Asked]]:
    """Ask about one picture several times; the block begins when all wait for the first."""
    f.e.answer = held
    asked = [f.start(chat(picture(PNG)))]
    await soon(held.asked)
    asked += [f.start(chat(text(str(n)), picture(PNG))) for n in range(1, number)]
    await until(lambda: f.count("encodes", "waiting") == number - 1)
    yield asked


async def test_a_new_picture_is_encoded_once_for_all_who_send_it(f: Fleet) -> None:
    async with at_the_same_moment(f, held := Held(encoded), 4) as asked:
        held.let_go.set()
        for each in asked:
            assert (await each)[0].headers["x-ecshare-path"] == ALL
        assert len(f.e.bodies) == 1
        assert [media_of(body)[-1]["type"] for body in f.d.bodies] == ["image_embeds"] * 4
        status = f.router.counts()["encodes"]
        assert (status["asked"], status["avoided"], status["waiting"]) == (1, 3, 0)


async def test_a_client_that_leaves_takes_nothing_from_the_others(f: Fleet) -> None:
    async with at_the_same_moment(f, held := Held(encoded), 4) as asked:
        second = f.e.hold(encoded)
        asked[0].cancel()
        await soon(held.left, second.asked)
        second.let_go.set()
        for each in asked[1:]:
            assert (await each)[0].headers["x-ecshare-path"] == ALL
        assert len(f.e.bodies) == 2, "one of the others asked for all of them"


async def test_one_who_waits_may_leave(f: Fleet) -> None:
    async with at_the_same_moment(f, held := Held(encoded), 3) as asked:
        asked[1].cancel()
        await asyncio.wait([asked[1]])
        await until(lambda: f.count("encodes", "waiting") == 1)
        held.let_go.set()
        for each in (asked[0], asked[2]):
            assert (await each)[0].status == 200
        assert len(f.e.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "status"), [(failing(422), 422), (failing(500), 200), (hang_up, 200)]
)
async def test_a_failure_is_nobody_elses(answer: Answer, status: int) -> None:
    async with (
        fleet(num_e=2, retry_share=0.0) as f,
        at_the_same_moment(f, held := Held(answer), 3) as asked,
    ):
        f.e.answer = encoded
        held.let_go.set()
        responses = [(await each)[0] for each in asked]
        assert [response.status for response in responses] == [status, 200, 200]
        num_asked = sum(len(engine.bodies) for engine in f.encoders)
        assert num_asked == 2, "one of the others asked for both"
        lean = [body for body in f.d.bodies if media_of(body)[-1]["type"] == "image_embeds"]
        assert len(lean) == 2
        for response in responses[1:]:
            assert response.headers["x-ecshare-path"] == ALL


async def test_nobody_waits_for_another_longer_than_it_wants() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    held = asyncio.Event()

    async def slow() -> int:
        await held.wait()
        return 1

    async def quick() -> int:
        return 2

    first = asyncio.create_task(flights.run("a", slow, 60))
    await asyncio.sleep(0)
    assert await flights.run("a", quick, 0.0) == 2
    assert await flights.run("b", quick, 60) == 2
    held.set()
    assert await first == 1
    assert await flights.run("a", quick, 60) == 2, "what is done is not kept"
