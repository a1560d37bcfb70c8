# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: which media items are on this host, which must be encoded, which are lost.

vLLM takes "yes, I have it" as a promise without a way back: an item that is promised and then
cannot be loaded kills the engine. So an embedding is fetched into the host cache, verified and
pinned BEFORE this half says yes. Every hook runs on the scheduler thread, many times a second: it
polls and looks into dictionaries; it never touches storage, but for a few looks a step at a host
cache that is in memory, and never waits, but for a moment in a step that computes nothing.

`items` knows what becomes of an item, `loads` and `saves` what the workers are told of it. Here is
who waits for which item.
"""

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ecshare.encoder.config import OPTIONS_PATH, EncoderConfig
from ecshare.encoder.facts import EncoderFacts, encoder_facts, encoder_namespace, refusal, role_of
from ecshare.encoder.messages import Orders, Report, SaveOrder
from ecshare.encoder.scheduler.items import Item, Items, Phase
from ecshare.encoder.scheduler.load_plan import LoadPlan
from ecshare.encoder.scheduler.placeholders import Placeholders
from ecshare.encoder.scheduler.saves import SavePlan
from ecshare.encoder.scheduler.worker_totals import WorkerTotals
from ecshare.plugin.compat import (
    has_input_cache,
    is_named_by_request,
    option,
)
from ecshare.plugin.connector_spans import add_span
from ecshare.plugin.idle import IdleSteps
from ecshare.plugin.ledger import Ledger, open_ledger
from ecshare.plugin.logs import log_host_cache, log_sharing
from ecshare.plugin.metrics import CounterStats, counter_stats
from ecshare.plugin.start import start_with_namespace
from ecshare.store.recent import Recent
from ecshare.transfer.engine import TransferEngine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# vLLM's encoder cache has room for no more items than this, by far.
_MAX_CACHED = 10_000
# vLLM's own identifiers have 64 characters. A client's may have any number, and to hash megabytes
# on the scheduler thread would hold up every other request: longer ones are not shared.
MAX_IDENTIFIER_CHARS = 4096


class EncoderScheduler:
    """Decides for each media item: load, encode, wait or fail.

    Ownership: everything belongs to vLLM's scheduler thread; the transfer engine has its own thread
    and meets this one in `poll`.
    """

    def __init__(
        self,
        config: EncoderConfig,
        facts: EncoderFacts,
        placeholders: Placeholders,
        engine: TransferEngine,
        ledger: Ledger | None = None,
    ) -> None:
        """Own `engine` from now on. `ledger`: where workers write what vLLM does not report."""
        self._facts = facts
        self._placeholders = placeholders
        self._engine = engine
        self._totals = WorkerTotals(engine, ledger)
        self._idle_steps = IdleSteps(facts.max_steps_in_flight)
        self._items = Items(
            engine,
            facts.embeddings,
            role=facts.role,
            wait_s=config.wait_s,
            in_store=facts.has_remote_workers,
        )
        self._loads = LoadPlan(self._items.limit)
        save_after = config.save_after if facts.role.is_consumer else 1
        self._saves = SavePlan(self._items, engine.stats, save_after)
        self._wanted: dict[str, set[str]] = {}  # request id -> identifiers
        # Of requests that need no item any more: how many they have, and where the last one ends.
        self._passed: dict[str, tuple[int, int]] = {}
        self._lost: set[str] = set()  # requests to fail
        # What vLLM's encoder cache holds, as far as it tells, and the number of embeddings: it does
        # not say that it was reset. Kept by engines that store nothing; others ask what they are to
        # store or to announce.
        self._cached: Recent[str, int] = Recent(_MAX_CACHED)

    @classmethod
    def start(cls, vllm_config: "VllmConfig", config: EncoderConfig) -> "EncoderScheduler":
        """Start the I/O thread and check that the store answers.

        An engine whose embeddings cannot be shared gets a half that does nothing, and says why
        once.

        Raises:
            ConfigError: the store cannot be used; names the option and the fix.
        """
        role, placeholders = role_of(vllm_config), Placeholders(vllm_config.model_config)
        why_not = refusal(vllm_config)
        if why_not is not None:
            logger.warning("ecshare saves and loads nothing: %s.", why_not)
        engine, namespace = start_with_namespace(
            config,
            OPTIONS_PATH,
            partial(encoder_namespace, vllm_config, config.epoch),
            write=role.is_producer and why_not is None,
        )
        facts = encoder_facts(vllm_config, role, namespace, is_shareable=why_not is None)
        if facts.is_shareable:
            _warn(vllm_config, config, facts)
            log_sharing(
                "embeddings",
                config,
                namespace.digest,
                saves=role.is_producer,
                loads=role.is_consumer,
            )
            log_host_cache(engine.host)
        ledger = open_ledger(vllm_config, engine.host) if role.only_encodes else None
        return cls(config, facts, placeholders, engine, ledger)

    # --- hooks ---

    def ready(self, request: "Request", num_computed_tokens: int) -> bool:
        """Whether no item that `request` still needs is on its way.

        O(items) until they are all computed, O(1) then: vLLM asks in every step of a request. Items
        that end before `num_computed_tokens` are covered by KV and need nothing. An item that is
        lost and cannot be encoded marks the request for `take_unavailable`.
        """
        request_id, features = request.request_id, request.mm_features
        passed = self._passed.get(request_id)
        if passed and passed[0] == len(features) and passed[1] <= num_computed_tokens:
            return True
        if not self._facts.is_shareable:
            features = []
        needed = [feature for feature in features if _end(feature) > num_computed_tokens]
        if len(needed) < len(features) and request_id in self._wanted:
            self._release(request_id, {feature.identifier for feature in needed})
        if not needed:
            self._passed[request_id] = len(features), max(map(_end, features), default=0)
            return True
        self._passed.pop(request_id, None)  # preempted, or a session that goes on
        self._engine.poll()
        if request_id not in self._wanted and not self._items.has_room:
            return False  # nothing is asked yet, so its time does not run
        # A list: every item is asked for at once, not one after the other.
        return all([self._is_settled(request, feature) for feature in needed])

    def has(self, identifier: str) -> bool:
        """Whether the item is loaded or stored rather than encoded. No I/O."""
        item = self._items.get(identifier)
        return item is not None and item.phase in (Phase.READY, Phase.STORED)

    def allocated(self, request: "Request", index: int) -> None:
        """Item `index` has a place in the encoder cache: load it, or count the encode."""
        identifier, stats = request.mm_features[index].identifier, self._engine.stats
        item = self._items.get(identifier)
        is_stored = item is not None and item.phase is Phase.STORED
        self._saves.allocated(identifier, is_stored=is_stored)
        if item is not None and request.request_id in item.waiters:
            seconds = time.monotonic() - item.waiters[request.request_id]
            add_span(request, "ecshare.item", seconds, found=item.phase.name.lower())
        if item is not None and item.phase is Phase.READY:
            self._loads.order(item)
            stats.add("items/loaded")
            stats.add("encodes_avoided")
        elif is_stored:
            stats.add("items/stored")
            stats.add("encodes_avoided")
        elif _is_encoded(request.mm_features[index]):
            stats.add("items/encoded")
        if not self._facts.role.is_producer:
            num_embeds = request.mm_features[index].mm_position.get_num_embeds()
            self._cached[identifier] = num_embeds

    def orders(self, scheduled: dict[str, int], evicted: Sequence[str] = ()) -> Orders:
        """Return what the workers shall do in a step that runs the requests of `scheduled`.

        `evicted`: identifiers of items that vLLM's encoder cache has dropped.
        """
        for identifier in evicted:
            self._cached.pop(identifier, None)
        self._items.flush()
        self._engine.begin_step()
        saves = self._save_orders(scheduled)
        self._loads.let_go()
        if self._idle_steps.is_idle(scheduled) and self._wanted and self._engine.in_flight:
            self._engine.wait_idle()
        return Orders(self._loads.take(), saves)

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """Let go of what `request` still holds; return the announcement of a producer, else None.

        The announcement is vLLM's `ec_transfer_params`: per identifier the placeholder metadata
        with which a consumer can do without the pixels. It lacks what is neither in the store nor
        will be: the store has lost it, and vLLM will not encode it, believing that it has. Or this
        half has declined to store it.
        """
        self._lost.discard(request.request_id)
        self._passed.pop(request.request_id, None)
        self._release(request.request_id, set())
        facts, unannounced = self._facts, self._saves.take_unannounced(request.request_id)
        if not facts.role.is_producer or not request.mm_features or not facts.is_shareable:
            return None
        shared = [feature for feature in request.mm_features if self._is_shared(feature)]
        announced = self._placeholders.announcement(shared)
        return {
            name: entry
            for name, entry in announced.items()
            if name not in unannounced and not self._saves.has_declined(name)
        }

    def take_unavailable(self) -> set[str]:
        """Return the requests to fail, once each; re-sending one runs its encode again."""
        if self._lost:
            self._engine.stats.add("items/failed", len(self._lost))
        return self.take_lost()

    def reported(self, report: Any) -> None:
        """Take the workers' counts and note what they loaded; what is no report is ignored."""
        if not isinstance(report, Report):
            return
        self._totals.take(report.totals)
        self._loads.reported(report.loaded)

    def take_stats(self) -> CounterStats | None:
        """Return the counts since the last call; None if there are none."""
        self._engine.poll()
        self._totals.read_ledger()
        return counter_stats(self._engine.take_counts("scheduler"))

    # --- in place of hooks, once this half has given up ---

    def give_up(self) -> None:
        """Let go of all items. What was promised stays pinned until it must have been loaded."""
        self._engine.stats.add("gave_up/scheduler")
        for request_id in list(self._wanted):
            self._release(request_id, set())
        self._items.flush()

    @property
    def has_lost_worker(self) -> bool:
        """Whether a worker has said that it has given up: nothing more is to be promised."""
        return self._totals.has_lost_worker

    def can_do_without(self, request: "Request", num_computed_tokens: int) -> bool:
        """As `ready`, where nothing is shared: what cannot be encoded is lost."""
        return not self._facts.is_shareable or all(
            self._placeholders.can_encode(feature) or self._lose(request)
            for feature in request.mm_features
            if _end(feature) > num_computed_tokens
        )

    def is_promised(self, identifier: str) -> bool:
        """Whether the item was said to be here in this step."""
        return self._loads.is_promised(identifier)

    def keep_promise(self, identifier: str) -> None:
        """Order the item to be loaded if it was promised, or else nothing: it is encoded."""
        self._loads.keep_promise(identifier)

    def promised_orders(self) -> Orders:
        """Return orders for what was promised in this step."""
        orders = Orders(self._loads.take())
        self._loads.let_go()
        return orders

    def take_lost(self) -> set[str]:
        """As `take_unavailable`; counts nothing."""
        lost, self._lost = self._lost, set()
        return lost

    # --- the rest ---

    @property
    def engine(self) -> TransferEngine:
        """What moves the objects, which this half owns."""
        return self._engine

    def close(self) -> None:
        """Unpin everything and stop the I/O thread."""
        for request_id in list(self._wanted):
            self._release(request_id, set())
        self._loads.close()
        self._engine.close()
        self._totals.close()

    def _save_orders(self, scheduled: dict[str, int]) -> tuple[SaveOrder, ...]:
        """Have the absent items of this step's requests stored, if there are any."""
        if not self._facts.role.is_producer or not self._items.unsaved:
            return ()
        # Each request and each item is looked at once: a long queue may wait with many.
        wanted = set().union(*(self._wanted.get(request_id, ()) for request_id in scheduled))
        return self._saves.orders(wanted)

    # --- items ---

    def _is_settled(self, request: "Request", feature: "MultiModalFeatureSpec") -> bool:
        """Whether it is known what to do with one item of a request; asks the store if need be."""
        if not _is_encoded(feature):
            return True
        if not self._is_shared(feature):
            return self._placeholders.can_encode(feature) or self._lose(request)
        item = self._sought(request, feature)
        if item is None or item.phase is Phase.ASKED:
            return self._is_cached(feature)
        is_lost = item.phase is Phase.ABSENT and not self._placeholders.can_encode(feature)
        if is_lost and self._items.retry_for(item, request.request_id):
            self._items.flush()
            return False
        # One identifier for two different contents: loading would hand this request rows that do
        # not fit its placeholders. vLLM fails such a request too.
        if is_lost or item.num_embeds != feature.mm_position.get_num_embeds():
            return self._lose(request)
        if item.phase is Phase.READY:
            self._loads.promise(item)
        return True

    def _sought(self, request: "Request", feature: "MultiModalFeatureSpec") -> Item | None:
        """Return the item, which `request` waits for; None if there is no need to."""
        item = self._items.get(feature.identifier)
        if item is None or request.request_id not in item.waiters:
            if self._is_cached(feature):
                return None
            item = self._join(request, feature, item)
        elif item.phase is Phase.ASKED:
            self._items.flush()  # nothing to do, unless the last step had no `orders`
        if item.phase is Phase.ASKED:
            self._items.check_time(item)
        return item

    def _is_cached(self, feature: "MultiModalFeatureSpec") -> bool:
        """Whether vLLM's own encoder cache has it; if it has just dropped it, it can be encoded."""
        num_embeds = feature.mm_position.get_num_embeds()
        is_cached = self._cached.get(feature.identifier) == num_embeds
        return is_cached and self._placeholders.can_encode(feature)

    def _is_shared(self, feature: "MultiModalFeatureSpec") -> bool:
        """Whether the item may be in the store, by its name."""
        if not _is_encoded(feature) or (self._facts.numbers_media and is_named_by_request(feature)):
            return False
        return len(feature.identifier) <= MAX_IDENTIFIER_CHARS

    def _join(
        self, request: "Request", feature: "MultiModalFeatureSpec", item: Item | None
    ) -> Item:
        """Note that `request` needs `item`, and ask the store for one that nobody asked for yet."""
        is_announced = self._facts.role.is_consumer and self._is_announced(request, feature)
        joined_s = time.monotonic()
        if item is None:
            adapter = request.lora_request if self._facts.has_tower_adapters else None
            item = self._items.ask(
                feature.identifier,
                feature.mm_position.get_num_embeds(),
                adapter=(adapter.lora_name, adapter.lora_path) if adapter else None,
                is_announced=is_announced,
            )
        item.is_announced = item.is_announced or is_announced
        item.waiters[request.request_id] = joined_s
        self._wanted.setdefault(request.request_id, set()).add(item.identifier)
        if self._facts.role.is_producer and not item.metadata:
            item.metadata = self._placeholders.metadata(feature)
        if self._facts.role.is_producer:
            self._saves.consider(request, item)
        return item

    def _is_announced(self, request: "Request", feature: "MultiModalFeatureSpec") -> bool:
        """Whether somebody says that the item is stored or about to be.

        An encoder's `ec_transfer_params` do, and so does a request without pixels: it has the
        placeholder metadata from an encoder. Both come from the client, so all that follows from
        them is a wait, of at most `wait_s`.
        """
        params = option(request, "ec_transfer_params")
        is_named = isinstance(params, dict) and feature.identifier in params
        return is_named or not self._placeholders.can_encode(feature)

    def _lose(self, request: "Request") -> bool:
        self._lost.add(request.request_id)
        return False

    def _release(self, request_id: str, needed: set[str]) -> None:
        """Let go of all items of a request but those `needed`; the last to let go unpins, later.

        An item that is needed again, after a preemption say, is asked for again.
        """
        wanted = self._wanted.pop(request_id, set())
        if kept := wanted & needed:
            self._wanted[request_id] = kept
        for identifier in wanted - needed:
            item = self._items.get(identifier)
            assert item is not None  # it lives as long as a request wants it
            self._saves.released(request_id, item)
            item.waiters.pop(request_id, None)
            item.retried_for.discard(request_id)
            if item.waiters:
                continue
            pin = self._items.drop(item)
            if pin is not None:
                self._loads.unpin_late(pin, item.key)


