# SPDX-License-Identifier: Apache-2.0
"""What an engine does in the store as long as it shares in a namespace: it keeps the record of the
namespace there, and notes which of its objects are used."""

import asyncio

from ecshare.store.integrity import Integrity
from ecshare.store.keys import Kind
from ecshare.store.objects import ObjectStore
from ecshare.transfer.upkeep.noting import NoteWriter
from ecshare.transfer.upkeep.renewal import Record, renew, write_record
from ecshare.upkeep.record import UseRecord


class InNamespace:
    """The tasks for one namespace at a time. Ownership: the I/O thread."""

    def __init__(self, store: ObjectStore, integrity: Integrity | None, timeout_s: float) -> None:
        """`timeout_s`: how long an operation of the store may take."""
        self._store = store
        self._integrity = integrity
        self._timeout_s = timeout_s
        self._notes: NoteWriter | None = None
        self._moving = asyncio.Lock()
        self.tasks: list[asyncio.Task[None]] = []
        """To be cancelled at the end."""

    async def renew(self, record: Record, *, at_once: bool) -> None:
        """Write `record`, `at_once` or in some minutes, and renew it from time to time."""
        is_written = at_once and await write_record(self._store, record, self._timeout_s)
        renewing = renew(self._store, record, self._timeout_s, is_written=is_written)
        self.tasks.append(asyncio.create_task(renewing))

    async def note(self, uses: UseRecord, kind: Kind, namespace: str) -> None:
        """Note `uses` from time to time."""
        self._notes = NoteWriter(
            self._store, uses, kind, namespace, self._integrity, self._timeout_s
        )
        self.tasks.append(asyncio.create_task(self._notes.run()))

    async def move(self, uses: UseRecord, record: Record, *, write: bool) -> None:
        """Do all this in the namespace of `record` instead. `write`: also keep the record."""
        async with self._moving:
            for task in self.tasks:
                task.cancel()
            self.tasks = []
            await self.end(self._timeout_s)  # what was used until now is in the namespace before
            await self.note(uses, record.kind, record.namespace)
            if write:
                await self.renew(record, at_once=True)

    async def end(self, timeout_s: float) -> None:
        """Note the uses of the last minutes, within `timeout_s`. Raises nothing."""
        if self._notes is not None:
            await self._notes.end(timeout_s)
