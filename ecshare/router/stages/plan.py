# SPDX-License-Identifier: Apache-2.0
"""What each stage is sent, and how much work it is. Pure: JSON objects in, new JSON objects out.

Each stage gets its own form of the conversation. E (encode) gets single items. P (prefill) and D
(decode) get the client's request, in which each item is either inline, under its uuid, or replaced
by the metadata that E reported. All other fields stay as the client sent them, because P and D must
compute the same prompt tokens: templates may use tools, tool_choice, response_format and more.

The work is estimated, for balancing alone. Clients can make estimates wrong, so each is bounded.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ecshare.router.api.chat import other_fields, part_with_bytes
from ecshare.router.api.client_request import (
    EC_PARAMS,
    KV_PARAMS,
    SAVE_OPTIONS,
    ClientRequest,
    Endpoint,
    Media,
    MediaItem,
    Request,
    too_deep,
)
from ecshare.router.types import Work

Metadata = dict[str, list[int | float]]

# They ask for output that nobody reads, or contradict max_tokens = 1.
_NOT_FOR_PREFILL = (
    "stream_options", "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs",
    "min_tokens", "use_beam_search", "echo", "return_token_ids", "return_prompt_text", "include",
    "enable_response_messages", "max_tool_calls",
)  # fmt: skip
FOR_DECODE: Request = {"kvshare": {"for_decode": True}}
"""Tells P that another engine goes on with the prompt. See docs/format.md."""
DIRECT: Request = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "kvshare": {"for_decode": False},
}
"""Tells P that another engine fetches the KV from it, by a connector beside ours. Ours then stores
the prompt by its own rules, because nobody waits for it. The first two fields are vLLM's."""
STREAMED: Request = {"kvshare": {"streamed": True}}
"""Tells D, while P still computes, that the whole prompt will be stored. See docs/format.md."""
_NAMES_ALL: Request = {"ecshare": {"names_all": True}}
"""Tells P and D that no item is on its way to the store but those that are named beside this. See
docs/format.md."""

_SERVE_AGAIN = ("kvshare", SAVE_OPTIONS[KV_PARAMS])
_MAX_METADATA_FIELDS = 16
_MAX_METADATA_VALUES = 65_536


def inline_request(client: ClientRequest, media: Sequence[Media]) -> Request:
    """Return the client's request with the bytes of every item, under its uuid if it takes one."""
    parts = zip(client.items, media, strict=True)
    return client.with_parts({item: _full_part(client, item, held) for item, held in parts})


def renamed(held: Media) -> Media:
    """Return an item under another uuid, always the same one, which is only sent with the bytes.

    vLLM's cache of inputs (`--mm-processor-cache-gb`) keeps an item by its uuid. If an item once
    came without its bytes, vLLM may use that one, and ignore the bytes that are sent later.
    """
    uuid = hashlib.sha256(b"whole\0" + held.uuid.encode()).hexdigest()
    return Media(uuid, held.url)