def _warn(vllm_config: "VllmConfig", config: EncoderConfig, facts: EncoderFacts) -> None:
    """Log what of this engine's deployment may fail requests, or the engine."""
    if not facts.role.is_producer and has_input_cache(vllm_config.model_config):
        # The API server's half of that cache does not see inputs without pixels, and the engine's
        # half lets them take the place of those with pixels (vLLM 0.32, multimodal/cache/lru.py).
        logger.warning(
            "--mm-processor-cache-gb: set it to 0. This engine's cache of inputs keeps what "
            "came last under a picture's hash, be it without the picture: when an embedding "
            "is lost, requests that have the picture would fail"
        )
    if facts.has_remote_workers and facts.role.is_consumer:
        logger.warning(
            "workers may be on other hosts than the scheduler: each loads embeddings from the "
            "store while a step waits, and only what the store has is promised. If the store "
            "fails during such a step, for %g s, vLLM ends this engine",
            config.promise_s,
        )


def _is_encoded(feature: "MultiModalFeatureSpec") -> bool:
    """Whether an encoder makes the item's embedding.

    Not one that the client sends as it is: vLLM takes it for a modality of its own.
    """
    return feature.modality != "prompt_embeds"


def _end(feature: "MultiModalFeatureSpec") -> int:
    """Return the position after the item's last placeholder token."""
    return feature.mm_position.offset + feature.mm_position.length
