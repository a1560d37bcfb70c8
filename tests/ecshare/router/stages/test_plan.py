# SPDX-License-Identifier: Apache-2.0
"""What each stage is sent, and what is believed of its answers."""

import copy
import json
from typing import Any

import pytest

from ecshare.router.api.chat import CHAT_ENDPOINT, read_chat
from ecshare.router.api.client_request import ClientRequest, Media
from ecshare.router.media.identity import identity
from ecshare.router.stages import plan
from tests.ecshare.router.bodies import PNG, PNG_2, data_url, picture

SOUND = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}
GRID: plan.Metadata = {"image_grid_thw": [1, 32, 32]}


def read(request: dict[str, Any]) -> tuple[ClientRequest, list[Media]]:
    chat = read_chat(json.dumps(request).encode(), 16)
    media = [Media(identity(item.modality, item.source), item.source) for item in chat.items]
    return chat, media


def conversation() -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "name": "u", "content": [
                {"type": "text", "text": "one"},
                picture(PNG) | {"uuid": "client's", "cache_control": {"type": "ephemeral"}},
                "two",
                picture(PNG_2),
            ]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "tool_call_id": "t", "content": [picture(PNG)]},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"a": 1},
        "documents": [{"title": "t"}],
        "mm_processor_kwargs": {"max_pixels": 4096},
        "media_io_kwargs": {"image": {"x": 1}},
        "temperature": 0.3, "seed": 12345678901234567890, "n": 3, "logprobs": True,
        "max_tokens": 9, "min_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
        "unheard_of": {"deep": [1.5, None, True]},
    }  # fmt: skip


def test_the_plain_request_differs_in_identities_only() -> None:
    chat, media = read(conversation())
    expected = conversation()
    expected["messages"][1]["content"][1]["uuid"] = media[0].uuid
    expected["messages"][1]["content"][3]["uuid"] = media[1].uuid
    expected["messages"][3]["content"][0]["uuid"] = media[0].uuid
    assert plan.inline_request(chat, media) == expected
    assert chat.request == conversation()  # untouched


def test_a_downloaded_item_travels_as_bytes() -> None:
    part = {"type": "image_url", "image_url": {"url": "http://h/a", "detail": "low"}}
    chat = read_chat(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode(), 1)
    request = plan.inline_request(chat, [Media("id", data_url(PNG))])
    sent = request["messages"][0]["content"][0]
    assert sent == {"type": "image_url", "image_url": {"url": data_url(PNG)}, "uuid": "id"}


def test_input_audio_keeps_its_shape() -> None:
    chat, media = read({"messages": [{"role": "user", "content": [SOUND]}]})
    (sent,) = plan.inline_request(chat, media)["messages"][0]["content"]
    assert sent == SOUND | {"uuid": media[0].uuid}


def test_an_encoder_gets_each_distinct_item_once_and_nothing_else() -> None:
    chat, media = read(conversation())
    requests = plan.encode_requests(chat, media)
    assert list(requests) == [media[0].uuid, media[1].uuid]
    assert requests[media[1].uuid] == {
        "model": "m",
        "mm_processor_kwargs": {"max_pixels": 4096},
        "media_io_kwargs": {"image": {"x": 1}},
        "messages": [{"role": "user", "content": [picture(PNG_2) | {"uuid": media[1].uuid}]}],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "ec_transfer_params": {"ecshare_save": True},
    }


def test_reported_items_become_metadata() -> None:
    chat, media = read(conversation())
    other: plan.Metadata = {"image_grid_thw": [1, 2, 2]}
    lean = plan.metadata_request(chat, media, {media[0].uuid: GRID, media[1].uuid: other})
    expected = conversation()
    first = {"type": "image_embeds", "image_embeds": GRID, "uuid": media[0].uuid}
    expected["messages"][1]["content"][1] = first | {"cache_control": {"type": "ephemeral"}}
    expected["messages"][1]["content"][3] = {
        "type": "image_embeds", "image_embeds": other, "uuid": media[1].uuid
    }  # fmt: skip
    expected["messages"][3]["content"][0] = first
    assert lean == expected
    assert chat.request == conversation()


@pytest.mark.parametrize("second", [None, {"other_field": [1]}])
def test_a_modality_is_rewritten_whole_or_not_at_all(second: plan.Metadata | None) -> None:
    content = [picture(PNG), picture(PNG_2), SOUND]
    chat, media = read({"messages": [{"role": "user", "content": content}]})
    tokens: plan.Metadata = {"audio_num_tokens": [8]}
    reports = {media[0].uuid: GRID, media[1].uuid: second, media[2].uuid: tokens}
    parts = plan.metadata_request(chat, media, reports)["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "audio_embeds"]
    assert [part["uuid"] for part in parts] == [held.uuid for held in media]


def test_prefill_gets_the_same_prompt_and_one_token() -> None:
    chat, media = read(conversation())
    request = plan.inline_request(chat, media)
    before = copy.deepcopy(request)
    sent = plan.prefill_request(CHAT_ENDPOINT, request)
    expected = before | {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}
    expected["kv_transfer_params"] = {"kvshare": {"for_decode": True}}
    for name in ("stream_options", "logprobs", "min_tokens"):
        del expected[name]
    assert sent == expected
    assert request == before


def test_decode_gets_the_clients_sampling_and_the_hand_over() -> None:
    chat, media = read(conversation())
    request = plan.inline_request(chat, media)
    sent = plan.decode_request(request, {"kvshare": {"num_tokens": 7}})
    assert sent == request | {"kv_transfer_params": {"kvshare": {"num_tokens": 7}}}
    assert plan.decode_request(request, None) == request


def test_null_transfer_params_are_dropped() -> None:
    chat, media = read(conversation() | {"kv_transfer_params": None})
    assert "kv_transfer_params" not in plan.inline_request(chat, media)


def report(**fields: Any) -> dict[str, Any]:
    return {"ec_transfer_params": {"key": {"metadata": dict(GRID), "item_indices": [0], **fields}}}


NO_PARAMS: list[Any] = [None, [], {}, {"a": 1}]
NO_METADATA: list[Any] = [{}, [], {f"f{n}": [1] for n in range(17)}]


def test_an_encoders_report_is_taken_whatever_its_key() -> None:
    assert plan.reported_metadata(report()) == GRID


@pytest.mark.parametrize(
    "answer",
    [
        {},
        *({"ec_transfer_params": params} for params in NO_PARAMS),
        {"ec_transfer_params": {"a": {"metadata": GRID}, "b": {"metadata": GRID}}},
        report(item_indices=[0, 1]),
        *(report(metadata=metadata) for metadata in NO_METADATA),
        *(report(metadata={"image_grid_thw": row}) for row in ("AAAA", [], [1] * 65_537)),
        *(report(metadata={"image_grid_thw": [each]}) for each in ([1, 2, 3], True)),
        *(report(metadata={"image_grid_thw": [each]}) for each in (1 << 63, -(10**400))),
    ],
)
def test_any_other_report_leaves_the_picture(answer: dict[str, Any]) -> None:
    assert plan.reported_metadata(answer) is None


def test_the_hand_over_is_opaque() -> None:
    assert plan.reported_hand_over({"kv_transfer_params": {"x": [1]}}) == {"x": [1]}
    for nothing in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": "x"}):
        assert plan.reported_hand_over(nothing) is None


def test_only_kvshare_stores_while_it_computes() -> None:
    assert plan.is_streamed({"kvshare": {"num_tokens": 7}})
    assert plan.is_streamed({"other": 1, "kvshare": {}})
    for other in (None, {}, {"other": {"kvshare": 1}}):
        assert not plan.is_streamed(other)
