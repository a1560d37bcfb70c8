# SPDX-License-Identifier: Apache-2.0
"""Probes the store before the first job, stores an engine's manifest and mark, and renews them."""

import asyncio
import logging
import random
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ecshare.store.cloud.s3_region import wrong_region
from ecshare.store.config import ConnectorConfig, StoreConfig
from ecshare.store.errors import ConfigError, StoreBusy, StoreError
from ecshare.store.folder.temp_files import sweep
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Kind
from ecshare.store.objects import ObjectStore, probe
from ecshare.store.open import open_store
from ecshare.store.secrets import masked_url
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.device.affinity import start_unbound
from ecshare.transfer.upkeep.elected import ElectedCleaner
from ecshare.transfer.upkeep.namespaces import NamespaceWatch
from ecshare.transfer.upkeep.noting import note_uses
from ecshare.transfer.upkeep.renewal import Record, renew, write_record
from ecshare.upkeep.budget import Budget
from ecshare.upkeep.record import UseRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The pauses between probes of a store that cannot serve.
_FIRST_PAUSE_S = 0.1
_PAUSE_GROWTH = 2.0
_LONGEST_PAUSE_S = 2.0


class StartUp:
    """The start of an engine at its store: probe, comparison of namespaces, manifest and mark.

    Ownership: the thread that creates the engine calls `probe` and `begin`, which block; the rest
    belongs to the I/O thread, that of `loop`.
    """

    def __init__(  # noqa: PLR0913 — all that the engine owns
        self,
        config: StoreConfig,
        path: str,
        store: ObjectStore,
        client: StoreClient,
        loop: asyncio.AbstractEventLoop,
        integrity: Integrity | None,
    ) -> None:
        """Use what the engine owns. `path`: where the user wrote `config`, for messages."""
        self._config = config
        self._path = path
        self._store = store
        self._client = client
        self._loop = loop
        self._integrity = integrity
        self._watch: NamespaceWatch | None = None
        self.is_watching = False
        """True for an engine that only reads: its reads are reported to `compare_again`."""
        self._comparing: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._noting: asyncio.Task[None] | None = None
        self._cleaner: ElectedCleaner | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the background tasks, to be cancelled at the end."""
        tasks = (self._comparing, self._renewing, self._noting)
        return [task for task in tasks if task is not None]

    def probe(self, *, write: bool) -> bool:
        """See `TransferEngine.probe`."""
        option = f"{self._path}.url: {masked_url(self._config.url)!r}"
        try:
            reason = self._block_on(self._probe_until_ready(write=write))
        except StoreError as exc:
            check = f"Check the url, {self._path}.storage_options and that the store is up"
            # Without its causes: a client's message may quote a signed url.
            raise ConfigError(
                f"{option} cannot be used: {exc}. {wrong_region(self._config) or check}."
            ) from None
        if reason:
            logger.warning(
                "%s does not serve now: %s. This engine starts without it, and uses it as soon as "
                "it does; until then nothing is shared.",
                option,
                reason,
            )
        return not reason

    def begin(self, record: Record, *, write: bool) -> None:
        """See `TransferEngine.start_up`."""
        for warning in self._config.warnings(self._path):
            logger.warning("%s", warning)
        serves = self.probe(write=write)
        watch = NamespaceWatch(self._client, record)
        if serves:
            # No time-out is needed: `compare` has its own, and never raises.
            self._block_on(watch.compare())
        if not write:
            self._watch, self.is_watching = watch, True
            return
        self._block_on(self._start_renewal(record, at_once=serves))
        self._start_cleaner(record.kind)
        if self._config.folder:
            # A sweep may take long, and no request waits for it. If the process ends first, a later
            # start does the rest.
            start_unbound("ecshare-sweep", sweep, self._config.folder)

    def note(self, uses: UseRecord, kind: Kind, namespace: str) -> None:
        """Note `uses` in the store from now on, from time to time."""
        self._block_on(self._start_noting(uses, kind, namespace))

    def compare_again(self, *, is_hit: bool) -> None:
        """Record a hit or a miss of a read; compare namespaces if that is due."""
        if self._watch is not None and self._watch.is_due(is_hit=is_hit):
            self._comparing = self._loop.create_task(self._watch.compare())

    def close(self) -> None:
        """End the thread of the cleaner, if there is one."""
        if self._cleaner is not None:
            self._cleaner.close()

    def _start_cleaner(self, kind: Kind) -> None:
        config = self._config
        if not isinstance(config, ConnectorConfig):
            return
        max_bytes = {str(kind): config.max_bytes} if config.max_bytes is not None else {}
        ttl_hours = {str(kind): config.ttl_hours} if config.ttl_hours is not None else {}
        if max_bytes or ttl_hours:
            self._cleaner = ElectedCleaner(
                partial(open_store, config, self._path),
                kind,
                Budget(max_bytes, ttl_hours),
                self._integrity,
                config.call_timeout_s,
            )

    async def _start_renewal(self, record: Record, *, at_once: bool) -> None:
        """Write `record`, `at_once` or in some minutes, and renew it from time to time."""
        timeout_s = self._config.io_timeout_s
        is_written = at_once and await write_record(self._store, record, timeout_s)
        renewing = renew(self._store, record, timeout_s, is_written=is_written)
        self._renewing = self._loop.create_task(renewing)

    async def _start_noting(self, uses: UseRecord, kind: Kind, namespace: str) -> None:
        timeout_s = self._config.io_timeout_s
        noting = note_uses(self._store, uses, kind, namespace, self._integrity, timeout_s)
        self._noting = self._loop.create_task(noting)

    async def _probe_until_ready(self, *, write: bool) -> str:
        """Return why the store did not serve within `io_timeout_s`; "" if it did.

        Raises:
            StoreError: the fault is not temporary.
        """
        reason = f"no answer within {self._config.io_timeout_s:g} s"
        pause_s = _FIRST_PAUSE_S
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.io_timeout_s):
                while True:
                    try:
                        await probe(self._store, write=write)
                    except StoreBusy as exc:
                        reason = str(exc)
                    else:
                        return ""
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1))
                    pause_s = min(_PAUSE_GROWTH * pause_s, _LONGEST_PAUSE_S)
        return reason

    def _block_on(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the I/O thread and wait for it; only while the engine starts."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
