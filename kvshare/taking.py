# SPDX-License-Identifier: Apache-2.0
"""Taking an object out of a store, by exactly one of many processes.

Who takes an object makes a marker under a name that follows from the object's. Stores let only one
process make an object, so only one succeeds. Then the object goes, and then the marker: whoever
comes late and makes the marker again looks whether the object is still there, and sees that it is
not. A marker that stays tells of a process that died.
"""

import secrets
import time
from contextlib import aclosing

from ecshare.store.errors import ConfigError, ObjectCorrupt, ObjectMissing, StoreUnavailable
from ecshare.store.keys import Kind, namespace_prefix, object_key
from ecshare.store.objects import ObjectStore, read

_MARKER_BYTES = 4096
# Longer than any process that is alive takes from its marker to its last step.
_DEAD_S = 3600.0


class Taker:
    """Takes objects of one store. Several processes and threads may; markers are in `namespace`."""

    def __init__(self, store: ObjectStore, namespace: str) -> None:
        self._store = store
        self._namespace = namespace

    async def check(self, path: str) -> None:
        """ConfigError, naming `path`.url: the store overwrites, so nothing is taken only once."""
        key = f"probe/taking-{secrets.token_hex(8)}"
        try:
            await self._store.put(key, b"1")
            if await self._store.put(key, b"2"):
                raise ConfigError(
                    f"{path}.url: this store overwrites objects that are there (S3 servers should "
                    "answer If-None-Match), so that two processes could take the same entry; "
                    "choose another store"
                )
        finally:
            await self._store.delete([key])

    async def is_taken(self, key: str) -> bool:
        """Whether it would be in vain to read the object first. No promise either way."""
        (is_marked,) = await self._store.exists([self._marker(key)])
        return is_marked

    async def take(self, key: str) -> bool:
        """Remove the object under `key`; whether this call, and no other anywhere, did.

        Raises StoreError: nobody knows; the object may be lost.
        """
        marker = self._marker(key)
        if not await self._mark(marker, key):
            return False
        (is_there,) = await self._store.exists([key])
        if is_there:
            await self._store.delete([key])
        await self._store.delete([marker])
        return is_there

    async def sweep(self) -> None:
        """Remove what processes left that died while they took something."""
        now_s = time.time()
        async with aclosing(self._store.list(namespace_prefix(Kind.KV, self._namespace))) as found:  # type: ignore[type-var]
            dead = [info.key async for info in found if now_s - info.modified_s > _DEAD_S]
        for marker in dead:
            try:
                _, _, key = bytes(await read(self._store, marker, _MARKER_BYTES)).partition(b" ")
                taken = key.decode("ascii")
                if self._marker(taken) == marker:
                    await self._store.delete([taken])
            except (ObjectMissing, ObjectCorrupt, ValueError):
                pass  # somebody else swept it, or it is no marker
            await self._store.delete([marker])

    def _marker(self, key: str) -> str:
        return object_key(Kind.KV, self._namespace, key)

    async def _mark(self, marker: str, key: str) -> bool:
        body = f"{secrets.token_hex(16)} {key}".encode("ascii")
        try:
            if await self._store.put(marker, body):
                return True
        except StoreUnavailable:
            if not await self._is(marker, body):
                raise
            return True
        # A client that sent it twice, because the first answer was lost, is told that it is there.
        return await self._is(marker, body)

    async def _is(self, marker: str, body: bytes) -> bool:
        try:
            return bytes(await read(self._store, marker, _MARKER_BYTES)) == body
        except (ObjectMissing, ObjectCorrupt):
            return False
