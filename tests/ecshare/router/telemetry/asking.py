# SPDX-License-Identifier: Apache-2.0
"""What operators ask a router for, and requests that are on their way meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.ecshare.router.fake_engine import STATUS_KEY, Fleet
from tests.ecshare.router.held import Hanging, Held, soon

SOON_S = 10.0
WITH_KEY = {"Authorization": f"Bearer {STATUS_KEY}"}


async def get(
    f: Fleet, path: str, headers: Mapping[str, str] = WITH_KEY
) -> tuple[aiohttp.ClientResponse, str]:
    """Return the answer, and its body."""
    async with f.client.get(f.url + path, headers=headers, allow_redirects=False) as response:
        return response, await response.text()


async def told(f: Fleet, path: str) -> dict[str, Any]:
    """Return the JSON that is at a path."""
    async with f.client.get(f.url + path, headers=WITH_KEY) as response:
        assert response.status == 200
        content: dict[str, Any] = await response.json()
        return content


@asynccontextmanager
async def on_its_way(
    f: Fleet, waits: Hanging | Held, body: dict[str, Any]
) -> AsyncIterator[asyncio.Task[tuple[aiohttp.ClientResponse, bytes]]]:
    """Send a request; the block begins once an engine that `waits` has it, and ends it."""
    asked = asyncio.create_task(f.post(body))
    await soon(waits.asked)
    yield asked
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
