# SPDX-License-Identifier: Apache-2.0
"""What the engine tests ask of an engine, and how they read its answers."""

import base64
import io
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from PIL import Image

from ecshare.testing.processes import Server


@dataclass(frozen=True)
class Answer:
    """One answer: an HTTP status, and what came with it."""

    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        assert self.status == 200, self.body
        tokens: list[int] = self.body["choices"][0]["token_ids"]
        assert tokens
        return tokens

    @property
    def num_cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens"])


def ask(server: Server, model: str, content: list[dict[str, Any]], **fields: Any) -> Answer:
    """Send one chat request, greedy; return the answer, whatever its status."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    request = urllib.request.Request(
        f"{server.base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return Answer(response.status, json.load(response))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, json.load(error))


def counts(server: Server) -> dict[str, float]:
    """Return our own counters from an engine's /metrics, by `family/event`."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    found = {}
    for line in lines:
        name, _, rest = line.partition("{")
        if name.startswith(("ecshare_", "kvshare_")) and name.endswith("_total"):
            event = rest.split('event="')[1].split('"')[0]
            found[f"{name.removesuffix('_total')}/{event}"] = float(line.split()[-1])
    return found


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(colour: int, uuid: str | None = None) -> dict[str, Any]:
    """Return a picture item; each `colour` gives another picture."""
    image = Image.new(
        "RGB", (224, 224), (colour * 53 % 256, colour * 101 % 256, colour * 197 % 256)
    )
    for x in range(0, 224, 8):
        image.paste((x, colour % 256, 255 - x), (x, x % 97, x + 4, x % 97 + 60))
    png = io.BytesIO()
    image.save(png, "PNG")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    item: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    return item if uuid is None else item | {"uuid": uuid}


def announced(answer: Answer, uuid: str) -> dict[str, Any]:
    """Return the metadata-only item that an encoder's answer announces for `uuid`."""
    assert answer.status == 200, answer.body
    metadata = answer.body["ec_transfer_params"][uuid]["metadata"]
    assert metadata
    return {"type": "image_embeds", "image_embeds": metadata, "uuid": uuid}
