# SPDX-License-Identifier: Apache-2.0
"""Reading a client's request, and the identity of its media."""

import base64
import json
from typing import Any

import pytest
from blake3 import blake3

from ecshare.router.api.chat import read_chat
from ecshare.router.api.client_request import ClientRequest
from ecshare.router.api.errors import ApiError
from ecshare.router.media.identity import identity, inline_url


def read(request: object, max_items: int = 8) -> ClientRequest:
    return read_chat(json.dumps(request).encode(), max_items)


def with_part(part: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


URL = "http://h/a"
WAV = {"data": "QUJD", "format": "wav"}


@pytest.mark.parametrize(
    ("part", "kind", "modality"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, "image_url", "image"),
        ({"type": "image_url", "image_url": URL}, "image_url", "image"),
        ({"image_url": URL, "uuid": "mine"}, "image_url", "image"),
        ({"type": "input_image", "image_url": URL}, "image_url", "image"),
        ({"type": "image_url", "image_url": {"url": URL}, "video_url": None}, "image_url", "image"),
        ({"type": "video_url", "video_url": {"url": URL}}, "video_url", "video"),
        ({"type": "audio_url", "audio_url": {"url": URL}}, "audio_url", "audio"),
        ({"type": "input_audio", "input_audio": WAV}, "input_audio", "audio"),
    ],
)
def test_media_items_are_found_in_every_shape_vllm_takes(
    part: object, kind: str, modality: str
) -> None:
    (item,) = read(with_part(part)).items
    source = "data:audio/wav;base64,QUJD" if kind == "input_audio" else URL
    assert (item.kind, item.modality, item.source) == (kind, modality, source)
    assert item.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    "content",
    [
        "just text",
        None,
        ["bare string"],
        [{"type": "text", "text": "hello"}],
        [{"type": "text", "text": "hello", "image_url": None}],
        [{"type": "refusal", "refusal": "no"}, {"type": "something_new", "x": 1}],
    ],
)
def test_other_content_holds_no_media(content: object) -> None:
    assert read({"messages": [{"role": "user", "content": content}]}).items == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", None),
        (b'{"messages": NaN}', None),
        (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b"[]", None),
        (b"{}", "messages"),
        (b'{"messages": {}}', "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [1]}', "messages[0]"),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": [5]}]}', "messages[0].content[0]"),
        (b'{"model": 5, "messages": [{"role": "user", "content": "x"}]}', "model"),
    ],
)
def test_malformed_requests_are_refused_by_field(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(body, 8)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": {"url": ""}},
        {"image_url": None},  # vLLM would take it for an item without data
        # A uuid alone would fetch what somebody else sent.
        {"type": "image_url", "image_url": None, "uuid": "theirs"},
        # Where type and content disagree, vLLM follows the content as soon as there is a uuid.
        {"type": "text", "text": "hi", "image_url": "http://h/a", "uuid": "theirs"},
        {"type": "text", "text": "hi", "image_url": None, "uuid": "theirs"},
        {"type": "video_url", "video_url": "http://h/v", "image_url": "http://h/a"},
        {"video_url": "http://h/v", "image_url": "http://h/a"},
        # Tensors and metadata are for our own encoders to send.
        {"type": "image_embeds", "image_embeds": "AAAA", "uuid": "theirs"},
        {"type": "video_embeds", "video_embeds": None},
        {"audio_embeds": {"audio_num_tokens": [4]}},
        {"type": "image_pil", "image_pil": "x"},
        {"type": "input_audio", "input_audio": {"data": "QUJD"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav;base64,QUJD,"}},
    ],
)
def test_parts_that_could_borrow_another_identity_are_refused(part: object) -> None:
    with pytest.raises(ApiError) as caught:
        read(with_part(part))
    assert (caught.value.status, caught.value.param) == (400, "messages[0].content[0]")


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"remote_host": "evil"}},
        {"ec_transfer_params": {"peer_host": "evil"}},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": {"kvshare_save": 1}},
        {"kv_transfer_params": {"kvshare_save": True, "kvshare": {"num_tokens": 9}}},
        {"ec_transfer_params": {"kvshare_save": True}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ],
)
def test_transfer_params_are_not_for_clients(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        read(with_part("hello") | fields)
    assert caught.value.param in ("kv_transfer_params", "ec_transfer_params")


def test_the_number_of_items_is_bounded() -> None:
    part = {"type": "image_url", "image_url": "http://h/a"}
    request = {"messages": [{"role": "user", "content": [part] * 3}]}
    assert len(read(request, max_items=3).items) == 3
    with pytest.raises(ApiError, match="3 media items; at most 2"):
        read(request, max_items=2)


def test_identity_is_blake3_of_modality_and_bytes() -> None:
    content = bytes(range(256)) * 4096  # several pieces of base64
    text = base64.b64encode(content).decode()
    expected = blake3(b"image\0" + content).hexdigest()
    for url in (
        f"data:image/png;base64,{text}",
        f"data:image/jpeg;base64,{text}",
        inline_url(text),
    ):
        assert identity("image", url) == expected
        assert identity("video", url) != expected


def test_a_video_of_jpegs_is_more_than_its_joined_bytes() -> None:
    first, second, joined = (
        base64.b64encode(each).decode() for each in (b"abc", b"def", b"abcdef")
    )
    urls = [f"jpeg;base64,{first},{second}", f"jpeg;base64,{joined}", f"mp4;base64,{joined}"]
    assert len({identity("video", f"data:video/{url}") for url in urls}) == 3


@pytest.mark.parametrize(
    "text",
    ["", "Q", "QQ", "QQ=", "QQ==QQ==", "Q Q=", "QUI-", "QUI=\n", "=QQ=", "QQ==" + "A" * 262_144,
     "A" * 262_142 + "==AAAA", "é"],
)  # fmt: skip
def test_base64_is_read_strictly(text: str) -> None:
    with pytest.raises(ValueError, match="base64|empty"):
        identity("image", "data:image/png;base64," + text)


@pytest.mark.parametrize(
    "url", ["data:image/png;base64", "data:image/png,QUJD", "data:;BASE64,QQ=="]
)
def test_only_base64_data_urls_are_read(url: str) -> None:
    with pytest.raises(ValueError, match="data: url"):
        identity("image", url)
