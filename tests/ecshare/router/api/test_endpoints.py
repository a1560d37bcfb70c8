# SPDX-License-Identifier: Apache-2.0
"""The endpoints besides chat completions: what each stage is sent, and what the client gets."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from ecshare.router.api.chat import CHAT
from ecshare.router.api.endpoints import PASSED_ON, SPLIT
from ecshare.router.media.identity import identity
from tests.ecshare.router import answers
from tests.ecshare.router.answers import DECODED, EVENTS, HASHED, decoded, failing, stored
from tests.ecshare.router.bodies import PNG, chat, data_url, picture, uuid_of
from tests.ecshare.router.fake_engine import KEY, LOOPBACK, Fleet, fleet
from tests.ecshare.router.media.fake_media import media_server

COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
UUID = uuid_of(PNG)
ALL = "encode,prefill,decode"
HAND_OVER = {"kvshare": {"num_tokens": 7}}
SCREENSHOT = {"type": "computer_screenshot", "image_url": data_url(PNG)}
VIDEO = {"type": "video_url", "video_url": data_url(PNG, "video/mp4")}
BASE64 = base64.b64encode(PNG).decode()


def completion(prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": 5, **fields}


def input_image(url: str = data_url(PNG)) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def response(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "input_text", "text": "what is this?"}, *parts]
    message = {"role": "user", "content": content}
    return {"model": "m", "input": [message], "max_output_tokens": 5, **fields}


def block(data: str = BASE64, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "image", "source": source}


def message(*parts: Any, **fields: Any) -> dict[str, Any]:
    return chat(*parts, **{"max_tokens": 5, **fields})


BODIES: dict[str, Callable[..., dict[str, Any]]] = {
    CHAT: lambda **fields: chat(**fields),
    COMPLETIONS: completion,
    RESPONSES: response,
    MESSAGES: message,
}
every_endpoint = pytest.mark.parametrize("path", SPLIT)


@pytest.fixture
async def after() -> AsyncIterator[Fleet]:
    """A fleet whose D is asked behind P."""
    async with fleet(hand_over="after") as made:
        yield made


@every_endpoint
async def test_prefill_and_decode_are_asked_at_the_same_endpoint(after: Fleet, path: str) -> None:
    body = BODIES[path](temperature=0, unheard_of={"a": 1.5})
    assert await after.way(body, path) == "prefill,decode"
    assert after.p.paths == after.d.paths == [path]
    assert after.d.bodies == [body | {"kv_transfer_params": HAND_OVER}]
    (prefill,) = after.p.bodies
    limits = [name for name in prefill if name.startswith("max_")]
    assert limits
    assert prefill.items() >= (body | dict.fromkeys(limits, 1) | {"stream": False}).items()


async def test_decode_alone_gets_an_image_of_a_response_under_another_name() -> None:
    """vLLM's cache of inputs may have it without its bytes, from a chat completion."""

    async def with_cache_of_inputs(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        names = {part.get("uuid") for part in body["input"][0]["content"]}
        return await (failing(500) if UUID in names else decoded)(http, body)

    async with fleet(hand_over="after") as f:
        f.d.answer = with_cache_of_inputs
        assert await f.way(response(input_image()), RESPONSES) == "decode"


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["text"], [[1, 2, 3]]])
async def test_a_completion_of_one_prompt_is_handed_over(after: Fleet, prompt: Any) -> None:
    assert await after.way(completion(prompt), COMPLETIONS) == "prefill,decode"
    assert after.d.bodies[0]["kv_transfer_params"] == HAND_OVER
    assert after.d.bodies[0]["prompt"] == after.p.bodies[0]["prompt"] == prompt


