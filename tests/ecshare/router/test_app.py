# SPDX-License-Identifier: Apache-2.0
"""The router on a real socket in front of small engines: the way of a request."""

import asyncio
import re
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.api.client_request import Media
from ecshare.router.stages.plan import renamed
from tests.ecshare.router import answers
from tests.ecshare.router.answers import DECODED, EVENTS, Answer, decoded, encoded, failing
from tests.ecshare.router.bodies import PNG, PNG_2, chat, data_url, media_of, picture, uuid_of
from tests.ecshare.router.fake_engine import LOOPBACK, FakeEngine, Fleet, fleet
from tests.ecshare.router.held import Hanging, soon
from tests.ecshare.router.media.fake_media import at, media_server

ALL = "encode,prefill,decode"
FOR_DECODE = {"kvshare": {"for_decode": True}}
both_ways = pytest.mark.parametrize("stream", [False, True])


async def test_a_picture_goes_through_all_stages(f: Fleet) -> None:
    response, body = await f.post(chat(picture(PNG), temperature=0, max_tokens=5))
    assert (response.status, body) == (200, DECODED[False])
    assert response.headers["x-ecshare-path"] == ALL
    assert re.fullmatch(
        r"encode;dur=[\d.]+, prefill;dur=[\d.]+, decode;dur=[\d.]+",
        response.headers["Server-Timing"],
    )
    (e,), (p,), (d,) = f.e.bodies, f.p.bodies, f.d.bodies
    assert media_of(e) == [picture(PNG) | {"uuid": uuid_of(PNG)}]
    metadata = {"image_grid_thw": [1, 2, len(data_url(PNG))]}
    lean = {"type": "image_embeds", "image_embeds": metadata, "uuid": uuid_of(PNG)}
    assert media_of(p) == media_of(d) == [lean]
    assert (p["max_tokens"], p["max_completion_tokens"], p["stream"]) == (1, 1, False)
    assert d["kv_transfer_params"] == {"kvshare": {"num_tokens": 7}}
    assert (d["temperature"], d["max_tokens"]) == (0, 5)
    assert "stream" not in d


async def test_a_stream_is_passed_on_byte_for_byte(f: Fleet) -> None:
    response, body = await f.post(chat(picture(PNG), stream=True))
    assert body == DECODED[True]
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Server"] == "ecshare"
    assert response.headers["x-ecshare-path"] == ALL
    timing = r"encode;dur=[\d.]+, prefill;dur=[\d.]+"
    assert re.fullmatch(timing, response.headers["Server-Timing"])
    assert (f.p.bodies[0]["stream"], f.d.bodies[0]["stream"]) == (False, True)


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


async def check_it_leaves_at_once(f: Fleet, first: bytes) -> None:
    """Check that the client has the first events of a stream that does not go on."""
    async with (
        asyncio.timeout(10),
        f.client.post(f.url + CHAT, json=chat(picture(PNG), stream=True)) as response,
    ):
        assert await response.content.readexactly(len(first)) == first


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("first", [EVENTS[0], TOKEN, ROLE + TOKEN, ROLE + TOKEN + b"data: {"])
async def test_the_first_token_leaves_when_decode_has_it(first: bytes, number: int) -> None:
    async with fleet(number, number) as f:
        f.d.answer = Hanging(start=first)
        await check_it_leaves_at_once(f, first.removesuffix(b"data: {"))


@pytest.mark.usefixtures("short_is_long")
async def test_the_first_token_leaves_while_prefill_still_works() -> None:
    async with fleet(0, 1, prefill="always") as f:
        params = {"kvshare": {"streamed": True, "num_tokens": 7}}
        f.p.answer = answers.answering(kv_transfer_params=params)
        await f.post(chat())
        f.p.answer, f.d.answer = Hanging(), Hanging(start=TOKEN)
        await check_it_leaves_at_once(f, TOKEN)


async def test_two_pictures_are_encoded_apart_and_one_picture_twice_once() -> None:
    async with fleet(num_e=2) as f:
        await f.way(chat(picture(PNG), picture(PNG_2), picture(PNG)))
        sent = [[media_of(body)[0]["uuid"] for body in engine.bodies] for engine in f.encoders]
        assert sent == [[uuid_of(PNG)], [uuid_of(PNG_2)]]
        uuids = [part["uuid"] for part in media_of(f.d.bodies[0])]
        assert uuids == list(map(uuid_of, (PNG, PNG_2, PNG)))


@pytest.mark.parametrize(
    ("num_e", "num_p", "path", "kind"),
    [
        (1, 0, "encode,decode", "image_embeds"),
        (0, 1, "prefill,decode", "image_url"),
        (0, 0, "decode", "image_url"),
    ],
)
async def test_stages_may_be_missing(num_e: int, num_p: int, path: str, kind: str) -> None:
    async with fleet(num_e, num_p) as f:
        assert await f.way(chat(picture(PNG))) == path
        (part,) = media_of(f.d.bodies[0])
        assert (part["type"], part["uuid"]) == (kind, uuid_of(PNG))
        assert ("kv_transfer_params" in f.d.bodies[0]) is bool(num_p)


