# SPDX-License-Identifier: Apache-2.0
"""The messages of a prompt, by digests that cover all that decides its tokens. Pure.

A message's digest is of this message and all before it, and of model, tools, `cache_salt` and every
field that is not known to be for sampling alone.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ecshare.router.api.chat import MEDIA_FIELDS
from ecshare.router.api.client_request import ClientRequest, Media, Request, too_deep

# All other fields may decide tokens.
_FOR_SAMPLING = frozenset((
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "logit_bias",
    "max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs", "stream",
    "stream_options", "user", "priority", "request_id", "kv_transfer_params", "max_output_tokens",
    "ec_transfer_params", "stop_sequences", "metadata", "store", "include", "echo",
    "return_token_ids",
))  # fmt: skip


class Turn(NamedTuple):
    """A message of a prompt."""

    digest: bytes
    """Of this message and all that decides the tokens up to its end."""
    num_chars: int
    has_media: bool
    is_answer: bool
    json: bytes
    """The message itself, with names instead of its media."""


def turns_of(client: ClientRequest, media: Sequence[Media]) -> list[Turn]:
    """Return the messages of a request, each with the names of its media instead of them.

    Empty if it has several prompts: nobody says of them what is stored.

    Raises:
        ApiError: a field is nested too deeply.
    """
    if not client.is_one_prompt:
        return []
    named = client.with_parts(
        {
            item: _without_media(client.part_at(item)) | {"uuid": held.uuid}
            for item, held in zip(client.items, media, strict=True)
        }
    )
    fields = {name: value for name, value in named.items() if name not in _FOR_SAMPLING}
    fields["path"] = client.endpoint.path
    fields.pop(client.endpoint.prompt, None)
    digest = hashlib.sha256(_json(fields)).digest()
    with_media = {client.turn_of(item) for item in client.items}
    turns = []
    for at, message in enumerate(client.turns_of(named)):
        json = _json(message, order=None)  # templates may show objects in the client's order
        digest = hashlib.sha256(digest + hashlib.sha256(json).digest()).digest()
        is_answer = isinstance(message, dict) and message.get("role") == "assistant"
        turns.append(Turn(digest, len(json), at in with_media, is_answer, json))
    return turns


def with_json_of(turns: Sequence[Turn], client: ClientRequest, request: Request) -> Request:
    """Return `request`, in which the messages without media are JSON already: they are encoded once
    for all engines.
    """
    messages = request.get(client.endpoint.prompt)
    own = turns[len(client.preamble) :]
    if not client.has_messages or not isinstance(messages, list) or len(messages) != len(own):
        return request
    both = zip(messages, own, strict=True)
    encoded = [message if turn.has_media else msgspec.Raw(turn.json) for message, turn in both]
    return request | {client.endpoint.prompt: encoded}


def _json(value: Any, order: Literal["deterministic"] | None = "deterministic") -> bytes:
    try:
        return msgspec.json.encode(value, order=order)
    except RecursionError as exc:
        raise too_deep() from exc


def _without_media(part: Request) -> Request:
    return {name: part[name] for name in part if name not in (*MEDIA_FIELDS, "type", "source")}
