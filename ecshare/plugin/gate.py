# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware for vLLM's API server: only the router may name media or transfers.

    export ECSHARE_ROUTER_KEY=file:/etc/ecshare/router.key
    vllm serve ... --middleware ecshare.plugin.gate.RouterGate

vLLM takes a client's `uuid` for the content of a picture. Embeddings and KV are stored by it for
the whole fleet, so a client that chooses it chooses what others get. Behind the API server such a
name cannot be distinguished from a hash that vLLM made, so it is checked here. Requests with the
router's key pass, and so do requests that name nothing. All others are refused.

vLLM imports this class by name and creates one object in each API server process.
"""

import hmac
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from ecshare.store.integrity import TOKEN_HEADER, read_key, router_token

KEY_VARIABLE = "ECSHARE_ROUTER_KEY"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# vLLM itself has no limit. This one applies to clients without the key.
MAX_BODY_BYTES = 256 << 20
# JSON without any of these contains nothing to refuse, in any encoding: names may be escaped, and
# UTF-16 has a zero byte in every bracket.
_MARKERS = (b"uuid", b"mm_hashes", b"transfer_params", b"\\u", b"\0")
_TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_MEDIA = re.compile("image|audio|video|vision|embed")
# Schemas may describe anything, and vLLM reads no media from them.
_SCHEMAS = ("tools", "functions")


class RouterGate:
    """Passes requests that are the router's or that name nothing; refuses others with 400.

    Any task of the server's event loop may call. The only state is the key.
    """

    def __init__(self, app: App) -> None:
        """Guard `app`. Without the environment variable ECSHARE_ROUTER_KEY no client is the router.

        Raises:
            ConfigError: the variable is set, but neither holds a valid key nor names a file with
                one.
        """
        self._app = app
        key = os.environ.get(KEY_VARIABLE, "")
        self._token = router_token(read_key(key, KEY_VARIABLE)).encode() if key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http" or self._is_router(scope):
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            await _refuse(send, 413, "The body is too large.")
            return
        field = forbidden_field(body) or await _field_in_form(scope, body)
        if field is not None:
            await _refuse(send, 400, f"`{field}` is not accepted from clients; leave it out.")
            return
        await self._app(scope, _replaying(body, receive), send)

    def _is_router(self, scope: Scope) -> bool:
        name = TOKEN_HEADER.encode()
        shown = [value for header, value in scope["headers"] if header.lower() == name]
        return bool(self._token) and len(shown) == 1 and hmac.compare_digest(shown[0], self._token)


def forbidden_field(body: bytes) -> str | None:
    """Return the first field of a request that names media or transfers, None if there is none.

    A body that is not JSON contains none: vLLM uses the same parser, in every encoding.
    """
    if not any(word in body for word in _MARKERS):
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for part in _json_objects(request):
        if part.get("uuid") is not None and _is_media(part):
            return "uuid"
        for name in (*_TRANSFER_FIELDS, "mm_hashes"):
            if part.get(name) is not None:
                return name
    return None


async def _field_in_form(scope: Scope, body: bytes) -> str | None:
    """Return the first such field in the JSON texts of a form, such as `vllm_xargs` beside a sound.

    The form is parsed as the server parses it, and not searched as bytes: the client chooses the
    charset, and may escape any letter, as %41. The server refuses a form that cannot be parsed.
    """
    try:
        async with Request(scope, _replaying(body, _nothing)).form() as form:
            texts = [value for _, value in form.multi_items() if isinstance(value, str)]
    except (MultiPartException, HTTPException, ValueError):  # or an odd charset
        return None
    encoded = (text.encode(errors="surrogatepass") for text in texts)
    return next(filter(None, map(forbidden_field, encoded)), None)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _is_media(part: dict[str, Any]) -> bool:
    """Return whether vLLM may read this object as a content part that holds or names media."""
    return any(_MEDIA.search(name) for name in (*part, str(part.get("type"))))


def _json_objects(request: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value, except those in schemas."""
    left = [request]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += [inner for name, inner in value.items() if name not in _SCHEMAS]
        elif isinstance(value, list):
            left += value


async def _read(receive: Receive) -> bytes | None:
    """Return the whole body, or what arrived before the client left. None: it is too large."""
    body, goes_on = bytearray(), True
    while goes_on:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        goes_on = message["type"] == "http.request" and message.get("more_body", False)
    return bytes(body)


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields `body`, which was already read, and then what follows it."""
    unread = [body]

    async def receive_again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receive_again


async def _refuse(send: Send, status: int, message: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