@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize(
    "body",
    [completion(["one", "two"]), completion([[1], [2, 3]]), completion("", prompt_embeds="A")],
)
async def test_several_prompts_are_prefilled_and_nothing_is_announced(
    f: Fleet, body: dict[str, Any]
) -> None:
    for _ in range(2):  # P is now known to store while it computes
        assert await f.way(body, COMPLETIONS) == "prefill,decode"
    assert f.d.bodies == [body, body]
    assert len(f.p.bodies) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion(echo=True, logprobs=1)),
        (COMPLETIONS, completion(prompt_logprobs=0)),
        (CHAT, chat(echo=True)),
    ],
)
async def test_decode_alone_is_asked_for_the_scores_of_a_prompt(
    f: Fleet, path: str, body: dict[str, Any]
) -> None:
    assert await f.way(body, path) == "decode"
    assert await f.way(completion(echo=True), COMPLETIONS) == "prefill,decode"


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        (COMPLETIONS, {"prompt_tokens": 100}),
        (RESPONSES, {"input_tokens": 100}),
        (MESSAGES, {"input_tokens": 60, "cache_read_input_tokens": 40}),
    ],
)
async def test_a_prompt_that_is_stored_goes_straight_to_decode(
    after: Fleet, path: str, usage: dict[str, int]
) -> None:
    after.p.answer = stored(99, **usage)
    assert await after.way(BODIES[path](), path) == "prefill,decode"
    assert await after.way(BODIES[path](temperature=1), path) == "decode"
    assert await after.way(BODIES[path](cache_salt="other"), path) == "prefill,decode"


@pytest.mark.parametrize(
    ("path", "field", "said"),
    [(RESPONSES, "instructions", "Be brief."), (MESSAGES, "system", [{"text": "Be brief."}])],
)
async def test_instructions_are_part_of_the_prompt(
    after: Fleet, path: str, field: str, said: Any
) -> None:
    after.p.answer = stored(input_tokens=100)
    for fields in ({}, {field: said}):
        assert await after.way(BODIES[path](**fields), path) == "prefill,decode"
        assert await after.way(BODIES[path](**fields), path) == "decode"


async def test_one_prompt_at_two_endpoints_is_two_prompts(after: Fleet) -> None:
    after.p.answer = stored(input_tokens=100, prompt_tokens=100)
    body = message() | {"max_tokens": 5}
    assert await after.way(body, MESSAGES) == "prefill,decode"
    assert await after.way(body, CHAT) == "prefill,decode"


async def test_a_picture_of_a_response_is_named_and_announced(after: Fleet) -> None:
    body = response(input_image(), store=True)
    assert await after.way(body, RESPONSES) == ALL
    assert after.e.paths == [CHAT]
    assert after.e.bodies[0]["messages"][0]["content"] == [picture(PNG) | {"uuid": UUID}]
    for sent in (after.p.bodies[0], after.d.bodies[0]):
        assert sent["input"][0]["content"][1] == input_image() | {"uuid": UUID}
        assert sent["ec_transfer_params"].keys() == {UUID}
    # It is stored by now, also for chat completions.
    assert await after.way(body, RESPONSES) == "prefill,decode"
    assert await after.way(chat(picture(PNG)), CHAT) == "prefill,decode"
    assert "ec_transfer_params" not in after.p.bodies[1]
    assert len(after.e.bodies) == 1


async def test_a_picture_in_a_tools_answer_is_one_too(f: Fleet) -> None:
    answer = {"type": "function_call_output", "call_id": "c", "output": [input_image()]}
    assert await f.way({"model": "m", "input": [answer]}, RESPONSES) == ALL
    assert f.p.bodies[0]["input"][0]["output"] == [input_image() | {"uuid": UUID}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block()]}
    assert await f.way(message(result), MESSAGES) == ALL
    assert f.p.bodies[1]["messages"] == message(result)["messages"]
    # vLLM looks no deeper.
    deeper = result | {"content": [block("AAAA")]}
    nested = result | {"content": [deeper]}
    assert await f.way(message(nested), MESSAGES) == "prefill,decode"


async def test_a_picture_of_a_message_keeps_vllms_own_name(after: Fleet) -> None:
    assert await after.way(message(block()), MESSAGES) == ALL
    assert after.e.paths == [CHAT]
    assert after.e.bodies[0]["messages"][0]["content"] == [picture(PNG)]
    for sent in (after.p.bodies[0], after.d.bodies[0]):
        assert sent["messages"] == message(block())["messages"]
        assert sent["ec_transfer_params"].keys() == {HASHED}
    assert await after.way(message(block()), MESSAGES) == "prefill,decode"
    # Under the router's name it is not stored.
    assert await after.way(chat(picture(PNG)), CHAT) == ALL


