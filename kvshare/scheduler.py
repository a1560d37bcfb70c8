# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in the scheduler process: what to load, what to save, and when."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ecshare.plugin.compat import (
    is_named_by_request,
    max_steps_in_flight,
    names_media_by_request,
    option,
)
from ecshare.plugin.idle import IdleSteps
from ecshare.plugin.logs import log_host_cache, log_sharing
from ecshare.plugin.metrics import CounterStats, counter_stats
from ecshare.plugin.start import start_with_namespace
from ecshare.store.keys import Kind, object_key, tp_size_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import GiveUp, Tier
from kvshare.adapters import Adapter
from kvshare.admission import Admission, is_for_decode
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.events import BlockEvents, publishes_events
from kvshare.facts import UNSPECIFIED_SOURCE, KVFacts, kv_namespace
from kvshare.layers import (
    block_bytes,
    cache_dtypes,
    layer_sets_of,
    own_tp_size,
    readable_tp_sizes,
    refusal,
    shard_names_of,
)
from kvshare.load_or_compute import LoadOrCompute
from kvshare.lookups import Lookups, Search
from kvshare.messages import LoadOrder, Orders, Piece, Report, announcement
from kvshare.misfits import Misfits
from kvshare.pieces import Pieces
from kvshare.prefix import Chunk, ChunkKey, Grid, covered_tokens, prompt_chunks, stored_tokens
from kvshare.save_budget import SaveBudget, log_limit, most_ordered_bytes, slab_sizes
from kvshare.saves import Progress, SavePlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tracked:
    """One request of the engine, from the first sight to its end."""

    progress: Progress
    start_tokens: int = 0
    """Tokens of the local cache hit that the latest answer was given for."""
    search: Search | None = None
    load_failed: bool = False
    num_lost_before: int = 0
    """Chunks that workers had ever reported as lost when it was first seen."""


@dataclass(frozen=True, slots=True)
class _Loading:
    """A load that was ordered; which of its chunks came to nothing, as far as is known."""

    chunks: tuple[Chunk, ...]
    tiers: Mapping[ChunkKey, Tier]
    start_tokens: int
    num_tokens: int
    begun_s: float
    lost: set[ChunkKey] = field(default_factory=set)