def encode_requests(client: ClientRequest, media: Sequence[Media]) -> dict[str, Request]:
    """Return one chat completion for E for each distinct item, by uuid.

    An embedding does not depend on the rest of the prompt. So E needs no text, and several encoders
    can share the items of one request.
    """
    names = (*client.endpoint.options, EC_PARAMS)
    common = {name: client.request[name] for name in names if name in client.request}
    common |= {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    # P and D are told that they are stored, so E is not to wait until it has seen them more often.
    common = _with_params(common, EC_PARAMS, {SAVE_OPTIONS[EC_PARAMS]: True})
    return {
        held.uuid: common
        | {"messages": [{"role": "user", "content": [_encoder_part(client, item, held)]}]}
        for item, held in zip(client.items, media, strict=True)
    }


def encoding_options(client: ClientRequest) -> bytes:
    """Return a digest of all that E's reports depend on besides the item.

    Raises:
        ApiError: the processing options are nested too deeply.
    """
    options = {name: client.request.get(name) for name in client.endpoint.options}
    if not client.endpoint.takes_names:
        options["named by"] = "vLLM"
    try:
        return hashlib.sha256(msgspec.json.encode(options, order="deterministic")).digest()
    except RecursionError as exc:
        raise too_deep() from exc


def encoding_key(options: bytes, uuid: str) -> bytes:
    """Return the digest of all that E's report of an item depends on."""
    return hashlib.sha256(options + uuid.encode()).digest()


def encoded_request(
    client: ClientRequest,
    media: Sequence[Media],
    reports: Mapping[str, Metadata | None],
    announced: Request,
    *,
    names_all: bool,
) -> Request:
    """Return the client's request, for P and D, with what E says.

    E's answers may be there before what they announce. P waits for items without bytes, unless
    `names_all`: only those that are `announced` may be on their way. Where vLLM takes no metadata
    in place of an item, P gets its bytes, and waits for the embedding if it is announced.
    """
    if client.endpoint.takes_metadata:
        request = metadata_request(client, media, reports)
        if not names_all:
            return request
        return _with_params(request, EC_PARAMS, dict.fromkeys(announced, {}) | _NAMES_ALL)
    request = inline_request(client, media)
    return _with_params(request, EC_PARAMS, announced) if announced else request


def metadata_request(
    client: ClientRequest, media: Sequence[Media], reports: Mapping[str, Metadata | None]
) -> Request:
    """Return the client's request with metadata in place of the items that E encoded.

    For each modality vLLM takes either media or metadata, and metadata with one set of fields. So a
    modality keeps its media if an item has no metadata, or other fields than the rest.
    """
    whole = _modalities_sent_whole(client, media, reports)
    parts = {}
    for item, held in zip(client.items, media, strict=True):
        if (report := reports.get(held.uuid)) and item.modality not in whole:
            parts[item] = _metadata_part(client, item, held.uuid, report)
        else:
            parts[item] = _full_part(client, item, held)
    return client.with_parts(parts)


def needs_bytes(
    client: ClientRequest, media: Sequence[Media], reports: Mapping[str, Metadata | None]
) -> bool:
    """Tell whether `encoded_request` would send an item whole."""
    return not client.endpoint.takes_metadata or bool(
        _modalities_sent_whole(client, media, reports)
    )


def _modalities_sent_whole(
    client: ClientRequest, media: Sequence[Media], reports: Mapping[str, Metadata | None]
) -> set[str]:
    fields: dict[str, set[tuple[str, ...]]] = {}
    for item, held in zip(client.items, media, strict=True):
        names = tuple(sorted(reports.get(held.uuid) or ()))
        fields.setdefault(item.modality, set()).add(names)
    return {name for name, sets in fields.items() if len(sets) > 1 or () in sets}


def prefill_request(
    endpoint: Endpoint,
    request: Request,
    params: Request = FOR_DECODE,
    new_media: Sequence[str] = (),
) -> Request:
    """Return the request to P: the same prompt for another engine, one token, no further output.

    `params`: FOR_DECODE or DIRECT. `new_media`: P need not look for KV of what follows one of them.
    """
    kept = {name: value for name, value in request.items() if name not in _NOT_FOR_PREFILL}
    if _is_thinking(kept.get("thinking")):
        del kept["thinking"]  # its budget must be less than max_tokens, and is all that it sets
    kept |= dict.fromkeys(endpoint.limits, 1) | endpoint.prefill
    if new_media:
        params = params | {"kvshare": params["kvshare"] | {"new_media": list(new_media)}}
    return _with_params(kept, KV_PARAMS, params)


def _is_thinking(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "enabled"


def decode_request(request: Request, hand_over: Request | None) -> Request:
    """Return the request to D: the client's own sampling, and what P handed over."""
    return request if hand_over is None else _with_params(request, KV_PARAMS, hand_over)


def is_fetched_once(client: ClientRequest) -> bool:
    """Tell whether D fetches the prompt's KV once at most, if it is handed over directly.

    Several answers to one prompt would each fetch it; after the first one P reuses its memory.
    """
    request = client.request
    is_one_answer = request.get("n") in (None, 1) and not request.get("use_beam_search")
    return client.is_one_prompt and is_one_answer


def serves_once(hand_over: Request | None) -> bool:
    """Whether a hand-over has what a connector beside ours says, for one reader."""
    return hand_over is not None and not hand_over.keys() <= {*_SERVE_AGAIN}


def serves_again(request: Request) -> Request:
    """Return a request to D without what P handed over for one reader: all but our part."""
    params: Request = request.get(KV_PARAMS) or {}
    if not serves_once(params):
        return request
    return request | {KV_PARAMS: {name: params[name] for name in params if name in _SERVE_AGAIN}}


def _with_params(request: Request, name: str, params: Request) -> Request:
    """Return the request with transfer params beside what the client says of saves."""
    return request | {name: params | (request.get(name) or {})}


def _full_part(client: ClientRequest, item: MediaItem, held: Media) -> Request:
    assert held.url, "an item without its bytes"
    return client.endpoint.with_bytes(client.part_at(item), item, held)


def _encoder_part(client: ClientRequest, item: MediaItem, held: Media) -> Request:
    if client.endpoint.takes_metadata:
        return _full_part(client, item, held)
    part = part_with_bytes({}, item, held)
    if not client.endpoint.takes_names:
        del part["uuid"]  # P and D name it by its bytes, and so must E
    return part


def _metadata_part(client: ClientRequest, item: MediaItem, uuid: str, report: Metadata) -> Request:
    kind = f"{item.modality}_embeds"
    return other_fields(client.part_at(item)) | {"type": kind, kind: report, "uuid": uuid}


def reported_metadata(answer: Request) -> Metadata | None:
    """Return the metadata that E reports for its one item, None if P could not use it.

    The key of the report is not compared: vLLM hashes the uuid with the processing options, if any.
    """
    reports = answer.get(EC_PARAMS)
    if not isinstance(reports, dict) or len(reports) != 1:
        return None
    (report,) = reports.values()
    if not isinstance(report, dict) or report.get("item_indices", [0]) != [0]:
        return None
    metadata = report.get("metadata")
    return metadata if is_metadata(metadata) else None


def announced_media(answer: Request) -> Request:
    """Return what E says of its item, in the form that P and D are sent."""
    reports = answer.get(EC_PARAMS)
    return reports if isinstance(reports, dict) else {}


def new_media(reports: Request) -> list[str]:
    """Return the items that were not stored when E was asked for them, by what E says."""
    return [
        name
        for name, report in reports.items()
        if isinstance(report, dict) and report.get("stored") is False
    ]


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
        and all(_is_number(each) for each in value)
    )


def _is_number(value: Any) -> bool:
    """Whether a tensor could hold it: JSON has integers of any length."""
    return type(value) is float or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def reported_hand_over(answer: Request) -> Request | None:
    """Return P's transfer params, which the router does not interpret; None if there are none."""
    params = answer.get(KV_PARAMS)
    return params if isinstance(params, dict) and params else None


def num_missing_tokens(answer: Request) -> int | None:
    """Return how many tokens of its prompt P has not stored, besides the last, which D computes.

    None: P does not say.
    """
    ours = (reported_hand_over(answer) or {}).get("kvshare")
    if not isinstance(ours, dict):
        return None
    num_stored, num_tokens = ours.get("num_tokens"), _num_prompt_tokens(answer.get("usage"))
    if type(num_stored) is not int or num_tokens is None:
        return None
    return num_tokens - 1 - num_stored if 0 < num_stored < num_tokens else None


def _num_prompt_tokens(usage: Any) -> int | None:
    """Return the length of the prompt, as any of the endpoints spells it."""
    if not isinstance(usage, dict):
        return None
    # The Messages API alone counts what was found in a cache apart.
    apart = (usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens"))
    counts = [usage.get("prompt_tokens", usage.get("input_tokens")), *(each or 0 for each in apart)]
    numbers = [count for count in counts if type(count) is int]
    return sum(numbers) if len(numbers) == len(counts) else None


class PromptTokens(NamedTuple):
    """The tokens of a prompt, and how many of them an engine had or loaded: in whole blocks."""

    total: int
    cached: int


def prompt_tokens(answer: Request) -> PromptTokens | None:
    """Return what an answer's usage tells of its prompt; None: it does not tell."""
    usage = answer.get("usage")
    total = _num_prompt_tokens(usage)
    if total is None or not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    of = details.get("cached_tokens") if isinstance(details, dict) else None
    cached = usage.get("cache_read_input_tokens") if of is None else of
    return PromptTokens(total, cached) if type(cached) is int else None


def is_streamed(hand_over: Request | None) -> bool:
    """Whether P stored KV while it computed, as its hand-over tells."""
    return hand_over is not None and STREAMED.keys() <= hand_over.keys()


# --- how much work it is ---

_CHARS_A_TOKEN = 4
_ITEM_TOKENS = {"image": 1000, "audio": 500, "video": 4000}
STREAMED_TOKENS = 4096
"""P computes shorter prompts in a step or two: by then D could have loaded little or nothing. vLLM
computes 2,048 to 8,192 tokens a step by default."""
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
    texts = [_texts(message) for message in turns]
    tokens = 1 + sum([len(text) for each in texts for text in each]) // _CHARS_A_TOKEN
    tokens += sum([_ITEM_TOKENS[item.modality] for item in client.items])
    return Work(_conversation_key(client, turns, texts, media), tokens, client.model)


def decode_work(prompt: Work, request: Request) -> Work:
    """Return the work of answering: D holds the prompt, and computes as much as it may say."""
    limit = _USUAL_OUTPUT_TOKENS
    for name in _LIMITS:
        if type(given := request.get(name)) is int:
            limit = max(1, min(given, _MAX_OUTPUT_TOKENS))
            break
    return Work(prompt.key, prompt.tokens + limit, prompt.model)


def _conversation_key(
    client: ClientRequest,
    turns: Sequence[Request],
    texts: Sequence[list[str]],
    media: Sequence[Media],
) -> bytes:
    """`texts`: those of each turn."""
    opening = 0  # the first turn that is no instruction, the last one if all are
    while opening < len(turns) - 1 and turns[opening].get("role") in _INSTRUCTIONS:
        opening += 1
    instructions = _start([text for each in texts[:opening] for text in each])
    shown = [
        held.uuid
        for item, held in zip(client.items, media, strict=True)
        if client.turn_of(item) == opening
    ]
    # With media it is they that cost: their question may come first, and differ.
    subject = shown or _start(texts[opening])
    salt = client.request.get("cache_salt")
    salt = salt if isinstance(salt, str) else ""
    # `repr` keeps the parts apart, and escapes what UTF-8 lacks.
    return hashlib.sha256(repr((client.model, salt, instructions, subject)).encode()).digest()


def _start(texts: Sequence[str]) -> str:
    start = ""
    for text in texts:
        start += text[: _MAX_KEY_CHARS - len(start)]
        if len(start) >= _MAX_KEY_CHARS:
            break
    return start


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else ()
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]
