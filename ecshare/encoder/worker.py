# SPDX-License-Identifier: Apache-2.0
"""The worker half: embeddings between vLLM's encoder cache and this host.

Every rank loads, one rank saves: all of them hold the same embedding.
"""

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ecshare.encoder.config import OPTIONS_PATH, EncoderConfig
from ecshare.encoder.facts import Role, role_of
from ecshare.encoder.messages import LoadOrder, Orders, Report, SaveOrder
from ecshare.plugin.ledger import Ledger, open_ledger
from ecshare.plugin.ranks import Rank
from ecshare.plugin.start import start_engine
from ecshare.store.format import TensorSpec
from ecshare.store.recent import Recent
from ecshare.transfer.device.staging import Slab, Staging, as_tensor, dtype_name, is_gpu
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.fetch import open_object
from ecshare.transfer.jobs import Done, Fetch, GiveUp, Handle, Outcome, Put, Run, StoredObject
from ecshare.transfer.stats import merged

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

# An order whose encode was cancelled is never carried out, so only the latest orders are kept.
_ORDERS_KEPT = 4096
_WRITE_EVERY_S = 0.5
# Staging memory of a rank that only loads: a few embeddings of the largest videos.
_LOAD_BYTES = 256 << 20


class EncoderWorker:
    """Carries out the scheduler half's orders.

    Ownership: all fields belong to vLLM's worker thread; the transfer engine has its own.
    """

    def __init__(  # noqa: PLR0913 — its role, and all that it owns
        self,
        config: EncoderConfig,
        role: Role,
        rank: Rank,
        device: torch.device,
        staging: Staging,
        engine: TransferEngine,
        ledger: Ledger | None = None,
    ) -> None:
        """Own `staging` and `engine` from now on. `ledger`: where to write what vLLM does not
        report."""
        self._device = device
        self._rank = rank.tp_rank
        self._is_writer = _is_writer(role, rank)
        self._is_durable = self._is_writer and config.save == "durable"
        # An engine that also decodes must not wait for memory: it drops the save.
        self._waits_for_room = self._is_durable or not role.is_consumer
        self._timeout_s = config.io_timeout_s
        self._promise_s = config.promise_s
        self._staging = staging
        self._engine = engine
        self._stats = engine.stats
        self._ledger = ledger
        self._orders: Recent[str, SaveOrder] = Recent(_ORDERS_KEPT)
        self._loaded: set[str] = set()
        self._totals: dict[str, float] = {}
        self._num_stops = 0
        self._is_unreported = False
        self._is_unwritten = False
        self._next_write_s = 0.0

    @classmethod
    def start(cls, vllm_config: "VllmConfig", config: EncoderConfig, rank: Rank) -> "EncoderWorker":
        """Start the I/O thread and check that the store answers. `rank`: of this worker.

        Raises:
            ConfigError: the store cannot be used; names the option and the fix.
        """
        role, named = role_of(vllm_config), vllm_config.device_config.device
        assert named is not None  # or vLLM would not have made this worker
        device, is_writer = torch.device(named), _is_writer(role, rank)
        buffer_bytes = config.buffer_bytes
        if is_gpu(device) and not is_writer:  # it is pinned at start
            buffer_bytes = min(buffer_bytes, _LOAD_BYTES if role.is_consumer else 1)
        staging = Staging(device, buffer_bytes)
        engine = start_engine(config, OPTIONS_PATH, write=is_writer, device=device)
        ledger = open_ledger(vllm_config, engine.host) if role.only_encodes else None
        return cls(config, role, rank, device, staging, engine, ledger)

    def load(self, orders: Orders, encoder_cache: dict[str, Tensor]) -> None:
        """Fill `encoder_cache` (identifier -> [num_embeds, width] on the device) as ordered.

        The cache owns the tensors. On a CPU they share the host cache's pages until they are
        written to. On return they are usable on the current stream.
        """
        for order in orders.loads:
            tensor = self._mapped(order) if not is_gpu(self._device) else None
            if tensor is None:
                tensor = self._copied_to_device(order)
            if tensor is None:
                self._stats.add("items/failed")
                logger.error("embedding %s was promised and cannot be loaded", order.key)
                continue
            encoder_cache[order.identifier] = tensor
            self._loaded.add(order.key)

    def begin_saves(self, orders: Orders, encoder_cache: dict[str, Tensor]) -> None:
        """Take save orders; save at once what the encoder cache holds from an earlier step."""
        if orders.num_stops != self._num_stops:
            # What is encoded from now on may be of other weights than those of their keys.
            self._num_stops = orders.num_stops
            self._orders.clear()
        for order in orders.saves:
            self._orders[order.identifier] = order
            self.save(order.identifier, encoder_cache)

    def save(self, identifier: str, encoder_cache: dict[str, Tensor]) -> None:
        """Store an item, if its save was ordered and the encoder cache has it; else do nothing.

        Blocks the step only for the copy to the host.
        """
        tensor = encoder_cache.get(identifier)
        if tensor is None:
            return
        order = self._orders.pop(identifier, None)
        if order is None or not self._is_writer:
            return
        slab = self._reserve(tensor, order)
        if slab is None:
            self._drop(order)
            return
        try:
            self._staging.copy_out(slab, tensor)
        except torch.OutOfMemoryError:
            # The device is full. Losing a save is acceptable, ending the engine is not.
            slab.release()
            self._drop(order)
            return
        self._engine.submit(Handle(Put(order.key, slab), self._saved))

    def _drop(self, order: SaveOrder) -> None:
        """Give up the save of `order`, and notify the engines that wait for the embedding."""
        self._stats.add("items/dropped")
        self._engine.submit(GiveUp(order.key))

    def settle(self) -> None:
        """End a step. In the mode `durable`, block, bounded, until its saves are stored."""
        self._staging.free_arrived()
        if not self._is_durable:
            self._engine.poll()
        elif self._engine.in_flight:
            self._engine.drain(self._timeout_s)
        self.write_totals()

    def report(self) -> Report | None:
        """Return the totals and the keys loaded since the last report; None if nothing is new."""
        self._update_totals()
        is_new, self._is_unreported = self._is_unreported, False
        loaded, self._loaded = frozenset(self._loaded), set()
        if not is_new and not loaded:
            return None
        return Report({self._rank: dict(self._totals)}, loaded)

    def give_up(self) -> None:
        """Count that this half has given up: the scheduler half then promises no more loads."""
        self._stats.add("gave_up/worker")

    def load_rest(self, orders: Orders, encoder_cache: dict[str, Tensor]) -> None:
        """Load in the simplest way what `load` has not loaded, after this half has given up."""
        for order in orders.loads:
            if order.identifier in encoder_cache:
                continue
            stored = open_object(self._engine.host, order.key)
            if stored is None:
                logger.error("embedding %s was promised and cannot be loaded", order.key)
                continue
            tensor = as_tensor(stored.payload, stored.spec)
            encoder_cache[order.identifier] = tensor.to(self._device, copy=True)
            stored.release()
            self._loaded.add(order.key)

    def close(self) -> None:
        """Wait briefly for uploads, and stop the I/O thread."""
        self._engine.close()

    def _mapped(self, order: LoadOrder) -> Tensor | None:
        """Return an embedding in a private mapping, if the host cache has it; for CPUs."""
        stored = open_object(self._engine.host, order.key, own=True)
        if stored is None or stored.entry is None:
            return None
        stored.entry.close()  # without `release`: the tensor holds the payload
        return as_tensor(stored.payload, stored.spec)

    def _copied_to_device(self, order: LoadOrder) -> Tensor | None:
        """Return a copy of an embedding on the device, from the host cache or the store.

        None: neither has it, or the device has no memory for it.
        """
        stored = open_object(self._engine.host, order.key) or self._fetch(order)
        if stored is None:
            return None
        try:
            return self._staging.copy_in(as_tensor(stored.payload, stored.spec))
        except torch.OutOfMemoryError as exc:
            logger.error("embedding %s: %s", order.key, exc)  # noqa: TRY400 — no bug of ours
            return None
        finally:
            stored.release()

    def _reserve(self, tensor: Tensor, order: SaveOrder) -> Slab | None:
        """Return a slab for `tensor`; None if its dtype cannot be stored, or memory stays short."""
        try:
            dtype = dtype_name(tensor.dtype)
        except ValueError as exc:
            logger.warning("embedding not stored: %s", exc)
            return None
        spec = TensorSpec(dtype, tuple(tensor.shape), order.attributes)
        slab = self._staging.reserve(spec)
        if slab is None and self._waits_for_room:
            self._engine.drain(self._timeout_s)
            slab = self._staging.reserve(spec)
        return slab

    def _fetch(self, order: LoadOrder) -> StoredObject | None:
        """Read an embedding from the store, and wait for it.

        Called only by a worker on another host than the scheduler half, which pinned the embedding
        on its own host and found it in the store. vLLM cannot continue without a promised
        embedding, so a failed fetch is repeated until `promise_s` is over.
        """
        timeout_s = self._promise_s
        found: list[StoredObject] = []
        is_late = False

        def fetched(done: Done[StoredObject]) -> None:
            if done.value is not None and is_late:
                done.value.release()
            elif done.value is not None:
                found.append(done.value)

        handle = Handle(Fetch(order.key, timeout_s, is_announced=True), fetched)
        self._engine.submit(handle)
        self._engine.drain(timeout_s, until=handle)
        is_late = True
        return found[0] if found else None

    def _saved(self, done: Done[None]) -> None:
        self._stats.add("items/saved" if done.outcome is Outcome.OK else "items/dropped")

    def _update_totals(self) -> None:
        """Add the counts since the last call to the totals."""
        self._stats.set("now/save_queue_bytes", self._staging.used_bytes)
        if counts := self._engine.take_counts("worker"):
            self._totals = merged(self._totals, counts)
            self._is_unreported = self._is_unwritten = True

    def write_totals(self) -> None:
        """Write the totals to the ledger, if there is one; at most every half second."""
        self._update_totals()
        now_s = time.monotonic()
        if self._ledger is not None and self._is_unwritten and now_s >= self._next_write_s:
            self._is_unwritten, self._next_write_s = False, now_s + _WRITE_EVERY_S
            work = partial(self._ledger.write, self._rank, self._totals)
            self._engine.submit(Run("ledger", work))


def _is_writer(role: Role, rank: Rank) -> bool:
    """Return whether a worker stores embeddings."""
    return role.is_producer and rank.is_writer
