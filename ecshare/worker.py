# SPDX-License-Identifier: Apache-2.0
"""The worker half: embeddings between vLLM's encoder cache and this host.

Every rank loads, one rank saves: all of them hold the same embedding.
"""

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ecshare.config import OPTIONS_PATH, EncoderConfig
from ecshare.messages import LoadOrder, Orders, Report, SaveOrder
from ecshare.plugin.ranks import Rank
from ecshare.store.format import TensorFacts
from ecshare.transfer.engine import (
    Done,
    Fetch,
    Outcome,
    Put,
    StoredObject,
    TransferEngine,
    open_object,
)
from ecshare.transfer.staging import Slab, Staging, as_tensor, dtype_name
from ecshare.transfer.stats import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Orders for items whose encode was cancelled are never redeemed; keep the latest.
_ORDERS_KEPT = 4096


class EncoderWorker:
    """Carries out the scheduler half's orders.

    Ownership: all fields belong to vLLM's worker thread; the transfer engine has its own.
    """

    def __init__(self, vllm_config: "VllmConfig", config: EncoderConfig, rank: Rank) -> None:
        """Start the I/O thread and check that the store answers. `rank`: this worker's place.

        Raises:
            ConfigError: the store cannot be used; names the option and the fix.
        """
        role, device = vllm_config.ec_transfer_config, vllm_config.device_config.device
        assert role is not None  # or vLLM would not have made the connector
        assert device is not None  # nor this worker
        self._device = torch.device(device)
        self._is_writer = role.is_ec_producer and rank.is_writer
        # Only an engine that does nothing but encode may wait for its uploads: others decode.
        self._is_durable = self._is_writer and not role.is_ec_consumer
        self._timeout_s = config.io_timeout_s
        self._wait_s = config.wait_s
        self._staging = Staging(self._device, config.buffer_bytes)
        self._engine = TransferEngine(config, OPTIONS_PATH)
        self._engine.probe(write=self._is_writer)
        self._orders: OrderedDict[str, SaveOrder] = OrderedDict()
        self._loaded: set[str] = set()
        self._stats = Stats()

    def load(self, orders: Orders, encoder_cache: dict[str, Tensor]) -> None:
        """Fill `encoder_cache` (identifier -> [num_embeds, width] on the device) as ordered.

        The tensors are copies that the cache owns. On return they are usable on the current stream.
        """
        for order in orders.loads:
            stored = open_object(self._engine.host, order.key) or self._fetch(order)
            if stored is None:
                self._stats.add("items/failed")
                logger.error("embedding %s was promised and cannot be loaded", order.key)
                continue
            encoder_cache[order.identifier] = as_tensor(stored.payload, stored.facts).to(
                self._device, copy=True
            )
            stored.release()
            self._loaded.add(order.key)

    def begin_saves(self, orders: Orders, encoder_cache: dict[str, Tensor]) -> None:
        """Take save orders; save at once what the encoder cache holds from an earlier step."""
        for order in orders.saves:
            self._orders[order.identifier] = order
            self.save(order.identifier, encoder_cache)
        while len(self._orders) > _ORDERS_KEPT:
            self._orders.popitem(last=False)

    def save(self, identifier: str, encoder_cache: dict[str, Tensor]) -> None:
        """Store an item as ordered, if it was ordered and is in the encoder cache; else nothing.

        Holds the step up for the copy to the host, no longer.
        """
        tensor = encoder_cache.get(identifier)
        if tensor is None:
            return
        order = self._orders.pop(identifier, None)
        if order is None or not self._is_writer:
            return
        slab = self._reserve(tensor, order)
        if slab is None:
            self._stats.add("items/dropped")
            return
        self._staging.copy_out(slab, tensor)
        self._engine.submit(Put(order.key, slab))

    def settle(self) -> None:
        """End a step. A producer-only engine waits here, bounded, until its saves are stored."""
        if not self._is_durable:
            self._count(self._engine.poll())
        elif self._engine.in_flight:
            self._count(self._engine.drain(self._timeout_s))

    def report(self) -> Report | None:
        """Return what was counted and loaded since the last report; None if nothing was."""
        counts = self._stats.take()
        loaded, self._loaded = frozenset(self._loaded), set()
        return Report(counts, loaded) if counts or loaded else None

    def close(self) -> None:
        """Let uploads end, briefly, and stop the I/O thread."""
        self._engine.close()

    def _reserve(self, tensor: Tensor, order: SaveOrder) -> Slab | None:
        """Return a slab for `tensor`; None if it cannot be stored, or the budget stays spent."""
        try:
            dtype = dtype_name(tensor.dtype)
        except ValueError as exc:
            logger.warning("embedding not stored: %s", exc)
            return None
        facts = TensorFacts(dtype, tuple(tensor.shape), order.attributes)
        slab = self._staging.reserve(facts)
        if slab is None and self._is_durable:
            self._count(self._engine.drain(self._timeout_s))
            slab = self._staging.reserve(facts)
        return slab

    def _fetch(self, order: LoadOrder) -> StoredObject | None:
        """Read an embedding from the store, waiting for it.

        The scheduler half pinned it on its own host; only a worker on another host gets here.
        """
        self._count(self._engine.drain(self._timeout_s))
        self._engine.submit(Fetch(order.key, self._wait_s))
        for done in self._engine.drain(self._wait_s):
            if isinstance(done.value, StoredObject):
                return done.value
        return None

    def _count(self, ended: list[Done]) -> None:
        for done in ended:
            if isinstance(done.job, Put):
                is_saved = done.outcome is Outcome.OK
                self._stats.add("items/saved" if is_saved else "items/dropped")
            elif isinstance(done.value, StoredObject):
                done.value.release()  # a fetch that came too late for its step
