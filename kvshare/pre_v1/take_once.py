# SPDX-License-Identifier: Apache-2.0
"""Taking an object out of a store, by exactly one of many processes.

Who takes an object makes a marker, whose key is the object's in another namespace. Stores let only
one process make an object, so only one succeeds; then the object goes. The marker stays, for the
object may come back: a store's client that lost the answer to a put sends it once more, and a disk
of another host is seen late. An hour later nothing comes back, and whoever sweeps removes both.

A name that was taken must not be given to another object.
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
from ecshare.store.keys import Kind, namespace_prefix, object_key
from ecshare.store.objects import ObjectInfo, ObjectStore, read

logger = logging.getLogger(__name__)

_MARKER_BYTES = 4096
# Longer than any process that is alive takes from its marker to its last step, and than any put
# that was sent is on its way.
_OLD_S = 3600.0
_SWEEP_S = 1800.0
_SWEPT = 256  # at once: the store bounds the time of one call


class TakeOnce:
    """Takes the objects of one namespace of a store. Several processes and threads may."""

    def __init__(self, store: ObjectStore, namespace: str, markers: str) -> None:
        """`namespace`: of the objects; `markers`: another one, of their markers alone."""
        self._store = store
        self._namespace = markers
        self._objects = namespace_prefix(Kind.KV, namespace)
        self._markers = namespace_prefix(Kind.KV, markers)

    async def check(self, path: str) -> None:
        """ConfigError, naming `path`.url: the store overwrites, so nothing is taken only once."""
        key = f"probe/taking-{secrets.token_hex(8)}"
        try:
            await self._store.put(key, b"1")
            if not self._store.creates_once or await self._store.put(key, b"2"):
                raise ConfigError(
                    f"{path}.url: this store overwrites objects that are there (S3 servers should "
                    "answer If-None-Match, and folders take hard links), so that two processes "
                    "could take the same entry; choose another store"
                )
        finally:
            await self._store.delete([key])

    async def is_taken(self, key: str) -> bool:
        """Whether it would be in vain to read the object first. No promise either way."""
        (is_marked,) = await self._store.exists([self._marker(key)])
        return is_marked

    async def take(self, key: str) -> bool:
        """Remove the object under `key`; whether this call, and no other anywhere, did.

        An object that the store does not remove is taken all the same. Raises StoreError: nobody
        knows; the object may be lost.
        """
        marker = self._marker(key)
        if not await self._mark(marker):
            return False
        try:
            (is_there,) = await self._store.exists([key])
        except StoreError:
            with suppress(StoreError):
                await self._store.delete([marker])  # so that others may take it
            raise
        if is_there:
            with suppress(StoreError):  # the marker guards it until it is swept
                await self._store.delete([key])
        return is_there

    async def keep_swept(self) -> None:
        """Sweep now, and from time to time, for ever."""
        while True:
            try:
                await self.sweep()
            except Exception as exc:  # noqa: BLE001 — nobody would see it end, and sweeping with it
                logger.warning("KV buffer: what was taken is not swept: %s", exc)
            await asyncio.sleep(_SWEEP_S)

    async def sweep(self) -> None:
        """Remove old markers, and before each what is left of the object it names."""
        now, found = await self._marked()
        old = [each.key for each in found if now and now.modified_s - each.modified_s > _OLD_S]
        for start in range(0, len(old), _SWEPT):
            some = old[start : start + _SWEPT]
            names = (marker.removeprefix(self._markers) for marker in some)
            await self._store.delete([self._objects + name for name in names])
            await self._store.delete(some)

    async def _marked(self) -> tuple[ObjectInfo | None, list[ObjectInfo]]:
        """Return a marker made now, of nothing, and all others.

        It tells the time by the store's clock: that of this host may be wrong.
        """
        now = object_key(Kind.KV, self._namespace, secrets.token_hex(16))
        await self._store.put(now, b"now")
        try:
            async with aclosing(self._store.list(self._markers)) as listing:  # type: ignore[type-var]
                found = {info.key: info async for info in listing}
        finally:
            await self._store.delete([now])
        return found.pop(now, None), [*found.values()]

    def _marker(self, key: str) -> str:
        return self._markers + key.removeprefix(self._objects)

    async def _mark(self, marker: str) -> bool:
        body = secrets.token_hex(16).encode("ascii")
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
