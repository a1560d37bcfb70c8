# SPDX-License-Identifier: Apache-2.0
"""A client's chat completion: parsed, checked, and its media items identified. Pure."""

import gc
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pybase64
from msgspec import Struct

from ecshare.router.blobs import Blobs
from ecshare.router.errors import ApiError

Request = dict[str, Any]

CHAT = "/v1/chat/completions"

_MODALITIES = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
# Only our own encoders may send tensors and processor metadata. An engine that accepts metadata
# also loads a client's tensor, and caches it for everybody under the uuid that the client chose.
_REFUSED = ("image_embeds", "video_embeds", "audio_embeds", "image_pil")
MEDIA_FIELDS = (*_MODALITIES, *_REFUSED)
TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")

_HASHED_AT_ONCE = 256 * 1024  # base64; whole groups of four

_AUDIO_FORMAT = re.compile(r"[A-Za-z0-9.+-]{1,32}")


class MediaItem(Struct, frozen=True):
    """One media item: its place in the conversation, and its url (a data: url for input_audio)."""

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
        """Return the item's place as error messages name it."""
        return _param(self.message, self.part)


class Media(Struct, frozen=True):
    """An item's content: a data: `url` with its bytes, and the `uuid` derived from them.

    An empty url: the bytes were not needed so far.
    """

    uuid: str
    url: str


class Chat(Struct, frozen=True):
    """A client's request, checked as far as the router reads it, and its media items."""

    request: Request
    items: tuple[MediaItem, ...]

    @property
    def model(self) -> str | None:
        """Return the requested model, None if the engine may choose."""
        model: str | None = self.request.get("model")
        return model


def read_chat(body: bytes | bytearray, max_items: int) -> Chat:
    """Parse and check the body of a chat completion.

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
    _check_fields(request)
    items = tuple(_items(request["messages"]))
    if len(items) > max_items:
        raise ApiError(
            400, f"{len(items)} media items; at most {max_items} are taken.", param="messages"
        )
    return Chat(request, items)


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


def _check_fields(request: Request) -> None:
    if not isinstance(request.get("model"), str | None):
        raise ApiError(400, "`model` must be a string.", param="model")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "`messages` must be a non-empty array.", param="messages")
    extra = request.get("vllm_xargs")
    for name in TRANSFER_FIELDS:
        # vLLM merges vllm_xargs into the dictionary that holds the transfer params.
        if request.get(name) is not None or (isinstance(extra, dict) and name in extra):
            raise ApiError(400, f"`{name}` is set by the router.", param=name)


def _items(messages: list[Any]) -> Iterator[MediaItem]:
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


def _items_of(message: int, content: list[Any]) -> Iterator[MediaItem]:
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
            yield MediaItem(message, at, kind, source)


def _kind(part: Request, param: str) -> str | None:
    """Return which media field a content part holds, None for text and the like.

    vLLM reads a part by its `type` or, when it has a uuid, by the first media field it finds. A
    part on which the two could disagree is refused: it could store one picture's bytes under
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
    """Return the item's url. For input_audio it is the data: url that vLLM would build."""
    if kind == "input_audio":
        sound = value if isinstance(value, dict) else {}
        text, form = sound.get("data"), sound.get("format")
        # vLLM inserts the format into a url, where a comma would move the start of the data.
        if not isinstance(form, str) or not _AUDIO_FORMAT.fullmatch(form):
            raise ApiError(400, "`input_audio.format` must be like `wav`.", param=param)
        if not isinstance(text, str) or not text:
            raise ApiError(400, "`input_audio.data` must be base64 text.", param=param)
        return f"data:audio/{form};base64,{text}"
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        # A uuid alone would ask for what somebody else sent under it.
        raise ApiError(400, f"`{kind}` must hold a url.", param=param)
    return url


def _param(message: int, part: int) -> str:
    return f"messages[{message}].content[{part}]"


def is_inline(url: str) -> bool:
    """Tell whether the url contains the media itself."""
    return url[:5].lower() == "data:"


def inline_url(base64: str) -> str:
    """Return a data: url for downloaded bytes."""
    # vLLM ignores the type but for video/jpeg, which a foreign server could send.
    return f"data:application/octet-stream;base64,{base64}"


def identity(modality: str, url: str, blobs: Blobs | None = None) -> str:
    """Return an item's uuid: the hex SHA-256 of its modality, NUL and the bytes in its data: url.

    `blobs` holds the long texts of the url. Any thread may call. The url is read as vLLM reads it.

    Raises:
        ValueError: the url holds no valid base64.
    """
    blobs = blobs or Blobs()
    head, comma, text = url[5:].partition(",")
    media_type, _, encoding = head.rpartition(";")
    if not comma or encoding != "base64":
        raise ValueError("A data: url must read data:TYPE;base64,DATA.")
    digest = hashlib.sha256(modality.encode() + b"\0")
    if modality == "video" and media_type.partition(";")[0].lower() == "video/jpeg":
        # Pictures joined by commas: the boundaries between them are part of the content.
        digest.update(b"video/jpeg\0")
        for frame in text.split(","):
            digest.update(_hashed(frame, hashlib.sha256(), blobs).digest())
        return digest.hexdigest()
    return _hashed(text, digest, blobs).hexdigest()


def _hashed(text: str, digest: "hashlib._Hash", blobs: Blobs) -> "hashlib._Hash":
    """Add the decoded base64 to `digest`, and return it.

    Raises:
        ValueError: the text is empty or malformed.
    """
    try:
        base64 = blobs.resolve(text)
        for decoded in _decoded(base64):
            digest.update(decoded)
    except ValueError as exc:
        raise ValueError("The base64 text is malformed.") from exc
    if not base64:
        raise ValueError("The media item is empty.")
    return digest


def _decoded(base64: bytes | memoryview) -> Iterator[bytes]:
    """Yield the decoded bytes piece by piece, so that other threads can run in between.

    Raises:
        ValueError: the text is malformed.
    """
    for start in range(0, len(base64), _HASHED_AT_ONCE):
        # vLLM's own decoder with its strictness: both get the same bytes, or both fail.
        decoded = pybase64.b64decode(base64[start : start + _HASHED_AT_ONCE], validate=True)
        is_last_resort = start + _HASHED_AT_ONCE >= len(base64)
        if not is_last_resort and len(decoded) < _HASHED_AT_ONCE // 4 * 3:
            raise ValueError("padding in the middle")  # the piece alone is well-formed
        yield decoded
