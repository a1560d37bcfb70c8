# SPDX-License-Identifier: Apache-2.0
"""Long work on a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator

from ecshare.transfer.upkeep.background import Background


def test_work_that_is_ended_closes_what_it_iterates() -> None:
    """Else asyncio logs an error when the process ends, and a listing keeps its connection."""
    is_listing, is_closed = threading.Event(), threading.Event()

    async def pages() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            is_closed.set()

    async def work() -> None:
        async for _ in pages():
            is_listing.set()
            await asyncio.sleep(3600)

    background = Background("test", work())
    assert is_listing.wait(10)
    background.close()
    assert is_closed.is_set()
