# SPDX-License-Identifier: Apache-2.0
"""Notes that an announced object will not be stored, for the readers that wait for it."""

import time
from collections.abc import Callable
from contextlib import closing

from ecshare.store.errors import ObjectCorrupt, StoreError
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key, gap_key
from ecshare.store.objects import Memory
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient

# Longer than any reader waits by default, with room for clocks that differ. After that, another
# engine may store the object.
_VALID_S = 30.0
_TIME = "time"


class AbsenceNotes:
    """Writes notes to this host's cache and to the store, and reads them.

    A note is an object without a payload that holds its time of writing. It is valid for
    `_VALID_S`. Like anything in a store it may be false: it ends a wait for an object, which then
    counts as missing, and has no other effect. A reader whose clock differs by more than `_VALID_S`
    ignores it, and waits until its deadline.

    Ownership: the I/O thread.
    """

    def __init__(
        self,
        host: HostCache,
        client: StoreClient,
        integrity: Integrity | None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Use what the engine owns. `clock_s`: seconds since 1970."""
        self._host = host
        self._client = client
        self._integrity = integrity
        self._clock_s = clock_s

    async def write(self, key: Key) -> None:
        """Record that the object under `key` will not be stored, in place of an earlier note.

        A note that cannot be written within `_VALID_S` is dropped: while the store is down, each
        save that fails adds one.

        Raises:
            StoreError, TimeoutError: the note is only on this host.
        """
        deadline_s = time.monotonic() + _VALID_S
        name, body = gap_key(key), bytearray(PROLOGUE_BYTES)
        spec = TensorSpec("U8", (0,), {_TIME: self._clock_s()})
        seal(memoryview(body), spec, name, self._integrity)
        if self._host.has(name):
            self._host.discard(name)
        if (entry := self._host.publish(name, body)) is not None:
            entry.close()
        await self._client.note(name, body, deadline_s)

    def is_on_host(self, key: Key) -> bool:
        """Return whether this host's cache has a valid note for `key`."""
        name = gap_key(key)
        entry = self._host.open(name) if self._host.has(name) else None
        if entry is None:
            return False
        with closing(entry):
            return self._is_valid(name, entry.body)

    async def is_in_store(self, key: Key, deadline_s: float) -> bool:
        """Return whether the store has a valid note; False if it has not answered by then."""
        name, sink = gap_key(key), Memory(PROLOGUE_BYTES)
        try:
            await self._client.ask(
                lambda store: store.get(name, sink), Priority.POLL, 0, deadline_s
            )
        except (StoreError, TimeoutError):
            return False
        return self._is_valid(name, sink.body)

    def _is_valid(self, name: Key, body: memoryview) -> bool:
        try:
            sealed = unseal(body, name, integrity=self._integrity)
        except ObjectCorrupt:
            return False
        written_s, now_s = sealed.spec.attributes.get(_TIME), self._clock_s()
        if not isinstance(written_s, int | float):
            return False
        # Compared, not subtracted: the time may be an integer that no float can hold.
        return now_s - _VALID_S <= written_s <= now_s + _VALID_S
