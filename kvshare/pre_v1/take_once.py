# SPDX-License-Identifier: Apache-2.0
"""Takes objects out of a store, each exactly once among many processes.

A process takes an object by creating a marker, whose key is the object's in another namespace.
Stores let only one process create an object, so only one process succeeds. It then removes the
object. The marker stays, because the object may reappear: a client that lost the answer to a put
repeats it, and another host's disk may show the object late. After an hour nothing reappears, and
rules of expiry may remove both.

The name of a taken object must not be used for another object.
"""

import secrets
from contextlib import suppress

from ecshare.store.errors import (
    ConfigError,
    ObjectCorrupt,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
)
from ecshare.store.keys import Key, Kind, namespace_prefix
from ecshare.store.objects import ObjectStore, read

_MARKER_BYTES = 4096


class TakeOnce:
    """A taker of objects of one namespace. Several processes and threads may take concurrently."""

    def __init__(self, store: ObjectStore, namespace: str, markers: str) -> None:
        """`namespace`: of the objects; `markers`: a namespace that holds only their markers."""
        self._store = store
        self._objects = namespace_prefix(Kind.KV, namespace)
        self._markers = namespace_prefix(Kind.KV, markers)

    async def check(self, path: str) -> None:
        """Check that the store refuses to overwrite; otherwise objects could be taken twice.

        Raises:
            ConfigError: it overwrites; names `path`.url.
            StoreError: the store failed.
        """
        key = Key(f"probe/taking-{secrets.token_hex(8)}")
        try:
            await self._store.put(key, b"1")
            if not self._store.creates_once or await self._store.put(key, b"2"):
                raise ConfigError(
                    f"{path}.url: this store overwrites existing objects (S3 servers should "
                    "answer If-None-Match, and folders take hard links), so that two processes "
                    "could take the same entry; choose another store"
                )
        finally:
            await self._store.delete([key])

    async def take(self, key: Key) -> bool:
        """Remove the object under `key`; return whether this call, and no other anywhere, took it.

        An object that the store fails to remove counts as taken too.

        Raises:
            StoreError: the result is unknown; the object may be lost.
        """
        marker = self._marker(key)
        if not await self._put_marker(marker):
            return False
        try:
            (is_there,) = await self._store.exists([key])
        except StoreError:
            with suppress(StoreError):
                await self._store.delete([marker])  # so that another process may take it
            raise
        if is_there:
            with suppress(StoreError):  # the marker protects it
                await self._store.delete([key])
        return is_there

    def _marker(self, key: Key) -> Key:
        return Key(self._markers + key.removeprefix(self._objects))

    async def _put_marker(self, marker: Key) -> bool:
        body = secrets.token_hex(16).encode("ascii")
        try:
            if await self._store.put(marker, body):
                return True
        except StoreUnavailable:
            if not await self._holds(marker, body):
                raise
            return True
        # A client that lost the first answer and repeated the put gets "exists".
        return await self._holds(marker, body)

    async def _holds(self, marker: Key, body: bytes) -> bool:
        try:
            return bytes(await read(self._store, marker, _MARKER_BYTES)) == body
        except (ObjectMissing, ObjectCorrupt):
            return False
