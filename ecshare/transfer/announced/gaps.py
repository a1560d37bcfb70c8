# SPDX-License-Identifier: Apache-2.0
"""Notes that an announced object will not be stored, for those who wait for it."""

import time
from collections.abc import Callable

from ecshare.store.errors import ObjectCorrupt, StoreError
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key, gap_key
from ecshare.store.objects import Memory
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient

# Longer than anybody waits by default, with room for clocks that differ. Later another engine may
# store the object.
_VALID_S = 30.0
_TIME = "time"


class Gaps:
    """Leaves notes on this host and in the store, and reads them.

    A note is an object without a payload that holds the time of its writer. It counts for
    `_VALID_S`. It may be false, as all in a store: it ends a wait for an object, which then counts
    as missing, and has no other effect. A reader whose clock differs by more waits in vain.

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

    async def note(self, key: Key) -> None:
        """Note that the object under `key` will not be stored, in place of an earlier note.

        A note whose turn comes too late to be of use is dropped: while the store is down, each save
        that fails adds one.

        Raises:
            StoreError, TimeoutError: the note is on this host alone.
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

    def is_noted_here(self, key: Key) -> bool:
        """Whether a process of this host has noted it."""
        name = gap_key(key)
        entry = self._host.open(name) if self._host.has(name) else None
        if entry is None:
            return False
        with entry:
            return self._counts(name, entry.body)

    async def is_noted(self, key: Key, deadline_s: float) -> bool:
        """Whether the store has a note; False if it has not said so by `deadline_s`."""
        name, sink = gap_key(key), Memory(PROLOGUE_BYTES)
        try:
            await self._client.ask(
                lambda store: store.get(name, sink), Priority.POLL, 0, deadline_s
            )
        except (StoreError, TimeoutError):
            return False
        return self._counts(name, sink.body)

    def _counts(self, name: Key, body: memoryview) -> bool:
        try:
            sealed = unseal(body, name, integrity=self._integrity)
        except ObjectCorrupt:
            return False
        noted_s, now_s = sealed.spec.attributes.get(_TIME), self._clock_s()
        if not isinstance(noted_s, int | float):
            return False
        # Compared, not subtracted: it may be an integer that no float can hold.
        return now_s - _VALID_S <= noted_s <= now_s + _VALID_S
