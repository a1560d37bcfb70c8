# SPDX-License-Identifier: Apache-2.0
"""The worker half: blocks between vLLM's cache tensors and the store."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from torch import Tensor

from ecshare.plugin.metrics import CounterStats, counter_stats
from ecshare.plugin.ranks import Rank
from ecshare.plugin.start import start_engine
from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.keys import Key, Kind, object_key
from ecshare.transfer.device.load_streams import LoadStreams
from ecshare.transfer.device.staging import Slab, Staging, is_gpu
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Backfill, Done, GiveUp, Handle, Moved, Outcome, Put, Tier
from ecshare.transfer.packing import ZSTD, Packing
from kvshare.chunks.layers import LayerSet, is_shareable, layer_sets_of
from kvshare.chunks.prefix import ChunkKey
from kvshare.chunks.recent_keys import RecentKeys
from kvshare.compat import erase_slots, repacks_blocks, vllm_release
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.messages import Orders, Piece, Report
from kvshare.worker import float8
from kvshare.worker.blocks import BlockCaches, Erase
from kvshare.worker.layout_check import LayoutCheck
from kvshare.worker.loads import Finished, Loads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

# Pinned memory of a GPU's worker for loads is four times this. A copy of so much takes longer than
# to launch it.
_LOAD_BUFFER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What vLLM says of the cache of this worker, before the tensors are there."""

    num_blocks: int
    block_tokens: int
    layer_sets: tuple[LayerSet, ...]
    num_groups: int
    erase: Erase | None = None
    """Where the kernel mixes the tokens of a block: see `BlockCaches`."""
    check: LayoutCheck = field(default_factory=LayoutCheck)

    @classmethod
    def of(cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> "CacheShape":
        """Return that of an engine whose blocks are shareable."""
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
        """See `Loads`."""
        return self.num_groups == 1 and all(each.window.is_full for each in self.layer_sets)


@dataclass(frozen=True, slots=True)
class _Save:
    """A piece that is to be copied to `slab` and stored under `key`."""

    key: Key
    piece: Piece
    slab: Slab


class KVWorker:
    """Executes orders; reports each request once.

    Saves: blocks are copied out after the forward pass that filled them, in stream order before any
    later write to them, so vLLM may free or refill them at once. Loads: see `Loads`.

    Ownership: the worker's main thread owns everything here.
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

        `saves`: this engine stores KV, also what only this host has. `loads`: it loads KV.
        """
        self._config = config
        self._shape = shape
        self._rank = rank
        self._engine = engine
        self._stats = engine.stats
        # These are set by `register`, as far as this rank needs them; without them every save is
        # dropped, every load fails.
        self._blocks: list[BlockCaches] = []
        self._staging: Staging | None = None
        self._loads: Loads | None = None
        self._saving: set[Key] = set()
        self._unloadable = Finished()
        self._invalid_blocks: set[int] = set()
        self._lost: set[ChunkKey] = set()
        self._not_saved: set[ChunkKey] = set()
        self._has_misfits = False
        self._tells_idle = False
        self._saves = saves
        self._may_load = loads
        self._as_float8 = config.stored_dtype == float8.NAME
        self._has_cache = True
        self._num_ended: Counter[ChunkKey] = Counter()
        self._in_store = RecentKeys[str](monotonic)

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
        """Take hold of vLLM's cache tensors; refuse a layout that is not understood."""
        shape = self._shape
        if shape is None:
            # The scheduler half knows less of the layers: it may think that they can be shared.
            self._tells_idle = True
            return
        try:
            blocks = [
                BlockCaches(
                    caches,
                    layer_set,
                    shape.num_blocks,
                    shape.block_tokens,
                    erase=shape.erase,
                    as_float8=self._as_float8,
                )
                for layer_set in shape.layer_sets
            ]
        except ValueError as exc:
            logger.warning("kvshare saves and loads nothing: %s.", exc)
            self._tells_idle = True
            return
        if not _learn_layouts(shape, blocks):
            self._tells_idle = True
            return
        self._blocks = blocks
        # On a GPU both pin memory.
        if self._saves and any(each.is_written_by(self._rank) for each in shape.layer_sets):
            self._staging = Staging(blocks[0].device, self._buffer_bytes(blocks, shape))
        if self._may_load:
            self._loads = self._loads_of(blocks, shape)

    def _loads_of(self, blocks: Sequence[BlockCaches], shape: CacheShape) -> Loads:
        buffer_bytes = max(_LOAD_BUFFER_BYTES, *(each.block_bytes for each in blocks))
        return Loads(
            self._config,
            self._engine,
            blocks,
            LoadStreams(blocks[0].device, buffer_bytes),
            keeps_prefix=shape.keeps_prefix,
            arrived_from=self._make_up_for,
        )

    def _buffer_bytes(self, blocks: Sequence[BlockCaches], shape: CacheShape) -> int:
        """Return how much host memory saves may take."""
        if not is_gpu(blocks[0].device):
            return self._config.buffer_bytes
        # A chunk that is larger may go alone; here by pinned memory too.
        num_blocks = self._config.chunk_blocks(shape.block_tokens)
        largest = num_blocks * max(each.block_bytes * each.num_layers for each in blocks)
        return max(self._config.buffer_bytes, PROLOGUE_BYTES + largest)

    def unregister(self) -> None:
        """Let go of vLLM's cache until `restore`: its memory is about to be given away.

        Saves have copied their blocks out on return. Loads are given up: each is reported as failed
        with the next step. What is ordered meanwhile is not saved, and fails to load. Waits for
        copies between host and device, and never for the store. The second call does nothing.
        """
        if not self._has_cache:
            return
        self._has_cache = False
        if self._loads is not None:
            self._loads.pause()
        self._wait_saved()

    def release_cache(self) -> None:
        """As `unregister`, for good, and without a report: what a worker does that has given up."""
        if self._loads is not None:
            self._loads.stop()
        self._wait_saved()

    def _wait_saved(self) -> None:
        """Block until all saves have copied their blocks out."""
        if self._staging is not None:
            self._staging.wait_copied()

    def restore(self) -> None:
        """Take hold of the cache again, after `unregister`: its tensors have memory again."""
        self._has_cache = True
        if self._loads is not None:
            self._loads.resume()

    def load(self, orders: Orders) -> None:
        """Start the loads of `orders`, and end those that nobody waits for any more."""
        key_of = partial(self._object_key, orders.namespace)
        for order in orders.loads:
            if self._loads is not None:
                pieces = (each for piece in order.pieces for each in self._sourced(piece))
                self._loads.start(replace(order, pieces=tuple(pieces)), key_of)
                continue
            num_blocks = sum(piece.num_held for piece in order.pieces)
            self._stats.add("blocks/failed", num_blocks)
            self._stats.add("misses/rejected", num_blocks)
            self._unloadable.requests.add(order.request_id)
            self._unloadable.failed.add(order.request_id)
        if self._loads is not None:
            for request_id in orders.abandoned:
                self._loads.abandon(request_id)

    def save(self, orders: Orders) -> None:
        """Start the saves of `orders`; on return their blocks may be refilled, in stream order."""
        self._save_all(orders.namespace, orders.saves)

    def save_leaving(self, orders: Orders) -> None:
        """As `save`, for blocks that this step may refill: to be called before it does."""
        self._save_all(orders.namespace, orders.leaving)

    def wait_idle(self, orders: Orders) -> None:
        """Wait a moment for the end of a load or save, if the step of `orders` computes nothing."""
        is_loading = self._loads is not None and self._loads.are_under_way
        if orders.is_idle and (is_loading or self._saving):
            self._engine.wait_idle()

    def settle(self) -> Finished:
        """Copy in what has arrived; return the loads that ended since the last call."""
        self._engine.poll()
        if self._loads is None:
            finished, self._unloadable = self._unloadable, Finished()
        else:
            finished = self._loads.take_finished()
        self._invalid_blocks |= finished.invalid_blocks
        self._lost |= finished.lost
        self._has_misfits |= bool(finished.misfits)
        return finished

    def _make_up_for(self, key: Key, piece: Piece, moved: Sequence[Moved]) -> None:
        """Have what this host's cache had stored, unless it is: its writer may have been killed
        before, and the scheduler half saves nothing that a look-up has found."""
        if not self._saves or not self._is_first_holder(piece) or key in self._in_store:
            return
        if [each.tier for each in moved] == [Tier.HOST]:
            self._in_store.add(key)
            self._engine.submit(Backfill(key))

    def _is_first_holder(self, piece: Piece) -> bool:
        """Whether this is the first of the ranks that load the same object, as all do with MLA."""
        if self._shape is None or (piece.shard is not None and piece.shard.heads.first):
            return False
        return self._shape.layer_sets[piece.layer_set].is_written_by(self._rank)

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks that loads have left unfilled, since the last call."""
        taken, self._invalid_blocks = self._invalid_blocks, set()
        return taken

    def report(self) -> Report | None:
        """Return what the scheduler half must know; None if there is nothing."""
        saves_fail = "write" in self._engine.open_breakers
        if not (self._lost or self._tells_idle or self._num_ended or saves_fail):
            return None
        not_saved, ended = frozenset(self._not_saved), dict(self._num_ended)
        lost = not_saved.union(self._lost)
        report = Report(lost, self._tells_idle, ended, saves_fail, not_saved, self._has_misfits)
        self._has_misfits = False
        self._lost.clear()
        self._not_saved.clear()
        self._num_ended.clear()
        self._tells_idle = False
        return report

    def take_stats(self) -> CounterStats | None:
        """Return the counts since the last call; None if there are none."""
        if self._staging is not None:
            self._stats.set("now/save_queue_bytes", self._staging.used_bytes)
        return counter_stats(self._engine.take_counts("worker"))

    def give_up(self) -> None:
        """Share nothing from now on, and have the scheduler half told."""
        self._stats.add("gave_up/worker")
        self._tells_idle = True

    @property
    def engine(self) -> TransferEngine:
        """What moves the objects, which this half owns."""
        return self._engine

    @property
    def is_empty(self) -> bool:
        """Whether no load and no save goes on."""
        return not self._saving and (self._loads is None or self._loads.is_empty)

    def has_stopped_loads(self) -> bool:
        """Begin to write to no block any more; return whether none is being written to."""
        return self._loads is None or self._loads.has_stopped()

    def close(self) -> None:
        """Let saves end, briefly, and stop the I/O thread."""
        self._engine.close()

    def _object_key(self, namespace: str, piece: Piece) -> Key:
        assert self._shape is not None
        layer_set = self._shape.layer_sets[piece.layer_set]
        if piece.shard is None or piece.tp_size is None:
            part = layer_set.own_shard_name(self._rank)
        else:
            part = layer_set.shard_name(piece.shard.number, piece.tp_size)
        return object_key(Kind.KV, namespace, bytes(piece.key), part)

    def _sourced(self, piece: Piece) -> Iterable[Piece]:
        """Make `piece` one of each object in which its heads lie."""
        if piece.tp_size is None or self._shape is None:
            return [piece]
        layer_set = self._shape.layer_sets[piece.layer_set]
        found = layer_set.shard_slices(self._rank, piece.tp_size)
        return [replace(piece, shard=shard) for shard in found]

    def _save_all(self, namespace: str, pieces: Iterable[Piece]) -> None:
        saves = [save for piece in pieces if (save := self._reserved(namespace, piece)) is not None]
        if not saves or self._staging is None:
            return
        with self._staging.copying([save.slab for save in saves]):
            for number, blocks in enumerate(self._blocks):
                own = [(each.piece, each.slab) for each in saves if each.piece.layer_set == number]
                blocks.save(own)
        if self._as_float8:
            for save in saves:  # when their bytes are here, on the thread that stores them
                save.slab.finish = partial(float8.pack, save.slab, save.slab.finish)
        # Not one by one: the threads that store the first would slow the copies of the rest, which
        # the step waits for.
        self._engine.submit(*map(self._put, saves))

    def _reserved(self, namespace: str, piece: Piece) -> _Save | None:
        """Return where to copy `piece` to. None: it is dropped, or another rank's to store."""
        staging, shape = self._staging, self._shape
        if shape is not None and not shape.layer_sets[piece.layer_set].is_written_by(self._rank):
            return None
        if staging is None or shape is None:
            self._dropped(piece)
            return None
        key = self._object_key(namespace, piece)
        if key in self._saving:
            self._num_ended[piece.key] += 1
            return None  # for another request, a moment ago
        blocks = self._blocks[piece.layer_set]
        # What an earlier request has left in the last block is not to leave this engine.
        is_clean = blocks.erases or not blocks.num_in_part(piece)
        slab = None
        if self._has_cache and is_clean:
            slab = staging.reserve(blocks.spec(piece))
        if slab is None:
            self._dropped(piece)
            self._engine.submit(GiveUp(key))
            return None
        self._saving.add(key)
        return _Save(key, piece, slab)

    def _put(self, save: _Save) -> Handle[None]:
        # What the store lacks this host's cache must not claim, or nobody here would save it again.
        put = Put(save.key, save.slab, keeps_unstored=False)
        return Handle(put, partial(self._saved, save.key, save.piece))

    def _saved(self, key: Key, piece: Piece, done: Done[None]) -> None:
        self._saving.discard(key)
        if done.outcome is Outcome.OK:
            self._in_store.add(key)
            self._stats.add("blocks/saved", piece.num_blocks)
            self._num_ended[piece.key] += 1
        else:
            self._dropped(piece)

    def _dropped(self, piece: Piece) -> None:
        """Take note that `piece` is not in the store."""
        self._stats.add("blocks/dropped", piece.num_blocks)
        self._num_ended[piece.key] += 1
        self._not_saved.add(piece.key)


def _learn_layouts(shape: CacheShape, blocks: Sequence[BlockCaches]) -> bool:
    """Have `blocks` know their layouts. False: they may not be shared; the log says why."""
    for each, layer_set in zip(blocks, shape.layer_sets, strict=True):
        # The last blocks, one for each cache group: groups may be one memory.
        block_ids = [shape.num_blocks - 1 - place for place, _ in enumerate(layer_set.groups)]
        try:
            layout = shape.check.layout_of(each, block_ids, shape.block_tokens)
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
