# SPDX-License-Identifier: Apache-2.0
"""The one way from the transfer engine to the store: in turn, in time, not while it is gone."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreError, StoreUnavailable
from ecshare.store.objects import ObjectStore
from ecshare.transfer.health import StoreHealth
from ecshare.transfer.lanes import Lanes, Urgency

T = TypeVar("T")

_LEFT_ALONE = "the store failed repeatedly and is left alone for a while"


class StoreAccess:
    """One store, its health, and whose turn it is.

    Ownership: the I/O thread; `is_open` may be read by any.
    """

    def __init__(self, store: ObjectStore, timeout_s: float) -> None:
        """Use `store`, which the engine closes; no operation may take longer than `timeout_s`."""
        self._store = store
        self._timeout_s = timeout_s
        self._health = StoreHealth()
        self._lanes = Lanes()

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: the store failed repeatedly and is left alone."""
        return self._health.is_open

    async def ask(
        self,
        call: Callable[[ObjectStore], Awaitable[T]],
        urgency: Urgency,
        cost_bytes: int = 0,
        deadline_s: float = math.inf,
        *,
        is_answered: bool = False,
    ) -> T:
        """Return what one operation returns; `cost_bytes` is what it may move at most.

        It must be over by `deadline_s` (monotonic seconds), the wait for its turn included, and
        itself take no longer than the time-out of this store. `is_answered`: whoever asks has had
        an answer before, so that only the latter counts as a failure of the store.

        Raises:
            StoreError, TimeoutError: as the store does; its health has heard of it.
        """
        if not self._health.is_worth_asking:
            raise StoreUnavailable(_LEFT_ALONE)
        asked_s = time.monotonic()
        async with AsyncExitStack() as held:
            # Not around the operation: of two time-outs at one moment the inner one goes unnoticed.
            async with _until(deadline_s):
                await held.enter_async_context(self._lanes.admitted(urgency, cost_bytes))
            operation = self._health.admit()
            if operation is None:  # it may have gone while this waited for its turn
                raise StoreUnavailable(_LEFT_ALONE)
            held.callback(self._health.ended, operation)
            begun_s = time.monotonic()
            # A job that spent most of its time in the queue says nothing about the store.
            is_fair = begun_s - asked_s <= deadline_s - begun_s
            ends_s = begun_s + self._timeout_s
            # Nor does one that asks again, with whatever is left of its own time.
            is_fair = is_fair and not (is_answered and deadline_s < ends_s)
            return await self._timed(call, min(deadline_s, ends_s), operation, is_fair)

    async def _timed(
        self,
        call: Callable[[ObjectStore], Awaitable[T]],
        deadline_s: float,
        operation: int,
        is_fair: bool,
    ) -> T:
        try:
            async with asyncio.timeout_at(deadline_s):
                answer = await call(self._store)
        except (ObjectMissing, ObjectCorrupt):
            self._health.succeeded()
            raise
        except StoreError:
            self._health.failed(operation)
            raise
        except TimeoutError:
            if is_fair:
                self._health.failed(operation)
            raise
        self._health.succeeded()
        return answer


def _until(deadline_s: float) -> asyncio.Timeout:
    return asyncio.timeout_at(None if math.isinf(deadline_s) else deadline_s)