async def test_unknown_fields_reach_the_engines_untouched(f: Fleet) -> None:
    extra = {"unheard_of": {"x": [1.5, None, 12345678901234567890]}, "seed": 3}
    await f.post(chat(picture(PNG), **extra))
    for engine in (f.p, f.d):
        assert engine.bodies[0].items() >= extra.items()


async def test_headers_that_belong_to_the_request_travel(f: Fleet) -> None:
    sent = {"x-request-id": "mine-1", "authorization": "Bearer k", "traceparent": "00-a"}
    response, _ = await f.post(chat(picture(PNG)), headers=sent | {"Cookie": "c=1"})
    assert response.headers["x-request-id"] == "mine-1"
    for engine in (f.e, f.p, f.d):
        assert engine.headers[0].items() >= sent.items()
        assert "cookie" not in engine.headers[0]
    response, _ = await f.post(chat(), headers={"x-request-id": "no good"})
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("stage", ["e", "p"])
@both_ways
async def test_a_failing_stage_leaves_the_work_to_decode(
    f: Fleet, stage: str, stream: bool
) -> None:
    getattr(f, stage).answer = failing(500)
    response, body = await f.post(chat(picture(PNG), stream=stream))
    assert (response.status, body) == (200, DECODED[stream])
    assert response.headers["x-ecshare-path"] == "decode"
    known = Media(uuid_of(PNG), "")
    named = renamed(known) if stage == "p" else known  # P may have failed for want of the picture
    assert media_of(f.d.bodies[0]) == [picture(PNG) | {"uuid": named.uuid}]
    assert "kv_transfer_params" not in f.d.bodies[0]
    counts = f.router.counts()
    assert (counts["fallbacks"], counts["answered"]) == (1, {"decode": 1})


async def test_an_unreachable_encoder_is_no_obstacle() -> None:
    async with fleet(encoders_more=("http://127.0.0.1:9",), num_e=0) as f:
        assert await f.way(chat(picture(PNG))) == "decode"
        assert (await f.health())[0] == 503


@pytest.mark.parametrize("answer", [answers.hang_up, failing(503)])
async def test_an_encoder_that_failed_is_left_alone_until_it_cooled_down(answer: Answer) -> None:
    async with fleet(cool_down_s=5.0) as f:
        f.e.answer = answer
        for now_s, num_asked in ((0.0, 1), (4.9, 1), (5.0, 2)):
            f.clock.now_s = now_s
            assert await f.way(chat(picture(PNG))) == "decode"
            assert len(f.e.bodies) == num_asked


