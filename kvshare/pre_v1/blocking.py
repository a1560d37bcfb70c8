# SPDX-License-Identifier: Apache-2.0
"""A blocking client of a store: one thread with an event loop, for callers that have none."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from ecshare.store.errors import ConfigError, StoreError
from ecshare.store.objects import ObjectStore

T = TypeVar("T")

_CLOSED = "the buffer is closed"


class BlockingClient:
    """A runner of coroutines on `store`, which it owns and closes. Any thread may call.

    The lock is held while a coroutine is passed to the loop. So `close` cancels every earlier call,
    and later calls are refused.
    """

    def __init__(self, store: ObjectStore, limit_s: float) -> None:
        """`limit_s`: the time limit of a call, which makes one or a few operations."""
        self._store = store
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvshare-session", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until `work` is done, and return its result.

        Raises:
            TimeoutError: it took too long.
            RuntimeError: the client is closed.
            Exception: whatever `work` raises.
        """
        try:
            return self._submit(work).result()
        except CancelledError as exc:
            raise RuntimeError(_CLOSED) from exc

    def start(self, work: Coroutine[Any, Any, T], option: str) -> T:
        """Run `work` as `run` does, at start-up.

        Raises:
            ConfigError: the store failed; names `option`.
        """
        try:
            return self.run(work)
        except (StoreError, TimeoutError) as exc:
            reason = str(exc) or f"no answer within {self._limit_s:g} s"
            raise ConfigError(f"{option}: the store cannot be used: {reason}") from exc

    def close(self) -> None:
        """Cancel what is running, close the store and end the thread. Safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            ending.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        async def bounded() -> T:
            async with asyncio.timeout(self._limit_s):
                return await work

        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError(_CLOSED)
            return asyncio.run_coroutine_threadsafe(bounded(), self._loop)

    async def _end(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(self._limit_s):
                await asyncio.gather(*running, return_exceptions=True)
                await self._store.close()