class KVScheduler:
    """Plans loads and saves. Every method runs on vLLM's scheduler thread, which owns all fields.

    None of them does I/O: look-ups are submitted, and polled when vLLM asks again. None waits, but
    for a moment in a step that computes nothing.
    """

    def __init__(
        self,
        config: KVConfig,
        facts: KVFacts,
        engine: TransferEngine,
        clock_s: Callable[[], float] = monotonic,
        events: BlockEvents | None = None,
    ) -> None:
        """`clock_s`: monotonic seconds. `events`: None where vLLM's KV events are off."""
        self._stats = engine.stats
        self._clock_s = clock_s
        self._facts = facts
        self._engine = engine
        self._idle_steps = IdleSteps(facts.max_steps_in_flight)
        self._events = events
        self._lookups = Lookups(config, facts, engine, clock_s)
        self._stored = self._lookups.stored
        self._adapters = self._lookups.adapters
        if events is not None:
            self._stored.on_lost = events.lost
        self._pieces = Pieces(facts.layer_sets, facts.grid.block_tokens)
        limit_bytes = most_ordered_bytes(
            config.buffer_bytes, facts.chunk_bytes(facts.grid.chunk_blocks)
        )
        self._budget = SaveBudget[Progress](limit_bytes, clock_s)
        admission = Admission(config, facts.hash_function)
        self._saves = SavePlan(facts, self._pieces, self._lookups, events, self._budget, admission)
        self._choice = LoadOrCompute(clock_s) if config.load == "if_faster" else None
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._loading: dict[str, _Loading] = {}
        self._abandoned: list[str] = []
        self._num_lost = 0
        self._saves_fail = False
        self._misfits = Misfits(clock_s)

    @classmethod
    def start(
        cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: KVConfig
    ) -> "KVScheduler":
        """Start the I/O thread and check that the store answers.

        An engine whose blocks cannot be shared gets a half that does nothing, and says why once.

        Raises:
            ConfigError: an option does not fit this engine, or the store cannot be used; names the
                option and the fix.
        """
        role = vllm_config.kv_transfer_config
        assert role is not None
        why_not = refusal(vllm_config, kv_cache_config)
        if why_not is not None:
            logger.warning("kvshare saves and loads nothing: %s.", why_not)
        else:
            config.check_dtypes(cache_dtypes(kv_cache_config))
        block_tokens = vllm_config.cache_config.block_size
        chunk_blocks = config.chunk_blocks(block_tokens) if why_not is None else 1
        tp_size = vllm_config.parallel_config.tensor_parallel_size
        sets = layer_sets_of(vllm_config, kv_cache_config) if why_not is None else ()
        size = own_tp_size(sets, tp_size)
        saves = role.is_kv_producer and why_not is None
        engine, namespace = start_with_namespace(
            config,
            OPTIONS_PATH,
            partial(
                kv_namespace,
                vllm_config,
                config.epoch,
                chunk_blocks=chunk_blocks,
                layer_sets=[each.facts for each in sets],
                stored_dtype=config.stored_dtype,
            ),
            write=saves,
            mark_of=lambda namespace: tp_size_key(namespace.kind, namespace.digest, size),
        )
        facts = KVFacts(
            namespace=namespace.digest,
            grid=Grid(block_tokens, chunk_blocks, tails=config.tails),
            layer_sets=sets,
            tp_size=size,
            shard_names={size: shard_names_of(sets, size) for size in readable_tp_sizes(sets)},
            slab_bytes=slab_sizes([block_bytes(kv_cache_config, each) for each in sets]),
            hash_function=get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo),
            saves=saves,
            loads=role.is_kv_consumer and why_not is None,
            numbers_media=names_media_by_request(vllm_config),
            store_source="disk" if config.folder else UNSPECIFIED_SOURCE,
            max_steps_in_flight=max_steps_in_flight(vllm_config),
        )
        log_sharing("KV blocks", config, namespace.digest, saves=facts.saves, loads=facts.loads)
        if facts.saves or facts.loads:
            log_host_cache(engine.host)
        if facts.saves:
            log_limit(
                config.buffer_bytes,
                facts.chunk_bytes(chunk_blocks),
                facts.grid.chunk_tokens,
                vllm_config.scheduler_config.max_num_batched_tokens,
            )
        events = None
        if facts.saves and publishes_events(vllm_config):
            events = BlockEvents(
                facts.grid,
                len(facts.shard_names[facts.tp_size]),
                group=0 if len(kv_cache_config.kv_cache_groups) == 1 else None,
                is_remote=not config.folder,
            )
        half = cls(config, facts, engine, events=events)
        half.learn_tp_sizes(config.io_timeout_s)
        return half

    def learn_tp_sizes(self, timeout_s: float) -> None:
        """Block until the store has said in which sizes there is KV, at start-up."""
        if self._facts.loads:
            self._lookups.sizes.look(timeout_s)
            self._engine.drain(timeout_s)

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after `num_computed_tokens` can be loaded; None: ask again.

        Called every step while the request waits; O(1), but for a copy of the list of its hashes
        at first. The answer is final after `wait_s`, whatever the store does.
        """
        if not self._facts.loads and not self._facts.saves:
            return 0
        tracked = self._track(request)
        adapter = tracked.progress.adapter
        if not adapter.is_settled:
            self._engine.poll()
            if not self._adapters.is_settled(adapter):
                return None
        grid = self._adapters.grid_of(adapter)
        # Who has waited in vain has waited long enough. Besides, vLLM goes on to keep free what
        # such a request still needs, and counts that against a second load of its own: where
        # blocks are few, neither it nor anybody behind it would ever run.
        may_load = self._facts.loads and not request.skip_reading_prefix_cache
        if not may_load or tracked.load_failed or grid is None:
            return 0
        tracked.start_tokens = num_computed_tokens
        search = tracked.search
        if search is None:
            self._stats.add("tokens/queried", request.num_tokens - num_computed_tokens)
            if self._misfits.is_pause:
                tracked.load_failed = True  # or as good as that
                num_blocks = len(request.block_hashes) - num_computed_tokens // grid.block_tokens
                self._stats.add("misses/layout", num_blocks)
                return 0
        if search is None or search.start_tokens > num_computed_tokens:
            # None yet; or the local hit has shrunk below what was looked up.
            fewest_tokens = self._choice.fewest_tokens if self._choice is not None else 0
            search = tracked.search = self._lookups.start(
                request, grid, num_computed_tokens, fewest_tokens
            )
        self._lookups.advance(search)
        if not search.is_over:
            return None
        if not search.is_weighed:
            self._weigh(request, search)
        return max(0, covered_tokens(request, search.found) - num_computed_tokens)

    def _weigh(self, request: Request, search: Search) -> None:
        """Leave of what was found what is worth loading."""
        search.is_weighed = True
        # What was announced is loaded: this engine was told to wait for it.
        if self._choice is None or search.is_announced or search.awaited_tokens:
            return
        start_tokens = self._tracked[request.request_id].start_tokens
        found, ahead = search.found, partial(self._num_ahead, request)
        num = self._choice.num_worth_loading(
            found, search.tiers, start_tokens, self._under_way_s(), ahead
        )
        search.found = found[:num]
        if num < len(found):
            num_kept = max(start_tokens, covered_tokens(request, search.found))
            self._stats.add("tokens/computed", covered_tokens(request, found) - num_kept)

    def _under_way_s(self) -> float:
        """Return the most seconds per token that a load has taken until now which goes on."""
        now_s = self._clock_s()
        going = (each for each in self._loading.values() if Tier.STORE in each.tiers.values())
        return max(((now_s - each.begun_s) / each.num_tokens for each in going), default=0.0)

    def _num_ahead(self, request: Request) -> int:
        """Return how many tokens of prompts that came before `request` are to be computed."""
        earlier = takewhile(lambda name: name != request.request_id, self._tracked)
        prompts = [self._tracked[name].progress.request for name in earlier]
        return sum(
            max(0, prompt.num_prompt_tokens - prompt.num_computed_tokens)
            for prompt in prompts
            if prompt.request_id not in self._loading
        )

    def allocated(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Take note that vLLM admitted `request`, with `num_external_tokens` to be loaded.

        `block_ids`: all blocks of the request, in order, of each cache group. Zero tokens: nothing
        to load (any more).
        """
        tracked = self._track(request)
        search, tracked.search = tracked.search, None
        if not num_external_tokens or search is None:
            return
        end_tokens = tracked.start_tokens + num_external_tokens
        pieces = [
            replace(piece, tp_size=search.other_tp_sizes.get(chunk.key))
            if search.other_tp_sizes
            else piece
            for chunk in search.found
            for piece in self._pieces.loaded(chunk, block_ids, tracked.start_tokens, end_tokens)
        ]
        self._loads.append(LoadOrder(request.request_id, tuple(pieces), search.is_announced))
        self._loading[request.request_id] = _Loading(
            search.found,
            search.tiers,
            tracked.start_tokens,
            num_external_tokens,
            self._clock_s(),
        )
        event = "announced" if search.is_announced else "hit"
        self._stats.add(f"tokens/{event}", num_external_tokens)

    def hit_sources(self, request: Request, num_tokens: int) -> dict[str, int]:
        """Return how many of the tokens that were just allocated come from where.

        As far as the look-up knows: of a long prompt it has not asked for every chunk.
        """
        sources: Counter[str] = Counter()
        loading = self._loading.get(request.request_id)
        if loading is not None:
            names = {Tier.HOST: "host", Tier.STORE: self._facts.store_source}
            position = loading.start_tokens
            for chunk in loading.chunks:
                end = min(chunk.end_tokens, loading.start_tokens + num_tokens)
                tier = loading.tiers.get(chunk.key)
                sources[names[tier] if tier else UNSPECIFIED_SOURCE] += max(0, end - position)
                position = max(position, end)
        sources[UNSPECIFIED_SOURCE] += num_tokens - sources.total()
        return {name: count for name, count in sources.items() if count}

    def orders(self, output: SchedulerOutput) -> Orders:
        """Return the orders of this step."""
        self._engine.poll()
        if self._choice is not None:
            drafts = output.scheduled_spec_decode_tokens.values()
            num_decoded = len(output.num_scheduled_tokens) + sum(map(len, drafts))
            self._choice.steps.began(output.total_num_scheduled_tokens, num_decoded)
        is_idle = self._idle_steps.is_idle(output.num_scheduled_tokens)
        if is_idle and self._is_searching():
            self._engine.wait_idle()
        loads, self._loads = tuple(self._loads), []
        abandoned, self._abandoned = tuple(self._abandoned), []
        if not self._facts.saves:
            return Orders(self._facts.namespace, loads, abandoned, is_idle=is_idle)
        for request_id in output.preempted_req_ids or ():
            if request_id in self._tracked:
                self._saves.left(self._tracked[request_id].progress)
        leaving = self._saves.take_leaving(_overwritten(output))
        saves = tuple(self._plan_saves(output))
        return Orders(self._facts.namespace, loads, abandoned, saves, leaving, is_idle=is_idle)

    def reported(self, output: KVConnectorOutput) -> None:
        """Learn from the workers which loads ended and which chunks are not in the store. Called
        after each step that computes."""
        if self._choice is not None:
            self._choice.steps.ended()
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._num_lost += len(report.lost)
            self._saves_fail = report.saves_fail
            self._misfits.reported(report.has_misfits)
            self._stored.lost(report.lost)
            for key in report.lost:
                progress = self._budget.owner(key)
                if progress is not None:
                    self._saves.stop(progress)
            self._budget.ended(report.ended)
            if self._events is not None:
                self._events.stored(
                    {key: n for key, n in report.ended.items() if key not in report.lost}
                )
            for loading in self._loading.values():
                loading.lost.update(report.lost)
            if report.is_idle:
                self._facts = replace(self._facts, saves=False, loads=False)
        for request_id in output.finished_recving or ():
            if request_id in self._loading:
                loading = self._loading.pop(request_id)
                self._loaded(request_id, loading, failed=request_id in output.failed_recving)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget `request`; return what its reader is to be told."""
        tracked = self._tracked.pop(request.request_id, None)
        if self._loading.pop(request.request_id, None) is not None:
            self._abandoned.append(request.request_id)
        if tracked is None:
            return None
        if self._facts.saves:
            # vLLM takes back tokens: a session goes on in place of the one that ended its turn.
            progress = tracked.progress
            progress.end_tokens = min(progress.end_tokens, request.num_computed_tokens)
            num_dropped, num_declined = self._saves.left(progress)
            if num_dropped:
                self._stats.add("blocks/dropped", num_dropped)
            if num_declined:
                self._stats.add(f"declined/{progress.limit.rule}", num_declined)
        num_tokens = self._num_handed_over(tracked)
        self._give_up_rest(tracked, num_tokens)
        return announcement(num_tokens, self._facts.tp_size) if num_tokens else None

    def reset(self) -> None:
        """Forget what lies in the cache's blocks: it is no longer what it was.

        vLLM does so before it sleeps, and gives the cache's memory away then. The store is not
        emptied: others use it, and an engine that wakes up finds what it had.
        """
        logger.info(
            "The cache was reset; what the store has is used on. If the weights were changed, "
            "restart the engine with another `epoch`."
        )
        self._saves.forget_leaving()
        for tracked in self._tracked.values():
            tracked.progress.end_tokens = 0

    def _is_searching(self) -> bool:
        searches = (tracked.search for tracked in self._tracked.values())
        return any(search is not None and not search.is_over for search in searches)

    @property
    def is_crowded(self) -> bool:
        """Whether the engine should step on until its workers have stored some of what it ordered.

        Workers report in steps alone. What an idle engine does not hear would take the room of what
        the next prompt is to have saved.
        """
        return self._budget.is_crowded

    def take_events(self) -> "list[KVCacheEvent]":
        """Return what became of the store's blocks since the last call."""
        return self._events.take() if self._events is not None else []

    def take_stats(self) -> CounterStats | None:
        """Return the counts since the last call; None if there are none."""
        return counter_stats(self._engine.take_counts("scheduler"))

    def give_up(self) -> None:
        """Share nothing from now on: no hook but `take_stats` and `close` is called any more."""
        self._stats.add("gave_up/scheduler")
        self._tracked.clear()
        self._loading.clear()

    def close(self) -> None:
        """Stop the I/O thread."""
        self._engine.close()

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            is_nameless = self._facts.numbers_media and any(
                map(is_named_by_request, request.mm_features)
            )
            adapter = Adapter(None, True) if is_nameless else self._adapters.of(request)
            progress = Progress(request, adapter)
            tracked = _Tracked(progress, num_lost_before=self._num_lost)
            self._tracked[request.request_id] = tracked
        return tracked

    def _loaded(self, request_id: str, loading: _Loading, *, failed: bool) -> None:
        """Take note that a load ended; vLLM has kept what leads up to the first lost chunk."""
        seconds = self._clock_s() - loading.begun_s
        self._stats.observe("wait_seconds/load", seconds)
        lost = [number for number, chunk in enumerate(loading.chunks) if chunk.key in loading.lost]
        first = 0 if failed else (lost or [len(loading.chunks)])[0]
        for chunk in loading.chunks[:first]:
            self._stored.add(chunk.key)
            self._misfits.end()
        if first == len(loading.chunks):
            self._stats.add("tokens/loaded", loading.num_tokens)
            if self._choice is not None:
                self._choice.loaded(loading.chunks, loading.tiers, loading.start_tokens, seconds)
            return
        num_tokens = loading.chunks[first].start_tokens - loading.start_tokens
        if num_tokens > 0:
            self._stats.add("tokens/loaded", num_tokens)
        # Nobody waited to see whether those after it were sound: save all of them again.
        for chunk in loading.chunks[first:]:
            self._stored.discard(chunk.key)
        if request_id in self._tracked:
            self._tracked[request_id].load_failed = True

    def _num_handed_over(self, tracked: _Tracked) -> int:
        """Return how many tokens of the prompt are stored or on their way, as far as is known."""
        progress = tracked.progress
        request, grid = progress.request, self._adapters.grid_of(progress.adapter)
        if grid is None or not self._facts.saves or self._saves_fail:
            return 0
        is_whole = progress.saved_prompt_tokens == request.num_prompt_tokens
        if is_whole and tracked.num_lost_before == self._num_lost and not progress.has_gap:
            return stored_tokens(request, grid)
        # There was no memory for all of it, or a save has failed: it may be one of this prompt.
        chunks = prompt_chunks(request, grid, self._facts.hash_function)
        ordered = list(takewhile(lambda chunk: chunk.key in self._stored, chunks))
        return min(ordered[-1].end_tokens, request.num_prompt_tokens - 1) if ordered else 0

    def _give_up_rest(self, tracked: _Tracked, num_tokens: int) -> None:
        """Tell an engine that may wait for the rest of the prompt, after `num_tokens`, that it will
        not be stored."""
        request, grid = tracked.progress.request, self._adapters.grid_of(tracked.progress.adapter)
        if not is_for_decode(request) or not self._facts.saves or grid is None:
            return
        if num_tokens == stored_tokens(request, grid):
            return
        chunks = prompt_chunks(request, grid, self._facts.hash_function)
        chunk = next((each for each in chunks if each.end_tokens > num_tokens), None)
        if chunk is not None:
            name = bytes(chunk.key)
            self._engine.submit(GiveUp(object_key(Kind.KV, self._facts.namespace, name)))

    def _plan_saves(self, output: SchedulerOutput) -> Iterable[Piece]:
        """Older requests come first, as long as there is memory."""
        tracked, num_scheduled = self._tracked, output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            # All that run pass here in each step: for most of them there is nothing to do.
            if request_id not in tracked:
                continue
            progress = tracked[request_id].progress
            if block_ids:
                is_resumed = request_id in cached.resumed_req_ids
                progress.add_blocks(block_ids, is_anew=is_resumed)
            end = num_computed_tokens + num_scheduled[request_id]
            yield from self._saves.computed(progress, num_computed_tokens, end)
        for new in output.scheduled_new_reqs:
            if new.req_id in tracked:
                progress = tracked[new.req_id].progress
                progress.block_ids = [list(ids) for ids in new.block_ids]
                end = new.num_computed_tokens + num_scheduled[new.req_id]
                yield from self._saves.computed(progress, new.num_computed_tokens, end)


def _overwritten(output: SchedulerOutput) -> set[int]:
    """Return the blocks that V2 runners overwrite before they carry out the orders of a step."""
    copies = option(output, "kv_cache_block_copies") or ()
    return {
        *(option(output, "new_block_ids_to_zero") or ()),
        *(each.dst_block_id for each in copies),
    }
