# SPDX-License-Identifier: Apache-2.0
"""The transfer engine's access to the store: with priorities, a time limit and breakers."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreBusy, StoreError
from ecshare.store.keys import Key
from ecshare.store.objects import Buffer, ObjectStore
from ecshare.store.threads import end_all
from ecshare.transfer.client.breaker import CircuitBreaker, DamagedKeys, Verdict, Verdicts
from ecshare.transfer.client.priority import Admission, Priority

T = TypeVar("T")

# A miss and a damaged object are answers.
_VERDICTS: Verdicts = (
    (ObjectMissing, Verdict.WORKS),
    (ObjectCorrupt, Verdict.WORKS),
    (StoreError, Verdict.FAILED),
)


class StoreClient:
    """One store with its circuit breakers, its list of damaged objects, and its admission.

    Reads and saves have a breaker each: a full disk or a refused PUT says nothing about loads. So
    failing saves never stop loads and look-ups, and failing loads never stop saves.

    An operation and the job that asks for it end independently. The operation has the time-out of
    the store, and its end is reported to a breaker. When a job stops waiting, the operation goes on
    and keeps its admission, because its thread or connection is still busy. It may still read a
    body or write to a sink, so the owner of that memory must not reuse it before all references to
    it are gone.

    Ownership: the I/O thread. Any thread may read `open_breakers`.
    """

    def __init__(
        self, store: ObjectStore, timeout_s: float, answer_timeout_s: float | None = None
    ) -> None:
        """Own `store`. An operation has failed after `timeout_s`.

        `answer_timeout_s`: the same for look-ups, which move no object; by default `timeout_s`.
        These limits hold for every store, even one that never answers.
        """
        self._store = store
        self._timeout_s = timeout_s
        self._answer_timeout_s = timeout_s if answer_timeout_s is None else answer_timeout_s
        self._reads = CircuitBreaker("loads and look-ups")
        self._writes = CircuitBreaker("saves")
        self.damaged = DamagedKeys()
        self._admission = Admission(timeout_s, grows=store.serves_many)
        # Separate: loads do not wait for objects that may never arrive, and polls not for loads.
        self._polls = Admission(timeout_s, grows=store.serves_many)
        self._operations: set[asyncio.Task[Any]] = set()  # that have not ended

    @property
    def open_breakers(self) -> frozenset[str]:
        """Return the directions, "read" and "write", whose breaker is open."""
        each = {"read": self._reads, "write": self._writes}
        return frozenset(direction for direction, breaker in each.items() if breaker.is_open)

    @property
    def num_in_flight(self) -> int:
        """Return the number of operations that have not ended, even if no job waits for them."""
        return len(self._operations)

    async def close(self) -> None:
        """Cancel the operations that have not ended, and close the store.

        Raises:
            StoreError: as the store.
        """
        await end_all(self._operations)
        await self._store.close()

    async def ask(
        self,
        call: Callable[[ObjectStore], Awaitable[T]],
        priority: Priority,
        cost_bytes: int = 0,
        deadline_s: float | None = None,
    ) -> T:
        """Do one operation and return its result. `cost_bytes`: the most it may move.

        `deadline_s` (monotonic seconds): until when to wait. An operation that is not admitted by
        then never begins. One that is goes on alone, as it does if the caller is cancelled.

        Raises:
            StoreError: as the store, or it took too long; counted by the breaker, except for notes.
            TimeoutError: the deadline has passed.
        """
        begins = asyncio.Event()
        operation = asyncio.create_task(self._operate(call, priority, cost_bytes, begins))
        self._operations.add(operation)
        operation.add_done_callback(self._operations.discard)
        try:
            async with asyncio.timeout_at(deadline_s):
                await asyncio.wait([operation])
        except BaseException:
            operation.add_done_callback(_ignore)
            if not begins.is_set():
                operation.cancel()
            raise
        try:
            return operation.result()
        finally:
            del operation  # of an error, the traceback keeps this frame: it must not keep the task

    async def _operate(
        self,
        call: Callable[[ObjectStore], Awaitable[T]],
        priority: Priority,
        cost_bytes: int,
        begins: asyncio.Event,
    ) -> T:
        """Do the operation of `ask`, in a task of its own. `begins` is set once it is admitted.

        Raises:
            StoreError: as `ask`.
        """
        is_write = priority in (Priority.NOTE, Priority.SAVE)
        breaker = self._writes if is_write else self._reads
        admission = self._polls if priority is Priority.POLL else self._admission
        breaker.check()
        async with admission.admitted(priority, cost_bytes):
            begins.set()
            # The store may have failed while this waited for admission. A note has no breaker: it
            # follows a failure that was counted, and a full disk may have room for it.
            with nullcontext() if priority is Priority.NOTE else breaker.attempt(_VERDICTS):
                moves_object = is_write or cost_bytes
                timeout_s = self._timeout_s if moves_object else self._answer_timeout_s
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        return await call(self._store)
                # Not raised from the TimeoutError: its traceback refers to this task, which keeps
                # this error. Such a cycle keeps the memory that was to be stored until Python
                # collects it.
                raise StoreBusy(f"the store took longer than {timeout_s:g} s")

    async def note(self, key: Key, body: Buffer, deadline_s: float) -> None:
        """Write a small object, in place of an existing one, without waiting for saves.

        Raises:
            StoreError, TimeoutError: as `ask`.
        """
        await self.ask(
            lambda store: store.put(key, body, replace=True), Priority.NOTE, 0, deadline_s
        )

    async def has(self, key: Key) -> bool:
        """Return whether the store has an object that need not be replaced.

        Raises:
            StoreError: as `ask`.
        """
        if key in self.damaged.replaceable:
            return False
        return (await self.ask(lambda store: store.exists([key]), Priority.LOOK_UP))[0]

    async def put(self, key: Key, body: Buffer) -> None:
        """Save an object; a damaged one is replaced.

        Raises:
            StoreError: as `ask`.
        """
        replace = key in self.damaged.replaceable
        num_bytes = memoryview(body).nbytes
        await self.ask(
            lambda store: store.put(key, body, replace=replace), Priority.SAVE, num_bytes
        )
        self.damaged.repaired(key)

    async def put_if_lost(self, key: Key, body: Buffer) -> bool:
        """Save an object unless the store has it. Return whether it was saved.

        Raises:
            StoreError: as `ask`.
        """
        if key in self.damaged.replaceable:
            await self.put(key, body)
            return True

        async def save(store: ObjectStore) -> bool:
            if (await store.exists([key]))[0]:
                return False
            await store.put(key, body)
            return True

        # One operation: an answer to `exists` alone must not close the breaker of saves.
        if not await self.ask(save, Priority.SAVE, memoryview(body).nbytes):
            return False
        self.damaged.repaired(key)
        return True


def _ignore(operation: asyncio.Task[Any]) -> None:
    """Retrieve the exception of an operation that no job awaits: else asyncio logs a warning."""
    if not operation.cancelled():
        operation.exception()
