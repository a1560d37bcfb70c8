# SPDX-License-Identifier: Apache-2.0
"""Small servers for the command, in a thread of their own: the command has the main thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TypeVar

from aiohttp import web

from tests.ecshare.router.answers import Answer
from tests.ecshare.router.fake_engine import FakeEngine, listening

T = TypeVar("T")


@contextmanager
def in_a_thread(server: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """Yield what `server` yields in an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        held = server()
        yield asyncio.run_coroutine_threadsafe(held.__aenter__(), loop).result(30)
        asyncio.run_coroutine_threadsafe(held.__aexit__(None, None, None), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def engine(answer: Answer) -> Iterator[FakeEngine]:
    """Run an engine with this answer."""
    with in_a_thread(lambda: FakeEngine(answer).serving()) as running:
        yield running


@contextmanager
def files(bodies: dict[str, bytes]) -> Iterator[str]:
    """Serve files; yields the url."""

    async def get(http: web.Request) -> web.Response:
        return web.Response(body=bodies[http.path])

    @asynccontextmanager
    async def server() -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/{path:.*}", get)
        async with listening(app) as url:
            yield url

    with in_a_thread(server) as url:
        yield url
