# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of the connector: decides what to load and what to save, and when."""

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
from ecshare.store.keys import tp_size_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.upkeep.renewal import Record
from kvshare.chunks.facts import KVFacts, kv_facts, kv_namespace
from kvshare.chunks.layers import LayerSet, is_bound, is_shareable
from kvshare.chunks.prefix import ChunkKey, Grid, covered_tokens, is_mixed, tail_of
from kvshare.chunks.recent_keys import RecentKeys
from kvshare.chunks.slabs import steps_state_bytes
from kvshare.compat import states_of_step
from kvshare.config import OPTIONS_PATH, KVConfig
from kvshare.messages import Orders, Piece, Report, is_prefilled_elsewhere
from kvshare.scheduler.adapters import Adapter, Adapters
from kvshare.scheduler.cached_blocks import CachedBlocks
from kvshare.scheduler.events import BlockEvents, publishes_events
from kvshare.scheduler.hand_over import HandOver
from kvshare.scheduler.load_or_compute import LoadOrCompute
from kvshare.scheduler.load_plan import Loading, LoadPlan
from kvshare.scheduler.lookups import Lookups, PrefixLookup
from kvshare.scheduler.pieces import BlocksOfGroups, Pieces
from kvshare.scheduler.save_budget import (
    SaveBudget,
    can_hold_state,
    log_limit,
    most_ordered_bytes,
)
from kvshare.scheduler.save_policy import SavePolicy
from kvshare.scheduler.saves import Progress, SavePlan
from kvshare.scheduler.siblings import Siblings

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

# A look-up finds no more of these: a partial chunk or a tail, and a state.
_MOST_ENDS = 2
# Of the look-up of marks in a new namespace.
_MARKS_S = 5.0


@dataclass(slots=True)
class _Tracked:
    """One request of the engine, from when it is first seen until it ends."""

    progress: Progress
    start_tokens: int = 0
    """Tokens of vLLM's own cache hit when it last asked how much can be loaded."""
    names_source: bool = False
    """At that time another connector was to load it."""
    lookup: PrefixLookup | None = None
    loads_no_more: bool = False
    """Nothing is looked up for it any more, and nothing is loaded."""


