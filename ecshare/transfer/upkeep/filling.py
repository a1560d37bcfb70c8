# SPDX-License-Identifier: Apache-2.0
"""Fills the host cache with what was used last while an engine starts, on a thread of its own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from ecshare.store.config import ConnectorConfig
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.integrity import Integrity
from ecshare.store.objects import ObjectStore
from ecshare.transfer.upkeep.background import MOST_OBJECTS, Background
from ecshare.transfer.upkeep.renewal import Record
from ecshare.upkeep.hot import Brought, bring, used_last
from ecshare.upkeep.notes import Pace

logger = logging.getLogger(__name__)

_MOST_S = 600.0
# Half of a core at most: vLLM's threads need the interpreter's lock.
_REST = 1.0
_BUSY_PAUSE_S = 0.05


class HostFiller:
    """Prefetches objects of one namespace into the host cache, until `close` or for ten minutes.

    Logs what it does; raises nothing.
    """

    def __init__(  # noqa: PLR0913 — what it brings, and where
        self,
        open_store: Callable[[], ObjectStore],
        host: HostCache,
        record: Record,
        integrity: Integrity | None,
        config: ConnectorConfig,
        is_busy: Callable[[], bool],
    ) -> None:
        """Start the thread. `open_store`: opens a store for this thread alone. `is_busy`: whether
        the engine has jobs in flight; the thread fetches nothing meanwhile."""
        self._open_store = open_store
        self._host = host
        self._record = record
        self._integrity = integrity
        self._config = config
        self._is_busy = is_busy
        self._background = Background("ecshare-fill", self._run())

    def close(self) -> None:
        """Cancel the work, and end the thread."""
        self._background.close()

    async def _run(self) -> None:
        counts, num_bytes, why = dict.fromkeys(Brought, 0), 0, ""
        store = None
        try:
            store = self._open_store()
            async with asyncio.timeout(_MOST_S):
                async for brought, size in self._brought(store):
                    counts[brought] += 1
                    num_bytes += size
        except TimeoutError:
            why = f"; it ended after {_MOST_S / 60:.0f} minutes"
        except Exception as exc:  # noqa: BLE001 — the engine goes on without
            why = f"; it ended: {exc}"
        finally:
            if store is not None:
                await store.close()
        shown = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        logger.info(
            "preload_bytes: %s objects, %.1f MB in the host cache%s",
            shown or "no",
            num_bytes / 1e6,
            why,
        )

    async def _brought(self, store: ObjectStore) -> AsyncIterator[tuple[Brought, int]]:
        record, pace = self._record, Pace(store, _REST)
        most = min(self._config.preload_bytes, self._host.limit_bytes)
        keys = await used_last(
            store,
            most,
            kinds=[record.kind],
            namespace=record.namespace,
            integrity=self._integrity,
            timeout_s=self._config.call_timeout_s,
            pace=pace,
            most_objects=MOST_OBJECTS,
        )
        for key in keys:
            while self._is_busy():
                await asyncio.sleep(_BUSY_PAUSE_S)
            async with asyncio.timeout(self._config.call_timeout_s):
                found = await bring(store, self._host, key, self._integrity)
            yield found
            if found[0] is Brought.FULL:
                return
            await pace()
