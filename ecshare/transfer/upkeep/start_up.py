# SPDX-License-Identifier: Apache-2.0
"""Probes the store before the first job, stores an engine's manifest and mark, and renews them."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ecshare.store.cloud.s3_region import wrong_region
from ecshare.store.config import ConnectorConfig, StoreConfig
from ecshare.store.errors import ConfigError, StoreBusy, StoreError
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Kind
from ecshare.store.objects import ObjectStore, probe
from ecshare.store.open import open_store
from ecshare.store.secrets import masked_url
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.upkeep.elected import ElectedCleaner
from ecshare.transfer.upkeep.epochs import EpochReader, Epochs
from ecshare.transfer.upkeep.filling import HostFiller
from ecshare.transfer.upkeep.in_namespace import InNamespace
from ecshare.transfer.upkeep.namespaces import NamespaceWatch
from ecshare.transfer.upkeep.renewal import Record
from ecshare.upkeep.budget import Budget, tenant_scope
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
        self._lasting: dict[str, asyncio.Task[None]] = {}
        self._in_namespace = InNamespace(store, integrity, config.io_timeout_s)
        self.epochs = Epochs()
        """Owned by the thread that submits jobs."""
        self._threads: list[ElectedCleaner | HostFiller] = []

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the background tasks, to be cancelled at the end."""
        return [*self._lasting.values(), *self._in_namespace.tasks]

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

    def begin(self, record: Record, *, write: bool, live: bool) -> None:
        """See `TransferEngine.start_up`."""
        for warning in self._config.warnings(self._path):
            logger.warning("%s", warning)
        serves = self.probe(write=write)
        if live:
            self._follow(record, write=write, at_once=serves)
        watch = NamespaceWatch(self._client, record)
        if serves:
            # No time-out is needed: `compare` has its own, and never raises.
            self._block_on(watch.compare())
        if not write:
            self._watch, self.is_watching = watch, True
            return
        self._block_on(self._in_namespace.renew(record, at_once=serves))
        self._start_cleaner(record.kind)

    def note(self, uses: UseRecord, kind: Kind, namespace: str) -> None:
        """Note `uses` in the store from now on, from time to time."""
        self._block_on(self._in_namespace.note(uses, kind, namespace))

    def move(self, uses: UseRecord, record: Record, *, write: bool) -> None:
        """See `TransferEngine.move`."""
        asyncio.run_coroutine_threadsafe(self._move(uses, record, write=write), self._loop)

    async def _move(self, uses: UseRecord, record: Record, *, write: bool) -> None:
        if self._watch is not None:
            self._watch = NamespaceWatch(self._client, record)
        await self._in_namespace.move(uses, record, write=write)

    def _follow(self, record: Record, *, write: bool, at_once: bool) -> None:
        """Follow the epochs of the model of `record`."""
        config = self._config
        model, timeout_s = str(record.facts.get("model", "")), config.io_timeout_s
        reader = EpochReader(
            self._store, model, self._integrity, timeout_s, self._loop, write=write
        )
        if at_once:
            self._block_on(reader.read_first())
        self._lasting["epochs"] = self._block_on(reader.start())
        self.epochs.follow(reader, record, min(config.wait_s, timeout_s))

    def fill(self, host: HostCache, record: Record, is_busy: Callable[[], bool]) -> None:
        """Bring what was used last into `host` in the background, if the options say so."""
        config = self._config
        if isinstance(config, ConnectorConfig) and config.preload_bytes:
            open_own = partial(open_store, config, self._path)
            hot = HostFiller(open_own, host, record, self._integrity, config, is_busy)
            self._threads.append(hot)

    def compare_again(self, *, is_hit: bool) -> None:
        """Record a hit or a miss of a read; compare namespaces if that is due."""
        if self._watch is not None and self._watch.is_due(is_hit=is_hit):
            self._lasting["compare"] = self._loop.create_task(self._watch.compare())

    def note_last(self, timeout_s: float) -> None:
        """Note the uses of the last minutes, within `timeout_s`. Raises nothing."""
        ending = asyncio.run_coroutine_threadsafe(self._in_namespace.end(timeout_s), self._loop)
        with suppress(TimeoutError):  # the I/O thread hangs
            ending.result(timeout_s + 1)

    def close(self) -> None:
        """End the threads of the cleaner and of the filling of the host cache, if there are any."""
        for thread in self._threads:
            thread.close()

    def _start_cleaner(self, kind: Kind) -> None:
        config = self._config
        if not isinstance(config, ConnectorConfig):
            return
        scope = tenant_scope(config.tenant) if config.tenant else str(kind)
        max_bytes = {scope: config.max_bytes} if config.max_bytes is not None else {}
        ttl_hours = {scope: config.ttl_hours} if config.ttl_hours is not None else {}
        if max_bytes or ttl_hours:
            cleaner = ElectedCleaner(
                partial(open_store, config, self._path),
                kind,
                Budget(max_bytes, ttl_hours),
                self._integrity,
                config.call_timeout_s,
                config.tenant,
            )
            self._threads.append(cleaner)

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
