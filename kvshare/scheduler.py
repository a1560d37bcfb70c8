# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in the scheduler process: what to load, what to save, and when."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ecshare.plugin.identity import kv_namespace
from ecshare.plugin.metrics import CounterStats, counter_stats
from ecshare.plugin.ranks import Rank
from ecshare.store.keys import Kind, object_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Lookup, Outcome
from ecshare.transfer.stats import Stats, merged
from kvshare.blocks import refusal
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.messages import LoadOrder, Orders, Piece, Report, announced_tokens, announcement
from kvshare.prefix import (
    Chunk,
    ChunkKey,
    HashFunction,
    covered_tokens,
    full_chunk,
    loadable_chunks,
    num_leading,
    tail_chunk,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.05
# What was seen in the store is not saved again for so long. Then it is, in case the store has lost
# it: writes are create-only, so that costs little where it has not.
_TRUST_S = 600.0
# About 20 MB.
_TRUSTED_CHUNKS = 100_000


@dataclass(frozen=True, slots=True)
class KVFacts:
    """What the scheduler half must know of its engine."""

    namespace: str
    block_tokens: int
    parts: tuple[str, ...]
    """The names of the shares in which the ranks store a chunk; it is there if all of them are."""
    hash_function: HashFunction
    """vLLM's own, which made the block hashes."""
    saves: bool
    loads: bool


@dataclass(slots=True)
class _Search:
    """The question how much of a request is stored. Answered once `is_over`."""

    start_tokens: int
    chunks: tuple[Chunk, ...]
    announced_tokens: int
    deadline_s: float
    next_ask_s: float
    pause_s: float = _FIRST_PAUSE_S
    is_asking: bool = False
    is_over: bool = False
    num_found: int = 0

    @property
    def found(self) -> tuple[Chunk, ...]:
        return self.chunks[: self.num_found]


@dataclass(slots=True)
class _Tracked:
    """One request of the engine, from the first sight to its end."""

    request: Request
    block_ids: list[int] = field(default_factory=list)
    next_chunk: int = 0
    prompt_is_saved: bool = False
    load_failed: bool = False
    start_tokens: int = 0
    """Tokens of the local cache hit that the latest answer was given for."""
    search: _Search | None = None


class _TrustedKeys:
    """Chunks that were seen in the store lately; holds a bounded number, the latest ones."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._seen_s: OrderedDict[ChunkKey, float] = OrderedDict()

    def __contains__(self, key: ChunkKey) -> bool:
        return self._clock_s() - self._seen_s.get(key, -inf) < _TRUST_S

    def add(self, key: ChunkKey) -> None:
        self._seen_s[key] = self._clock_s()
        self._seen_s.move_to_end(key)
        if len(self._seen_s) > _TRUSTED_CHUNKS:
            self._seen_s.popitem(last=False)

    def discard(self, key: ChunkKey) -> None:
        self._seen_s.pop(key, None)


class KVScheduler:
    """Plans loads and saves. Every method runs on vLLM's scheduler thread, which owns all fields.

    None of them does I/O or waits: look-ups are submitted, and polled when vLLM asks again.
    """

    def __init__(
        self,
        config: KVConfig,
        facts: KVFacts,
        engine: TransferEngine,
        clock_s: Callable[[], float] = monotonic,
    ) -> None:
        """`clock_s`: monotonic seconds."""
        self._stats = Stats()
        self._config = config
        self._facts = facts
        self._engine = engine
        self._clock_s = clock_s
        self._tracked: dict[str, _Tracked] = {}
        # By the look-up's keys: requests with one prefix share one look-up.
        self._asking: dict[tuple[str, ...], list[_Search]] = {}
        self._loads: list[LoadOrder] = []
        self._loading: dict[str, tuple[LoadOrder, int]] = {}
        # They need no saving. What was ordered to be saved counts, until a worker says otherwise.
        self._stored = _TrustedKeys(clock_s)

    @classmethod
    def start(
        cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: KVConfig
    ) -> "KVScheduler":
        """Start the I/O thread and check that the store answers.

        An engine whose blocks cannot be shared gets a half that does nothing, and says why once.

        Raises:
            ConfigError: the store cannot be used; names the option and the fix.
        """
        role = vllm_config.kv_transfer_config
        assert role is not None
        why_not = refusal(vllm_config, kv_cache_config)
        if why_not is not None:
            logger.warning("kvshare saves and loads nothing: %s.", why_not)
        engine = TransferEngine(config, OPTIONS_PATH)
        namespace = kv_namespace(vllm_config, kv_cache_config, config.epoch, engine.integrity)
        tp_size = vllm_config.parallel_config.tensor_parallel_size
        facts = KVFacts(
            namespace=namespace.digest,
            block_tokens=vllm_config.cache_config.block_size,
            parts=tuple(Rank(rank, tp_size, 0, 1).part for rank in range(tp_size)),
            hash_function=get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo),
            saves=role.is_kv_producer and why_not is None,
            loads=role.is_kv_consumer and why_not is None,
        )
        engine.start_up(namespace.kind, namespace.digest, namespace.facts, write=facts.saves)
        return cls(config, facts, engine)

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after `num_computed_tokens` can be loaded; None: ask again.

        Called every step while the request waits; O(blocks) once, then O(1). The answer is final
        after `wait_s`, whatever the store does.
        """
        tracked = self._track(request)
        if not self._facts.loads or request.skip_reading_prefix_cache or tracked.load_failed:
            return 0
        tracked.start_tokens = num_computed_tokens
        search = tracked.search
        if search is None:
            self._stats.add("tokens/queried", request.num_tokens - num_computed_tokens)
        if search is None or search.start_tokens > num_computed_tokens:
            # None yet; or the local hit has shrunk below what was looked up.
            search = tracked.search = self._start_search(request, num_computed_tokens)
        self._advance(search)
        if not search.is_over:
            return None
        return max(0, covered_tokens(request, search.found) - num_computed_tokens)

    def allocated(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Take note that vLLM admitted `request`, with `num_external_tokens` to be loaded.

        `block_ids`: all blocks of the request, in order. Zero tokens: nothing to load (any more).
        """
        tracked = self._track(request)
        search, tracked.search = tracked.search, None
        if not num_external_tokens or search is None:
            return
        end_tokens = tracked.start_tokens + num_external_tokens
        pieces = tuple(
            Piece(chunk.key, chunk.num_tokens, block_ids[chunk.index])
            for chunk in search.found
            if tracked.start_tokens <= chunk.start_tokens < end_tokens
        )
        order = LoadOrder(request.request_id, pieces)
        self._loads.append(order)
        self._loading[request.request_id] = order, num_external_tokens
        self._stats.add("tokens/hit", num_external_tokens)

    def orders(self, output: SchedulerOutput) -> Orders:
        """Return the orders of this step."""
        self._poll()
        loads, self._loads = tuple(self._loads), []
        saves = tuple(self._plan_saves(output)) if self._facts.saves else ()
        return Orders(self._facts.namespace, loads, saves)

    def reported(self, output: KVConnectorOutput) -> None:
        """Learn from the workers which loads ended and which chunks are not in the store."""
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            for key in report.lost:
                self._stored.discard(key)
            if report.is_idle:
                self._facts = replace(self._facts, saves=False, loads=False)
        for request_id in output.finished_recving or ():
            if request_id in self._loading:
                order, num_tokens = self._loading.pop(request_id)
                self._loaded(order, num_tokens, failed=request_id in output.failed_recving)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget `request`; return what its reader is to be told."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or not tracked.prompt_is_saved:
            return None
        return announcement(request.num_prompt_tokens - 1)

    def take_stats(self) -> CounterStats | None:
        """Return the counts since the last call; None if there are none."""
        self._stats.set("now/breaker_open/scheduler", float(self._engine.is_breaker_open))
        return counter_stats(merged(self._stats.take(), self._engine.stats.take()))

    def close(self) -> None:
        """Stop the I/O thread."""
        self._engine.close()

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        return tracked

    def _loaded(self, order: LoadOrder, num_tokens: int, *, failed: bool) -> None:
        if not failed:
            self._stats.add("tokens/loaded", num_tokens)
            return
        # One piece was bad, and nobody waited to see whether others were: save all of them again.
        for piece in order.pieces:
            self._stored.discard(piece.key)
        if order.request_id in self._tracked:
            # Its next answer is to be zero: the request has waited long enough.
            self._tracked[order.request_id].load_failed = True

    # --- what is stored ---

    def _start_search(self, request: Request, num_computed_tokens: int) -> _Search:
        facts, now_s = self._facts, self._clock_s()
        chunks = loadable_chunks(
            request, facts.block_tokens, facts.hash_function, num_computed_tokens
        )
        return _Search(
            num_computed_tokens,
            chunks,
            announced_tokens(request),
            deadline_s=now_s + self._config.wait_s,
            next_ask_s=now_s,
            is_over=not chunks,
        )

    def _advance(self, search: _Search) -> None:
        """Ask, or take the answer, or give up."""
        self._poll()
        now_s = self._clock_s()
        if search.is_over:
            return
        if now_s >= search.deadline_s:
            self._end(search, "failed" if search.is_asking else "missed")
        elif not search.is_asking and now_s >= search.next_ask_s:
            self._ask(search, min(self._config.io_timeout_s, search.deadline_s - now_s))

    def _ask(self, search: _Search, timeout_s: float) -> None:
        search.is_asking = True
        keys = tuple(self._object_keys(search.chunks))
        waiting = self._asking.setdefault(keys, [])
        waiting.append(search)
        if len(waiting) == 1:
            self._engine.submit(Lookup(keys, timeout_s))

    def _poll(self) -> None:
        for done in self._engine.poll():
            if isinstance(done.job, Lookup):
                for search in self._asking.pop(done.job.keys, ()):
                    self._answer(search, done)

    def _answer(self, search: _Search, done: Done) -> None:
        search.is_asking = False
        if done.outcome is not Outcome.OK or not isinstance(done.value, tuple):
            self._end(search, "failed")
            return
        shares = len(self._facts.parts)
        there = [
            all(done.value[number * shares : (number + 1) * shares])
            for number in range(len(search.chunks))
        ]
        for chunk, is_there in zip(search.chunks, there, strict=True):
            self._stored.add(chunk.key) if is_there else self._stored.discard(chunk.key)
        if search.is_over:
            return
        search.num_found = num_leading(there)
        found_tokens = search.found[-1].end_tokens if search.found else 0
        if search.num_found == len(there) or found_tokens >= search.announced_tokens:
            self._end(search, "missed")
            return
        # The rest was announced: it is being stored right now.
        search.next_ask_s = self._clock_s() + search.pause_s
        search.pause_s = min(2 * search.pause_s, _LONGEST_PAUSE_S)

    def _end(self, search: _Search, event: str) -> None:
        """Make the answer final; count what was not found as `event`."""
        if not search.is_over:
            search.is_over = True
            if search.num_found < len(search.chunks):
                self._stats.add(f"blocks/{event}", len(search.chunks) - search.num_found)

    def _object_keys(self, chunks: Iterable[Chunk]) -> Iterable[str]:
        for chunk in chunks:
            for part in self._facts.parts:
                yield object_key(Kind.KV, self._facts.namespace, bytes(chunk.key), part)

    # --- what to save ---

    def _plan_saves(self, output: SchedulerOutput) -> Iterable[Piece]:
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = list(new.block_ids[0])
                end = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
                yield from self._newly_filled(tracked, end)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if request_id in cached.resumed_req_ids:
                tracked.block_ids = []
            if block_ids is not None:
                tracked.block_ids += block_ids[0]
            end = num_computed_tokens + output.num_scheduled_tokens[request_id]
            yield from self._newly_filled(tracked, end)

    def _newly_filled(self, tracked: _Tracked, end_tokens: int) -> Iterable[Piece]:
        """Order the saves of what is computed once this step is: `end_tokens` of the request.

        Each chunk is considered once a request, wherever its KV came from: a block of the local
        cache may be one that the store has lost. With asynchronous scheduling `end_tokens` runs
        ahead of the known tokens; a block counts when all its tokens are known, that is, hashed.
        """
        request, block_tokens = tracked.request, self._facts.block_tokens
        end_chunk = min(end_tokens // block_tokens, len(request.block_hashes))
        for index in range(tracked.next_chunk, end_chunk):
            yield from self._save(tracked, full_chunk(request, index, block_tokens))
        tracked.next_chunk = max(tracked.next_chunk, end_chunk)
        if not tracked.prompt_is_saved and 0 < request.num_prompt_tokens - 1 <= end_tokens:
            tail = tail_chunk(request, block_tokens, self._facts.hash_function)
            if tail is not None:
                yield from self._save(tracked, tail)
            tracked.prompt_is_saved = True

    def _save(self, tracked: _Tracked, chunk: Chunk) -> Iterable[Piece]:
        if chunk.key not in self._stored:
            self._stored.add(chunk.key)
            yield Piece(chunk.key, chunk.num_tokens, tracked.block_ids[chunk.index])