async def test_engines_fetch_no_urls() -> None:
    async with media_server() as host, fleet(allow_media_networks=LOOPBACK) as f:
        url = host + "/a.png"
        inline = "data:application/octet-stream;base64," + BASE64
        assert await f.way(response(input_image(url)), RESPONSES) == ALL
        assert f.p.bodies[0]["input"][0]["content"][1]["image_url"] == inline
        linked = {"type": "image", "source": {"type": "url", "url": url}}
        assert await f.way(message(linked), MESSAGES) == ALL
        sent = f.p.bodies[1]["messages"][0]["content"][1]
        assert sent == block(media_type="application/octet-stream")
        for path, body in (
            ("/tokenize", {"messages": [{"role": "user", "content": [picture(PNG)]}]}),
            ("/score", {"queries": "q", "documents": {"content": [picture(PNG)]}}),
        ):
            by_url = json.dumps(body).replace(data_url(PNG), url)
            assert await f.way(json.loads(by_url), path) == "decode"
            named = inline + f'"}}, "uuid": "{UUID}"'
            fetched = json.dumps(body).replace(data_url(PNG) + '"}', named)
            assert f.d.bodies[-1] == json.loads(fetched) | {"model": "m"}


async def test_large_images_arrive_whole() -> None:
    """Their base64 is kept apart from the JSON."""
    large = base64.b64encode(bytes(range(256)) * 1000).decode()
    url = "data:image/png;base64," + large
    uuid = identity("image", url)
    async with fleet() as f:
        assert await f.way(message(block(large)), MESSAGES) == ALL
        assert await f.way(response(input_image(url)), RESPONSES) == ALL
        assert await f.way(message(block(large)), "/v1/messages/count_tokens") == "decode"
        shown = [body["messages"][0]["content"] for body in f.e.bodies]
        whole = {"type": "image_url", "image_url": {"url": url}}
        assert shown == [[whole], [whole | {"uuid": uuid}]]
        assert f.p.bodies[0]["messages"] == message(block(large))["messages"]
        assert f.d.bodies[1]["input"][0]["content"][1] == input_image(url) | {"uuid": uuid}
        assert f.d.bodies[2] == message(block(large))


async def test_a_known_image_is_fetched_at_once_where_its_bytes_are_needed() -> None:
    statuses: list[int] = []

    async def image(http: web.Request) -> web.Response:
        has_it = http.headers.get("If-None-Match") == '"a"'
        statuses.append(304 if has_it else 200)
        content = b"" if has_it else PNG
        return web.Response(status=statuses[-1], body=content, headers={"ETag": '"a"'})

    async with media_server(image) as host, fleet(allow_media_networks=LOOPBACK) as f:
        for stages in ("encode,prefill,decode", "prefill,decode"):
            assert await f.way(response(input_image(host + "/a.png")), RESPONSES) == stages
        assert statuses == [200, 200]


async def test_thinking_does_not_keep_prefill_from_one_token(f: Fleet) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = message(thinking=thinking) | {"max_tokens": 2048}
    assert await f.way(body, MESSAGES) == "prefill,decode"
    assert "thinking" not in f.p.bodies[0]
    assert f.d.bodies[0]["thinking"] == thinking


@every_endpoint
async def test_if_prefill_fails_decode_does_it_all(f: Fleet, path: str) -> None:
    for answer in (answers.hang_up, failing(500)):
        f.p.answer = answer
        assert await f.way(BODIES[path](), path) == "decode"
        assert f.d.bodies.pop() == BODIES[path]()
        f.clock.now_s += 60


@pytest.mark.parametrize(
    ("path", "body"), [(RESPONSES, response(input_image())), (MESSAGES, message(block()))]
)
async def test_if_encode_fails_decode_does_it_all(
    f: Fleet, path: str, body: dict[str, Any]
) -> None:
    f.e.answer = failing(500)
    assert await f.way(body, path) == "decode"
    assert f.p.bodies == []
    assert not any(name.endswith("transfer_params") for name in f.d.bodies[0])


