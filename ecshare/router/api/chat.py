# SPDX-License-Identifier: Apache-2.0
"""Chat completions: parsed, checked, and their media items found. Pure."""

import re
from typing import Any

from ecshare.router.api.client_request import (
    MEDIA_FIELDS,
    MODALITIES,
    NOT_FOR_CLIENTS,
    ClientRequest,
    Endpoint,
    FieldPath,
    Media,
    MediaItem,
    Request,
    client_request,
    parse_request,
    refusal,
)

CHAT = "/v1/chat/completions"

_ALL_MEDIA_FIELDS = frozenset(MEDIA_FIELDS)
_AUDIO_FORMAT = re.compile(r"[A-Za-z0-9.+-]{1,32}")


def read_chat(body: bytes, max_items: int) -> ClientRequest:
    """Parse and check the body of a chat completion.

    Raises:
        ApiError: the body is malformed; names the field at fault.
    """
    request = parse_request(body)
    items: list[MediaItem] = []
    for at, message in enumerate(messages_of(request)):
        content = message.get("content")
        path: FieldPath = ("messages", at, "content")
        if isinstance(content, list):
            items += _items_of_parts(content, path)
        elif not isinstance(content, str | None):
            raise refusal("`content` must be a string or an array.", path)
    return client_request(request, items, CHAT_ENDPOINT, max_items)


def messages_of(request: Request) -> list[Request]:
    """Return the messages of a conversation, which are objects with a role.

    Raises:
        ApiError: they are not; names the field at fault.
    """
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refusal("`messages` must be a non-empty array.", ("messages",))
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise refusal("A message must be an object.", ("messages", at))
        if not isinstance(message.get("role"), str):
            raise refusal("`role` must be a string.", ("messages", at, "role"))
    return messages


def _items_of_parts(parts: list[Any], path: FieldPath) -> list[MediaItem]:
    items = []
    for at, part in enumerate(parts):
        if isinstance(part, dict):
            if item := item_of_part(part, (*path, at)):
                items.append(item)
        elif not isinstance(part, str):
            raise refusal("A content part must be an object or a string.", (*path, at))
    return items


def item_of_part(part: Request, path: FieldPath) -> MediaItem | None:
    """Return the media item in a content part, None if it holds text and the like.

    Raises:
        ApiError: the part is malformed or must not come from a client; names it.
    """
    if part.get("type") == "text" and _ALL_MEDIA_FIELDS.isdisjoint(part):
        return None  # as most parts
    kind = _kind(part, path)
    if kind is None:
        return None
    return MediaItem(path, kind, _source(kind, part.get(kind), path), MODALITIES[kind])


def _kind(part: Request, path: FieldPath) -> str | None:
    """Return which media field a content part holds, None for text and the like.

    vLLM reads a part by its `type` or, when it has a uuid, by the first media field it finds. A
    part on which the two could disagree is refused: it could store one picture's bytes under
    another one's uuid.
    """
    named = part.get("type")
    fields = [key for key in MEDIA_FIELDS if key in part]
    null = [key for key in fields if part[key] is None]
    if named is None and null:  # vLLM would take it for an item without data
        raise refusal(f"`{null[0]}` is null; send the media, or leave the field out.", path)
    if named == "input_image":  # the Responses API's name
        named = "image_url"
    kinds = {key for key in fields if part.get("uuid") is not None or part[key] is not None}
    if isinstance(named, str) and (named in MEDIA_FIELDS or kinds):
        kinds.add(named)
    if not kinds:
        return None
    if refused := kinds.intersection(NOT_FOR_CLIENTS):
        raise refusal(f"`{min(refused)}` is not accepted from clients; send the media.", path)
    if len(kinds) > 1:
        raise refusal(f"A content part is one of {', '.join(sorted(kinds))}, not all.", path)
    return kinds.pop()


def _source(kind: str, value: Any, path: FieldPath) -> str:
    """Return the item's url. For input_audio it is the data: url that vLLM would build."""
    if kind == "input_audio":
        sound = value if isinstance(value, dict) else {}
        text, form = sound.get("data"), sound.get("format")
        # vLLM inserts the format into a url, where a comma would move the start of the data.
        if not isinstance(form, str) or not _AUDIO_FORMAT.fullmatch(form):
            raise refusal("`input_audio.format` must be like `wav`.", path)
        if not isinstance(text, str) or not text:
            raise refusal("`input_audio.data` must be base64 text.", path)
        return f"data:audio/{form};base64,{text}"
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        # A uuid alone would ask for what somebody else sent under it.
        raise refusal(f"`{kind}` must hold a url.", path)
    return url


def part_with_bytes(part: Request, item: MediaItem, held: Media) -> Request:
    """Return the content part of an item with its bytes and uuid."""
    value = part[item.kind] if item.kind == "input_audio" else {"url": held.url}
    return other_fields(part) | {"type": item.kind, item.kind: value, "uuid": held.uuid}


def other_fields(part: Request) -> Request:
    """Return the fields of a part besides its media; chat templates may read them."""
    return {name: value for name, value in part.items() if name not in MEDIA_FIELDS}


CHAT_ENDPOINT = Endpoint(
    path=CHAT,
    prompt="messages",
    with_bytes=part_with_bytes,
    limits=("max_completion_tokens", "max_tokens"),
    prefill={"n": 1, "stream": False},
    options=("model", "mm_processor_kwargs", "media_io_kwargs"),
    takes_metadata=True,
    has_top_logprobs=True,
)
