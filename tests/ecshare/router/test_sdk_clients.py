# SPDX-License-Identifier: Apache-2.0
"""The official clients of OpenAI and Anthropic, against a router and engines with fixed answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from tests.ecshare.router import answers
from tests.ecshare.router.answers import event, failing
from tests.ecshare.router.bodies import PNG, chat, data_url, picture
from tests.ecshare.router.fake_engine import Fleet, fleet

Json = dict[str, Any]
Told = tuple[Json, list[Json]]
"""A whole answer, and the events of a streamed one."""

WORDS = ["It", " is", " a cat."]
SAID = "".join(WORDS)


def completions() -> Told:
    head = {"id": "cmpl-1", "created": 1, "model": "m", "object": "text_completion"}
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    chunks = [{"index": 0, "text": word} for word in WORDS]
    whole = head | {"choices": [choice | {"text": SAID}], "usage": usage}
    return whole, [head | {"choices": [chunk]} for chunk in chunks]


def chat_completions() -> Told:
    head: Json = {"id": "chatcmpl-1", "created": 1, "model": "m", "object": "chat.completion"}
    message = {"role": "assistant", "content": SAID}
    whole = head | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in WORDS]
    chunk = head | {"object": "chat.completion.chunk"}
    return whole, [chunk | {"choices": [{"index": 0, "delta": delta}]} for delta in deltas]


def responses() -> Told:
    text = {"type": "output_text", "text": SAID, "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    whole: Json = {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed",
        "output": [message | {"content": [text]}], "parallel_tool_calls": True, "tools": [],
        "tool_choice": "auto",
    }  # fmt: skip
    begun = whole | {"status": "in_progress", "output": []}
    at = {"output_index": 0}
    place = {"item_id": "msg_1", "content_index": 0, "logprobs": [], **at}
    deltas = [{"type": "response.output_text.delta", "delta": word, **place} for word in WORDS]
    told: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "item": message | {"content": []}, **at},
        {"type": "response.content_part.added", "part": text | {"text": ""}, **place},
        *deltas,
        {"type": "response.completed", "response": whole},
    ]
    return whole, [event | {"sequence_number": at} for at, event in enumerate(told)]


def messages() -> Told:
    usage = {"input_tokens": 3, "output_tokens": 3}
    whole: Json = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "usage": usage,
        "content": [{"type": "text", "text": SAID}], "stop_reason": "end_turn",
    }  # fmt: skip
    at = {"index": 0}
    deltas = [{"type": "text_delta", "text": word} for word in WORDS]
    told: list[Json] = [
        {"type": "message_start", "message": whole | {"content": [], "stop_reason": None}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, **at},
        *({"type": "content_block_delta", "delta": delta, **at} for delta in deltas),
        {"type": "content_block_stop", **at},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    ]
    return whole, told


DATA = [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]
EMBEDDED: Json = {"object": "list", "model": "m", "data": DATA}
EMBEDDED |= {"usage": {"prompt_tokens": 1, "total_tokens": 1}}
SPEAKS: dict[str, Told] = {
    "/v1/completions": completions(),
    "/v1/chat/completions": chat_completions(),
    "/v1/responses": responses(),
    "/v1/messages": messages(),
    "/v1/messages/count_tokens": ({"input_tokens": 17}, []),
    "/v1/embeddings": (EMBEDDED, []),
}


def events_of(told: list[Json]) -> list[bytes]:
    return [
        (f"event: {each['type']}\n" if "type" in each else "").encode() + event(each)
        for each in told
    ]


async def speaking(http: web.Request, body: Json) -> web.StreamResponse:
    """Answer in the shape that vLLM gives the answers of this path."""
    whole, told = SPEAKS[http.path]
    done = [b"data: [DONE]\n\n"] if http.path.endswith("completions") else []
    stream = answers.streaming(*events_of(told), *done)
    return await answers.either(answers.answering(**whole), stream)(http, body)


@asynccontextmanager
async def speaking_fleet() -> AsyncIterator[tuple[Fleet, openai.AsyncOpenAI]]:
    async with fleet() as f:
        f.d.answer = speaking
        base_url = f.url + "/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
            yield f, client


CHAT: Any = chat(picture(PNG))["messages"]
INPUT_IMAGE = {"type": "input_image", "image_url": data_url(PNG), "detail": "auto"}
QUESTION = {"type": "input_text", "text": "what is this?"}
INPUT: Any = [{"role": "user", "content": [QUESTION, INPUT_IMAGE]}]


async def test_openais_client_completes_and_chats() -> None:
    async with speaking_fleet() as (f, client):
        text = await client.completions.create(model="m", prompt="This is", max_tokens=5)
        assert text.choices[0].text == SAID
        texts = await client.completions.create(model="m", prompt="This is", stream=True)
        assert "".join([part.choices[0].text async for part in texts]) == SAID
        talk = await client.chat.completions.create(model="m", messages=CHAT)
        assert talk.choices[0].message.content == SAID
        talks = await client.chat.completions.create(model="m", messages=CHAT, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in talks]) == SAID
        assert len(f.p.bodies) == 4
        assert len(f.e.bodies) == 1
        assert {headers["authorization"] for headers in f.p.headers} == {"Bearer k"}


async def test_openais_client_gets_responses_and_embeddings() -> None:
    async with speaking_fleet() as (f, client):
        told = await client.responses.create(model="m", input=INPUT)
        assert told.output_text == SAID
        async with client.responses.stream(model="m", input=INPUT) as stream:
            names = [event.type async for event in stream]
            assert names[0] == "response.created"
            assert (await stream.get_final_response()).output_text == SAID
        assert len(f.e.bodies) == 1
        assert len(f.p.bodies) == 2
        found = await client.embeddings.create(model="m", input="cat", encoding_format="float")
        assert found.data[0].embedding == [0.5, -1.0]
        assert len(f.p.bodies) == 2
        assert [model.id async for model in client.models.list()] == ["m"]


async def test_openais_client_understands_the_errors() -> None:
    async with speaking_fleet() as (f, client):
        with pytest.raises(openai.NotFoundError, match="`n` does not exist"):
            await client.responses.create(model="n", input="hi")
        with pytest.raises(openai.BadRequestError, match="responses are not kept"):
            await client.responses.create(model="m", input="hi", previous_response_id="resp_1")
        f.d.answer = failing(400)
        with pytest.raises(openai.BadRequestError, match="engine says no"):
            await client.completions.create(model="m", prompt="hi")


SOURCE = {"type": "base64", "media_type": "image/png", "data": data_url(PNG).split(",")[1]}
TALK: Any = chat({"type": "image", "source": SOURCE})["messages"]


@asynccontextmanager
async def anthropic_client(f: Fleet) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=f.url, auth_token="k", max_retries=0) as client:
        yield client


async def test_anthropics_client_gets_messages() -> None:
    async with speaking_fleet() as (f, _), anthropic_client(f) as client:
        told = await client.messages.create(model="m", max_tokens=5, messages=TALK)
        assert told.content[0].type == "text"
        assert told.content[0].text == SAID
        async with client.messages.stream(model="m", max_tokens=5, messages=TALK) as stream:
            assert [text async for text in stream.text_stream] == WORDS
        assert len(f.e.bodies) == 1
        assert len(f.p.bodies) == 2
        assert f.p.headers[0]["authorization"] == "Bearer k"
        counted = await client.messages.count_tokens(model="m", messages=TALK)
        assert counted.input_tokens == 17
        assert len(f.p.bodies) == 2


async def test_anthropics_client_understands_the_errors() -> None:
    async with speaking_fleet() as (f, _), anthropic_client(f) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(model="n", max_tokens=5, messages=TALK)
        assert caught.value.type == "not_found_error"
        f.d.answer = answers.streaming(*events_of(messages()[1][:3]), breaks=True)
        with pytest.raises(anthropic.APIStatusError, match="decode engine failed"):
            async with client.messages.stream(model="m", max_tokens=5, messages=TALK) as stream:
                await asyncio.wait_for(stream.until_done(), 10)
