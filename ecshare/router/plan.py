# SPDX-License-Identifier: Apache-2.0
"""What each stage is sent. Pure: JSON objects in, new JSON objects out.

Each stage gets its own form of the conversation. E (encode) gets single items. P (prefill) and D
(decode) get the client's request, in which each item is either inline, under its uuid, or replaced
by the metadata that E reported. All other fields stay as the client sent them, because P and D must
compute the same prompt tokens: templates may use tools, tool_choice, response_format and more.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ecshare.router.chat import (
    MEDIA_FIELDS,
    TRANSFER_FIELDS,
    Chat,
    Media,
    MediaItem,
    Request,
    too_deep,
)

Metadata = dict[str, list[int | float]]

# They ask for output that nobody reads, or contradict max_tokens = 1.
_NOT_FOR_PREFILL = (
    "stream_options", "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs",
    "min_tokens", "use_beam_search", "echo", "return_token_ids", "return_prompt_text",
)  # fmt: skip
# Besides its bytes, these change an item's embedding or its identity inside vLLM.
_FOR_ENCODE = ("model", "mm_processor_kwargs", "media_io_kwargs")

STREAMED: Request = {"kvshare": {"streamed": True}}
"""Tells D, while P still computes, that the whole prompt will be stored. See docs/format.md."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_METADATA_FIELDS = 16
_MAX_METADATA_VALUES = 65_536


def inline_request(chat: Chat, media: Sequence[Media]) -> Request:
    """Return the client's request with every item inline, under its uuid."""
    parts = zip(chat.items, media, strict=True)
    return _with_parts(chat, {item: _full_part(chat, item, held) for item, held in parts})


