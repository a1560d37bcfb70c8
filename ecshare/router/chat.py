# SPDX-License-Identifier: Apache-2.0
"""A client's request, and the media items in it: found, checked, given an identity. Pure."""

import gc
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pybase64
from msgspec import Struct

from ecshare.router.bulk import Bulk
from ecshare.router.errors import ApiError

Request = dict[str, Any]

_MODALITIES = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
# Tensors and processor metadata come from our own encoders only: an engine that accepts metadata
# also loads a client's tensor and keeps it under whatever uuid the client names, for everybody.
_REFUSED = ("image_embeds", "video_embeds", "audio_embeds", "image_pil")
MEDIA_FIELDS = (*_MODALITIES, *_REFUSED)
TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")

_HASHED_AT_ONCE = 256 * 1024  # base64; whole groups of four

_AUDIO_FORMAT = re.compile(r"[A-Za-z0-9.+-]{1,32}")


class Item(Struct, frozen=True):
    """One media item: its place in the conversation and its url (input_audio gets a data: url)."""

    message: int
    part: int
    kind: str
    source: str

    @property
    def modality(self) -> str:
        """Return image, video or audio."""
        return _MODALITIES[self.kind]

    @property
    def param(self) -> str:
        """Return the item's place as errors name it."""
        return _param(self.message, self.part)


class Media(Struct, frozen=True):
    """An item's content: `uuid` is made of its bytes, `url` is a data: url that holds them."""

    uuid: str
    url: str


class Chat(Struct, frozen=True):
    """A client's request, checked as far as the router reads it, and the media items in it."""

    request: Request
    items: tuple[Item, ...]

    @property
    def model(self) -> str | None:
        """Return the model asked for; None leaves the choice to the engine."""
        model: str | None = self.request.get("model")
        return model


def read_chat(body: bytes | bytearray, max_items: int) -> Chat:
    """Check a chat completion's body; raises ApiError naming the field at fault."""
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
    _check_fields(request)
    items = tuple(_items(request["messages"]))
    if len(items) > max_items:
        raise ApiError(
            400, f"{len(items)} media items; at most {max_items} are taken.", param="messages"
        )
    return Chat(request, items)


def _parsed(body: bytes | bytearray) -> Any:
    # The collector would look through a large body's values again and again while they are made.
    collects = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(body)
    finally:
        if collects:
            gc.enable()


def too_deep() -> ApiError:
    """Return the refusal of a body that cannot be read, or not be written again."""
    return ApiError(400, "The body is nested too deeply.")


def _check_fields(request: Request) -> None:
    if not isinstance(request.get("model"), str | None):
        raise ApiError(400, "`model` must be a string.", param="model")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "`messages` must be a non-empty array.", param="messages")
    extra = request.get("vllm_xargs")
    for name in TRANSFER_FIELDS:
        # vLLM merges vllm_xargs into the place where it keeps the transfer params.
        if request.get(name) is not None or (isinstance(extra, dict) and name in extra):
            raise ApiError(400, f"`{name}` is set by the router.", param=name)


def _items(messages: list[Any]) -> Iterator[Item]:
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ApiError(400, "A message must be an object.", param=f"messages[{at}]")
        if not isinstance(message.get("role"), str):
            raise ApiError(400, "`role` must be a string.", param=f"messages[{at}].role")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise ApiError(
                400, "`content` must be a string or an array.", param=f"messages[{at}].content"
            )
        if isinstance(content, list):
            yield from _items_of(at, content)


def _items_of(message: int, content: list[Any]) -> Iterator[Item]:
    for at, part in enumerate(content):
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            raise ApiError(
                400, "A content part must be an object or a string.", param=_param(message, at)
            )
        kind = _kind(part, _param(message, at))
        if kind is not None:
            source = _source(kind, part.get(kind), _param(message, at))
            yield Item(message, at, kind, source)


