# SPDX-License-Identifier: Apache-2.0
"""A client's request as far as the router reads it, whatever the shape of its JSON. Pure."""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


class MediaItem(Struct, frozen=True):
    """One media item: its path in the request, and its url (a data: url for input_audio)."""

    path: FieldPath
    kind: str
    source: str

    @property
    def modality(self) -> str:
        """Return image, video or audio."""
        return MODALITIES[self.kind]

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


class ClientRequest(Struct, frozen=True):
    """A client's request, checked as far as the router reads it, and its media items."""

    request: Request
    items: tuple[MediaItem, ...]
    endpoint: Endpoint
    is_one_prompt: bool = True
    """Whether there is one prompt, of which P's answer can say what is stored."""

    @property
    def model(self) -> str | None:
        """Return the requested model, None if the engine may choose."""
        model: str | None = self.request.get("model")
        return model or None

    @property
    def save_params(self) -> Request:
        """Return what it says of being stored, by the field that all engines get it in."""
        return {name: self.request[name] for name in SAVE_OPTIONS if self.request.get(name)}

    def allows(self, name: str) -> bool:
        """Tell whether KV (`KV_PARAMS`) or embeddings (`EC_PARAMS`) of it may be stored."""
        option = self.request.get(name)
        return not option or option[SAVE_OPTIONS[name]]

    def for_model(self, model: str | None) -> "ClientRequest":
        """Return the same request for another model; None: as it is."""
        if model in (None, self.model):
            return self
        return msgspec.structs.replace(self, request=self.request | {"model": model})

    @property
    def preamble(self) -> list[Request]:
        """Return the instructions before the prompt, as a message, if there are any."""
        text = self.request.get(self.endpoint.preamble)
        return [{"role": "system", "content": text}] if text else []

    @property
    def has_messages(self) -> bool:
        """Whether the prompt is a list of messages."""
        prompt = self.request.get(self.endpoint.prompt)
        return (
            isinstance(prompt, list)
            and bool(prompt)
            and all(isinstance(each, dict) for each in prompt)
        )

    def turns_of(self, request: Request) -> list[Any]:
        """Return the messages of `request`, which is this one or differs in media only.

        The preamble comes first. A prompt without messages is one message of a user.
        """
        prompt = request.get(self.endpoint.prompt)
        if isinstance(prompt, list) and self.has_messages:
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
        request = {name: self.request[name] for name in self.request if name not in SAVE_OPTIONS}
        request |= self.save_params
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


def parse_request(body: bytes | bytearray) -> Request:
    """Return the JSON object of a client, with the fields checked that all endpoints have.

    Raises:
        ApiError: the body is malformed; names the field at fault.
    """
    try:
        request = _parsed(body)
    except RecursionError as exc:
        raise too_deep() from exc
    except UnicodeDecodeError as exc:
        raise ApiError(400, f"The body is not valid UTF-8: {exc.reason}.") from exc
    except ValueError as exc:
        raise ApiError(400, f"The body is not valid JSON: {exc}") from exc
    if not isinstance(request, dict):
        raise ApiError(400, "The body must be a JSON object.")
    if not isinstance(request.get("model"), str | None):
        raise ApiError(400, "`model` must be a string.", param="model")
    _check_transfers(request)
    return request


def _parsed(body: bytes | bytearray) -> Any:
    # The garbage collector would scan the values of a large body repeatedly while they are created.
    collects = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(body)
    finally:
        if collects:
            gc.enable()


def too_deep() -> ApiError:
    """Return the error for a body that is nested too deeply to decode or encode."""
    return ApiError(400, "The body is nested too deeply.")


def _check_transfers(request: Request) -> None:
    extra = request.get("vllm_xargs")
    for name, option in SAVE_OPTIONS.items():
        # vLLM merges vllm_xargs into the dictionary that holds the transfer params.
        if not _is_save_option(request.get(name), option) or (
            isinstance(extra, dict) and name in extra
        ):
            message = (
                f"`{name}` is set by the router. Clients may send {{`{option}`: true or false}}."
            )
            raise ApiError(400, message, param=name)


def _is_save_option(params: Any, option: str) -> bool:
    if params is None:
        return True
    return isinstance(params, dict) and params.keys() == {option} and type(params[option]) is bool


def check_number(items: Sequence[MediaItem], max_items: int, param: str) -> None:
    """Check that there are not too many items.

    Raises:
        ApiError: there are.
    """
    if len(items) > max_items:
        message = f"{len(items)} media items; at most {max_items} are taken."
        raise ApiError(400, message, param=param)