class KVScheduler:
    """Plans loads and saves. Every method runs on vLLM's scheduler thread, which owns all fields.

    None of them does I/O: look-ups are submitted, and polled when vLLM asks again. None waits,
    except for up to 3 ms in a step that computes nothing.
    """

    def __init__(
        self,
        config: KVConfig,
        facts: KVFacts,
        engine: TransferEngine,
        clock_s: Callable[[], float] = monotonic,
        events: BlockEvents | None = None,
    ) -> None:
        """Own `engine` from now on. `clock_s`: monotonic seconds. `events`: None if vLLM's KV
        events are off."""
        stored = RecentKeys[ChunkKey](clock_s, events.lost if events is not None else None)
        pieces = Pieces(facts.layer_sets, facts.grid.block_tokens)
        chunk_bytes = facts.chunk_bytes(facts.grid.chunk_blocks)
        limit_bytes = most_ordered_bytes(config.buffer_bytes, chunk_bytes)
        budget = SaveBudget[Progress](limit_bytes, clock_s)
        only_saves = facts.saves and not facts.loads
        policy = SavePolicy(
            config,
            facts.hash_function,
            only_saves=only_saves,
            can_hold_state=can_hold_state(config.buffer_bytes, chunk_bytes, facts.state_bytes),
        )
        self._facts = facts
        self._engine = engine
        self._idle_steps = IdleSteps(facts.max_steps_in_flight)
        self._adapters = Adapters(engine, facts.grid, wait_s=config.wait_s, clock_s=clock_s)
        self._lookups = Lookups(config, facts, engine, stored, clock_s)
        self._choice = (
            LoadOrCompute(clock_s, facts.state_tokens) if config.load == "if_faster" else None
        )
        self._loads = LoadPlan(facts, pieces, clock_s)
        self._siblings = Siblings(facts.grid.block_tokens)
        self._cached = CachedBlocks(
            facts.layer_sets, facts.grid.block_tokens, self._siblings.are_foreign
        )
        self._saves = SavePlan(
            facts, pieces, stored, self._adapters, events, budget, policy, self._cached
        )
        self._hand_over = HandOver(facts, engine, self._adapters, stored, policy)
        self._tracked: dict[str, _Tracked] = {}

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
                only_tp_size=facts.tp_size if is_bound(facts.layer_sets) else None,
            ),
            write=facts.saves,
            mark_of=lambda found: tp_size_key(found.kind, found.digest, facts.tp_size),
        )
        facts = replace(facts, namespace=namespace.digest)
        _log_start(config, facts, engine, vllm_config.scheduler_config)
        events = _block_events(vllm_config, kv_cache_config, config, facts)
        half = cls(config, facts, engine, events=events)
        half.learn_tp_sizes(config.io_timeout_s)
        return half

    def bind(self, manager: "KVCacheManager") -> None:
        """Use the blocks of `manager`, at start-up."""
        self._loads.bind(manager)
        self._cached.bind(manager)

    def learn_tp_sizes(self, timeout_s: float) -> None:
        """Block until it is known in which tensor-parallel sizes KV is stored, at start-up."""
        if self._facts.loads:
            self._lookups.tp_sizes.look(timeout_s)
            self._engine.drain(timeout_s)

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after `num_computed_tokens` can be loaded; None: ask again.

        Called every step while the request waits. O(1), except that the first call copies the list
        of its hashes. The answer is final after `wait_s`, whatever the store does. It is zero if
        other loads, or one that failed, still leave no room for this one by then.
        """
        if not self._facts.loads and not self._facts.saves:
            return 0
        self._advance()
        if self._engine.epochs.must_wait and request.request_id not in self._tracked:
            return None
        tracked = self._track(request)
        tracked.start_tokens = num_computed_tokens
        tracked.names_source = is_prefilled_elsewhere(request)
        if tracked.names_source and self._siblings.fetch:
            return 0  # a look-up would delay the other connector
        adapter = tracked.progress.adapter
        if not self._is_settled(adapter):
            return None
        grid = self._adapters.grid_of(adapter)
        may_load = self._facts.loads and not request.skip_reading_prefix_cache
        may_load = may_load and request.request_id not in self._engine.epochs.left_out
        if not may_load or tracked.loads_no_more or grid is None:
            return 0
        lookup = tracked.lookup
        if lookup is None and not self._may_look_up(tracked, grid):
            return 0
        if lookup is None or lookup.start_tokens > num_computed_tokens:
            # There is none yet, or vLLM's own hit now ends before the tokens that were looked up.
            fewest_tokens = self._choice.fewest_tokens if self._choice is not None else 0
            lookup = tracked.lookup = self._lookups.start(
                request, grid, num_computed_tokens, fewest_tokens
            )
        self._lookups.advance(lookup)
        if not lookup.is_over:
            return None
        if not lookup.is_weighed:
            self._weigh(tracked, lookup)
            self._trace_look_up(tracked, lookup)
        return self._answer(tracked, lookup, num_computed_tokens)

    def _answer(
        self, tracked: _Tracked, lookup: PrefixLookup, num_computed_tokens: int
    ) -> int | None:
        """Return how much of what was found is loaded now; see `num_loadable_tokens`."""
        request = tracked.progress.request
        num_tokens = max(0, covered_tokens(request, lookup.found) - num_computed_tokens)
        must_yield = lookup.is_answered and self._siblings.another_failed(request)
        if must_yield or (num_tokens and not self._loads.has_room(request)):
            return 0 if self._lookups.has_waited(lookup) else None
        lookup.is_answered = True
        # vLLM still reserves blocks for a load that has failed. So a second one is offered once: if
        # there is no room for both, vLLM would never admit it.
        tracked.loads_no_more |= self._siblings.has_failed(request)
        return num_tokens

    def _may_look_up(self, tracked: _Tracked, grid: Grid) -> bool:
        """Count a request before its look-up; return False if look-ups are paused."""
        request, start_tokens = tracked.progress.request, tracked.start_tokens
        self._engine.stats.add("tokens/queried", request.num_tokens - start_tokens)
        if not self._loads.is_paused:
            return True
        # Load nothing: the blocks that would be found have another layout.
        tracked.loads_no_more = True
        num_blocks = len(request.block_hashes) - start_tokens // grid.block_tokens
        self._engine.stats.add("misses/layout", num_blocks)
        return False

    def _is_settled(self, adapter: Adapter) -> bool:
        if not adapter.is_settled:
            self._engine.poll()
        return self._adapters.is_settled(adapter)

    def _trace_look_up(self, tracked: _Tracked, lookup: PrefixLookup) -> None:
        request = tracked.progress.request
        num_tokens = max(0, covered_tokens(request, lookup.found) - tracked.start_tokens)
        add_span(request, "kvshare.look_up", self._lookups.age_s(lookup), tokens=num_tokens)

    def _weigh(self, tracked: _Tracked, lookup: PrefixLookup) -> None:
        """Cut what was found to what is worth loading."""
        lookup.is_weighed = True
        # Announced chunks are always loaded: the request was sent to wait for them.
        if self._choice is None or lookup.is_announced or lookup.awaited_tokens:
            return
        request, start_tokens = tracked.progress.request, tracked.start_tokens
        found, ahead = lookup.found, partial(self._num_ahead, request)
        num = self._choice.num_worth_loading(
            found, lookup.tiers, start_tokens, self._loads.under_way(), ahead
        )
        lookup.found = found[:num]
        if num < len(found):
            num_kept = max(start_tokens, covered_tokens(request, lookup.found))
            self._engine.stats.add("tokens/computed", covered_tokens(request, found) - num_kept)

    def _num_ahead(self, request: Request) -> int:
        """Return how many tokens of prompts before `request` are still to be computed."""
        earlier = takewhile(lambda name: name != request.request_id, self._tracked)
        prompts = [self._tracked[name].progress.request for name in earlier]
        return sum(
            max(0, prompt.num_prompt_tokens - prompt.num_computed_tokens)
            for prompt in prompts
            if prompt.request_id not in self._loads
        )

    def allocated(
        self, request: Request, block_ids: BlocksOfGroups, num_external_tokens: int
    ) -> None:
        """Record that vLLM admitted `request`, with `num_external_tokens` to be loaded.

        `block_ids`: all blocks of the request, in order, of each cache group. Zero tokens: there is
        nothing to load, or the load has ended.
        """
        tracked = self._track(request)
        lookup, tracked.lookup = tracked.lookup, None
        if not num_external_tokens or lookup is None:
            self._loads.runs(request.request_id)
            return
        self._loads.add(request, lookup, block_ids, tracked.start_tokens, num_external_tokens)
        for chunk in lookup.found[-_MOST_ENDS:]:
            self._engine.uses.add(chunk.key, chunk.first_block + chunk.num_blocks)
        event = "announced" if lookup.is_announced else "hit"
        self._engine.stats.add(f"tokens/{event}", num_external_tokens)

    def admitted(
        self, request: Request, block_ids: Callable[[], BlocksOfGroups], num_external_tokens: int
    ) -> None:
        """Record that vLLM gave blocks to `request`, for our load or another connector's; see
        `allocated`.

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
        """Return the sources of `num_tokens` that were just allocated, with the number from each.

        As far as it is known: the look-up of a long prompt does not ask for every chunk.
        """
        return self._loads.hit_sources(request.request_id, num_tokens)

    def orders(self, output: SchedulerOutput) -> Orders:
        """Return the orders of this step."""
        self._advance()
        self._engine.poll()
        self._engine.begin_step()
        if self._choice is not None:
            drafts = output.scheduled_spec_decode_tokens.values()
            num_decoded = len(output.num_scheduled_tokens) + sum(map(len, drafts))
            self._choice.steps.began(output.total_num_scheduled_tokens, num_decoded)
        is_idle = self._idle_steps.is_idle(output.num_scheduled_tokens)
        if is_idle and (self._awaits_store() or self._engine.epochs.must_wait):
            self._engine.wait_idle()
        loads, abandoned = self._loads.take()
        if self._facts.saves:
            for request_id in output.preempted_req_ids or ():
                if request_id in self._tracked:
                    self._saves.left(self._tracked[request_id].progress)
        self._siblings.scheduled(output, self._progress_of)
        if not self._facts.saves:
            return Orders(
                self._facts.namespace, loads, abandoned, is_idle=is_idle, kinds=self._facts.kinds
            )
        leaving: tuple[Piece, ...] = ()
        if self._saves.has_leaving:  # in few steps; the other ones need no look at block tables
            leaving = self._saves.take_leaving(_overwritten(output, self._facts.layer_sets))
        saves = tuple(self._plan_saves(output))
        self._saves.end_step()
        return Orders(
            self._facts.namespace,
            loads,
            abandoned,
            saves,
            leaving,
            is_idle=is_idle,
            kinds=self._facts.kinds,
        )

    def reported(self, output: KVConnectorOutput) -> None:
        """Process the workers' report: which loads ended, and which chunks the store lacks. Called
        for each step whose workers have something to report, empty steps included."""
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._loads.lost(report.lost)
            if report.has_misfits:
                self._loads.misfits()
            lost = self._saves.reported(report)
            self._hand_over.reported(len(lost), saves_fail=report.saves_fail)
            if report.is_idle:
                self._facts = replace(self._facts, saves=False, loads=False)
        for request_id in output.finished_recving or ():
            loading = self._loads.ended(request_id, failed=request_id in output.failed_recving)
            if loading is not None:
                self._loaded(request_id, loading)

    def step_ended(self) -> None:
        """Record that vLLM has processed the output of the oldest step. Called once for each call
        of `orders`."""
        if self._choice is not None:
            self._choice.steps.ended()

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Remove `request`; return the announcement for the engine that goes on with it, if there
        is one."""
        tracked = self._tracked.pop(request.request_id, None)
        left_out = self._engine.epochs.left_out
        is_left_out = request.request_id in left_out
        left_out.discard(request.request_id)
        self._loads.abandon(request.request_id)
        self._siblings.finished(request.request_id)
        if tracked is not None and (self._facts.saves or self._facts.loads):
            self._add_use(tracked.progress)
        if tracked is None or not self._facts.saves:
            return None
        progress = tracked.progress
        # A session that goes on replaces the token that ended its turn, so fewer are computed.
        progress.end_tokens = min(progress.end_tokens, request.num_computed_tokens)
        num_dropped, num_declined = self._saves.ended(progress)
        if is_left_out:
            return None
        if num_dropped:
            self._engine.stats.add("blocks/dropped", num_dropped)
        if num_declined:
            self._engine.stats.add(f"declined/{progress.limit.rule}", num_declined)
        return self._hand_over.announce(request, progress)

    def _add_use(self, progress: Progress) -> None:
        """Record that all chunks of a request were used, those in vLLM's own cache too.

        So no chunk counts as used later than one before it. Few microseconds for 100 chunks.
        """
        request, grid = progress.request, self._adapters.grid_of(progress.adapter)
        if grid is None:
            return
        hashes, size = request.block_hashes, grid.chunk_blocks
        end_block = min(request.num_computed_tokens // grid.block_tokens, len(hashes))
        names: Sequence[bytes] = hashes[size - 1 : end_block : size]
        if grid.adapter:
            names = [name + grid.adapter for name in names]
        self._engine.uses.add_chain(names, size)
        tail, ends = tail_of(request, grid), [end_block]
        if tail is None:
            ends.append(request.num_prompt_tokens // grid.block_tokens)
        elif request.num_computed_tokens >= request.num_prompt_tokens:
            chunk = tail.chunk(grid, self._facts.hash_function)
            self._engine.uses.add(chunk.key, chunk.first_block + chunk.num_blocks)
        # Partial chunks where the answer ends, and the prompt.
        for end in ends:
            if end % size and end <= end_block:
                self._engine.uses.add(hashes[end - 1] + grid.adapter, end)

    def reset(self) -> None:
        """Drop all state about the contents of the cache's blocks, which are no longer valid.

        vLLM resets its cache before it sleeps, and frees the cache's memory then. The store is not
        emptied: other engines use it, and an engine that wakes up loads from it again.
        """
        logger.info("The cache was reset; what the store has is used on, in the present epoch.")
        self._saves.forget_leaving()
        for tracked in self._tracked.values():
            tracked.progress.end_tokens = 0
        if not self._cached.sees_resets:
            self._begin_anew()

    def _advance(self) -> None:
        """Notice resets of vLLM's cache, and epochs of the model; see `Epochs`."""
        if self._cached.take_reset():
            self._begin_anew()
        self._engine.epochs.advance(self._leave_out_all, self._move)

    def _begin_anew(self) -> None:
        """Regard all requests as new: vLLM has reset its cache, so none of them has blocks."""
        if self._engine.epochs.reset():
            self._saves.forget(tracked.progress for tracked in self._tracked.values())
            self._tracked.clear()

    def _leave_out_all(self) -> None:
        """Neither save nor load anything for the requests that there are, except for loads that
        vLLM was promised: the weights are about to be changed."""
        self._engine.epochs.left_out.update(self._tracked)
        self._saves.forget(tracked.progress for tracked in self._tracked.values())

    def _move(self, record: Record) -> None:
        """Share in the namespace of `record` from now on."""
        self._facts = replace(self._facts, namespace=record.namespace)
        self._lookups = self._lookups.in_namespace(self._facts)
        self._hand_over.move(self._facts)
        self._saves.forget_stored()
        self._engine.move(record, write=self._facts.saves)
        if self._facts.loads:
            self._lookups.tp_sizes.look(_MARKS_S)

    def _awaits_store(self) -> bool:
        """Return whether a request waits for a look-up, or until its adapter is read."""
        return any(
            not tracked.lookup.is_over
            if tracked.lookup is not None
            else not tracked.progress.adapter.is_settled
            for tracked in self._tracked.values()
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no request, no load, and no order for the next step."""
        holds_requests = self._tracked or self._siblings.has_waiting
        return not holds_requests and self._loads.is_empty and not self._saves.has_leaving

    @property
    def is_crowded(self) -> bool:
        """Whether an idle engine should keep stepping until its workers have stored some chunks.

        Workers report only in steps. Without a report, memory of saves that have ended stays
        reserved, and the next prompt could not be saved.
        """
        return self._saves.is_crowded

    @property
    def reserved_bytes(self) -> int:
        """The memory of workers that is in use or reserved for saves."""
        return self._saves.reserved_bytes

    @property
    def engine(self) -> TransferEngine:
        """The transfer engine, which this half owns."""
        return self._engine

    def take_events(self) -> "list[KVCacheEvent]":
        """Return the events about stored and lost blocks since the last call."""
        return self._saves.take_events()

    def take_stats(self) -> CounterStats | None:
        """Return the counts since the last call; None if there are none."""
        return counter_stats(self._engine.take_counts("scheduler"))

    def give_up(self) -> None:
        """Share nothing from now on: only `take_stats` and `close` are called after this."""
        self._engine.stats.add("gave_up/scheduler")
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
            progress = Progress(request, adapter, num_lost_before=self._hand_over.num_lost)
            epochs = self._engine.epochs
            if not epochs.may_share:
                epochs.left_out.add(request.request_id)
            progress.has_gap = request.request_id in epochs.left_out
            tracked = self._tracked[request.request_id] = _Tracked(progress)
        return tracked

    def _progress_of(self, request_id: str) -> Progress | None:
        tracked = self._tracked.get(request_id)
        return tracked.progress if tracked is not None else None

    def _loaded(self, request_id: str, loading: Loading) -> None:
        """Record that a load ended; vLLM has kept the chunks before the first lost one."""
        self._engine.stats.observe("wait_seconds/load", loading.seconds)
        num_tokens = loading.num_loaded_tokens
        if num_tokens:
            self._engine.stats.add("tokens/loaded", num_tokens)
        tracked = self._tracked.get(request_id)
        progress = tracked.progress if tracked is not None else None
        self._saves.loaded(progress, loading.chunks, loading.num_sound)
        if tracked is not None:
            request = tracked.progress.request
            add_span(request, "kvshare.load", loading.seconds, tokens=num_tokens)
            # A request whose load failed does not load again. vLLM still reserves the blocks that
            # it needs, and would count them against a second load: with few free blocks, neither
            # this request nor those behind it would ever run.
            tracked.loads_no_more |= not loading.is_whole
        if loading.is_whole and self._choice is not None:
            self._choice.loaded(
                loading.chunks, loading.tiers, loading.start_tokens, loading.seconds
            )

    def _plan_saves(self, output: SchedulerOutput) -> Iterable[Piece]:
        """Yield the pieces that this step saves. Older requests get memory first."""
        tracked, num_scheduled = self._tracked, output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            # Every running request comes here in each step: for most there is nothing to do.
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
        if self._facts.grid.has_states:
            yield from self._plan_states(output)

    def _plan_states(self, output: SchedulerOutput) -> Iterable[Piece]:
        """Yield the pieces of states that this step saves, after all its chunks are planned."""
        for request_id, handed_over in states_of_step(output).items():
            if request_id in self._tracked:
                yield from self._saves.states(self._tracked[request_id].progress, handed_over)
        yield from self._saves.waiting_states()


def _log_start(
    config: KVConfig, facts: KVFacts, engine: TransferEngine, steps: "SchedulerConfig"
) -> None:
    """Log what this engine shares. `steps`: the limits of a step."""
    log_sharing("KV blocks", config, facts.namespace, saves=facts.saves, loads=facts.loads)
    if facts.saves or facts.loads:
        log_host_cache(engine.host)
        _log_sizes(facts)
    if facts.saves:
        log_limit(
            config.buffer_bytes,
            facts.chunk_bytes(facts.grid.chunk_blocks),
            facts.grid.chunk_tokens,
            steps.max_num_batched_tokens,
            (
                facts.state_bytes,
                steps_state_bytes(
                    facts.state_bytes,
                    facts.grid.block_tokens,
                    steps.max_num_batched_tokens,
                    steps.max_num_seqs,
                ),
            ),
        )


def _log_sizes(facts: KVFacts) -> None:
    """Log what a token, and a state of recurrent layers, weigh in the store."""
    attention = [each for each in facts.layer_sets if not each.is_recurrent]
    token_bytes = facts.chunk_bytes(facts.grid.chunk_blocks) // facts.grid.chunk_tokens
    logger.info(
        "KV of a token: %d bytes in each rank; a chunk: %d tokens, %d objects in each rank; "
        "layers: %s",
        token_bytes,
        facts.grid.chunk_tokens,
        len(attention),
        ", ".join(f"{len(each.layers)} of {each.facts[0]}" for each in facts.layer_sets),
    )
    if facts.grid.has_states:
        logger.info(
            "hybrid model: a hit ends with a state of its recurrent layers, %d bytes and %d "
            "objects in each rank, stored at the end of each prompt and every %d tokens or more; "
            "engines of other tensor-parallel sizes do not share it",
            facts.state_bytes,
            len(facts.layer_sets) - len(attention),
            facts.state_tokens,
        )


def _block_events(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: KVConfig, facts: KVFacts
) -> BlockEvents | None:
    """Return the publisher of KV events; None: this engine stores nothing, or they are off."""
    if not facts.saves or not publishes_events(vllm_config):
        return None
    return BlockEvents(
        facts.grid,
        len(facts.shard_names[facts.tp_size]),
        group=0 if len(kv_cache_config.kv_cache_groups) == 1 else None,
        is_remote=not config.folder,
    )


def _overwritten(output: SchedulerOutput, layer_sets: Sequence[LayerSet]) -> set[int]:
    """Return the blocks that V2 runners overwrite before they carry out the step's orders.

    They copy the running states of recurrent layers to their new blocks then. Blocks are not bound
    to a cache group: attention layers may have had these before.
    """
    recurrent = {group for each in layer_sets if each.is_recurrent for group in each.groups}
    copies = option(output, "kv_cache_block_copies") or ()
    tables = [
        *(new.block_ids for new in output.scheduled_new_reqs),
        *(new for new in output.scheduled_cached_reqs.new_block_ids if new is not None),
    ]
    return {
        *(option(output, "new_block_ids_to_zero") or ()),
        *(each.dst_block_id for each in copies),
        *(block for table in tables for group in recurrent for block in table[group]),
    }
