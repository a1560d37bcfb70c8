# SPDX-License-Identifier: Apache-2.0
"""Which prompts P has stored, so that it is asked only if there is something to prefill.

A prompt is known by the digests of its conversation, one for each message and all before it, which
also cover all that decides its tokens: model, tools, `cache_salt` and every field that is not known
to be for sampling alone. A wrong guess costs time only: D looks KV up by its own tokens.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from ecshare.router import plan
from ecshare.router.bounded_cache import BoundedCache
from ecshare.router.chat import MEDIA_FIELDS
from ecshare.router.client_request import ClientRequest, Media, Request, too_deep

_MAX_ENTRIES = 1_000_000
_ENTRY_BYTES = 500
_CHARS_A_TOKEN = 4
_KEPT_S = 3600.0
"""P is asked again after so long: the store may have lost the KV, and D may store none."""
_MUCH = 0.5
"""D was not served by the store if it has computed more than this share of a known prompt."""
_ON_ITS_WAY_S = 10.0
"""So long after P's answer D is told what P announced, and waits for it. Later D finds it."""

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


class Known(NamedTuple):
    """A prompt that D can compute the rest of."""

    missing_chars: int
    """How much text D computes, about."""
    hand_over: Request | None
    """What P announced, if it may still be on its way."""


class _Stored(Struct):
    missing_chars: int
    hand_over: Request
    stored_s: float
    answer_bytes: int = 0
    """The size of D's answer to it, as D has sent it."""


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


class PrefilledPrompts:
    """A bounded index of what is stored, for all requests. Belongs to the event loop's thread."""

    def __init__(self, max_bytes: int, max_new_tokens: int, clock_s: Callable[[], float]) -> None:
        """`max_new_tokens`: how much text D may compute itself, estimated."""
        self._index: BoundedCache[bytes, _Stored] = BoundedCache(_MAX_ENTRIES, max_bytes)
        self._max_new_chars = _CHARS_A_TOKEN * max_new_tokens
        self._clock_s = clock_s
        self._num_asked = 0
        self._num_avoided = 0
        self._num_lost = 0

    def find(self, turns: list[Turn]) -> Known | None:
        """Return what is known of a prompt; None: P is to be asked.

        D's own answer to a known prompt is not new: D has it or has stored it, and to compute it
        once more takes a small part of the time that the answer took.
        """
        new_chars = answer_chars = 0
        for turn in reversed(turns):
            stored = self._index.get(turn.digest)
            if stored is not None:
                return self._known(stored, new_chars - min(answer_chars, stored.answer_bytes))
            new_chars += turn.num_chars
            answer_chars = turn.num_chars if turn.is_answer else 0
            if turn.has_media or new_chars - answer_chars > self._max_new_chars:
                break
        return None

    def _known(self, stored: _Stored, new_chars: int) -> Known | None:
        age_s = self._clock_s() - stored.stored_s
        missing_chars = stored.missing_chars + new_chars
        if age_s >= _KEPT_S or missing_chars > self._max_new_chars:
            return None
        is_on_its_way = age_s < _ON_ITS_WAY_S and not new_chars and stored.hand_over
        return Known(missing_chars, stored.hand_over if is_on_its_way else None)

    def note_prefilled(self, turns: list[Turn], answer: Request) -> None:
        """Note what P's `answer` says that it has stored."""
        self._num_asked += 1
        hand_over = plan.reported_hand_over(answer)
        num_missing = plan.num_missing_tokens(answer)
        if num_missing is None or hand_over is None:
            self.forget(turns)
        else:
            self._put(turns, _CHARS_A_TOKEN * num_missing, hand_over)

    def note_decoded(self, turns: list[Turn], known: Known, answer: Request) -> None:
        """Note D's `answer` to a known prompt. D has stored what was new of it, if it does.

        If D has computed far more than that, the prompt is forgotten: the store has lost it, or is
        too slow for D to load from.
        """
        self._num_avoided += 1
        tokens = plan.prompt_tokens(answer)
        if tokens is not None and self._has_computed_much(tokens):
            self._num_lost += 1
            self.forget(turns)
        elif self._index.get(turns[-1].digest) is None:
            self._put(turns, known.missing_chars, {})

    def _has_computed_much(self, tokens: plan.PromptTokens) -> bool:
        computed = tokens.total - tokens.cached
        is_more_than_new = computed * _CHARS_A_TOKEN > self._max_new_chars
        return is_more_than_new and computed > _MUCH * tokens.total

    def note_done_first(self, turns: list[Turn], answer: Request) -> None:
        """Note that D has answered before P, if its `answer` tells that it has stored the prompt or
        had it.
        """
        tokens = plan.prompt_tokens(answer)
        num_missing = plan.num_missing_tokens(answer)
        if num_missing is None and tokens is not None and not self._has_computed_much(tokens):
            num_missing = max(0, tokens.total - 1 - tokens.cached)
        if turns and num_missing is not None:
            self._put(turns, _CHARS_A_TOKEN * num_missing, {})

    def note_answered(self, turns: list[Turn], num_bytes: int) -> None:
        """Note the size of D's answer, as it was sent, to a prompt that may be known now."""
        stored = self._index.get(turns[-1].digest) if turns else None
        if stored is not None:
            stored.answer_bytes = num_bytes

    def forget(self, turns: list[Turn]) -> None:
        """Have P asked for this prompt again."""
        for turn in turns:
            self._index.discard(turn.digest)

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return {
            "asked": self._num_asked,
            "avoided": self._num_avoided,
            "lost": self._num_lost,
            "remembered": len(self._index),
            "memory": self._index.num_bytes,
            "evicted": self._index.num_evicted,
        }

    def _put(self, turns: list[Turn], missing_chars: int, hand_over: Request) -> None:
        stored = _Stored(missing_chars, hand_over, self._clock_s())
        self._index.put(turns[-1].digest, stored, _ENTRY_BYTES)
