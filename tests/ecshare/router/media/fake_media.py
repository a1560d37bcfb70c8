# SPDX-License-Identifier: Apache-2.0
"""A server of media, for tests, and requests that name it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.ecshare.router.bodies import PNG, chat
from tests.ecshare.router.fake_engine import LOOPBACK, Fleet, fleet, listening_on

Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]


def at(*urls: str) -> dict[str, Any]:
    """A request with pictures at urls."""
    return chat(*({"type": "image_url", "image_url": {"url": url}} for url in urls))


def answering(body: bytes = PNG, **more: Any) -> Serve:
    """Answer whatever is asked for so; `more` as in web.Response."""

    async def serve(http: web.Request) -> web.StreamResponse:
        return web.Response(body=body, **more)

    return serve


a_picture = answering()


@asynccontextmanager
async def media_server(serve: Serve = a_picture) -> AsyncIterator[str]:
    """A server of media; yields its url."""
    app = web.Application()
    app.router.add_get("/{name}", serve)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    async with listening_on(runner) as url:
        yield url


@asynccontextmanager
async def served(serve: Serve = a_picture, **options: Any) -> AsyncIterator[tuple[Fleet, str]]:
    """A D behind a router, and a server of media; yields the server's url."""
    async with (
        media_server(serve) as url,
        fleet(0, 0, **{"allow_media_networks": LOOPBACK, **options}) as f,
    ):
        yield f, url
