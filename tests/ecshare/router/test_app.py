# SPDX-License-Identifier: Apache-2.0
"""The router on a real socket in front of small engines: the way of a request."""

import asyncio
import hashlib
import json
import re
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.api.client_request import Media
from ecshare.router.stages.plan import renamed
from tests.ecshare.router.fake_engine import (
    EVENTS,
    LOOPBACK,
    PNG,
    PNG_2,
    Answer,
    FakeEngine,
    Hanging,
    chat,
    data_url,
    decoded,
    encoded,
    failing,
    fleet,
    hang_up,
    listening,
    picture,
)


def uuid_of(content: bytes) -> str:
    return hashlib.sha256(b"image\0" + content).hexdigest()


def parts_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in body["messages"][0]["content"] if part["type"] != "text"]


async def test_a_picture_goes_through_all_stages() -> None:
    async with fleet() as f:
        response, body = await f.post(chat(picture(PNG), temperature=0, max_tokens=5))
        assert response.status == 200
        assert body == b'{"choices":  []}'
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"
        assert re.fullmatch(
            r"encode;dur=[\d.]+, prefill;dur=[\d.]+, decode;dur=[\d.]+",
            response.headers["Server-Timing"],
        )
        (e,), (p,), (d,) = f.e.bodies, f.p.bodies, f.d.bodies
        assert parts_of(e) == [picture(PNG) | {"uuid": uuid_of(PNG)}]
        metadata = {"image_grid_thw": [1, 2, len(data_url(PNG))]}
        lean = {"type": "image_embeds", "image_embeds": metadata, "uuid": uuid_of(PNG)}
        assert parts_of(p) == parts_of(d) == [lean]
        assert (p["max_tokens"], p["max_completion_tokens"], p["stream"]) == (1, 1, False)
        assert d["kv_transfer_params"] == {"kvshare": {"num_tokens": 7}}
        assert (d["temperature"], d["max_tokens"]) == (0, 5)
        assert "stream" not in d


async def test_a_stream_is_passed_on_byte_for_byte() -> None:
    async with fleet() as f:
        response, body = await f.post(chat(picture(PNG), stream=True))
        assert body == b"".join(EVENTS)
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Server"] == "ecshare"
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"
        assert re.fullmatch(
            r"encode;dur=[\d.]+, prefill;dur=[\d.]+", response.headers["Server-Timing"]
        )
        assert f.p.bodies[0]["stream"] is False
        assert f.d.bodies[0]["stream"] is True


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("first", [EVENTS[0], TOKEN, ROLE + TOKEN, ROLE + TOKEN + b"data: {"])
async def test_the_first_token_leaves_when_decode_has_it(first: bytes, number: int) -> None:
    async with fleet(number, number) as f:
        f.d.answer = Hanging(start=first)
        body = json.dumps(chat(picture(PNG), stream=True))
        whole = first.removesuffix(b"data: {")
        async with asyncio.timeout(10), f.client.post(f.url + CHAT, data=body) as response:
            assert await response.content.readexactly(len(whole)) == whole


