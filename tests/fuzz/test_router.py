# SPDX-License-Identifier: Apache-2.0
"""The router's parsers, of clients' requests and of engines' answers, without a network.

A request is accepted, or refused with an error in OpenAI's shape. Forwarded requests name each
media item by its content, and have no transfer params of a client.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ecshare.router.api.chat import CHAT_ENDPOINT, read_chat
from ecshare.router.api.client_request import (
    MEDIA_FIELDS,
    SAVE_OPTIONS,
    TRANSFER_FIELDS,
    ClientRequest,
    Media,
)
from ecshare.router.api.errors import ApiError
from ecshare.router.http.dispatch import request_id
from ecshare.router.media.identity import identity, inline_url, is_inline
from ecshare.router.options.engines import engine_url
from ecshare.router.stages import plan
from tests.fuzz.running import fuzzed
from tests.fuzz.values import ODD_TEXT, mutated, odd_text, values, written

pytestmark = pytest.mark.fuzz

MAX_ITEMS = 64
PIXELS = "data:image/png;base64,iVBORw0KGgo="
REQUESTS: list[dict[str, Any]] = [
    {
        "model": "m",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "hi"},
                    {"type": "image_url", "image_url": {"url": PIXELS}, "uuid": "abc"},
                ],
            }
        ],
        "stream": True,
        "max_tokens": 5,
    },
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "x"},
            {
                "role": "user",
                "content": [
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                    {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,AAAB"}},
                ],
            },
        ],
        "vllm_xargs": {"a": 1},
    },
    {
        "model": "m",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "audio_url", "audio_url": {"url": PIXELS}},
                    {"image_url": {"url": PIXELS}},
                    "text",
                    {"type": "input_image", "image_url": PIXELS},
                ],
            }
        ],
        "mm_processor_kwargs": {"a": 1},
        "cache_salt": "s",
    },
]
KINDS = [*MEDIA_FIELDS, "text", "input_image", "input_text", "refusal", "thinking"]
URLS = [
    *(
        PIXELS,
        "DATA:image/png;base64,AAAA",
        "data:,AAAA",
        "data:image/png;base64,",
        "data:;base64,A",
    ),
    *("data:video/jpeg;x=1;base64,AA==,BB==", "data:image/png;BASE64,AAAA", "data:x ;base64 ,AAAA"),
    *("data:image/png;base64,AA\nAA", "data:image/png;base64,____", "data:;base64,AAA=AAAA"),
    *("http://127.0.0.1:1/x", "file:///etc/passwd", " data:;base64,AAAA", "data:;base64,\ud800"),
]
SOUNDS = [{"data": "AAAA", "format": form} for form in ("wav", "w,av", "wav;base64", "x" * 33)]
TRANSFERS: list[Any] = [
    None,
    {},
    {"kvshare_save": True},
    {"ecshare_save": 1},
    {"kvshare": {"streamed": True}},
    0,
    False,
    "",
    [],
]
XARGS = [{name: None} for name in TRANSFER_FIELDS] + [[["kv_transfer_params", 1]], "x", None]

held = st.sampled_from([{"url": url} for url in URLS] + URLS + SOUNDS + [None, {}]) | values


@st.composite
def requests(draw: DrawFn) -> Any:
    """A request with malformed parts, mostly in its media."""
    request = draw(st.sampled_from(REQUESTS).flatmap(mutated))
    parts = [part for part in media_parts(request) if draw(st.booleans())]
    for part in parts:
        if draw(st.booleans()):
            part["type"] = draw(st.sampled_from(KINDS))
        if draw(st.booleans()):
            part[draw(st.sampled_from(KINDS))] = draw(held)
        if draw(st.booleans()):
            part["uuid"] = draw(values)
    if isinstance(request, dict) and draw(st.integers(0, 4)) == 0:
        request[draw(st.sampled_from(TRANSFER_FIELDS))] = draw(st.sampled_from(TRANSFERS))
        request["vllm_xargs"] = draw(st.sampled_from(XARGS))
    return request


def media_parts(request: Any) -> list[dict[str, Any]]:
    """Every object in a list of contents, however malformed the rest is."""
    messages = request.get("messages") if isinstance(request, dict) else None
    contents = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict)
    ]
    return [
        part
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict)
    ]


@st.composite
def bodies(draw: DrawFn) -> bytes:
    body = written(draw(requests()), ascii_only=draw(st.booleans()))
    match draw(st.integers(0, 19)):
        case 0:
            at = draw(st.integers(0, len(body) - 1))
            body = body[:at] + draw(st.binary(min_size=1, max_size=3)) + body[at + 1 :]
        case 1:
            body = body[: draw(st.integers(0, len(body)))]
        case 2:
            body = b"[" * draw(st.sampled_from([100, 5000, 100_000])) + body
        case 3:
            body = b'{"messages":' * draw(st.sampled_from([100, 5000])) + b"1"
    return body


def decoded(answer: Any) -> dict[str, Any] | None:
    """An engine's answer as the router reads it."""
    try:
        read = msgspec.json.decode(written(answer))
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def media_of(chat: ClientRequest) -> list[Media]:
    media = []
    for item in chat.items:
        url = item.source if is_inline(item.source) else inline_url("ZG93bmxvYWRlZA==")
        try:
            media.append(Media(identity(item.modality, url), url))
        except ValueError as exc:
            raise ApiError(400, str(exc)) from exc
    return media