def openai_error(content: bytes) -> str:
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["type"])


def anthropic_error(content: bytes) -> str:
    body = json.loads(content)
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return str(body["error"]["type"])


KINDS = {path: openai_error for path in SPLIT} | {MESSAGES: anthropic_error}


@every_endpoint
async def test_errors_have_the_shape_of_the_endpoint(path: str) -> None:
    kind = KINDS[path]
    async with fleet(max_decodes=1) as f:
        for body, status in (
            (b"{", 400),
            (BODIES[path](kv_transfer_params={}), 400),
            (BODIES[path](ec_transfer_params={"a": {}}), 400),
            (BODIES[path](vllm_xargs={"kv_transfer_params": 1}), 400),
            ({"model": "m", "input": 7, "messages": 7}, 400 if path in (CHAT, MESSAGES) else 200),
            (BODIES[path](model="other"), 404),
        ):
            answer, content = await f.post(body, path=path)
            assert answer.status == status, body
            assert status == 200 or kind(content)
        async with f.client.get(f.url + path) as wrong:
            assert wrong.status == 405
            assert kind(await wrong.read())
    async with fleet(num_e=0, num_p=0, num_d=0, decoders_more=("http://127.0.0.1:9",)) as f:
        answer, content = await f.post(BODIES[path](), path=path)
        assert answer.status == 503
        assert kind(content) == ("overloaded_error" if path == MESSAGES else "server_error")


@pytest.mark.parametrize(
    ("path", "end"),
    [
        (COMPLETIONS, b'\n\ndata: {"error":{"message":"The decode engine failed.",'),
        (
            RESPONSES,
            b'\n\nevent: error\ndata: {"type":"error","code":"engine_failed",'
            b'"message":"The decode engine failed.","param":null,"sequence_number":0}\n\n',
        ),
        (
            MESSAGES,
            b'\n\nevent: error\ndata: {"type":"error","error":{"type":"api_error",'
            b'"message":"The decode engine failed."}}\n\n',
        ),
    ],
)
async def test_a_stream_that_breaks_off_ends_in_the_shape_of_the_endpoint(
    f: Fleet, path: str, end: bytes
) -> None:
    f.d.answer = answers.break_in_the_stream
    _, content = await f.post(BODIES[path](stream=True), path=path)
    assert content.startswith(EVENTS[0] + end)


async def test_a_refusal_of_encode_is_restated_for_anthropics_clients(f: Fleet) -> None:
    f.e.answer = failing(400)
    answer, content = await f.post(message(block()), path=MESSAGES)
    assert answer.status == 400
    assert anthropic_error(content) == "invalid_request_error"
    assert "engine says no" in content.decode()
    answer, content = await f.post(response(input_image()), path=RESPONSES)
    assert json.loads(content) == {"error": {"message": "engine says no"}}
    own = {"type": "error", "error": {"type": "engines_own", "message": "no"}}
    f.p.answer = answers.answering(400, **own)
    answer, content = await f.post(message(), path=MESSAGES)
    assert json.loads(content) == own


async def test_a_stream_that_begins_with_an_error_is_begun_elsewhere() -> None:
    begun = {"type": "message_start"}, {"type": "error", "error": {"message": "no"}}
    content = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in begun)
    async with fleet(num_d=2) as f:
        await f.post(message(), path=MESSAGES)  # which asks for the models too
        (first,) = (each for each in f.decoders if f.is_next(each))
        first.bodies.clear()
        first.answer = answers.streaming(content.encode())
        assert (await f.post(message(stream=True), path=MESSAGES))[1] == DECODED[True]
        assert first.bodies


@pytest.mark.parametrize("path", PASSED_ON)
async def test_other_requests_are_passed_on_to_one_engine(f: Fleet, path: str) -> None:
    body = {"model": "m", "input": ["a", "b"], "prompt": "a", "messages": message()["messages"]}
    body |= {"tools": [{"image_url": 1}], "image_url": 7, "tokens": [1, 2**63 - 1], "more": 1.5}
    assert await f.way(body, path) == "decode"
    assert (f.d.paths, f.d.bodies) == ([path], [body])
    assert f.e.bodies == f.p.bodies == []
    f.d.answer = failing(404)
    answer, content = await f.post(body, path=path)
    assert answer.status == 404
    assert b"engine says no" in content


