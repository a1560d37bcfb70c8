# SPDX-License-Identifier: Apache-2.0
"""Takes objects out of a store, each exactly once among many processes.

A process takes an object by creating a marker, whose key is the object's in another namespace.
Stores let only one process create an object, so only one process succeeds. It then removes the
object. The marker stays, because the object may reappear: a client that lost the answer to a put
repeats it, and another host's disk may show the object late. After an hour nothing reappears, and a
sweep removes both.

The name of a taken object must not be used for another object.
"""

import asyncio
import logging
import secrets
from contextlib import aclosing, suppress

from ecshare.store.errors import (
    ConfigError,
    ObjectCorrupt,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
)
from ecshare.store.keys import Key, Kind, namespace_prefix, object_key
from ecshare.store.objects import ObjectInfo, ObjectStore, read

logger = logging.getLogger(__name__)

_MARKER_BYTES = 4096
# Longer than a live process needs from its marker to its last step, and than a put can be delayed.
_SWEEP_AGE_S = 3600.0
SWEEP_S = 1800.0
_SWEPT_AT_ONCE = 256  # the store limits the time of one call


class TakeOnce:
    """A taker of objects of one namespace. Several processes and threads may take concurrently."""

    def __init__(self, store: ObjectStore, namespace: str, markers: str) -> None:
        """`namespace`: of the objects; `markers`: a namespace that holds only their markers."""
        self._store = store
        self._namespace = markers
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

    async def is_taken(self, key: Key) -> bool:
        """Return whether the object has a marker, so that reading it is useless. Only a hint."""
        (is_marked,) = await self._store.exists([self._marker(key)])
        return is_marked

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
            with suppress(StoreError):  # the marker protects it until the sweep
                await self._store.delete([key])
        return is_there

    async def sweep_forever(self) -> None:
        """Sweep now, and then every `SWEEP_S`. Never returns."""
        while True:
            try:
                await self.sweep()
            except Exception as exc:  # noqa: BLE001 — the task would end silently
                logger.warning("KV buffer: old markers cannot be removed: %s", exc)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Remove old markers, each after what remains of its object."""
        now, found = await self._marked()
        old = [
            each.key for each in found if now and now.modified_s - each.modified_s > _SWEEP_AGE_S
        ]
        for start in range(0, len(old), _SWEPT_AT_ONCE):
            some = old[start : start + _SWEPT_AT_ONCE]
            names = (marker.removeprefix(self._markers) for marker in some)
            await self._store.delete([Key(self._objects + name) for name in names])
            await self._store.delete(some)

    async def _marked(self) -> tuple[ObjectInfo | None, list[ObjectInfo]]:
        """Return a marker created now, for no object, and all other markers.

        The new marker's time of modification is the store's time; this host's clock may be wrong.
        """
        now = object_key(Kind.KV, self._namespace, secrets.token_hex(16))
        await self._store.put(now, b"now")
        try:
            async with aclosing(self._store.list(self._markers)) as listing:  # type: ignore[type-var]
                found = {info.key: info async for info in listing}
        finally:
            await self._store.delete([now])
        return found.pop(now, None), [*found.values()]

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
