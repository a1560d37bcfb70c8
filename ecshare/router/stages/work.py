# SPDX-License-Identifier: Apache-2.0
"""How much work a request is, and which engine may have part of it in its caches. Pure.

Both are estimates, for balancing alone. Clients can make them wrong, so each is bounded.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from ecshare.router.api.client_request import ClientRequest, Media, MediaItem, Request
from ecshare.router.types import Work

_CHARS_A_TOKEN = 4
_ITEM_TOKENS = {"image": 1000, "audio": 500, "video": 4000}
_USUAL_OUTPUT_TOKENS = 256
_MAX_OUTPUT_TOKENS = 4096
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_INSTRUCTIONS = ("system", "developer")
_MAX_KEY_CHARS = 4000
"""How much of the instructions, and of the text behind them, tells prompts apart."""


def item_work(key: bytes, item: MediaItem, model: str | None) -> Work:
    """Return the work of encoding an item for `model`; `key` identifies it."""
    return Work(key, _ITEM_TOKENS[item.modality], model)


def prompt_work(client: ClientRequest, media: Sequence[Media]) -> Work:
    """Return the work of prefilling a conversation.

    All turns of a conversation have one key. So have questions about the same media or the same
    long text, if they come after it and after the same instructions.
    """
    turns = client.turns_of(client.request)
    num_chars = sum(len(text) for message in turns for text in _texts(message))
    tokens = 1 + num_chars // _CHARS_A_TOKEN
    tokens += sum(_ITEM_TOKENS[item.modality] for item in client.items)
    return Work(_conversation_key(client, turns, media), tokens, client.model)


def decode_work(prompt: Work, request: Request) -> Work:
    """Return the work of answering: D holds the prompt, and computes as much as it may say."""
    limits = (request.get(name) for name in _LIMITS)
    given = next((limit for limit in limits if type(limit) is int), _USUAL_OUTPUT_TOKENS)
    return prompt._replace(tokens=prompt.tokens + max(1, min(given, _MAX_OUTPUT_TOKENS)))


def _conversation_key(
    client: ClientRequest, turns: Sequence[Request], media: Sequence[Media]
) -> bytes:
    is_opening = [message.get("role") not in _INSTRUCTIONS for message in turns]
    opening = is_opening.index(True) if True in is_opening else len(turns) - 1
    instructions = (text for message in turns[:opening] for text in _texts(message))
    shown = [
        held.uuid
        for item, held in zip(client.items, media, strict=True)
        if client.turn_of(item) == opening
    ]
    # With media it is they that cost: their question may come first, and differ.
    subject = "\0".join(shown) if shown else _start(_texts(turns[opening]))
    salt = client.request.get("cache_salt")
    parts = (client.model, salt if isinstance(salt, str) else "", _start(instructions), subject)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256((part or "").encode("utf-8", "replace")).digest())
    return digest.digest()


def _start(texts: Iterator[str]) -> str:
    start = ""
    for text in texts:
        start += text[: _MAX_KEY_CHARS - len(start)]
        if len(start) >= _MAX_KEY_CHARS:
            break
    return start


def _texts(message: dict[str, Any]) -> Iterator[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text