@pytest.mark.parametrize("path", sorted({*PASSED_ON, *SPLIT} - {COMPLETIONS}))
async def test_no_endpoint_takes_names_or_tensors_from_clients(path: str) -> None:
    lean: list[dict[str, Any]] = [
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 3]}, "uuid": UUID},
        {"type": "input_image", "image_url": None, "uuid": UUID},
        {"type": "text", "text": "a", "image_url": data_url(PNG), "uuid": UUID},
    ]
    async with fleet() as f:
        for part in lean:
            role = {"role": "user", "content": [part]}
            body = {"model": "m", "max_tokens": 5, "messages": [role], "input": [role]}
            answer, _ = await f.post(body, path=path)
            # The Messages API has no such parts: vLLM ignores what they say.
            assert answer.status == (200 if path.startswith(MESSAGES) else 400)
        bodies = f.e.bodies + f.p.bodies + f.d.bodies
        assert path.startswith(MESSAGES) or not bodies


async def test_only_what_goes_through_the_stages_is_measured_as_a_completion(f: Fleet) -> None:
    for path, number in (("/v1/embeddings", 0), (COMPLETIONS, 1), (RESPONSES, 2)):
        await f.post(BODIES[RESPONSES](prompt="a"), path=path)
        async with f.client.get(f.url + "/metrics", headers=KEY) as metrics:
            text = await metrics.text()
        assert f'ecshare_router_answers_total{{route="{path}",status="2xx"}} 1.0' in text
        counted = f'ecshare_router_request_seconds_count{{path="prefill,decode"}} {number}.0'
        assert (counted in text) is bool(number)
        assert 'request_seconds_count{path="decode"}' not in text


async def test_a_clients_name_is_replaced(f: Fleet) -> None:
    theirs = {"role": "user", "content": [picture(PNG) | {"uuid": "theirs"}]}
    for path in ("/tokenize", "/pooling", "/v1/embeddings", "/classify"):
        assert await f.way({"model": "m", "messages": [theirs]}, path) == "decode"
        assert f.d.bodies[-1]["messages"][0]["content"][0]["uuid"] == UUID
    assert await f.way(response(input_image() | {"uuid": "theirs"}), RESPONSES) == ALL
    assert f.d.bodies[-1]["input"][0]["content"][1]["uuid"] == UUID


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, response(input_image("")), "input[0].content[1]"),
        (RESPONSES, {"input": input_image("")}, "input"),
        (RESPONSES, response(input_image(""), input_image("")), "input[0].content[1]"),  # the first
        (RESPONSES, response(VIDEO), "input[0].content[1]"),
        (RESPONSES, {"input": [{"output": SCREENSHOT}]}, "input[0].output"),
        (RESPONSES, response(previous_response_id="x"), "previous_response_id"),
        (RESPONSES, response(background=True), "background"),
        (CHAT, chat({"type": "image_url"}), "messages[0].content[1]"),
        (CHAT, {"messages": "hello"}, "messages"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": ["a"]}, "messages[0]"),
        (MESSAGES, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (MESSAGES, message({"type": "image"}), "messages[0].content[1]"),
        (MESSAGES, message(block(media_type="image/png,x")), "messages[0].content[1]"),
        (MESSAGES, message(block(data="!")), "messages[0].content[1]"),
        ("/pooling", {"messages": [{"content": [{"image_url": 1}]}]}, "messages[0].content[0]"),
    ],
)
async def test_malformed_requests_are_refused(
    f: Fleet, path: str, body: dict[str, Any], param: str
) -> None:
    answer, content = await f.post(body, path=path)
    assert answer.status == 400
    error = json.loads(content)["error"]
    assert path == MESSAGES or error["param"] == param
    assert f.e.bodies == f.p.bodies == f.d.bodies == []
