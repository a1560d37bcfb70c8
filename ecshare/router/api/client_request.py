# SPDX-License-Identifier: Apache-2.0
"""A client's request as far as the router reads it, whatever the shape of its JSON. Pure."""

import gc
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from ecshare.router.api.errors import ApiError

Request = dict[str, Any]
FieldPath = tuple[str | int, ...]
"""The names and indices that lead to a value of a request."""

KV_PARAMS = "kv_transfer_params"
EC_PARAMS = "ec_transfer_params"
SAVE_OPTIONS = {KV_PARAMS: "kvshare_save", EC_PARAMS: "ecshare_save"}
"""All that a client may say there: whether its prompt, or its media, are stored."""
TRANSFER_FIELDS = tuple(SAVE_OPTIONS)

MODALITIES = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
# Only our own encoders may send tensors and processor metadata. An engine that accepts metadata
# also loads a client's tensor, and caches it for everybody under the uuid that the client chose.
NOT_FOR_CLIENTS = ("image_embeds", "video_embeds", "audio_embeds", "image_pil")
MEDIA_FIELDS = (*MODALITIES, *NOT_FOR_CLIENTS)

# All other fields may decide tokens.
_FOR_SAMPLING = frozenset((
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "logit_bias",
    "max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs", "stream",
    "stream_options", "user", "priority", "request_id", "kv_transfer_params", "max_output_tokens",
    "ec_transfer_params", "stop_sequences", "metadata", "store", "include", "echo",
    "return_token_ids",
))  # fmt: skip


class MediaItem(Struct, frozen=True):
    """One media item: its path in the request, and its url (a data: url for input_audio)."""

    path: FieldPath
    kind: str
    """One of MODALITIES."""
    source: str
    modality: str
    """That of `kind`."""

    @property
    def param(self) -> str:
        """Return the item's path as error messages name it."""
        return param_at(self.path)


class Media(Struct, frozen=True):
    """An item's content: a data: `url` with its bytes, and the `uuid` derived from them.

    An empty url: the bytes were not needed so far.
    """

    uuid: str
    url: str


class Endpoint(Struct, frozen=True):
    """A path by which clients ask for tokens, and how its JSON is shaped."""

    path: str
    prompt: str
    """The field with the prompt: a string or a list."""
    with_bytes: Callable[[Request, MediaItem, Media], Request]
    """Returns a content part with the bytes of its item, and with the uuid if it takes one."""
    preamble: str = ""
    """The field with the instructions that stand before the prompt; empty: there is none."""
    limits: tuple[str, ...] = ()
    """The fields that limit the length of the answer."""
    prefill: Request = {}
    """The fields that make a request for one token of it, besides `limits`."""
    options: tuple[str, ...] = ()
    """The fields besides an item's bytes that change its embedding, or its identity in vLLM."""
    takes_names: bool = True
    """Whether vLLM takes a uuid beside an item."""
    takes_metadata: bool = False
    """Whether vLLM takes metadata in place of an item that has a uuid."""
    has_top_logprobs: bool = False
    """Whether `echo` alone has the prompt's logits told: `top_logprobs` counts as 0 if missing."""


class ClientRequest(Struct, frozen=True):
    """A client's request, checked as far as the router reads it, and its media items."""

    request: Request
    items: tuple[MediaItem, ...]
    endpoint: Endpoint
    model: str | None
    """The requested model, None if the engine may choose."""
    is_one_prompt: bool = True
    """Whether there is one prompt, of which P's answer can say what is stored."""

    @property
    def save_params(self) -> Request:
        """Return what it says of being stored, by the field that all engines get it in."""
        return {name: self.request[name] for name in SAVE_OPTIONS if self.request.get(name)}

    def allows(self, name: str) -> bool:
        """Tell whether KV (`KV_PARAMS`) or embeddings (`EC_PARAMS`) of it may be stored."""
        option = self.request.get(name)
        return not option or option[SAVE_OPTIONS[name]]

    def scores_prompt(self) -> bool:
        """Tell whether D computes the whole prompt in any case, because its logits are asked
        for.
        """
        request = self.request
        if request.get("prompt_logprobs") is not None:
            return True
        counts = self.endpoint.has_top_logprobs or request.get("logprobs") is not None
        return counts and bool(request.get("echo"))

    def for_model(self, model: str) -> "ClientRequest":
        """Return the same request for another model."""
        request = self.request | {"model": model}
        return msgspec.structs.replace(self, request=request, model=model)

    @property
    def preamble(self) -> list[Request]:
        """Return the instructions before the prompt, as a message, if there are any."""
        text = self.request.get(self.endpoint.preamble)
        return [{"role": "system", "content": text}] if text else []

    def turns_of(self, request: Request) -> list[Any]:
        """Return the messages of `request`, which is this one or differs in media only.

        The preamble comes first. A prompt without messages is one message of a user.
        """
        prompt = request.get(self.endpoint.prompt)
        if isinstance(prompt, list) and _are_messages(prompt):
            return [*self.preamble, *prompt]
        return [*self.preamble, {"role": "user", "content": _text(prompt)}]

    def turn_of(self, item: MediaItem) -> int:
        """Return the index of the message with `item`; 0 if there are no messages."""
        at = item.path[1] if len(item.path) > 1 else 0
        return len(self.preamble) + at if isinstance(at, int) else 0

    def part_at(self, item: MediaItem) -> Request:
        """Return the content part that holds `item`."""
        value: Any = self.request
        for step in item.path:
            value = value[step]
        assert isinstance(value, dict)
        return value

    def with_parts(self, parts: Mapping[MediaItem, Request]) -> Request:
        """Return the request with other content parts, and of transfer params only `*_save`."""
        request = {
            name: value for name, value in self.request.items() if value or name not in SAVE_OPTIONS
        }
        copied: dict[FieldPath, Any] = {(): request}
        for item, part in parts.items():
            *above, last = item.path
            inner: Any = request
            for depth, step in enumerate(above, 1):
                way = item.path[:depth]
                if way not in copied:
                    copied[way] = inner[step] = inner[step].copy()
                inner = copied[way]
            inner[last] = part
        return request


