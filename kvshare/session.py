# SPDX-License-Identifier: Apache-2.0
"""Blocking calls to a store: one thread with an event loop, for callers that have none."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from ecshare.store.errors import ConfigError, StoreError
from ecshare.store.objects import ObjectStore

T = TypeVar("T")


class Session:
    """Runs coroutines over `store`, which it closes at the end. Any thread may call."""

    def __init__(self, store: ObjectStore, limit_s: float) -> None:
        """`limit_s`: what a call may take, of one or a few operations."""
        self._store = store
        self._limit_s = limit_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvshare-session", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until `work` is done. Raises what it raises; TimeoutError; RuntimeError: closed."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the buffer is closed")

        async def bounded() -> T:
            async with asyncio.timeout(self._limit_s):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()

    def start(self, work: Coroutine[Any, Any, T], option: str) -> T:
        """As `run`, at start-up: ConfigError names `option` where the store fails."""
        try:
            return self.run(work)
        except (StoreError, TimeoutError) as exc:
            reason = str(exc) or f"no answer within {self._limit_s:g} s"
            raise ConfigError(f"{option}: the store cannot be used: {reason}") from exc

    def close(self) -> None:
        """Close the store and end the thread; once."""
        if self._loop.is_closed():
            return
        with suppress(StoreError, TimeoutError):
            self.run(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
