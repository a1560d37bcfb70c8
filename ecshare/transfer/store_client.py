# SPDX-License-Identifier: Apache-2.0
"""The one way from the transfer engine to the store: in turn, in time, not while it is gone."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import TypeVar

from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreError, StoreUnavailable
from ecshare.store.objects import ObjectStore
from ecshare.transfer.breaker import CircuitBreaker, DamagedKeys
from ecshare.transfer.priority import Admission, Priority

T = TypeVar("T")


class StoreClient:
    """One store, its circuit breakers, what is damaged in it, and whose turn it is.

    Reads and saves have a breaker each: a full disk or a refused PUT says nothing about loads. So
    failing saves never stop loads and look-ups, nor the other way round.

    Ownership: the I/O thread; `open_breakers` may be read by any.
    """

    def __init__(self, store: ObjectStore, timeout_s: float) -> None:
        """Use `store`, which the engine closes; no operation may take longer than `timeout_s`."""
        self._store = store
        self._timeout_s = timeout_s
        self._reads = CircuitBreaker("loads and look-ups")
        self._writes = CircuitBreaker("saves")
        self.damaged = DamagedKeys()
        self._admission = Admission()
        # Neither do loads wait for what may never come, nor it for loads.
        self._polls = Admission()

    @property
    def open_breakers(self) -> frozenset[str]:
        """Which of "read" and "write" failed repeatedly and is left alone for a while."""
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
        """Return what one operation returns; `cost_bytes` is what it may move at most.

        It must be over by `deadline_s` (monotonic seconds), the wait for its turn included, and
        itself take no longer than the time-out of this store. `patience_s`: how long its job waits
        in all. A time-out counts as a failure of the store if the operation had half of that; one
        that begins later, since the job waited for its turn or asks once more, shows nothing.

        Raises:
            StoreError, TimeoutError: as the store does; its breaker has heard of it.
        """
        breaker = self._writes if priority is Priority.SAVE else self._reads
        admission = self._polls if priority is Priority.POLL else self._admission
        if not breaker.is_worth_asking:
            raise _left_alone(breaker)
        async with AsyncExitStack() as held:
            # Not around the operation: of two time-outs at one moment the inner one goes unnoticed.
            async with _until(deadline_s):
                await held.enter_async_context(admission.admitted(priority, cost_bytes))
            operation = breaker.admit()
            if operation is None:  # it may have gone while this waited for its turn
                raise _left_alone(breaker)
            held.callback(breaker.ended, operation)
            begun_s = time.monotonic()
            ends_s = min(deadline_s, begun_s + self._timeout_s)
            is_fair = ends_s < deadline_s or ends_s - begun_s >= patience_s / 2
            with _heard(breaker, operation, is_fair=is_fair):
                async with asyncio.timeout_at(ends_s):
                    return await call(self._store)


@contextmanager
def _heard(breaker: CircuitBreaker, operation: int, *, is_fair: bool) -> Iterator[None]:
    """Tell `breaker` how the body ended; of a time-out only if it `is_fair`."""
    try:
        yield
    except (ObjectMissing, ObjectCorrupt):
        breaker.succeeded()
        raise
    except StoreError as exc:
        breaker.failed(operation, str(exc))
        raise
    except TimeoutError:
        if is_fair:
            breaker.failed(operation, "no answer in time")
        raise
    breaker.succeeded()


def _left_alone(breaker: CircuitBreaker) -> StoreUnavailable:
    return StoreUnavailable(f"{breaker.what} failed repeatedly and are left alone for a while")


def _until(deadline_s: float) -> asyncio.Timeout:
    return asyncio.timeout_at(None if math.isinf(deadline_s) else deadline_s)
