# SPDX-License-Identifier: Apache-2.0
"""What the tests' clients ask."""

import base64
from typing import Any

from blake3 import blake3

from ecshare.router.api.chat import CHAT

HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % CHAT.encode()
"""The start of a chat completion's head."""
PNG = b"\x89PNG picture one"
PNG_2 = b"\x89PNG picture two"


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def picture(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def chat(*parts: object, **fields: Any) -> dict[str, Any]:
    content = [text("what is this?"), *parts]
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def media_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the media of a chat completion's first message."""
    return [part for part in body["messages"][0]["content"] if part["type"] != "text"]


def uuid_of(content: bytes) -> str:
    """Return the name under which the router sends this picture."""
    return blake3(b"image\0" + content).hexdigest()