def encode_requests(chat: Chat, media: Sequence[Media]) -> dict[str, Request]:
    """Return one request to E for each distinct item, by uuid.

    An embedding does not depend on the rest of the prompt. So E needs no text, and several encoders
    can share the items of one request.
    """
    common = {name: chat.request[name] for name in _FOR_ENCODE if name in chat.request}
    common |= {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    return {
        held.uuid: common
        | {"messages": [{"role": "user", "content": [_full_part(chat, item, held)]}]}
        for item, held in zip(chat.items, media, strict=True)
    }


def encoding_options(chat: Chat) -> bytes:
    """Return a digest of all that E's reports depend on besides the item.

    Raises:
        ApiError: the processing options are nested too deeply.
    """
    options = {name: chat.request.get(name) for name in _FOR_ENCODE}
    try:
        return hashlib.sha256(msgspec.json.encode(options, order="deterministic")).digest()
    except RecursionError as exc:
        raise too_deep() from exc


def encoding_key(options: bytes, uuid: str) -> bytes:
    """Return the digest of all that E's report of an item depends on."""
    return hashlib.sha256(options + uuid.encode()).digest()


def metadata_request(
    chat: Chat, media: Sequence[Media], reports: Mapping[str, Metadata | None]
) -> Request:
    """Return the client's request with metadata in place of the items that E encoded.

    For each modality vLLM takes either media or metadata, and metadata with one set of fields. So a
    modality keeps its media if an item has no metadata, or other fields than the rest.
    """
    whole = _modalities_sent_whole(chat, media, reports)
    parts = {}
    for item, held in zip(chat.items, media, strict=True):
        if (report := reports.get(held.uuid)) and item.modality not in whole:
            parts[item] = _metadata_part(chat, item, held.uuid, report)
        else:
            parts[item] = _full_part(chat, item, held)
    return _with_parts(chat, parts)


def needs_bytes(chat: Chat, media: Sequence[Media], reports: Mapping[str, Metadata | None]) -> bool:
    """Tell whether `metadata_request` would send an item whole."""
    return bool(_modalities_sent_whole(chat, media, reports))


def _modalities_sent_whole(
    chat: Chat, media: Sequence[Media], reports: Mapping[str, Metadata | None]
) -> set[str]:
    fields: dict[str, set[tuple[str, ...]]] = {}
    for item, held in zip(chat.items, media, strict=True):
        names = tuple(sorted(reports.get(held.uuid) or ()))
        fields.setdefault(item.modality, set()).add(names)
    return {name for name, sets in fields.items() if len(sets) > 1 or () in sets}


def prefill_request(request: Request) -> Request:
    """Return the request to P: the same prompt, one token, no further output."""
    kept = {name: value for name, value in request.items() if name not in _NOT_FOR_PREFILL}
    return kept | {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}


def decode_request(request: Request, hand_over: Request | None) -> Request:
    """Return the request to D: the client's own sampling, and what P handed over."""
    return request if hand_over is None else request | {"kv_transfer_params": hand_over}


def _full_part(chat: Chat, item: MediaItem, held: Media) -> Request:
    assert held.url, "an item without its bytes"
    part = _other_fields(chat, item)
    if item.kind == "input_audio":
        value = chat.request["messages"][item.message]["content"][item.part]["input_audio"]
        return part | {"type": item.kind, item.kind: value, "uuid": held.uuid}
    return part | {"type": item.kind, item.kind: {"url": held.url}, "uuid": held.uuid}


def _metadata_part(chat: Chat, item: MediaItem, uuid: str, report: Metadata) -> Request:
    kind = f"{item.modality}_embeds"
    return _other_fields(chat, item) | {"type": kind, kind: report, "uuid": uuid}


def _other_fields(chat: Chat, item: MediaItem) -> Request:
    """Return the remaining fields of a part; chat templates may read them."""
    part = chat.request["messages"][item.message]["content"][item.part]
    return {name: value for name, value in part.items() if name not in MEDIA_FIELDS}


def _with_parts(chat: Chat, parts: Mapping[MediaItem, Request]) -> Request:
    messages = list(chat.request["messages"])
    for item, part in parts.items():
        message = messages[item.message]
        if message is chat.request["messages"][item.message]:
            message = messages[item.message] = message | {"content": list(message["content"])}
        message["content"][item.part] = part
    request = chat.request | {"messages": messages}
    return {name: value for name, value in request.items() if name not in TRANSFER_FIELDS}


def reported_metadata(answer: Request) -> Metadata | None:
    """Return the metadata that E reports for its one item, None if P could not use it.

    The key of the report is not compared: vLLM hashes the uuid with the processing options, if any.
    """
    reports = answer.get("ec_transfer_params")
    if not isinstance(reports, dict) or len(reports) != 1:
        return None
    (report,) = reports.values()
    if not isinstance(report, dict) or report.get("item_indices", [0]) != [0]:
        return None
    metadata = report.get("metadata")
    return metadata if is_metadata(metadata) else None


def is_metadata(value: Any) -> bool:
    """Tell whether P could use `value` in place of an item."""
    return (
        isinstance(value, dict)
        and 0 < len(value) <= _MAX_METADATA_FIELDS
        and all(_is_row(row) for row in value.values())
    )


def _is_row(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= _MAX_METADATA_VALUES
        and all(type(number) in (int, float) for number in value)
    )


def reported_hand_over(answer: Request) -> Request | None:
    """Return P's transfer params, which the router does not interpret; None if there are none."""
    params = answer.get("kv_transfer_params")
    return params if isinstance(params, dict) and params else None


def num_missing_tokens(answer: Request) -> int | None:
    """Return how many tokens of its prompt P has not stored, besides the last, which D computes.

    None: P does not say, or hands over something that may serve only once.
    """
    hand_over, usage = reported_hand_over(answer) or {}, answer.get("usage")
    ours = hand_over.get("kvshare")
    if hand_over.keys() != {"kvshare"} or not isinstance(ours, dict) or not isinstance(usage, dict):
        return None
    num_stored, num_tokens = ours.get("num_tokens"), usage.get("prompt_tokens")
    if type(num_stored) is not int or type(num_tokens) is not int:
        return None
    return num_tokens - 1 - num_stored if 0 < num_stored < num_tokens else None


def is_streamed(hand_over: Request | None) -> bool:
    """Whether P stored KV while it computed, as its hand-over tells."""
    return hand_over is not None and STREAMED.keys() <= hand_over.keys()


def acceptable_request_id(text: str | None) -> str | None:
    """Return a client's request id if it is safe in headers and logs, else None."""
    return text if text and _REQUEST_ID.fullmatch(text) else None


def server_timing(seconds: Mapping[str, float]) -> str:
    """Return the value of the Server-Timing header; durations are in milliseconds."""
    return ", ".join(f"{stage};dur={spent * 1000:.1f}" for stage, spent in seconds.items())
