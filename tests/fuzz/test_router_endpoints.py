# SPDX-License-Identifier: Apache-2.0
"""Malformed requests at each endpoint of the router: accepted or refused. No engine gets a client's
item names."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ecshare.router.api.chat import CHAT
from ecshare.router.api.client_request import MEDIA_FIELDS, TRANSFER_FIELDS, turns_of
from ecshare.router.api.endpoints import PASSED_ON, SPLIT
from ecshare.router.api.errors import ApiError, error_body, restated
from ecshare.router.http.dispatch import dialect_of
from ecshare.router.stages import plan
from ecshare.router.stages.plan import prompt_work
from tests.fuzz.running import fuzzed
from tests.fuzz.test_router import MAX_ITEMS, PIXELS, REQUESTS, URLS, media_of
from tests.fuzz.values import mutated, values, written

pytestmark = pytest.mark.fuzz

INPUT_IMAGE = {"type": "input_image", "image_url": PIXELS, "detail": "auto", "uuid": "abc"}
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PIXELS.partition(",")[2]},
}
LINK = {"type": "image", "source": {"type": "url", "url": PIXELS}}
BASES: dict[str, list[dict[str, Any]]] = {
    CHAT: REQUESTS,
    "/v1/completions": [
        {"model": "m", "prompt": "a", "max_tokens": 3, "echo": True, "logprobs": 1},
        {"prompt": [[1, 2], [3]], "stream": True},
        {"prompt": ["a"], "prompt_embeds": "AAAA"},
    ],
    "/v1/responses": [
        {"model": "m", "input": "a", "instructions": "b", "max_output_tokens": 3},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, INPUT_IMAGE]},
                {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]},
            ],
            "previous_response_id": None,
        },
    ],
    "/v1/messages": [
        {
            "model": "m",
            "max_tokens": 3,
            "system": [{"type": "text", "text": "a"}],
            "messages": [
                {"role": "user", "content": [BLOCK, {"type": "text", "text": "a"}, LINK]},
                {"role": "user", "content": [{"type": "tool_result", "content": [BLOCK]}]},
            ],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
    ],
    "/score": [
        {"queries": "a", "documents": {"content": [REQUESTS[0]["messages"][0]["content"][1]]}}
    ],
    "/v1/embeddings": [*REQUESTS, {"input": ["a", "b"]}, {"input": [1, 2]}],
}
BASES["/v1/messages/count_tokens"] = BASES["/v1/messages"]


@st.composite
def asked(draw: DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(BASES)))
    request = draw(st.sampled_from(BASES[path]).flatmap(mutated))
    for part in list(objects(request)):
        if any(name in part for name in ("image_url", "source")) and draw(st.booleans()):
            name = draw(st.sampled_from([*MEDIA_FIELDS, "uuid", "type", "source"]))
            part[name] = draw(st.sampled_from([*MEDIA_FIELDS, *URLS]) | values)
    return path, written(request)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object from which vLLM may read media."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += [inner for name, inner in value.items() if name != "tools"]
        elif isinstance(value, list):
            left += value


def check_refusal(path: str, error: ApiError) -> None:
    assert 400 <= error.status < 500
    shown = error_body(dialect_of(path), error)
    assert isinstance(shown["error"]["message"], str)


def check_sent(path: str, request: dict[str, Any], uuids: set[str]) -> None:
    assert request.get("kv_transfer_params") in (None, plan.FOR_DECODE)
    for part in objects({name: request[name] for name in request if name not in TRANSFER_FIELDS}):
        if path.startswith("/v1/messages"):
            source = part.get("source")
            is_linked = isinstance(source, dict) and source.get("type") == "url"
            assert not (is_linked and part.get("type") == "image" and part in images(request))
        elif part.get("uuid") is not None and (part.keys() & set(MEDIA_FIELDS)):
            assert part["uuid"] in uuids, "an item goes out under a client's name"


def images(request: dict[str, Any]) -> list[Any]:
    """Return the contents in which vLLM looks for images of a message."""
    contents = [message.get("content") for message in request["messages"]]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    results = [block for block in blocks if isinstance(block, dict)]
    inner = [block.get("content") for block in results if block.get("type") == "tool_result"]
    return [*blocks, *(each for content in inner if isinstance(content, list) for each in content)]


@fuzzed(400)
@given(asked())
def test_each_endpoint_accepts_or_refuses_requests(case: tuple[str, bytes]) -> None:
    path, body = case
    try:
        client = {**SPLIT, **PASSED_ON}[path](body, MAX_ITEMS)
        media = media_of(client)
        turns = turns_of(client, media)
        plan.encoding_options(client)
    except ApiError as exc:
        check_refusal(path, exc)
        return
    assert bool(turns) == client.is_one_prompt
    prompt_work(client, media)
    uuids = {each.uuid for each in media}
    plain = plan.inline_request(client, media)
    client.scores_prompt()
    named: dict[str, Any] = {"a": {}} if media else {}
    announced, names_all = (
        plan.encoded_request(client, media, {}, named, names_all=each) for each in (False, True)
    )
    for sent in (plain, announced, names_all, plan.prefill_request(client.endpoint, plain)):
        check_sent(path, sent, uuids)
        with contextlib.suppress(RecursionError):  # which the router reports
            msgspec.json.encode(sent)
    encoded = plan.encode_requests(client, media) if path in SPLIT else {}
    for sent in encoded.values():
        check_sent(CHAT, sent, uuids)


@fuzzed(100)
@given(st.sampled_from(sorted(BASES)), mutated({"error": {"message": "a", "type": "b"}}))
def test_engine_errors_are_translated_or_passed_on(path: str, error: Any) -> None:
    body = written(error)
    shown = restated(dialect_of(path), 400, body)
    assert shown == body or msgspec.json.decode(shown)["type"] == "error"
