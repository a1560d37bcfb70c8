# SPDX-License-Identifier: Apache-2.0
"""What the tests' engines answer."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

EVENTS = [b'data: {"n":1}\n\n', b'data: {"n":', b"2}\n\n", b"data: [DONE]\n\n"]
DECODED = {True: b"".join(EVENTS), False: b'{"choices":  []}'}
"""All that D answers, by whether it streams."""
HASHED = "vLLM's own name of an item that has no uuid"


def answering(status: int = 200, headers: dict[str, str] | None = None, /, **fields: Any) -> Answer:
    """Answer with a JSON object of these fields."""

    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(fields, status=status, headers=headers)

    return answer


def failing(status: int) -> Answer:
    return answering(status, error={"message": "engine says no"})


def stored(num_tokens: int = 99, **usage: int) -> Answer:
    """Answer as P that has stored so much of a prompt, of 100 tokens unless `usage` differs."""
    params = {"kvshare": {"num_tokens": num_tokens, "size": 1}}
    return answering(kv_transfer_params=params, usage=usage or {"prompt_tokens": 100})


def event(content: Any, end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(content)}{end}".encode()


async def begin(
    http: web.Request, *events: bytes, content_type: str = "text/event-stream"
) -> web.StreamResponse:
    """Return a stream of which these events have been sent."""
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await response.prepare(http)
    for event in events:
        await response.write(event)
    return response


def streaming(*events: bytes, breaks: bool = False, **head: str) -> Answer:
    """Answer with these events. `breaks`: the connection ends behind them, and not the stream."""

    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(http, *events, **head)
        if breaks:
            await hang_up(http, body)
        return response

    return answer


def either(whole: Answer, stream: Answer) -> Answer:
    """Answer as clients ask: at once or in a stream."""

    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (stream if body.get("stream") else whole)(http, body)

    return answer


async def hang_up(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert http.transport is not None
    http.transport.close()
    return web.Response()


async def encoded(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer as E does: metadata that depends on the item."""
    (part,) = body["messages"][0]["content"]
    grid = [1, 2, len(part["image_url"]["url"])]
    report = {"metadata": {"image_grid_thw": grid}, "item_indices": [0]}
    return web.json_response({"ec_transfer_params": {part.get("uuid", HASHED): report}})


prefilled = answering(kv_transfer_params={"kvshare": {"num_tokens": 7}})


async def decoded(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if body.get("stream"):
        return await begin(http, *EVENTS, content_type="text/event-stream; charset=utf-8")
    return web.Response(body=DECODED[False], content_type="application/json")


break_in_the_stream = streaming(*EVENTS[:2], breaks=True)
"""Answer as D whose connection ends within the second event of a stream."""


@dataclass
class First:
    """Answers the first requests of a stage in another way, whichever engine they come to."""

    first: Answer
    otherwise: Answer
    left: int = 1

    async def __call__(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.left -= 1
        return await (self.first if self.left >= 0 else self.otherwise)(http, body)
