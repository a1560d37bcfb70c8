# SPDX-License-Identifier: Apache-2.0
"""What E has reported, in a store that several routers share.

    router/1/<first 2 hex>/<64 hex>      one report, as JSON

Whoever may write to the store may put anything there. What is read is bounded and checked, and with
an integrity key it carries a MAC. A store that fails or is slow costs hits and a short wait.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable

import msgspec
from msgspec import Struct

from ecshare.router.plan import Metadata, is_metadata
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreError
from ecshare.store.integrity import open_integrity
from ecshare.store.keys import Key
from ecshare.store.objects import read
from ecshare.store.open import open_store

logger = logging.getLogger(__name__)

OPTION = "--store"

_MAX_BYTES = 64 * 1024
_READ_TIMEOUT_S = 1.0
_REST_S = 5.0
"""After a failure the store is left alone for so long."""
_MAX_WRITES = 64
"""At once; further ones are dropped."""
_MAC_CONTEXT = b"ecshare router report 1\0"


class _Record(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    metadata: msgspec.Raw
    mac: str = ""


class SharedReports:
    """Reports, each under the key of all that it depends on.

    Belongs to the event loop's thread. Only the constructor raises because of the store.
    """

    def __init__(self, config: StoreConfig, clock_s: Callable[[], float]) -> None:
        """Open the store; no request is sent yet.

        Raises:
            ConfigError: an option cannot work; names it.
        """
        self._integrity = open_integrity(config.integrity_key, OPTION)
        self._store = open_store(config, OPTION)
        self._write_timeout_s = config.io_timeout_s
        self._epoch = config.epoch
        self._clock_s = clock_s
        self._rests_until_s = float("-inf")
        self._writes: set[asyncio.Task[None]] = set()

    async def read(self, key: bytes) -> Metadata | None:
        """Return the report under `key`; None: there is none, or it cannot be had soon."""
        if self._clock_s() < self._rests_until_s:
            return None
        name = self._name(key)
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                body = await read(self._store, _store_key(name), _MAX_BYTES)
            return self._checked(name, bytes(body))
        except ObjectMissing:
            pass
        except (ObjectCorrupt, ValueError, RecursionError) as exc:
            logger.warning("a shared report is not one: %s", exc)
        except (StoreError, TimeoutError) as exc:
            self._rest("read", exc)
        return None

    def write(self, key: bytes, metadata: Metadata) -> None:
        """Store a report in the background, in place of a former one."""
        name, payload = self._name(key), msgspec.json.encode(metadata)
        record = _Record(name, msgspec.Raw(payload), self._mac(name, payload))
        body = msgspec.json.encode(record)
        has_room = len(body) <= _MAX_BYTES and len(self._writes) < _MAX_WRITES
        if has_room and self._clock_s() >= self._rests_until_s:
            task = asyncio.create_task(self._put(_store_key(name), body))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def close(self) -> None:
        """Give up what is on its way, and close the store."""
        writes = list(self._writes)
        for write in writes:
            write.cancel()
        await asyncio.gather(*writes, return_exceptions=True)
        await self._store.close()

    def _name(self, key: bytes) -> str:
        return hashlib.sha256(key + self._epoch.encode()).hexdigest()

    def _mac(self, name: str, payload: bytes) -> str:
        if self._integrity is None:
            return ""
        return self._integrity.mac(_MAC_CONTEXT + name.encode(), memoryview(payload))

    def _checked(self, name: str, body: bytes) -> Metadata:
        """Return the report in `body`.

        Raises:
            ValueError, RecursionError: it is not the one of that name.
        """
        record = msgspec.json.decode(body, type=_Record)
        payload = bytes(record.metadata)
        if record.name != name:
            raise ValueError("it has another name")
        if self._integrity is not None and not self._integrity.accepts(
            record.mac, _MAC_CONTEXT + name.encode(), memoryview(payload)
        ):
            raise ValueError("its MAC is wrong")
        metadata: Metadata = msgspec.json.decode(payload)
        if not is_metadata(metadata):
            raise ValueError("it is no placeholder metadata")
        return metadata

    async def _put(self, key: Key, body: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._store.put(key, body, replace=True)
        except (StoreError, TimeoutError) as exc:
            self._rest("written", exc)

    def _rest(self, what: str, failure: Exception) -> None:
        self._rests_until_s = self._clock_s() + _REST_S
        reason = str(failure) or type(failure).__name__
        logger.warning("%s: shared reports cannot be %s: %s", OPTION, what, reason)


def _store_key(name: str) -> Key:
    return Key(f"router/1/{name[:2]}/{name}")
