# SPDX-License-Identifier: Apache-2.0
"""Runs long work in an event loop on a thread of its own."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from ecshare.transfer.device.affinity import start_unbound

MOST_OBJECTS = 4_000_000
"""Of a store, in the memory of an engine: 500 MB while they are sorted."""
_CLOSE_S = 1.0


class Background:
    """Runs `work` on a thread of its own until it ends, or until `close`."""

    def __init__(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start the thread `name`. `work` raises nothing."""
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(work)
        self._thread = start_unbound(name, self._serve)

    def close(self) -> None:
        """Cancel the work, and wait up to a second for the thread to end."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