def _are_messages(prompt: list[Any]) -> bool:
    return bool(prompt) and all([isinstance(each, dict) for each in prompt])


def _text(prompt: Any) -> str:
    """Return a prompt that is a string, token ids or a list of either as a text of its length."""
    if isinstance(prompt, str):
        return prompt
    given = prompt if isinstance(prompt, list) else ()
    flat = (inner for each in given for inner in (each if isinstance(each, list) else (each,)))
    return " ".join(str(each) for each in flat if isinstance(each, int | str))


def param_at(path: FieldPath) -> str:
    """Return a path in a request as error messages name it, such as `messages[0].content`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def refusal(message: str, path: FieldPath) -> ApiError:
    """Return the error for a value at `path` that is malformed or must not come from a client."""
    return ApiError(400, message, param=param_at(path))


def too_deep() -> ApiError:
    """Return the error for a body that is nested too deeply to decode or encode."""
    return ApiError(400, "The body is nested too deeply.")


def parse_request(body: bytes) -> Request:
    """Return the JSON object of a client, with the fields checked that all endpoints have.

    Raises:
        ApiError: the body is malformed; names the field at fault.
    """
    # The garbage collector would scan the values of a large body repeatedly while they are created.
    collects = gc.isenabled()
    gc.disable()
    try:
        request = msgspec.json.decode(body)
    except RecursionError as exc:
        raise too_deep() from exc
    except UnicodeDecodeError as exc:
        raise ApiError(400, f"The body is not valid UTF-8: {exc.reason}.") from exc
    except ValueError as exc:
        raise ApiError(400, f"The body is not valid JSON: {exc}") from exc
    finally:
        if collects:
            gc.enable()
    if not isinstance(request, dict):
        raise ApiError(400, "The body must be a JSON object.")
    if not isinstance(request.get("model"), str | None):
        raise ApiError(400, "`model` must be a string.", param="model")
    _check_transfers(request)
    return request


def _check_transfers(request: Request) -> None:
    extra = request.get("vllm_xargs")
    for name, option in SAVE_OPTIONS.items():
        params = request.get(name)
        is_save_option = params is None or (
            isinstance(params, dict) and params.keys() == {option} and type(params[option]) is bool
        )
        # vLLM merges vllm_xargs into the dictionary that holds the transfer params.
        if not is_save_option or (isinstance(extra, dict) and name in extra):
            message = (
                f"`{name}` is set by the router. Clients may send {{`{option}`: true or false}}."
            )
            raise ApiError(400, message, param=name)


def client_request(
    request: Request,
    items: Iterable[MediaItem],
    endpoint: Endpoint,
    max_items: int,
    *,
    is_one_prompt: bool = True,
) -> ClientRequest:
    """Return a parsed request with its media items.

    Raises:
        ApiError: there are too many items.
    """
    found = tuple(items)
    if len(found) > max_items:
        message = f"{len(found)} media items; at most {max_items} are taken."
        raise ApiError(400, message, param=endpoint.prompt)
    model = request.get("model") or None
    return ClientRequest(request, found, endpoint, model, is_one_prompt)


class Turn(NamedTuple):
    """A message of a prompt."""

    digest: bytes
    """Of this message and all that decides the tokens up to its end: all messages before it, model,
    tools, `cache_salt` and every field that is not known to be for sampling alone."""
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
    named = client.request
    if client.items:
        both = zip(client.items, media, strict=True)
        named = client.with_parts({item: _named(client, item, held.uuid) for item, held in both})
    fields = {name: value for name, value in named.items() if name not in _FOR_SAMPLING}
    fields["path"] = client.endpoint.path
    fields.pop(client.endpoint.prompt, None)
    digest = hashlib.sha256(_json(fields)).digest()
    with_media = set(map(client.turn_of, client.items))
    turns = []
    for at, message in enumerate(client.turns_of(named)):
        json = _json(message, order=None)  # templates may show objects in the client's order
        digest = hashlib.sha256(digest + json).digest()
        is_answer = message.get("role") == "assistant"
        turns.append(Turn(digest, len(json), at in with_media, is_answer, json))
    return turns


def with_json_of(turns: Sequence[Turn], client: ClientRequest, request: Request) -> Request:
    """Return `request`, in which the messages without media are JSON already: they are encoded once
    for all engines.
    """
    name = client.endpoint.prompt
    messages = request.get(name)
    if not turns or not isinstance(messages, list) or not _are_messages(messages):
        return request
    both = zip(messages, turns[-len(messages) :], strict=True)
    encoded = [message if turn.has_media else msgspec.Raw(turn.json) for message, turn in both]
    return request | {name: encoded}


def _json(value: Any, order: Literal["deterministic"] | None = "deterministic") -> bytes:
    try:
        return msgspec.json.encode(value, order=order)
    except RecursionError as exc:
        raise too_deep() from exc


def _named(client: ClientRequest, item: MediaItem, uuid: str) -> Request:
    """Return the content part of an item without its media, which `uuid` stands for."""
    part = client.part_at(item)
    left = {name: part[name] for name in part if name not in (*MEDIA_FIELDS, "type", "source")}
    return left | {"uuid": uuid}
