# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in the scheduler process: what to load, what to save, and when."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ecshare.plugin.compat import is_named_by_request, option
from ecshare.plugin.connector_spans import add_span
from ecshare.plugin.idle import IdleSteps
from ecshare.plugin.logs import log_host_cache, log_sharing
from ecshare.plugin.metrics import CounterStats, counter_stats
from ecshare.plugin.start import start_with_namespace
from ecshare.store.keys import Kind, object_key, tp_size_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import GiveUp
from kvshare.chunks.facts import KVFacts, kv_facts, kv_namespace
from kvshare.chunks.layers import is_shareable
from kvshare.chunks.prefix import (
    ChunkKey,
    Grid,
    covered_tokens,
    is_mixed,
    prompt_chunks,
    stored_tokens,
)
from kvshare.chunks.recent_keys import RecentKeys
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.messages import (
    Orders,
    Piece,
    Report,
    announcement,
    is_prefilled_elsewhere,
    wants_announcement,
)
from kvshare.scheduler.adapters import Adapter, Adapters
from kvshare.scheduler.events import BlockEvents, publishes_events
from kvshare.scheduler.load_or_compute import LoadOrCompute
from kvshare.scheduler.load_plan import Loading, LoadPlan
from kvshare.scheduler.lookups import Lookups, Search
from kvshare.scheduler.pieces import BlocksOfGroups, Pieces
from kvshare.scheduler.room import Room
from kvshare.scheduler.save_budget import SaveBudget, log_limit, most_ordered_bytes
from kvshare.scheduler.save_policy import SavePolicy
from kvshare.scheduler.saves import Progress, SavePlan
from kvshare.scheduler.siblings import Siblings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tracked:
    """One request of the engine, from the first sight to its end."""

    progress: Progress
    start_tokens: int = 0
    """Tokens of the local cache hit that the latest answer was given for."""
    names_source: bool = False
    """At that time another connector was to load it."""
    search: Search | None = None
    load_failed: bool = False
    num_lost_before: int = 0
    """Chunks that workers had ever reported as lost when it was first seen."""


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
        self._wait_s = config.wait_s
        self._facts = facts
        self._engine = engine
        self._idle_steps = IdleSteps(facts.max_steps_in_flight)
        self._events = events
        on_lost = events.lost if events is not None else None
        self._stored = RecentKeys[ChunkKey](clock_s, on_lost)
        self._adapters = Adapters(engine, facts.grid, wait_s=config.wait_s, clock_s=clock_s)
        self._lookups = Lookups(config, facts, engine, self._stored, clock_s)
        self._pieces = Pieces(facts.layer_sets, facts.grid.block_tokens)
        self._loads = LoadPlan(facts, self._pieces, clock_s)
        self._room = Room()
        limit_bytes = most_ordered_bytes(
            config.buffer_bytes, facts.chunk_bytes(facts.grid.chunk_blocks)
        )
        self._budget = SaveBudget[Progress](limit_bytes, clock_s)
        only_saves = facts.saves and not facts.loads
        self._policy = SavePolicy(config, facts.hash_function, only_saves=only_saves)
        self._saves = SavePlan(
            facts, self._pieces, self._stored, self._adapters, events, self._budget, self._policy
        )
        self._choice = LoadOrCompute(clock_s) if config.load == "if_faster" else None
        self._tracked: dict[str, _Tracked] = {}
        self._num_lost = 0
        self._saves_fail = False
        self._siblings = Siblings(facts.grid.block_tokens)

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
        can_share = is_shareable(vllm_config, kv_cache_config, config)
        facts = kv_facts(vllm_config, kv_cache_config, config, can_share=can_share)
        engine, namespace = start_with_namespace(
            config,
            OPTIONS_PATH,
            partial(
                kv_namespace,
                vllm_config,
                config.epoch,
                chunk_blocks=facts.grid.chunk_blocks,
                layer_sets=[each.facts for each in facts.layer_sets],
                stored_dtype=config.stored_dtype,
                compression=config.compression,
            ),
            write=facts.saves,
            mark_of=lambda found: tp_size_key(found.kind, found.digest, facts.tp_size),
        )
        facts = replace(facts, namespace=namespace.digest)
        _log_start(config, facts, engine, vllm_config.scheduler_config.max_num_batched_tokens)
        events = _block_events(vllm_config, kv_cache_config, config, facts)
        half = cls(config, facts, engine, events=events)
        half.learn_tp_sizes(config.io_timeout_s)
        return half

    def bind(self, manager: "KVCacheManager") -> None:
        """Take note of who gives out the cache's blocks, at start-up."""
        self._room.bind(manager)

    def learn_tp_sizes(self, timeout_s: float) -> None:
        """Block until the store has said in which sizes there is KV, at start-up."""
        if self._facts.loads:
            self._lookups.tp_sizes.look(timeout_s)
            self._engine.drain(timeout_s)

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after `num_computed_tokens` can be loaded; None: ask again.

        Called every step while the request waits; O(1), but for a copy of the list of its hashes
        at first. The answer is final after `wait_s`, whatever the store does; zero, if other loads
        still leave this one no room by then.
        """
        if not self._facts.loads and not self._facts.saves:
            return 0
        tracked = self._track(request)
        tracked.start_tokens = num_computed_tokens
        tracked.names_source = is_prefilled_elsewhere(request)
        if tracked.names_source and self._siblings.fetch:
            return 0  # a look-up would hold that one up
        adapter = tracked.progress.adapter
        if not self._is_settled(adapter):
            return None
        grid = self._adapters.grid_of(adapter)
        # Who has waited in vain has waited long enough. Besides, vLLM goes on to keep free what
        # such a request still needs, and counts that against a second load of its own: where
        # blocks are few, neither it nor anybody behind it would ever run.
        may_load = self._facts.loads and not request.skip_reading_prefix_cache
        if not may_load or tracked.load_failed or grid is None:
            return 0
        search = tracked.search
        if search is None and not self._may_look_up(tracked, grid):
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
            self._trace_look_up(request, search)
        return self._answer(tracked, search, num_computed_tokens)

    def _answer(self, tracked: _Tracked, search: Search, num_computed_tokens: int) -> int | None:
        """Return how much of what was found is loaded now; see `num_loadable_tokens`."""
        request = tracked.progress.request
        num_tokens = max(0, covered_tokens(request, search.found) - num_computed_tokens)
        if num_tokens and not self._room.is_left(request):
            has_waited = self._clock_s() - search.begun_s > self._wait_s
            return 0 if has_waited else None
        if tracked.progress.awaits_sibling:
            # That load has failed, which leaves the request with a claim to blocks as well. So ours
            # is offered once: where there is no room for both, it would never be admitted.
            tracked.load_failed = True
        return num_tokens

    def _may_look_up(self, tracked: _Tracked, grid: Grid) -> bool:
        """Count a request that is about to be looked up, or would be but for a pause."""
        request, start_tokens = tracked.progress.request, tracked.start_tokens
        self._stats.add("tokens/queried", request.num_tokens - start_tokens)
        if self._loads.is_paused:
            tracked.load_failed = True  # or as good as that
            num_blocks = len(request.block_hashes) - start_tokens // grid.block_tokens
            self._stats.add("misses/layout", num_blocks)
        return not tracked.load_failed

    def _is_settled(self, adapter: Adapter) -> bool:
        if not adapter.is_settled:
            self._engine.poll()
        return self._adapters.is_settled(adapter)

    def _trace_look_up(self, request: Request, search: Search) -> None:
        start_tokens = self._tracked[request.request_id].start_tokens
        num_tokens = max(0, covered_tokens(request, search.found) - start_tokens)
        seconds = self._clock_s() - search.begun_s
        add_span(request, "kvshare.look_up", seconds, tokens=num_tokens)

    def _weigh(self, request: Request, search: Search) -> None:
        """Leave of what was found what is worth loading."""
        search.is_weighed = True
        # What was announced is loaded: this engine was told to wait for it.
        if self._choice is None or search.is_announced or search.awaited_tokens:
            return
        start_tokens = self._tracked[request.request_id].start_tokens
        found, ahead = search.found, partial(self._num_ahead, request)
        num = self._choice.num_worth_loading(
            found, search.tiers, start_tokens, self._loads.under_way(), ahead
        )
        search.found = found[:num]
        if num < len(found):
            num_kept = max(start_tokens, covered_tokens(request, search.found))
            self._stats.add("tokens/computed", covered_tokens(request, found) - num_kept)

    def _num_ahead(self, request: Request) -> int:
        """Return how many tokens of prompts that came before `request` are to be computed."""
        earlier = takewhile(lambda name: name != request.request_id, self._tracked)
        prompts = [self._tracked[name].progress.request for name in earlier]
        return sum(
            max(0, prompt.num_prompt_tokens - prompt.num_computed_tokens)
            for prompt in prompts
            if prompt.request_id not in self._loads
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
            self._room.leave(request.request_id)
            return
        self._room.take(request, block_ids)
        self._loads.add(
            request.request_id, search, block_ids, tracked.start_tokens, num_external_tokens
        )
        event = "announced" if search.is_announced else "hit"
        self._stats.add(f"tokens/{event}", num_external_tokens)

    def admitted(
        self, request: Request, block_ids: Callable[[], BlocksOfGroups], num_external_tokens: int
    ) -> None:
        """Take note that vLLM gave blocks to `request`, whether we load into them or another
        connector does; as `allocated`.

        `block_ids`: called in `orders`, if at all.
        """
        tracked = self._track(request)
        self._siblings.admitted(
            tracked.progress,
            tracked.start_tokens,
            num_external_tokens,
            block_ids,
            names_source=tracked.names_source,
        )

    def hit_sources(self, request: Request, num_tokens: int) -> dict[str, int]:
        """Return how many of the tokens that were just allocated come from where.

        As far as the look-up knows: of a long prompt it has not asked for every chunk.
        """
        return self._loads.hit_sources(request.request_id, num_tokens)

    def orders(self, output: SchedulerOutput) -> Orders:
        """Return the orders of this step."""
        self._engine.poll()
        self._engine.begin_step()
        if self._choice is not None:
            drafts = output.scheduled_spec_decode_tokens.values()
            num_decoded = len(output.num_scheduled_tokens) + sum(map(len, drafts))
            self._choice.steps.began(output.total_num_scheduled_tokens, num_decoded)
        is_idle = self._idle_steps.is_idle(output.num_scheduled_tokens)
        if is_idle and self._is_searching():
            self._engine.wait_idle()
        loads, abandoned = self._loads.take()
        if self._facts.saves:
            for request_id in output.preempted_req_ids or ():
                if request_id in self._tracked:
                    self._saves.left(self._tracked[request_id].progress)
        self._siblings.scheduled(output, self._progress_of)
        if not self._facts.saves:
            return Orders(self._facts.namespace, loads, abandoned, is_idle=is_idle)
        leaving = self._saves.take_leaving(_overwritten(output))
        saves = tuple(self._plan_saves(output))
        return Orders(self._facts.namespace, loads, abandoned, saves, leaving, is_idle=is_idle)

    def reported(self, output: KVConnectorOutput) -> None:
        """Learn from the workers which loads ended and which chunks are not in the store. Called
        for the steps whose workers have something to say, empty ones among them."""
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._loads.lost(report.lost)
            lost = self._lost(report)
            self._num_lost += len(lost)
            self._saves_fail = report.saves_fail
            if report.has_misfits:
                self._loads.misfits()
            self._stored.lost(lost)
            for key in lost:
                progress = self._budget.owner(key)
                if progress is not None:
                    self._saves.stop(progress)
            self._budget.ended(report.ended)
            if self._events is not None:
                self._events.stored({key: n for key, n in report.ended.items() if key not in lost})
            if report.is_idle:
                self._facts = replace(self._facts, saves=False, loads=False)
        for request_id in output.finished_recving or ():
            loading = self._loads.ended(request_id)
            if loading is not None:
                self._loaded(request_id, loading, failed=request_id in output.failed_recving)

    def step_ended(self) -> None:
        """Take note that vLLM has processed the output of the oldest step. Called for each step for
        which `orders` was."""
        if self._choice is not None:
            self._choice.steps.ended()

    def _lost(self, report: Report) -> set[ChunkKey]:
        """Return what is not in the store, and not on its way there again either."""
        saving = {key for key in report.lost if self._budget.owner(key) is not None}
        return set(report.lost - saving | report.not_saved)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget `request`; return what its reader is to be told, if there is one."""
        tracked = self._tracked.pop(request.request_id, None)
        self._loads.abandon(request.request_id)
        self._room.leave(request.request_id)
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
        is_for_decode = self._policy.is_for_decode(request)
        if not (is_for_decode or wants_announcement(request)):
            return None
        num_tokens = self._num_handed_over(tracked)
        if is_for_decode:
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
        """Whether a request waits for a look-up, or for what its adapter is."""
        return any(
            not tracked.search.is_over
            if tracked.search is not None
            else not tracked.progress.adapter.is_settled
            for tracked in self._tracked.values()
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing of any request is left here, nor an order for the next step."""
        return not self._tracked and self._loads.is_empty and not self._saves.has_leaving

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
        self._loads.clear()

    def close(self) -> None:
        """Stop the I/O thread."""
        self._engine.close()

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            is_nameless = is_mixed(request) or (
                self._facts.numbers_media and any(map(is_named_by_request, request.mm_features))
            )
            adapter = Adapter(None, True) if is_nameless else self._adapters.of(request)
            progress = Progress(request, adapter)
            tracked = _Tracked(progress, num_lost_before=self._num_lost)
            self._tracked[request.request_id] = tracked
        return tracked

    def _progress_of(self, request_id: str) -> Progress | None:
        tracked = self._tracked.get(request_id)
        return tracked.progress if tracked is not None else None

    def _loaded(self, request_id: str, loading: Loading, *, failed: bool) -> None:
        """Take note that a load ended; vLLM has kept what leads up to the first lost chunk."""
        seconds = self._clock_s() - loading.begun_s
        self._stats.observe("wait_seconds/load", seconds)
        if failed:
            self._room.failed(request_id)
        first = 0 if failed else loading.num_sound
        for chunk in loading.chunks[:first]:
            self._stored.add(chunk.key)
        if first:
            self._loads.fits()
        is_whole = first == len(loading.chunks)
        num_tokens = (
            loading.num_tokens
            if is_whole
            else max(0, loading.chunks[first].start_tokens - loading.start_tokens)
        )
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            add_span(tracked.progress.request, "kvshare.load", seconds, tokens=num_tokens)
            self._saves.loaded(tracked.progress, loading.chunks[:first])
        if num_tokens:
            self._stats.add("tokens/loaded", num_tokens)
        if is_whole:
            if self._choice is not None:
                self._choice.loaded(loading.chunks, loading.tiers, loading.start_tokens, seconds)
            return
        # Nobody waited to see whether those after it were sound: save all of them again.
        for chunk in loading.chunks[first:]:
            self._stored.discard(chunk.key)
        if tracked is not None:
            tracked.load_failed = True

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
        if not self._facts.saves or grid is None:
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


def _log_start(
    config: KVConfig, facts: KVFacts, engine: TransferEngine, most_step_tokens: int
) -> None:
    """Log what this engine shares. `most_step_tokens`: the most tokens that a step computes."""
    log_sharing("KV blocks", config, facts.namespace, saves=facts.saves, loads=facts.loads)
    if facts.saves or facts.loads:
        log_host_cache(engine.host)
    if facts.saves:
        log_limit(
            config.buffer_bytes,
            facts.chunk_bytes(facts.grid.chunk_blocks),
            facts.grid.chunk_tokens,
            most_step_tokens,
        )


def _block_events(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: KVConfig, facts: KVFacts
) -> BlockEvents | None:
    """Return what makes vLLM's KV events; None: this engine stores nothing, or they are off."""
    if not facts.saves or not publishes_events(vllm_config):
        return None
    return BlockEvents(
        facts.grid,
        len(facts.shard_names[facts.tp_size]),
        group=0 if len(kv_cache_config.kv_cache_groups) == 1 else None,
        is_remote=not config.folder,
    )


def _overwritten(output: SchedulerOutput) -> set[int]:
    """Return the blocks that V2 runners overwrite before they carry out the orders of a step."""
    copies = option(output, "kv_cache_block_copies") or ()
    return {
        *(option(output, "new_block_ids_to_zero") or ()),
        *(each.dst_block_id for each in copies),
    }
