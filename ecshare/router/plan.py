# SPDX-License-Identifier: Apache-2.0
"""What each stage is sent. Pure: JSON objects in, JSON objects out; nothing is changed in place.

The same conversation is worded for each stage: E gets single items, P and D get the client's own
request with every item either as it is, under its identity, or as the metadata that E reported.
All other fields stay as the client sent them, because P and D must arrive at the same prompt
tokens: templates may use tools, tool_choice, response_format and more.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ecshare.router.chat import MEDIA_FIELDS, TRANSFER_FIELDS, Chat, Item, Media, Request

Metadata = dict[str, list[int | float]]

# These ask for output that nobody reads, or contradict max_tokens = 1.
_NOT_FOR_PREFILL = (
    "stream_options", "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs",
    "min_tokens", "use_beam_search", "echo", "return_token_ids", "return_prompt_text",
)  # fmt: skip
# What changes an item's embedding or its identity inside vLLM besides its bytes.
_FOR_ENCODE = ("model", "mm_processor_kwargs", "media_io_kwargs")

STREAMED: Request = {"kvshare": {"streamed": True}}
"""What D is told while P computes: all of the prompt will be stored. See docs/format.md."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_METADATA_FIELDS = 16
_MAX_METADATA_VALUES = 65_536


def plain_request(chat: Chat, media: Sequence[Media]) -> Request:
    """Return the client's request with every item's bytes inline and under its identity."""
    parts = zip(chat.items, media, strict=True)
    return _with_parts(chat, {item: _full_part(chat, item, held) for item, held in parts})


def encode_requests(chat: Chat, media: Sequence[Media]) -> dict[str, Request]:
    """Return one request for E per distinct item, by uuid.

    An embedding does not depend on the rest of the prompt, so E needs no text, and several
    encoders can share one request's items.
    """
    common = {name: chat.request[name] for name in _FOR_ENCODE if name in chat.request}
    common |= {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    return {
        held.uuid: common
        | {"messages": [{"role": "user", "content": [_full_part(chat, item, held)]}]}
        for item, held in zip(chat.items, media, strict=True)
    }


def lean_request(
    chat: Chat, media: Sequence[Media], reports: Mapping[str, Metadata | None]
) -> Request:
    """Return the client's request with the items that E reported as metadata only.

    vLLM takes either media or metadata of one modality, and metadata of one shape: a modality
    with an item that has none keeps its media.
    """
    fields: dict[str, set[tuple[str, ...]]] = {}
    for item, held in zip(chat.items, media, strict=True):
        names = tuple(sorted(reports.get(held.uuid) or ()))
        fields.setdefault(item.modality, set()).add(names)
    parts = {}
    for item, held in zip(chat.items, media, strict=True):
        if (report := reports.get(held.uuid)) and len(fields[item.modality]) == 1:
            parts[item] = _metadata_part(chat, item, held.uuid, report)
        else:
            parts[item] = _full_part(chat, item, held)
    return _with_parts(chat, parts)


def prefill_request(request: Request) -> Request:
    """Return what P is sent: the same prompt, one token, nothing else asked for."""
    kept = {name: value for name, value in request.items() if name not in _NOT_FOR_PREFILL}
    return kept | {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}


def decode_request(request: Request, hand_over: Request | None) -> Request:
    """Return what D is sent: the client's own sampling, and what P handed over."""
    return request if hand_over is None else request | {"kv_transfer_params": hand_over}


def _full_part(chat: Chat, item: Item, held: Media) -> Request:
    part = _other_fields(chat, item)
    if item.kind == "input_audio":
        value = chat.request["messages"][item.message]["content"][item.part]["input_audio"]
        return part | {"type": item.kind, item.kind: value, "uuid": held.uuid}
    return part | {"type": item.kind, item.kind: {"url": held.url}, "uuid": held.uuid}


def _metadata_part(chat: Chat, item: Item, uuid: str, report: Metadata) -> Request:
    kind = f"{item.modality}_embeds"
    return _other_fields(chat, item) | {"type": kind, kind: report, "uuid": uuid}


def _other_fields(chat: Chat, item: Item) -> Request:
    """Return the fields of a part that chat templates may read."""
    part = chat.request["messages"][item.message]["content"][item.part]
    return {name: value for name, value in part.items() if name not in MEDIA_FIELDS}


def _with_parts(chat: Chat, parts: Mapping[Item, Request]) -> Request:
    messages = list(chat.request["messages"])
    for item, part in parts.items():
        message = messages[item.message]
        if message is chat.request["messages"][item.message]:
            message = messages[item.message] = message | {"content": list(message["content"])}
        message["content"][item.part] = part
    request = chat.request | {"messages": messages}
    return {name: value for name, value in request.items() if name not in TRANSFER_FIELDS}


def reported_metadata(answer: Request) -> Metadata | None:
    """Return what E says of its one item; None when it is nothing that P would understand.

    E's key is not compared: vLLM hashes the uuid together with processing options, if any.
    """
    reports = answer.get("ec_transfer_params")
    if not isinstance(reports, dict) or len(reports) != 1:
        return None
    (report,) = reports.values()
    if not isinstance(report, dict) or report.get("item_indices", [0]) != [0]:
        return None
    metadata = report.get("metadata")
    if not isinstance(metadata, dict) or not 0 < len(metadata) <= _MAX_METADATA_FIELDS:
        return None
    return metadata if all(_is_row(value) for value in metadata.values()) else None


def _is_row(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= _MAX_METADATA_VALUES
        and all(type(number) in (int, float) for number in value)
    )


def reported_hand_over(answer: Request) -> Request | None:
    """Return P's transfer params, opaque to the router; None when it has none."""
    params = answer.get("kv_transfer_params")
    return params if isinstance(params, dict) and params else None


def is_streamed(hand_over: Request | None) -> bool:
    """Whether P, which hands this over, has stored KV while it computed."""
    return hand_over is not None and STREAMED.keys() <= hand_over.keys()


def acceptable_request_id(text: str | None) -> str | None:
    """Return a client's request id if it may be repeated in headers and logs."""
    return text if text and _REQUEST_ID.fullmatch(text) else None


def server_timing(seconds: Mapping[str, float]) -> str:
    """Return the Server-Timing header, durations in milliseconds."""
    return ", ".join(f"{stage};dur={spent * 1000:.1f}" for stage, spent in seconds.items())
