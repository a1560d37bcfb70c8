# SPDX-License-Identifier: Apache-2.0
"""A thread with an event loop, and a second one that wakes it."""

import asyncio
import os
import queue
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from ecshare.transfer.device.affinity import start_unbound

M = TypeVar("M")


class LoopThread(Generic[M]):
    """Runs an event loop that takes messages in order, until `stop`.

    Waking a loop is a system call, for which Python releases the interpreter's lock; on return it
    waits for the thread that took the lock meanwhile, up to milliseconds. So a second thread, the
    carrier, wakes the loop. `SimpleQueue.put` keeps the lock, so the thread that puts a message
    continues at once (p99 of a submit: 50 us instead of 500).

    Ownership: the thread that creates it puts messages and stops it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        begin: Callable[[], object],
        take: Callable[[M], object],
        end: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Start both threads. `loop`: is closed at the end.

        On the loop's thread, `begin` is called first, then `take` with each message, and after
        `stop` the coroutine of `end` is run.
        """
        self.inbox: queue.SimpleQueue[M | None] = queue.SimpleQueue()
        """The messages for the loop. `put` never waits."""
        self._loop = loop
        self._thread = start_unbound("ecshare-io", self._run, begin, end)
        self._carrier = start_unbound("ecshare-inbox", self._carry, take)
        self._process = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Return whether this process has its threads; False in a forked child."""
        return self._process == os.getpid()

    def stop(self, timeout_s: float) -> None:
        """Deliver the messages that were put, then end the loop, within at most `timeout_s`."""
        self.inbox.put(None)
        self._carrier.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _carry(self, take: Callable[[M], object]) -> None:
        while (message := self.inbox.get()) is not None:
            self._loop.call_soon_threadsafe(take, message)

    def _run(
        self, begin: Callable[[], object], end: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        begin()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(end())
        self._loop.close()
