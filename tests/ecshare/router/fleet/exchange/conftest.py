# SPDX-License-Identifier: Apache-2.0
"""The tests of the client for engines run on asyncio's own event loop and on uvloop's."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from tests.ecshare.router.fleet.exchange.scripted_server import Server, answer, answering, serving


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server that answers "ok" to each request."""
    async with serving(answering(answer())) as server:
        yield server
