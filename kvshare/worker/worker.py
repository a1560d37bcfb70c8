# SPDX-License-Identifier: Apache-2.0
"""The worker half: moves blocks between vLLM's cache tensors and the store."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ecshare.plugin.metrics import CounterStats, counter_stats
from ecshare.plugin.ranks import Rank
from ecshare.plugin.start import start_engine
from ecshare.store.format import PROLOGUE_BYTES
from ecshare.transfer.device.load_streams import LoadStreams
from ecshare.transfer.device.staging import Staging, is_gpu
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.packing import ZSTD, Packing
from kvshare.chunks.layers import LayerSet, is_shareable, layer_sets_of
from kvshare.chunks.stages import kinds_of
from kvshare.compat import erase_slots, repacks_blocks, vllm_release
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.messages import LoadOrder, Orders, Piece, Report
from kvshare.worker import float8
from kvshare.worker.blocks import BlockCaches, Erase
from kvshare.worker.layout_check import LayoutCheck
from kvshare.worker.loads import Finished, Loads
from kvshare.worker.rank_shards import RankShards
from kvshare.worker.reports import Reports
from kvshare.worker.saves import Saves

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

# The worker of a GPU pins eight times this for loads. With smaller buffers the threads spend more
# time on launches, and wait for each other's.
_LOAD_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The cache of this worker as vLLM describes it, before its tensors exist."""

    num_blocks: int
    block_tokens: int
    layer_sets: tuple[LayerSet, ...]
    num_groups: int
    erase: Erase | None = None
    """Given if the kernel mixes the tokens of a block: see `BlockCaches`."""
    check: LayoutCheck = field(default_factory=LayoutCheck)

    @classmethod
    def of(cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> "CacheShape":
        """Return the shape for an engine whose blocks are shareable."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        erase = partial(erase_slots, dtype=model.dtype, cache_dtype=cache.cache_dtype)
        layers = vllm_config.compilation_config.static_forward_context
        return cls(
            kv_cache_config.num_blocks,
            cache.block_size,
            layer_sets_of(vllm_config, kv_cache_config),
            len(kv_cache_config.kv_cache_groups),
            erase if repacks_blocks() else None,
            LayoutCheck(layers, model.dtype, vllm_release()),
        )

    @property
    def keeps_prefix(self) -> bool:
        """Whether vLLM can keep the blocks before a piece that failed; see `Loads`."""
        return self.num_groups == 1 and all(
            each.window.is_full and not each.is_recurrent for each in self.layer_sets
        )


class KVWorker:
    """Executes orders; reports each request once.

    Saves start after the forward pass that filled their blocks: see `Saves`, and `Loads`. If the
    cache cannot be shared, every save is dropped and every load fails.

    Ownership: the worker's main thread owns all fields.
    """

    def __init__(  # noqa: PLR0913 — all that a worker is told of its engine
        self,
        config: KVConfig,
        shape: CacheShape | None,
        rank: Rank,
        engine: TransferEngine,
        *,
        saves: bool = True,
        loads: bool = True,
    ) -> None:
        """Own `engine` from now on. `shape`: None for a cache that cannot be shared.

        `saves`: this engine stores KV, including objects that only this host has. `loads`: it loads
        KV.
        """
        self._config = config
        self._shape = shape
        self._shards = None if shape is None else RankShards(shape.layer_sets, rank)
        self._engine = engine
        self._reports = Reports(engine.stats)
        self._may_save = saves
        self._may_load = loads
        # `register` sets these if the cache can be shared and this rank needs them.
        self._saves: Saves | None = None
        self._loads: Loads | None = None
        self._refused = Finished()
        """Loads that cannot be carried out, since the last `settle`."""

    @classmethod
    def start(
        cls,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: KVConfig,
        rank: Rank,
    ) -> "KVWorker":
        """Start the I/O thread and check that the store answers. `rank`: this worker's place.

        Raises:
            ConfigError: an option does not fit this engine, or the store cannot be used; names the
                option and the fix.
        """
        role = vllm_config.kv_transfer_config
        assert role is not None  # or vLLM would not have made the connector
        shape = None
        if is_shareable(vllm_config, kv_cache_config, config):
            shape = CacheShape.of(vllm_config, kv_cache_config)
        engine = start_engine(
            config,
            OPTIONS_PATH,
            write=role.is_kv_producer,
            device=vllm_config.device_config.device,
            packing=Packing(f"{OPTIONS_PATH}.compression") if config.compression == ZSTD else None,
        )
        return cls(
            config, shape, rank, engine, saves=role.is_kv_producer, loads=role.is_kv_consumer
        )

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Use vLLM's cache tensors from now on; refuse a layout that is not understood."""
        blocks = self._blocks_of(caches)
        shape, shards = self._shape, self._shards
        if not blocks or shape is None or shards is None:
            # The scheduler half knows less of the layers, and may think that they can be shared.
            self._reports.stopped()
            return
        # On a GPU both pin memory.
        if self._may_save and shards.writes_any:
            self._saves = Saves(
                self._engine,
                blocks,
                Staging(blocks[0].device, self._buffer_bytes(blocks, shape)),
                shards,
                self._reports,
            )
        if self._may_load:
            buffer_bytes = max(_LOAD_BUFFER_BYTES, *(each.block_bytes for each in blocks))
            self._loads = Loads(
                self._config,
                self._engine,
                blocks,
                LoadStreams(blocks[0].device, buffer_bytes),
                shards,
                keeps_prefix=shape.keeps_prefix,
                backfill=None if self._saves is None else self._saves.backfill,
            )

    def _blocks_of(self, caches: Mapping[str, Tensor]) -> Sequence[BlockCaches]:
        """Return the blocks of each layer set; empty if they may not be shared."""
        shape = self._shape
        if shape is None:
            return ()
        try:
            blocks = [
                _block_caches(caches, layer_set, shape, as_float8=self._as_float8)
                for layer_set in shape.layer_sets
            ]
        except ValueError as exc:
            logger.warning("kvshare saves and loads nothing: %s.", exc)
            return ()
        return blocks if _learn_layouts(shape, blocks) else ()

    @property
    def _as_float8(self) -> bool:
        return self._config.stored_dtype == float8.NAME

    def _buffer_bytes(self, blocks: Sequence[BlockCaches], shape: CacheShape) -> int:
        """Return how much host memory saves may take."""
        if not is_gpu(blocks[0].device):
            return self._config.buffer_bytes
        # A chunk larger than `buffer_bytes` may be saved alone; on a GPU it needs pinned memory.
        chunk_blocks = self._config.chunk_blocks(shape.block_tokens)
        largest = max(
            (1 if layer_set.is_recurrent else chunk_blocks) * each.block_bytes * each.num_layers
            for each, layer_set in zip(blocks, shape.layer_sets, strict=True)
        )
        return max(self._config.buffer_bytes, PROLOGUE_BYTES + largest)

    def unregister(self) -> None:
        """Stop using vLLM's cache until `restore`: its memory is about to be freed.

        Saves have copied their blocks out on return. Loads are given up: each is reported as failed
        with the next step. What is ordered meanwhile is not saved, and fails to load. Waits for
        copies between host and device, and never for the store. A second call changes nothing.
        """
        if self._loads is not None:
            self._loads.pause()
        if self._saves is not None:
            self._saves.pause()

    def release_cache(self) -> None:
        """Stop using vLLM's cache for good, without a report: for a worker that has given up."""
        if self._loads is not None:
            self._loads.stop()
        if self._saves is not None:
            self._saves.wait_copied()

    def restore(self) -> None:
        """Use the cache again, after `unregister`: its tensors have memory again."""
        if self._saves is not None:
            self._saves.resume()
        if self._loads is not None:
            self._loads.resume()

    def load(self, orders: Orders) -> None:
        """Start the loads of `orders`, and end those of requests that have ended."""
        self._compare(orders)
        if self._loads is None:
            for order in orders.loads:
                self._refuse(order)
            return
        for order in orders.loads:
            self._loads.start(order, orders.namespace)
        for request_id in orders.abandoned:
            self._loads.abandon(request_id)

    def _refuse(self, order: LoadOrder) -> None:
        """Report the load of `order` as failed."""
        num_blocks = sum(piece.num_held for piece in order.pieces)
        self._engine.stats.add("blocks/failed", num_blocks)
        self._engine.stats.add("misses/rejected", num_blocks)
        self._refused.requests.add(order.request_id)
        self._refused.failed.add(order.request_id)

    def save(self, orders: Orders) -> None:
        """Start the saves of `orders`; on return their blocks may be refilled, in stream order."""
        self._save(orders, orders.saves)

    def save_leaving(self, orders: Orders) -> None:
        """Save blocks that this step may refill; to be called before it does. See `save`."""
        self._save(orders, orders.leaving)

    def _save(self, orders: Orders, pieces: Iterable[Piece]) -> None:
        self._compare(orders)
        if self._saves is not None:
            self._saves.start(orders.namespace, pieces)
            return
        for piece in pieces:
            if self._shards is None or self._shards.writes(piece):
                self._reports.dropped(piece)

    def _compare(self, orders: Orders) -> None:
        """Share nothing from now on if the scheduler half has layer sets of other kinds."""
        if not orders.kinds or self._shape is None:
            return
        own = kinds_of(self._shape.layer_sets)
        if orders.kinds == own:
            return
        logger.warning(
            "kvshare saves and loads nothing: this pipeline stage has layers of other kinds (%s) "
            "than the first one (%s).",
            own,
            orders.kinds,
        )
        # There is no load or save yet: all orders of an engine name the same kinds.
        self._shape = self._shards = self._saves = self._loads = None
        self._reports.stopped()

    def wait_idle(self, orders: Orders) -> None:
        """Wait up to 3 ms for the end of a load if the step of `orders` computes nothing; if there
        is no load, for the end of a save.

        The end of one chunk among several is no news for the scheduler half, and each step costs
        its process and this one.
        """
        if not orders.is_idle:
            return
        loads = self._loads
        if loads is not None and loads.are_under_way:
            self._engine.wait_idle(lambda: loads.have_ended)
        elif self._is_saving:
            self._engine.wait_idle()

    @property
    def _is_saving(self) -> bool:
        return self._saves is not None and self._saves.are_under_way

    def settle(self) -> Finished:
        """Record which jobs have ended; return the loads that ended since the last call."""
        self._engine.poll()
        if self._loads is None:
            finished, self._refused = self._refused, Finished()
        else:
            finished = self._loads.take_finished()
        if finished.lost:
            self._reports.lost(finished.lost, has_misfits=bool(finished.misfits))
        return finished

    def report(self) -> Report | None:
        """Return the report for the scheduler half; None if there is nothing to report."""
        return self._reports.take(saves_fail="write" in self._engine.open_breakers)

    @property
    def save_queue_bytes(self) -> int:
        """The memory that saves under way take."""
        return 0 if self._saves is None else self._saves.queue_bytes

    def take_stats(self) -> CounterStats | None:
        """Return the counts since the last call; None if there are none."""
        self._engine.stats.set("now/save_queue_bytes", self.save_queue_bytes)
        return counter_stats(self._engine.take_counts("worker"))

    def give_up(self) -> None:
        """Share nothing from now on, and report that to the scheduler half."""
        self._engine.stats.add("gave_up/worker")
        self._reports.stopped()

    @property
    def engine(self) -> TransferEngine:
        """The transfer engine, which this half owns."""
        return self._engine

    @property
    def is_empty(self) -> bool:
        """Whether no load and no save is under way."""
        return not self._is_saving and (self._loads is None or self._loads.is_empty)

    def has_stopped_loads(self) -> bool:
        """Begin no further copy to a block; return whether none is under way."""
        return self._loads is None or self._loads.has_stopped()

    def close(self) -> None:
        """Wait briefly for saves under way, and stop the I/O thread."""
        self._engine.close()


def _block_caches(
    caches: Mapping[str, Tensor], layer_set: LayerSet, shape: CacheShape, *, as_float8: bool
) -> BlockCaches:
    """Return the blocks of one layer set; see `BlockCaches`."""
    if layer_set.is_recurrent:
        # A state is opaque bytes: as if it were one token of one head.
        return BlockCaches(caches, layer_set, shape.num_blocks, 1)
    return BlockCaches(
        caches,
        layer_set,
        shape.num_blocks,
        shape.block_tokens,
        erase=_cannot_erase if layer_set.is_opaque else shape.erase,
        as_float8=as_float8 and not layer_set.page_bytes,
    )


def _cannot_erase(block: Tensor, first_slot: int) -> None:
    raise NotImplementedError


def _learn_layouts(shape: CacheShape, blocks: Sequence[BlockCaches]) -> bool:
    """Set the layouts of `blocks`. False: they may not be shared; the log says why."""
    for each, layer_set in zip(blocks, shape.layer_sets, strict=True):
        if layer_set.is_recurrent:
            # Only a forward pass writes a state, so the kernels cannot be tried.
            each.layout = shape.check.untried(layer_set.state)
            continue
        # The last blocks, one for each cache group: groups may be one memory.
        block_ids = [shape.num_blocks - 1 - place for place, _ in enumerate(layer_set.groups)]
        try:
            layout = shape.check.layout_of(
                each, block_ids, shape.block_tokens, is_opaque=layer_set.is_opaque
            )
        except Exception as exc:  # noqa: BLE001 — another release's kernel may raise anything
            logger.warning(
                "kvshare saves and loads nothing: the check of its block layout failed (%s: %s).",
                type(exc).__name__,
                exc,
            )
            return False
        each.layout = layout.digest
        if layout.untried:
            logger.warning(
                "kvshare cannot check the attention back end %s: its KV is shared only between "
                "engines with the same back end and the same vLLM release.",
                layout.untried,
            )
        else:
            logger.info("kvshare has checked the attention kernels: block layout %s", layout.digest)
    return True