async def test_cookies_of_an_engine_stay_with_it() -> None:
    async def baker(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await encoded(http, body)
        response.set_cookie("session", "first client's")
        return response

    async with FakeEngine(baker).serving() as engine:
        # By name: no jar keeps the cookies of a bare address.
        by_name = engine.url.replace("127.0.0.1", "localhost")
        async with fleet(num_e=0, encoders_more=(by_name,)) as f:
            for each in (PNG, PNG_2):  # of a picture that is known nobody is asked again
                await f.way(chat(picture(each)))
        assert len(engine.headers) == 2
        assert not any("cookie" in headers for headers in engine.headers)


async def test_an_engine_sends_nobody_elsewhere() -> None:
    """Its answer would be another server's, which would get the prompt and the keys."""
    async with FakeEngine(decoded).serving() as elsewhere, fleet(0, 0) as f:
        f.d.answer = answers.answering(307, {"Location": elsewhere.url + CHAT})
        assert (await f.post(chat()))[0].status == 307
        assert not elsewhere.headers


@pytest.mark.parametrize("answer", [b"<html>", b'{"a": "\xff"}', b"[" * 100_000])
async def test_nonsense_from_prefill_is_a_failure(f: Fleet, answer: bytes) -> None:
    f.p.answer = answers.streaming(answer, content_type="application/json")
    assert await f.way(chat()) == "decode"


async def test_a_stage_that_hangs_is_given_up() -> None:
    async with fleet(stage_timeout_s=0.2) as f:
        f.p.answer = hanging = Hanging()
        assert await f.way(chat(picture(PNG))) == "decode"
        await soon(hanging.left)


async def test_missing_metadata_leaves_the_picture_to_prefill(f: Fleet) -> None:
    f.e.answer = answers.answering(ec_transfer_params=None)
    assert await f.way(chat(picture(PNG))) == ALL
    assert media_of(f.p.bodies[0]) == [picture(PNG) | {"uuid": uuid_of(PNG)}]


@pytest.mark.parametrize("stage", ["e", "p", "d"])
async def test_a_client_that_leaves_is_not_worked_for(f: Fleet, stage: str) -> None:
    getattr(f, stage).answer = hanging = Hanging()
    request = f.start(chat(picture(PNG), picture(PNG_2)))
    await soon(hanging.asked)
    request.cancel()
    await soon(hanging.left)
    await asyncio.wait([request])
    assert not f.in_flight()


async def test_a_client_that_leaves_a_stream_is_not_worked_for(f: Fleet) -> None:
    f.d.answer = hanging = Hanging(start=EVENTS[0])
    async with f.client.post(f.url + CHAT, json=chat(picture(PNG), stream=True)) as response:
        await response.content.readany()
    await soon(hanging.left)


async def test_a_large_body_passes(f: Fleet) -> None:
    content = bytes(24 * 1024 * 1024)
    await f.way(chat(picture(content)))
    assert media_of(f.e.bodies[0])[0]["uuid"] == uuid_of(content)
    assert len(str(f.d.bodies[0])) < 2000


async def test_media_urls_are_downloaded_once_and_sent_as_bytes() -> None:
    fetched = []

    async def serve(http: web.Request) -> web.StreamResponse:
        fetched.append(dict(http.headers))
        if http.path == "/moved":
            raise web.HTTPFound("/real")
        return web.Response(body=PNG, content_type="text/html")

    async with media_server(serve) as url, fleet(allow_media_networks=LOOPBACK) as f:
        body = at(url + "/moved", url + "/moved")
        response, _ = await f.post(body, headers={"Authorization": "Bearer k"})
        assert response.status == 200
        assert len(fetched) == 2
        assert not any("Authorization" in headers for headers in fetched)
        (sent,) = media_of(f.e.bodies[0])
        assert sent["uuid"] == uuid_of(PNG)
        assert sent["image_url"]["url"] == data_url(PNG, "application/octet-stream")


async def test_models_and_health() -> None:
    async with fleet(num_d=2) as f:
        async with f.client.get(f.url + "/v1/models") as response:
            assert (await response.json())["data"] == [{"id": "m"}]
            assert "x-request-id" in response.headers
        status, health = await f.health()
        assert (status, health["status"]) == (200, "ok")
        assert [each["url"] for each in health["stages"]["decode"]] == [d.url for d in f.decoders]
        f.d.healthy = False
        f.clock.now_s += 1
        assert (await f.health())[0] == 200
        f.p.healthy = False
        f.clock.now_s += 1
        status, health = await f.health()
        assert (status, health["status"]) == (503, "incomplete")
        assert health["stages"]["prefill"][0]["healthy"] is False


async def test_the_model_list_is_asked_for_now_and_then(f: Fleet) -> None:
    for _ in range(3):
        await f.post(chat())
    assert f.d.num_model_lists == 1
    f.d.models = ("new",)
    f.clock.now_s = 100.0
    await f.way(chat(model="new"))
    await f.way({"messages": [{"role": "user", "content": "no model named"}]})


# --- `kvshare_save` and `ecshare_save` ---


def kv(is_saved: bool) -> dict[str, Any]:
    return {"kv_transfer_params": {"kvshare_save": is_saved}}


def ec(is_saved: bool) -> dict[str, Any]:
    return {"ec_transfer_params": {"ecshare_save": is_saved}}


@both_ways
async def test_a_wish_to_be_stored_reaches_every_engine(f: Fleet, stream: bool) -> None:
    for _ in range(2):  # P streams the second time
        await f.post(chat(picture(PNG), stream=stream, **kv(True), **ec(True)))
    assert f.e.bodies[0].items() >= ec(True).items()
    assert "kv_transfer_params" not in f.e.bodies[0]
    for sent in f.p.bodies:
        assert sent["kv_transfer_params"] == FOR_DECODE | {"kvshare_save": True}
        assert sent.items() >= ec(True).items()
    for sent in f.d.bodies:
        assert sent["kv_transfer_params"].keys() == {"kvshare", "kvshare_save"}


async def test_a_wish_to_be_stored_reaches_a_decode_that_is_alone() -> None:
    async with fleet(hand_over="after") as f:
        f.p.answer = failing(500)
        await f.post(chat(picture(PNG_2), **kv(True), **ec(True)))
        assert f.d.bodies[-1]["kv_transfer_params"] == {"kvshare_save": True}


async def test_what_must_not_be_stored_is_computed_by_those_who_need_it(f: Fleet) -> None:
    """E and P work for what others load from the store."""
    assert await f.way(chat(picture(PNG), **ec(False))) == "prefill,decode"
    assert f.p.bodies[0].items() >= ec(False).items()
    assert await f.way(chat(picture(PNG), **kv(False))) == "encode,decode"
    assert f.d.bodies[1].items() >= kv(False).items()


async def test_a_wish_that_no_engine_understands_is_refused(f: Fleet) -> None:
    status, error = await f.error({"model": "m", "input": "x"} | kv(True), path="/v1/embeddings")
    assert (status, error["param"]) == (400, "kv_transfer_params")
