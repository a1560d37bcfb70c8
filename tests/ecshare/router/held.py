# SPDX-License-Identifier: Apache-2.0
"""What engines of tests answer that do not answer at once."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.ecshare.router.answers import EVENTS, Answer, begin


def streaming_until(let_go: asyncio.Event, last: bytes = EVENTS[-1]) -> Answer:
    """Answer as D whose stream has begun, and goes on once somebody lets it go."""

    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(http, EVENTS[0])
        await let_go.wait()
        await response.write(last)
        return response

    return answer


@dataclass
class Hanging:
    """An answer that never comes; says when it was asked for and when the caller had gone."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    start: bytes | None = None

    async def __call__(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        if self.start is not None:
            response = await begin(http, self.start)
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return response


@dataclass
class Held:
    """An answer that is held back until somebody lets it go; says when the caller had gone."""

    answer: Answer
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.asked.set()
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        return await self.answer(http, body)


async def soon(*events: asyncio.Event) -> None:
    """Return when all of them are set."""
    async with asyncio.timeout(10):
        for event in events:
            await event.wait()