@pytest.mark.usefixtures("short_is_long")
async def test_the_first_token_leaves_while_prefill_still_works() -> None:
    async def streaming(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = {"kvshare": {"streamed": True, "num_tokens": 7}}
        return web.json_response({"kv_transfer_params": params})

    async with fleet(0, 1, prefill="always") as f:
        f.p.answer = streaming
        await f.post(chat())
        f.p.answer, f.d.answer = Hanging(), Hanging(start=TOKEN)
        body = json.dumps(chat(stream=True))
        async with asyncio.timeout(10), f.client.post(f.url + CHAT, data=body) as response:
            assert await response.content.readexactly(len(TOKEN)) == TOKEN


async def test_two_pictures_are_encoded_apart_and_one_picture_twice_once() -> None:
    async with fleet(num_e=2) as f:
        response, _ = await f.post(chat(picture(PNG), picture(PNG_2), picture(PNG)))
        assert response.status == 200
        sent = [parts_of(body)[0]["uuid"] for engine in f.encoders for body in engine.bodies]
        assert sent == [uuid_of(PNG), uuid_of(PNG_2)]
        assert [len(engine.bodies) for engine in f.encoders] == [1, 1]
        assert [part["uuid"] for part in parts_of(f.d.bodies[0])] == [
            uuid_of(PNG), uuid_of(PNG_2), uuid_of(PNG),
        ]  # fmt: skip


async def test_text_skips_the_encoder() -> None:
    async with fleet() as f:
        response, _ = await f.post(chat())
        assert response.headers["x-ecshare-path"] == "prefill,decode"
        assert f.e.bodies == []
        assert f.d.bodies[0]["kv_transfer_params"] == {"kvshare": {"num_tokens": 7}}


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
        response, _ = await f.post(chat(picture(PNG)))
        assert response.headers["x-ecshare-path"] == path
        (part,) = parts_of(f.d.bodies[0])
        assert (part["type"], part["uuid"]) == (kind, uuid_of(PNG))
        assert ("kv_transfer_params" in f.d.bodies[0]) is bool(num_p)


async def test_unknown_fields_reach_the_engines_untouched() -> None:
    extra = {"unheard_of": {"x": [1.5, None, 12345678901234567890]}, "seed": 3}
    async with fleet() as f:
        await f.post(chat(picture(PNG), **extra))
        for engine in (f.p, f.d):
            assert engine.bodies[0].items() >= extra.items()


async def test_headers_that_belong_to_the_request_travel() -> None:
    sent = {
        "x-request-id": "mine-1",
        "Authorization": "Bearer k",
        "traceparent": "00-a",
        "Cookie": "c=1",
    }
    async with fleet() as f:
        response, _ = await f.post(chat(picture(PNG)), headers=sent)
        assert response.headers["x-request-id"] == "mine-1"
        for engine in (f.e, f.p, f.d):
            got = engine.headers[0]
            assert (got["x-request-id"], got["authorization"]) == ("mine-1", "Bearer k")
            assert got["traceparent"] == "00-a"
            assert "cookie" not in got
        response, _ = await f.post(chat(), headers={"x-request-id": "no good"})
        assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("stage", ["e", "p"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_stage_leaves_the_work_to_decode(stage: str, stream: bool) -> None:
    async with fleet() as f:
        getattr(f, stage).answer = failing(500)
        response, body = await f.post(chat(picture(PNG), stream=stream))
        assert response.status == 200
        assert body == (b"".join(EVENTS) if stream else b'{"choices":  []}')
        assert response.headers["x-ecshare-path"] == "decode"
        known = Media(uuid_of(PNG), "")
        # P may have failed for want of the picture.
        named = renamed(known) if stage == "p" else known
        assert parts_of(f.d.bodies[0]) == [picture(PNG) | {"uuid": named.uuid}]
        assert "kv_transfer_params" not in f.d.bodies[0]
        _, health = await f.health()
        assert (health["fallbacks"], health["answered"]) == (1, {"decode": 1})


async def test_an_unreachable_encoder_is_no_obstacle() -> None:
    async with listening(web.Application()) as gone:
        pass
    async with fleet(encoders_more=(gone,), num_e=0) as f:
        response, _ = await f.post(chat(picture(PNG)))
        assert response.headers["x-ecshare-path"] == "decode"
        assert (await f.health())[0] == 503


@pytest.mark.parametrize("answer", [hang_up, failing(503)])
async def test_an_encoder_that_failed_is_left_alone_until_it_cooled_down(answer: Answer) -> None:
    async with fleet(cool_down_s=5.0) as f:
        f.e.answer = answer
        for now_s, num_asked in ((0.0, 1), (4.9, 1), (5.0, 2)):
            f.clock.now_s = now_s
            response, _ = await f.post(chat(picture(PNG)))
            assert response.headers["x-ecshare-path"] == "decode"
            assert len(f.e.bodies) == num_asked


async def test_decode_is_asked_even_while_it_cools_down() -> None:
    async with fleet(0, 0) as f:
        f.d.answer = hang_up
        assert (await f.post(chat()))[0].status == 502
        f.d.answer = decoded
        assert (await f.post(chat()))[0].status == 200


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
                assert (await f.post(chat(picture(each))))[0].status == 200
        assert len(engine.headers) == 2
        assert not any("cookie" in headers for headers in engine.headers)


async def test_an_engine_sends_nobody_elsewhere() -> None:
    """Its answer would be another server's, which would get the prompt and the keys."""

    async def redirect(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": elsewhere.url + http.path})

    async with FakeEngine(decoded).serving() as elsewhere, fleet(0, 0) as f:
        f.d.answer = redirect
        assert (await f.post(chat()))[0].status == 307
        assert not elsewhere.headers


@pytest.mark.parametrize("answer", [b"<html>", b'{"a": "\xff"}', b"[" * 100_000])
async def test_nonsense_from_prefill_is_a_failure(answer: bytes) -> None:
    async def nonsense(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=answer)

    async with fleet() as f:
        f.p.answer = nonsense
        response, _ = await f.post(chat())
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")


async def test_a_stage_that_hangs_is_given_up() -> None:
    async with fleet(stage_timeout_s=0.2) as f:
        f.p.answer = hanging = Hanging()
        response, _ = await f.post(chat(picture(PNG)))
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        await asyncio.wait_for(hanging.left.wait(), 5)


async def test_decode_that_fails_on_metadata_is_asked_again_with_pictures() -> None:
    async def once(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        lost = any(part["type"] == "image_embeds" for part in parts_of(body))
        return await (failing(500) if lost else decoded)(http, body)

    async with fleet(num_p=0) as f:
        f.d.answer = once
        response, body = await f.post(chat(picture(PNG)))
        assert (response.status, response.headers["x-ecshare-path"]) == (200, "decode")
        assert body == b'{"choices":  []}'
        assert [parts_of(sent)[0]["type"] for sent in f.d.bodies] == ["image_embeds", "image_url"]


async def test_missing_metadata_leaves_the_picture_to_prefill() -> None:
    async def silent(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"ec_transfer_params": None})

    async with fleet() as f:
        f.e.answer = silent
        response, _ = await f.post(chat(picture(PNG)))
        assert response.headers["x-ecshare-path"] == "encode,prefill,decode"
        assert parts_of(f.p.bodies[0]) == [picture(PNG) | {"uuid": uuid_of(PNG)}]


@pytest.mark.parametrize("stage", ["e", "p", "d"])
async def test_a_client_that_leaves_is_not_worked_for(stage: str) -> None:
    async with fleet() as f:
        getattr(f, stage).answer = hanging = Hanging()
        request = asyncio.create_task(f.post(chat(picture(PNG), picture(PNG_2))))
        await asyncio.wait_for(hanging.asked.wait(), 5)
        request.cancel()
        await asyncio.wait_for(hanging.left.wait(), 5)
        await asyncio.wait([request])
        _, health = await f.health()
        assert {each["in_flight"] for group in health["stages"].values() for each in group} == {0}


async def test_a_client_that_leaves_a_stream_is_not_worked_for() -> None:
    async with fleet() as f:
        f.d.answer = hanging = Hanging(start=EVENTS[0])
        body = json.dumps(chat(picture(PNG), stream=True))
        async with f.client.post(f.url + CHAT, data=body) as response:
            await response.content.readany()
        await asyncio.wait_for(hanging.left.wait(), 5)


async def test_a_large_body_passes() -> None:
    content = bytes(24 * 1024 * 1024)
    async with fleet() as f:
        response, _ = await f.post(chat(picture(content)))
        assert response.status == 200
        assert parts_of(f.e.bodies[0])[0]["uuid"] == uuid_of(content)
        assert len(json.dumps(f.d.bodies[0])) < 2000


async def test_media_urls_are_downloaded_once_and_sent_as_bytes() -> None:
    fetched = []

    async def serve(http: web.Request) -> web.StreamResponse:
        fetched.append(dict(http.headers))
        if http.path == "/moved":
            raise web.HTTPFound("/real")
        return web.Response(body=PNG, content_type="text/html")

    media = web.Application()
    media.router.add_get("/{name}", serve)
    async with listening(media) as url, fleet(allow_media_networks=LOOPBACK) as f:
        part = {"type": "image_url", "image_url": {"url": url + "/moved"}}
        response, _ = await f.post(chat(part, part), headers={"Authorization": "Bearer k"})
        assert response.status == 200
        assert len(fetched) == 2
        assert not any("Authorization" in headers for headers in fetched)
        (sent,) = parts_of(f.e.bodies[0])
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


async def test_the_model_list_is_asked_for_now_and_then() -> None:
    async with fleet() as f:
        for _ in range(3):
            await f.post(chat())
        assert f.d.num_model_lists == 1
        f.d.models = ("new",)
        f.clock.now_s = 100.0
        response, _ = await f.post(chat() | {"model": "new"})
        assert response.status == 200
        response, _ = await f.post({"messages": [{"role": "user", "content": "no model named"}]})
        assert response.status == 200


FOR_DECODE = {"kvshare": {"for_decode": True}}
KV, EC = (
    {"kv_transfer_params": {"kvshare_save": True}},
    {"ec_transfer_params": {"ecshare_save": True}},
)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wish_to_be_stored_reaches_every_engine(stream: bool) -> None:
    async with fleet() as f:
        for _ in range(2):  # P streams the second time
            await f.post(chat(picture(PNG), stream=stream, **KV, **EC))
        assert f.e.bodies[0]["ec_transfer_params"] == {"ecshare_save": True}
        assert "kv_transfer_params" not in f.e.bodies[0]
        for sent in f.p.bodies:
            assert sent["kv_transfer_params"] == FOR_DECODE | KV["kv_transfer_params"]
            assert sent == sent | EC
        for sent in f.d.bodies:
            assert sent["kv_transfer_params"].keys() == {"kvshare", "kvshare_save"}


async def test_a_wish_to_be_stored_reaches_a_decode_that_is_alone() -> None:
    async with fleet(hand_over="after") as f:
        f.p.answer = failing(500)
        await f.post(chat(picture(PNG_2), **KV, **EC))
        assert f.d.bodies[-1]["kv_transfer_params"] == {"kvshare_save": True}


async def test_what_must_not_be_stored_is_computed_by_those_who_need_it() -> None:
    """E and P work for what others load from the store."""
    async with fleet() as f:
        no = {"ec_transfer_params": {"ecshare_save": False}}
        response, _ = await f.post(chat(picture(PNG), **no))
        assert response.headers["x-ecshare-path"] == "prefill,decode"
        assert f.p.bodies[0]["ec_transfer_params"] == no["ec_transfer_params"]
        no = {"kv_transfer_params": {"kvshare_save": False}}
        response, _ = await f.post(chat(picture(PNG), **no))
        assert response.headers["x-ecshare-path"] == "encode,decode"
        assert f.d.bodies[1]["kv_transfer_params"] == no["kv_transfer_params"]


async def test_a_wish_that_no_engine_understands_is_refused() -> None:
    async with fleet() as f:
        response, answer = await f.post({"model": "m", "input": "x"} | KV, path="/v1/embeddings")
        assert (response.status, json.loads(answer)["error"]["param"]) == (
            400,
            "kv_transfer_params",
        )
