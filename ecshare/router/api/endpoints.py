# SPDX-License-Identifier: Apache-2.0
"""The endpoints besides chat completions: by which paths clients ask, and in which shapes. Pure.

The same three stages serve each endpoint that makes tokens. What else vLLM serves is passed on to
one engine.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from ecshare.router.api.chat import (
    CHAT_ENDPOINT,
    item_of_part,
    messages_of,
    other_fields,
    part_with_bytes,
    read_chat,
)
from ecshare.router.api.client_request import (
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

Reader = Callable[[bytes, int], ClientRequest]
"""Parses and checks a body of at most so many media items.

Raises ApiError if the body is malformed; it names the field at fault.
"""

_NO_STATE = "responses are not kept; send the whole conversation"
_NOT_KEPT = ("previous_response_id", "background")
_USUAL_TYPE = "image/jpeg"  # what vLLM takes a picture for that has no type
_TYPE = re.compile(r"[A-Za-z0-9._+-]{1,63}(/[A-Za-z0-9._+-]{1,63})?")
# Schemas and options may hold anything, and vLLM reads no media from them.
_WITHOUT_MEDIA = ("tools", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs")


def _media_anywhere(request: Request) -> Iterator[MediaItem]:
    """Yield the content parts with media, wherever they are.

    An engine must not fetch urls for clients, nor take their names for media.

    Raises:
        ApiError: a part is malformed or must not come from a client; names it.
    """
    left: list[tuple[FieldPath, Request | list[Any]]] = [((), request)]
    while left:
        path, value = left.pop()
        item = item_of_part(value, path) if path and isinstance(value, dict) else None
        if item is not None:
            yield item
            continue
        inner = enumerate(value) if isinstance(value, list) else value.items()
        left += [  # the last one first
            ((*path, step), each)
            for step, each in reversed(list(inner))
            if isinstance(each, dict | list) and step not in _WITHOUT_MEDIA
        ]


# --- completions ---

COMPLETIONS_ENDPOINT = Endpoint(
    path="/v1/completions",
    prompt="prompt",
    with_bytes=part_with_bytes,  # it has no parts
    limits=("max_tokens",),
    prefill={"n": 1, "stream": False},
)


def read_completion(body: bytes, max_items: int) -> ClientRequest:
    """Read a completion of a text, of token ids, or of a list of either."""
    request = parse_request(body)
    prompt = request.get("prompt")
    has_several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    is_one = request.get("prompt_embeds") is None and not has_several
    return client_request(request, (), COMPLETIONS_ENDPOINT, max_items, is_one_prompt=is_one)


# --- OpenAI's Responses API ---


def read_responses(body: bytes, max_items: int) -> ClientRequest:
    """Read a request for a response."""
    request = parse_request(body)
    for name in _NOT_KEPT:
        if request.get(name):
            raise refusal(f"`{name}` is not served: {_NO_STATE}.", (name,))
    items = _media_anywhere({"input": request.get("input")})
    client = client_request(request, items, RESPONSES_ENDPOINT, max_items)
    for item in client.items:
        if item.kind != "image_url":
            raise refusal(f"`{item.kind}` is not served in responses; images are.", item.path)
    return client


def _input_image(part: Request, item: MediaItem, held: Media) -> Request:
    return other_fields(part) | {"image_url": held.url, "uuid": held.uuid}


RESPONSES_ENDPOINT = Endpoint(
    path="/v1/responses",
    prompt="input",
    with_bytes=_input_image,
    preamble="instructions",
    limits=("max_output_tokens",),
    prefill={"stream": False, "store": False},
    options=CHAT_ENDPOINT.options,
)

# --- Anthropic's Messages API ---


def read_messages(body: bytes, max_items: int) -> ClientRequest:
    """Read a request of Anthropic's Messages API."""
    request = parse_request(body)
    items = (
        item
        for at, message in enumerate(messages_of(request))
        for item in _images_of(message.get("content"), ("messages", at, "content"))
    )
    return client_request(request, items, MESSAGES_ENDPOINT, max_items)


def _images_of(content: Any, path: FieldPath, *, may_nest: bool = True) -> Iterator[MediaItem]:
    """Yield the pictures in a list of content blocks, and in the answers of tools among them."""
    for at, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            continue
        here = (*path, at)
        if block.get("type") == "image":
            yield MediaItem(here, "image_url", _image_url(block.get("source"), here), "image")
        elif block.get("type") == "tool_result" and may_nest:
            yield from _images_of(block.get("content"), (*here, "content"), may_nest=False)


def _image_url(source: Any, path: FieldPath) -> str:
    """Return the url of a picture: for base64 the data: url that vLLM would build."""
    given = source if isinstance(source, dict) else {}
    if given.get("type") == "url":
        url = given.get("url")
        if isinstance(url, str) and url:
            return url
    else:
        text, media_type = given.get("data"), given.get("media_type") or _USUAL_TYPE
        # vLLM reads no type, but inserts it into a url: a comma would move the start of the data.
        if isinstance(text, str) and isinstance(media_type, str) and _TYPE.fullmatch(media_type):
            return f"data:{media_type};base64,{text}"
    raise refusal("`source` must hold base64 text with a media type, or a url.", path)


def _image_block(part: Request, item: MediaItem, held: Media) -> Request:
    if part["source"].get("type") != "url":
        return part
    head, _, text = held.url.partition(";base64,")
    source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": text}
    return part | {"source": source}


MESSAGES_ENDPOINT = Endpoint(
    path="/v1/messages",
    prompt="messages",
    with_bytes=_image_block,
    preamble="system",
    limits=("max_tokens",),
    prefill={"stream": False},
    options=("model",),
    takes_names=False,
)

SPLIT: dict[str, Reader] = {
    CHAT_ENDPOINT.path: read_chat,
    COMPLETIONS_ENDPOINT.path: read_completion,
    RESPONSES_ENDPOINT.path: read_responses,
    MESSAGES_ENDPOINT.path: read_messages,
}
"""The endpoints to the three stages, by path."""

# --- what one engine does ---

_COUNT_TOKENS_ENDPOINT = replace(MESSAGES_ENDPOINT, path="/v1/messages/count_tokens")


def _read_count_tokens(body: bytes, max_items: int) -> ClientRequest:
    return replace(read_messages(body, max_items), endpoint=_COUNT_TOKENS_ENDPOINT)


def _passed_on(path: str) -> Reader:
    endpoint = Endpoint(path=path, prompt="messages", with_bytes=part_with_bytes)

    def read(body: bytes, max_items: int) -> ClientRequest:
        request = parse_request(body)
        return client_request(request, _media_anywhere(request), endpoint, max_items)

    return read


_PASSED_ON = (
    "/tokenize", "/detokenize", "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score",
    "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
PASSED_ON: dict[str, Reader] = {
    **{path: _passed_on(path) for path in _PASSED_ON},
    _COUNT_TOKENS_ENDPOINT.path: _read_count_tokens,
}
"""The endpoints to one engine, by path."""