def _kind(part: Request, param: str) -> str | None:
    """Return which media a part holds, None for text and the like.

    vLLM reads a part by its `type`, or, when there is a uuid, by the first media field it finds.
    A part on which the two could disagree is refused: it could put one picture's bytes under
    another one's uuid.
    """
    named = part.get("type")
    if named == "input_image":  # the Responses API's name
        named = "image_url"
    has_uuid = part.get("uuid") is not None
    held = [key for key in MEDIA_FIELDS if key in part and (has_uuid or part[key] is not None)]
    kinds = set(held)
    if isinstance(named, str) and (named in MEDIA_FIELDS or held):
        kinds.add(named)
    if not kinds:
        return None
    if refused := kinds.intersection(_REFUSED):
        raise ApiError(
            400, f"`{min(refused)}` is not accepted from clients; send the media.", param=param
        )
    if len(kinds) > 1:
        raise ApiError(
            400, f"A content part is one of {', '.join(sorted(kinds))}, not all.", param=param
        )
    return kinds.pop()


def _source(kind: str, value: Any, param: str) -> str:
    """Return the item's url; input_audio becomes the data: url that vLLM makes of it."""
    if kind == "input_audio":
        sound = value if isinstance(value, dict) else {}
        text, form = sound.get("data"), sound.get("format")
        # vLLM pastes the format into a url; a comma in it would move where the bytes begin.
        if not isinstance(form, str) or not _AUDIO_FORMAT.fullmatch(form):
            raise ApiError(400, "`input_audio.format` must be like `wav`.", param=param)
        if not isinstance(text, str) or not text:
            raise ApiError(400, "`input_audio.data` must be base64 text.", param=param)
        return f"data:audio/{form};base64,{text}"
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        # Also a uuid alone, which asks for whatever somebody else sent under it.
        raise ApiError(400, f"`{kind}` must hold a url.", param=param)
    return url


def _param(message: int, part: int) -> str:
    return f"messages[{message}].content[{part}]"


def is_inline(url: str) -> bool:
    """Tell whether the url holds the media itself."""
    return url[:5].lower() == "data:"


def inline_url(base64: str) -> str:
    """Return the data: url of some downloaded bytes."""
    # vLLM looks at the bytes, not at the type; a type from outside could be video/jpeg.
    return f"data:application/octet-stream;base64,{base64}"


def identity(modality: str, url: str, bulk: Bulk | None = None) -> str:
    """Return an item's uuid: sha256 hex over modality, NUL and the bytes in its data: url.

    `bulk` has the long texts that the url stands for. Any thread. Reads the url as vLLM does;
    raises ValueError with a sentence when it holds no proper base64.
    """
    bulk = bulk or Bulk()
    head, comma, text = url[5:].partition(",")
    media_type, _, encoding = head.rpartition(";")
    if not comma or encoding != "base64":
        raise ValueError("A data: url must read data:TYPE;base64,DATA.")
    digest = hashlib.sha256(modality.encode() + b"\0")
    if modality == "video" and media_type.partition(";")[0].lower() == "video/jpeg":
        # A list of pictures, joined by commas: where they are cut is part of the content.
        digest.update(b"video/jpeg\0")
        for frame in text.split(","):
            digest.update(_hashed(frame, hashlib.sha256(), bulk).digest())
        return digest.hexdigest()
    return _hashed(text, digest, bulk).hexdigest()


def _hashed(text: str, digest: "hashlib._Hash", bulk: Bulk) -> "hashlib._Hash":
    """Add decoded base64 to a hash."""
    try:
        base64 = bulk.resolve(text)
        for decoded in _decoded(base64):
            digest.update(decoded)
    except ValueError as exc:
        raise ValueError("The base64 text is malformed.") from exc
    if not base64:
        raise ValueError("The media item is empty.")
    return digest


def _decoded(base64: bytes | memoryview) -> Iterator[bytes]:
    """Yield the bytes in pieces: other threads go on between them."""
    for start in range(0, len(base64), _HASHED_AT_ONCE):
        # vLLM's own decoder, as strict as there: both see the same bytes, or neither does.
        decoded = pybase64.b64decode(base64[start : start + _HASHED_AT_ONCE], validate=True)
        is_last = start + _HASHED_AT_ONCE >= len(base64)
        if not is_last and len(decoded) < _HASHED_AT_ONCE // 4 * 3:
            raise ValueError("padding in the middle")  # the piece alone is well-formed
        yield decoded
