# SPDX-License-Identifier: Apache-2.0
"""The transfer engine's access to the store: with priorities, time limits and breakers."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from typing import TypeVar

from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreError
from ecshare.store.keys import Key
from ecshare.store.objects import Buffer, ObjectStore
from ecshare.transfer.breaker import CircuitBreaker, DamagedKeys, Verdict, Verdicts
from ecshare.transfer.priority import Admission, Priority

T = TypeVar("T")

# A miss and a damaged object are answers.
_WITHOUT_TIME: Verdicts = (
    (ObjectMissing, Verdict.WORKS),
    (ObjectCorrupt, Verdict.WORKS),
    (StoreError, Verdict.FAILED),
)
_VERDICTS: Verdicts = (*_WITHOUT_TIME, (TimeoutError, Verdict.FAILED))


class StoreClient:
    """One store with its circuit breakers, its list of damaged objects, and its admission.

    Reads and saves have a breaker each: a full disk or a refused PUT says nothing about loads. So
    failing saves never stop loads and look-ups, and failing loads never stop saves.

    Ownership: the I/O thread. Any thread may read `open_breakers`.
    """

    def __init__(self, store: ObjectStore, timeout_s: float) -> None:
        """Use `store`, which the engine closes; no operation may take longer than `timeout_s`."""
        self._store = store
        self._timeout_s = timeout_s
        self._reads = CircuitBreaker("loads and look-ups")
        self._writes = CircuitBreaker("saves")
        self.damaged = DamagedKeys()
        self._admission = Admission(timeout_s, grows=store.serves_many)
        # Neither do loads wait for what may never come, nor it for loads.
        self._polls = Admission(timeout_s, grows=store.serves_many)

    @property
    def open_breakers(self) -> frozenset[str]:
        """Which of "read" and "write" have an open breaker."""
        each = {"read": self._reads, "write": self._writes}
        return frozenset(direction for direction, breaker in each.items() if breaker.is_open)

    async def ask(
        self,
        call: Callable[[ObjectStore], Awaitable[T]],
        priority: Priority,
        cost_bytes: int = 0,
        deadline_s: float = math.inf,
        patience_s: float = 0.0,
    ) -> T:
        """Do one operation and return its result. `cost_bytes`: the most it may move.

        It must end by `deadline_s` (monotonic seconds), including the wait for admission. The
        operation itself must end within the time-out of this store. `patience_s`: how long its job
        waits in total. A time-out counts as a failure of the store if the operation had at least
        half of that time. If it had less, because its job waited before, a time-out shows nothing.

        Raises:
            StoreError, TimeoutError: as the store; the breaker is informed, except of notes.
        """
        is_write = priority in (Priority.NOTE, Priority.SAVE)
        breaker = self._writes if is_write else self._reads
        admission = self._polls if priority is Priority.POLL else self._admission
        breaker.check()
        async with AsyncExitStack() as held:
            # Not around the operation: of two time-outs at one moment the inner one goes unnoticed.
            async with asyncio.timeout_at(None if math.isinf(deadline_s) else deadline_s):
                await held.enter_async_context(admission.admitted(priority, cost_bytes))
            begun_s = time.monotonic()
            ends_s = min(deadline_s, begun_s + self._timeout_s)
            is_fair = ends_s < deadline_s or ends_s - begun_s >= patience_s / 2
            # It may have gone while this waited for its turn.
            attempt = breaker.attempt(_VERDICTS if is_fair else _WITHOUT_TIME)
            # A note follows a failure that was counted. And a full disk may have room for it.
            with nullcontext() if priority is Priority.NOTE else attempt:
                async with asyncio.timeout_at(ends_s):
                    return await call(self._store)

    async def note(self, key: Key, body: Buffer) -> None:
        """Write a small object in place of what is there. It waits for no save.

        Raises:
            StoreError, TimeoutError: as `ask`.
        """
        await self.ask(lambda store: store.put(key, body, replace=True), Priority.NOTE)

    async def put(self, key: Key, body: Buffer, *, only_if_lost: bool = False) -> bool:
        """Save an object; a damaged one is replaced. Return whether it was written.

        `only_if_lost`: ask the store first, and return False if it has the object.

        Raises:
            StoreError, TimeoutError: as `ask`.
        """
        replace = key in self.damaged.replaceable

        async def save(store: ObjectStore) -> bool:
            if only_if_lost and not replace and (await store.exists([key]))[0]:
                return False
            await store.put(key, body, replace=replace)
            return True

        # One operation: that the store answers the question does not mean that saves work.
        if not await self.ask(save, Priority.SAVE, memoryview(body).nbytes):
            return False
        self.damaged.repaired(key)
        return True