def check_sent(request: dict[str, Any], media: Sequence[Media]) -> None:
    extra = request.get("vllm_xargs")
    for name, option in SAVE_OPTIONS.items():
        assert (request.get(name) or {}).items() <= ({option: True} | plan.FOR_DECODE).items()
        assert not isinstance(extra, dict) or name not in extra
    uuids = {each.uuid for each in media}
    for part in media_parts(request):
        kinds = {name for name in MEDIA_FIELDS if part.get(name) is not None}
        if kinds or part.get("type") in (*MEDIA_FIELDS, "input_image"):
            assert part.get("uuid") in uuids, "an item goes out under a client's name"


def check_error(error: ApiError) -> None:
    assert 400 <= error.status < 500
    said = json.loads(msgspec.json.encode(error.body()))
    assert isinstance(said["error"]["message"], str)
    assert said["error"]["type"] == "invalid_request_error"


E_ANSWER = {"metadata": {"image_grid_thw": [1, 2, 3]}, "item_indices": [0]}
P_ANSWER = {"kv_transfer_params": {"kvshare": {"num_tokens": 7, "size": 1}}}


@fuzzed(200)
@given(bodies(), mutated({"ec_transfer_params": {"uuid": E_ANSWER}}), mutated(P_ANSWER))
def test_chat_requests_are_accepted_or_refused(body: bytes, encoded: Any, prefilled: Any) -> None:
    try:
        chat = read_chat(body, MAX_ITEMS)
        media = media_of(chat)
        answer = decoded(encoded) or {}
        reports = {each.uuid: plan.reported_metadata(answer) for each in media}
        lean = plan.metadata_request(chat, media, reports)
    except ApiError as exc:
        check_error(exc)
        return
    hand_over = plan.reported_hand_over(decoded(prefilled) or {})
    plan.is_streamed(hand_over)
    for request in (
        plan.inline_request(chat, media),
        lean,
        plan.prefill_request(CHAT_ENDPOINT, lean),
        *plan.encode_requests(chat, media).values(),
    ):
        check_sent(request, media)
        with contextlib.suppress(RecursionError):  # which the router reports
            msgspec.json.encode(request)
    sent = plan.decode_request(lean, hand_over)
    said = {**(hand_over or {}), **lean.get("kv_transfer_params", {})}
    assert (sent.get("kv_transfer_params") or {}) == said


@fuzzed(100)
@given(
    st.sampled_from(
        ["", "http://", "dns+http://", "http://127.0.0.1:", "https://[", "http://a:1/v1"]
    ),
    st.sampled_from(ODD_TEXT) | odd_text,
)
def test_engine_urls_are_normalized_or_refused(front: str, text: str) -> None:
    with contextlib.suppress(ValueError):
        url = engine_url(front + text)
        assert url.startswith(("http://", "https://", "dns+http://"))
        assert engine_url(url) == url


@fuzzed(50)
@given(odd_text)
def test_accepted_request_ids_are_printable_ascii(text: str) -> None:
    accepted = request_id({"x-request-id": text})
    assert accepted.isprintable()
    assert accepted.isascii()
