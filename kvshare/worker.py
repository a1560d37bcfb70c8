# SPDX-License-Identifier: Apache-2.0
"""The worker half: blocks between vLLM's cache tensors and the store."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ecshare.plugin.metrics import CounterStats, counter_stats
from ecshare.plugin.ranks import worker_rank
from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.keys import Kind, object_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Fetch, Outcome, Put, StoredObject
from ecshare.transfer.staging import Staging, as_tensor
from ecshare.transfer.stats import Stats, merged
from kvshare.blocks import BlockCaches, refusal
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.messages import Orders, Piece, Report
from kvshare.prefix import ChunkKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What vLLM says of the cache of this worker, before the tensors are there."""

    num_blocks: int
    block_tokens: int
    num_heads: int


@dataclass(slots=True)
class _Load:
    """A request whose blocks are being filled; `missing` counts the pieces still to come."""

    request_id: str
    missing: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """Requests whose load ended: all of them, and those among them that failed."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class KVWorker:
    """Executes orders; reports each request once.

    Loads: each piece is copied to its block as soon as it is here and verified. The blocks belong
    to the waiting request alone until it is reported, so nobody can read them half filled, and
    host memory is pinned for one piece at a time instead of for a whole prompt. The first piece
    that fails ends the load: the request is reported, and what arrives later is let go unwritten.

    Saves: a block is copied out after the forward pass that filled it, in stream order before any
    later write to it, so vLLM may free or refill it at once.

    Ownership: the worker's main thread owns everything here.
    """

    def __init__(
        self, config: KVConfig, shape: CacheShape | None, part: str, engine: TransferEngine
    ) -> None:
        """Own `engine` from now on.

        `shape`: None for a cache that cannot be shared. `part`: this rank's share of a chunk.
        """
        self._config = config
        self._shape = shape
        self._part = part
        self._engine = engine
        self._stats = Stats()
        # Both are set by `register`; without them every save is dropped, every load fails.
        self._blocks: BlockCaches | None = None
        self._staging: Staging | None = None
        # By object key: several requests may wait for one chunk, and it is fetched once.
        self._waiting: dict[str, list[tuple[_Load, Piece]]] = {}
        self._saving: dict[str, ChunkKey] = {}
        self._finished = Finished()
        self._lost: set[ChunkKey] = set()
        self._tells_idle = False

    @classmethod
    def start(
        cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: KVConfig
    ) -> "KVWorker":
        """Start the I/O thread and check that the store answers.

        Raises:
            ConfigError: the store cannot be used; names the option and the fix.
        """
        role = vllm_config.kv_transfer_config
        assert role is not None
        shape = None
        if refusal(vllm_config, kv_cache_config) is None:
            spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
            shape = CacheShape(kv_cache_config.num_blocks, spec.block_size, spec.num_heads)
        engine = TransferEngine(config, OPTIONS_PATH)
        engine.probe(write=role.is_kv_producer)
        return cls(config, shape, worker_rank(vllm_config).part, engine)

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Take hold of vLLM's cache tensors; refuse a layout that is not understood."""
        shape = self._shape
        if shape is None:
            return
        try:
            blocks = BlockCaches(caches, shape.num_blocks, shape.block_tokens, shape.num_heads)
        except ValueError as exc:
            logger.warning("kvshare saves and loads nothing: %s.", exc)
            self._tells_idle = True
            return
        self._blocks = blocks
        self._staging = Staging(blocks.device, self._config.buffer_bytes)

    def load(self, orders: Orders) -> None:
        """Start the loads of `orders`."""
        for order in orders.loads:
            load = _Load(order.request_id, missing=len(order.pieces))
            if self._blocks is None:
                self._stats.add("blocks/failed", len(order.pieces))
                self._fail(load)
                continue
            for piece in order.pieces:
                self._want(self._object_key(orders.namespace, piece), load, piece)

    def save(self, orders: Orders) -> None:
        """Start the saves of `orders`; on return their blocks may be refilled, in stream order."""
        for piece in orders.saves:
            if not self._save(self._object_key(orders.namespace, piece), piece):
                self._stats.add("blocks/dropped")
                self._lost.add(piece.key)

    def settle(self) -> Finished:
        """Copy in what has arrived; return the loads that ended since the last call."""
        for done in self._engine.poll():
            match done.job:
                case Fetch():
                    self._arrived(done)
                case Put():
                    self._saved(done)
        finished, self._finished = self._finished, Finished()
        return finished

    def report(self) -> Report | None:
        """Return what the scheduler half must know; None if there is nothing."""
        if not self._lost and not self._tells_idle:
            return None
        report = Report(frozenset(self._lost), self._tells_idle)
        self._lost, self._tells_idle = set(), False
        return report

    def take_stats(self) -> CounterStats | None:
        """Return the counts since the last call; None if there are none."""
        if self._staging is not None:
            self._stats.set("now/save_queue_bytes", self._staging.used_bytes)
        self._stats.set("now/breaker_open/worker", float(self._engine.is_breaker_open))
        return counter_stats(merged(self._stats.take(), self._engine.stats.take()))

    def close(self) -> None:
        """Let saves end, briefly, and stop the I/O thread."""
        self._engine.close()

    def _object_key(self, namespace: str, piece: Piece) -> str:
        return object_key(Kind.KV, namespace, bytes(piece.key), self._part)

    def _want(self, key: str, load: _Load, piece: Piece) -> None:
        waiters = self._waiting.setdefault(key, [])
        waiters.append((load, piece))
        if len(waiters) == 1:
            assert self._blocks is not None
            facts = self._blocks.facts(piece.num_tokens, piece.key.hex())
            limit_bytes = PROLOGUE_BYTES + facts.num_bytes
            self._engine.submit(Fetch(key, self._config.io_timeout_s, limit_bytes))

    def _arrived(self, done: Done) -> None:
        """Hand an object to all who wait for it."""
        waiters = self._waiting.pop(done.job.key)  # type: ignore[union-attr]
        stored = done.value if isinstance(done.value, StoredObject) else None
        for load, piece in waiters:
            if stored is None or not self._fits(stored, piece):
                self._lost.add(piece.key)
                if not load.failed:
                    self._stats.add("blocks/failed")
                    self._fail(load)
            elif not load.failed:
                self._copy_in(stored, load, piece)
        if stored is not None:
            stored.release()

    def _fits(self, stored: StoredObject, piece: Piece) -> bool:
        """Whether the object is what the piece says: sound bytes may be those of something else."""
        assert self._blocks is not None
        if stored.facts == self._blocks.facts(piece.num_tokens, piece.key.hex()):
            return True
        # Out of the host cache with it: what is computed and saved instead is to be found there.
        logger.warning("%s does not hold what its key promises: %s", stored.key, stored.facts)
        self._engine.host.discard(stored.key)
        return False

    def _copy_in(self, stored: StoredObject, load: _Load, piece: Piece) -> None:
        assert self._blocks is not None
        self._blocks.write(piece.block_id, as_tensor(stored.payload, stored.facts))
        self._stats.add("blocks/loaded")
        load.missing -= 1
        if not load.missing:
            self._finished.requests.add(load.request_id)

    def _fail(self, load: _Load) -> None:
        """End `load` at its first bad piece: vLLM computes the request's tokens instead."""
        load.failed = True
        self._finished.requests.add(load.request_id)
        self._finished.failed.add(load.request_id)

    def _save(self, key: str, piece: Piece) -> bool:
        if self._blocks is None or self._staging is None:
            return False
        slab = self._staging.reserve(self._blocks.facts(piece.num_tokens, piece.key.hex()))
        if slab is None:
            return False
        self._staging.stack_out(slab, self._blocks.read(piece.block_id), dim=1)
        self._saving[key] = piece.key
        self._engine.submit(Put(key, slab))
        return True

    def _saved(self, done: Done) -> None:
        chunk = self._saving.pop(done.job.key, None)  # type: ignore[union-attr]
        if done.outcome is Outcome.OK:
            self._stats.add("blocks/saved")
            return
        self._stats.add("blocks/failed")
        if chunk is not None:
            # Nor may this host's cache claim it, or nobody here would save it again.
            self._engine.host.discard(done.job.key)  # type: ignore[union-attr]
            self._lost.add(chunk)
