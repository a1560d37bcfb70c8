# SPDX-License-Identifier: Apache-2.0
"""The fuzz tests' description of the router is whole and true."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ecshare.router.api.chat import CHAT
from ecshare.router.api.endpoints import PASSED_ON, SPLIT
from ecshare.router.app import Router
from ecshare.router.options.config import RouterConfig
from tests.ecshare.router.answers import decoded, failing
from tests.ecshare.router.bodies import PNG, chat, data_url, picture
from tests.ecshare.router.fake_engine import KEY, Clock, Fleet, fleet
from tests.fuzz.description import description
from tests.fuzz.openapi import check_answer, validator

SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": data_url(b"film", "video/mp4")}}
BY_URL = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
GOOD = [chat(), chat("text"), chat(picture(PNG), SOUND, VIDEO, BY_URL, temperature=1)]
GOOD += [{"messages": [{"role": "user", "content": None}], "stream": True, "more": [1]}]
BAD: list[Any] = [
    *([], {}, {"messages": []}, {"messages": [{}]}, {"messages": "hello"}, chat(model=1)),
    *(chat(kv_transfer_params={}), chat(1), {"messages": [{"role": "user", "content": 1}]}),
    *(chat({"type": "image_url", "image_url": {"url": url}}) for url in ("", "file:///x", "data:")),
    chat({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "a,b"}}),
]


def test_every_route_is_described_and_nothing_else() -> None:
    served = Router(RouterConfig(decoders=("http://127.0.0.1:9",)), Clock()).routes()
    routes = {
        (path, method.lower())
        for path, methods in served.items()
        for method in methods
        if method != "HEAD"
    }
    described = {
        (path, method) for path, methods in description()["paths"].items() for method in methods
    }
    assert described == routes


def test_it_is_json_schema_and_refers_to_nothing_that_is_missing() -> None:
    Draft202012Validator.check_schema({"$defs": description()["components"]["schemas"]})
    text = json.dumps(description())
    for name in {each.split('"')[0] for each in text.split('"#/components/schemas/')[1:]}:
        assert name in description()["components"]["schemas"]


@pytest.mark.parametrize("body", GOOD, ids=repr)
def test_good_bodies_fit(body: Any) -> None:
    validator("ChatCompletion").validate(body)


@pytest.mark.parametrize("body", BAD, ids=repr)
async def test_bad_bodies_do_not_fit_and_are_refused(body: Any) -> None:
    assert not validator("ChatCompletion").is_valid(body)
    async with fleet(0, 0) as f:
        response, answer = await f.post(json.dumps(body).encode())
        assert response.status == 400
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
        check_answer(CHAT, "post", response.status, response.content_type, answer)


@pytest.mark.parametrize("headers", [{}, KEY])
@pytest.mark.parametrize("healthy", [False, True])
async def test_pages_answer_as_described(f: Fleet, headers: dict[str, str], healthy: bool) -> None:
    f.d.healthy = healthy
    for path, methods in description()["paths"].items():
        if "get" in methods:
            async with f.client.get(f.url + path, headers=headers) as response:
                answer = await response.read()
            check_answer(path, "get", response.status, response.content_type, answer)
            assert (response.status == 401) <= ("security" in methods["get"])


@pytest.mark.parametrize("path", sorted({*PASSED_ON, *SPLIT}))
async def test_every_endpoint_answers_as_described_whatever_engines_say(path: str) -> None:
    async with fleet(0, 0) as f:
        for status in (200, 400, 404, 422, 429, 500, 503):
            f.d.answer = decoded if status == 200 else failing(status)
            for stream in (False, True):
                body = chat(input="text", prompt="text", stream=stream)
                response, answer = await f.post(body, path=path)
                assert response.status == status
                check_answer(path, "post", response.status, response.content_type, answer)
                f.clock.now_s += 60.0  # the engine may be asked again
        response, answer = await f.post({"kv_transfer_params": {}}, path=path)
        check_answer(path, "post", response.status, response.content_type, answer)
