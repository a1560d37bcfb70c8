# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: decides for each media item whether it is loaded, encoded or lost.

vLLM takes "has the item" as a promise that cannot be withdrawn: if the item then cannot be loaded,
the engine dies. So an embedding is fetched into the host cache, verified and pinned BEFORE this
half promises it. Every hook runs on the scheduler thread, many times a second. It polls the
transfer engine and reads dictionaries. It does no I/O, except that it reads a few items a step from
a host cache in memory. It never waits, except for up to 3 ms in a step that computes nothing.

`items.py` holds the state of each item, `load_plan.py` and `saves.py` the orders for the workers.
This module records which requests need which items.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ecshare.encoder.config import OPTIONS_PATH, EncoderConfig
from ecshare.encoder.facts import EncoderFacts, encoder_facts, encoder_namespace, refusal, role_of
from ecshare.encoder.messages import Orders, Report, SaveOrder
from ecshare.encoder.scheduler.cached_items import CachedItems
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
from ecshare.plugin.model_facts import Namespace
from ecshare.plugin.start import start_with_namespace
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.upkeep.renewal import Record

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NAMES_ALL = {"names_all": True}
"""What a router's `ec_transfer_params` have under `ecshare`; see `_is_announced`."""

# vLLM's own identifiers have 64 characters. Those of clients may have any number. An item whose
# identifier is longer than this is not shared: hashing megabytes on the scheduler thread would
# delay every other request.
MAX_IDENTIFIER_CHARS = 4096


class EncoderScheduler:
    """Decides for each media item: load, encode, wait or fail.

    Ownership: vLLM's scheduler thread owns all fields. The transfer engine has its own thread, and
    passes results to this one in `poll`.
    """

    def __init__(
        self,
        config: EncoderConfig,
        facts: EncoderFacts,
        placeholders: Placeholders,
        engine: TransferEngine,
        ledger: Ledger | None = None,
    ) -> None:
        """Own `engine` and `ledger` from now on. `ledger`: where workers write the counts that
        vLLM drops."""
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
        # By request: the identifiers of the items that have it among their waiters.
        self._identifiers: dict[str, set[str]] = {}
        # By request whose items are all computed: how many it has, and where the last one ends.
        self._computed: dict[str, tuple[int, int]] = {}
        # Requests to fail, because an item can be neither loaded nor encoded.
        self._failing: set[str] = set()
        self._cached = CachedItems()

    @classmethod
    def start(cls, vllm_config: "VllmConfig", config: EncoderConfig) -> "EncoderScheduler":
        """Start the I/O thread and check that the store answers.

        An engine whose embeddings cannot be shared gets a half that does nothing, and logs the
        reason once.

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
            _log_risks(vllm_config, config, facts)
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
        """Return whether each item that `request` still needs can be loaded or encoded now.

        O(items) until all items are computed, then O(1): vLLM asks in every step of a request.
        Items that end within `num_computed_tokens` are in the KV cache and are not needed. If an
        item can be neither loaded nor encoded, the request is marked for `take_unavailable`.
        """
        self._advance()
        request_id, features = request.request_id, request.mm_features
        computed = self._computed.get(request_id)
        if computed and computed[0] == len(features) and computed[1] <= num_computed_tokens:
            return True
        if not self._facts.is_shareable:
            features = []
        needed = [feature for feature in features if _end(feature) > num_computed_tokens]
        if len(needed) < len(features) and request_id in self._identifiers:
            self._release(request_id, {feature.identifier for feature in needed})
        if not needed:
            self._computed[request_id] = len(features), max(map(_end, features), default=0)
            return True
        self._computed.pop(request_id, None)  # preempted, or its session continues
        self._engine.poll()
        if self._is_left_out(request_id):
            return not self._engine.epochs.must_wait and self._leave_out(request, needed)
        if request_id not in self._identifiers and not self._items.has_room:
            return False  # no look-up has begun, so `wait_s` does not run yet
        # A list, because `all` stops at the first False: all look-ups shall begin in this step.
        return all([self._is_settled(request, feature) for feature in needed])

    def has(self, identifier: str) -> bool:
        """Return whether the item need not be encoded: it is pinned, or in the store. No I/O."""
        item = self._items.get(identifier)
        return item is not None and item.phase in (Phase.READY, Phase.STORED)

    def _was_stored(self, identifier: str) -> bool | None:
        """Return whether the item need not be encoded; None if the store did not answer."""
        if self.has(identifier):
            return True
        item = self._items.get(identifier)
        return False if item is not None and item.is_new else None

    def allocated(self, request: "Request", index: int) -> None:
        """Record that item `index` got a place in vLLM's encoder cache: order its load if this host
        has it, and count whether it is loaded, stored or encoded."""
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
        """Return the workers' orders for a step that runs the requests of `scheduled`.

        `evicted`: the identifiers of items that vLLM's encoder cache has evicted.
        """
        for identifier in evicted:
            self._cached.pop(identifier, None)
        self._advance()
        self._items.flush()
        self._engine.begin_step()
        saves = self._save_orders(scheduled)
        self._loads.let_go()
        is_idle = self._idle_steps.is_idle(scheduled)
        awaits_store = self._identifiers and self._engine.in_flight
        if is_idle and (awaits_store or self._engine.epochs.must_wait):
            self._engine.wait_idle()
        return Orders(self._loads.take(), saves, self._engine.epochs.num_stops)

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """Release the items of `request`; return a producer's announcement, or None.

        The announcement is vLLM's `ec_transfer_params`: by identifier, the placeholder metadata
        with which a consumer needs no pixels. It omits the items that are not in the store and will
        not be: those that this half has declined to store, and those that the store has lost and
        that vLLM will not encode, because its own cache has an entry for them. `stored`: whether
        the item was in the store before, and was not encoded for this request; missing if the store
        did not answer.
        """
        is_left_out = self._is_left_out(request.request_id) or not self._engine.epochs.may_share
        stored = {
            each.identifier: self._was_stored(each.identifier) for each in request.mm_features
        }
        self._failing.discard(request.request_id)
        self._computed.pop(request.request_id, None)
        self._release(request.request_id, set())
        self._engine.epochs.left_out.discard(request.request_id)
        facts, unannounced = self._facts, self._saves.take_unannounced(request.request_id)
        if not facts.role.is_producer or not request.mm_features or not facts.is_shareable:
            return None
        if is_left_out:
            return None
        shared = [feature for feature in request.mm_features if self._is_shared(feature)]
        announced = self._placeholders.announcement(shared)
        return {
            name: entry if stored[name] is None else entry | {"stored": stored[name]}
            for name, entry in announced.items()
            if name not in unannounced and not self._saves.has_declined(name)
        }

    def take_unavailable(self) -> set[str]:
        """Return the requests to fail, once each, and count them. If a client sends one again, its
        items are encoded again."""
        if self._failing:
            self._engine.stats.add("items/failed", len(self._failing))
        return self.take_lost()

    def reported(self, report: Any) -> None:
        """Record the workers' counts and what they have loaded. Ignore anything but a `Report`."""
        if not isinstance(report, Report):
            return
        self._totals.take(report.totals)
        self._loads.reported(report.loaded)

    def take_stats(self) -> CounterStats | None:
        """Return the counts since the last call; None if there are none."""
        self._engine.poll()
        self._totals.read_ledger()
        return counter_stats(self._engine.take_counts("scheduler"))

    # --- instead of the hooks above, once this half has given up ---

    def give_up(self) -> None:
        """Release all items. Promised ones stay pinned until their loads must have ended."""
        self._engine.stats.add("gave_up/scheduler")
        for request_id in list(self._identifiers):
            self._release(request_id, set())
        self._items.flush()

    @property
    def has_lost_worker(self) -> bool:
        """Return whether a worker has reported that it has given up. If so, the caller must promise
        nothing more."""
        return self._totals.has_lost_worker

    def can_do_without(self, request: "Request", num_computed_tokens: int) -> bool:
        """Do `ready`, but without loads: each item that `request` still needs must be encoded."""
        return not self._facts.is_shareable or self._can_encode_all(
            request,
            [each for each in request.mm_features if _end(each) > num_computed_tokens],
        )

    def is_promised(self, identifier: str) -> bool:
        """Return whether the item was promised to vLLM in this step."""
        return self._loads.is_promised(identifier)

    def keep_promise(self, identifier: str) -> None:
        """Order the load of an item that was promised in this step. vLLM encodes any other."""
        self._loads.keep_promise(identifier)

    def promised_orders(self) -> Orders:
        """Return the load orders of this step, and no save orders."""
        orders = Orders(self._loads.take(), num_stops=self._engine.epochs.num_stops)
        self._loads.let_go()
        return orders

    def take_lost(self) -> set[str]:
        """Do `take_unavailable`, but count nothing."""
        failing, self._failing = self._failing, set()
        return failing

    # --- resources ---

    @property
    def engine(self) -> TransferEngine:
        """Return the transfer engine, which this half owns."""
        return self._engine

    def close(self) -> None:
        """Close all pins and stop the I/O thread."""
        for request_id in list(self._identifiers):
            self._release(request_id, set())
        self._loads.close()
        self._engine.close()
        self._totals.close()

    def _save_orders(self, scheduled: dict[str, int]) -> tuple[SaveOrder, ...]:
        """Order the saves of the absent items that this step's requests need."""
        is_closed = not self._engine.epochs.may_share
        if not self._facts.role.is_producer or not self._items.unsaved or is_closed:
            return ()
        # Each request and each item is visited once: a long queue may hold many of both.
        needed = set().union(*(self._identifiers.get(request_id, ()) for request_id in scheduled))
        return self._saves.orders(needed)

    # --- epochs of the model; see `Epochs` ---

    def _advance(self) -> None:
        """Notice resets of vLLM's encoder cache, and epochs of the model."""
        if self._loads.has_promised:
            return  # in the middle of a step
        if self._cached.take_reset() and self._engine.epochs.reset():
            for request_id in list(self._identifiers):
                self._release(request_id, set())
            self._items.flush()
            self._saves.forget_cached()
        self._engine.epochs.advance(lambda: None, self._move)

    def _move(self, record: Record) -> None:
        """Share in the namespace of `record` from now on."""
        namespace = Namespace(record.kind, record.namespace, record.facts)
        embeddings = msgspec.structs.replace(self._facts.embeddings, namespace=namespace)
        self._facts = replace(self._facts, embeddings=embeddings)
        self._items.move(embeddings)
        self._engine.move(record, write=self._facts.role.is_producer)

    def _is_left_out(self, request_id: str) -> bool:
        """Return whether no item is shared for a request. What earlier ones were promised is
        loaded: the weights are still those of that time."""
        epochs = self._engine.epochs
        is_new = request_id not in self._identifiers
        return request_id in epochs.left_out or (is_new and not epochs.may_share)

    def _leave_out(self, request: "Request", needed: "Sequence[MultiModalFeatureSpec]") -> bool:
        """Share no item of `request` from now on. Return whether it can be encoded without."""
        self._engine.epochs.left_out.add(request.request_id)
        return self._can_encode_all(request, needed)

    def _can_encode_all(
        self, request: "Request", needed: "Sequence[MultiModalFeatureSpec]"
    ) -> bool:
        return all(self._placeholders.can_encode(each) or self._fail(request) for each in needed)

    # --- items ---

    def _is_settled(self, request: "Request", feature: "MultiModalFeatureSpec") -> bool:
        """Return whether an item of `request` can be loaded or encoded now. Start its look-up or
        fetch when `request` first needs it.

        False: that is in flight, or the item is lost and `request` is marked to fail.
        """
        if not _is_encoded(feature):
            return True
        if not self._is_shared(feature):
            return self._placeholders.can_encode(feature) or self._fail(request)
        item = self._item_of(request, feature)
        if item is None or item.phase is Phase.ASKED:
            return self._is_cached(feature)
        is_lost = item.phase is Phase.ABSENT and not self._placeholders.can_encode(feature)
        if is_lost and self._items.retry_for(
            item, request.request_id, is_announced=self._is_announced(request, feature)
        ):
            self._items.flush()
            return False
        # Two contents have one identifier: the rows would not fit this request's placeholders. vLLM
        # fails such a request too.
        if is_lost or item.num_embeds != feature.mm_position.get_num_embeds():
            return self._fail(request)
        if item.phase is Phase.READY:
            self._loads.promise(item)
        return True

    def _item_of(self, request: "Request", feature: "MultiModalFeatureSpec") -> Item | None:
        """Return the item, with `request` among its waiters; None if vLLM's own cache has it."""
        item = self._items.get(feature.identifier)
        if item is None or request.request_id not in item.waiters:
            if self._is_cached(feature):
                return None
            item = self._join(request, feature, item)
        elif item.phase is Phase.ASKED:
            self._items.flush()  # has an effect only if the last step had no `orders`
        if item.phase is Phase.ASKED:
            self._items.check_time(item)
        return item

    def _is_cached(self, feature: "MultiModalFeatureSpec") -> bool:
        """Return whether vLLM's own encoder cache has the item, and it can be encoded in case that
        vLLM has just evicted it."""
        num_embeds = feature.mm_position.get_num_embeds()
        is_cached = self._cached.get(feature.identifier) == num_embeds
        return is_cached and self._placeholders.can_encode(feature)

    def _is_shared(self, feature: "MultiModalFeatureSpec") -> bool:
        """Return whether the item can be shared under its identifier."""
        if not _is_encoded(feature) or (self._facts.numbers_media and is_named_by_request(feature)):
            return False
        return len(feature.identifier) <= MAX_IDENTIFIER_CHARS

    def _join(
        self, request: "Request", feature: "MultiModalFeatureSpec", item: Item | None
    ) -> Item:
        """Add `request` to the waiters of `item`, and return it. None: no live request needs the
        item yet, so start its look-up or fetch."""
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
        self._identifiers.setdefault(request.request_id, set()).add(item.identifier)
        if self._facts.role.is_producer and not item.metadata:
            item.metadata = self._placeholders.metadata(feature)
        if self._facts.role.is_producer:
            self._saves.consider(request, item)
        return item

    def _is_announced(self, request: "Request", feature: "MultiModalFeatureSpec") -> bool:
        """Return whether `request` implies that the item may still be on its way to the store.

        It does if an encoder's `ec_transfer_params` in it name the item, or if it has no pixels: an
        encoder has then made its placeholder metadata. But a router that remembers the metadata can
        say that all items that it does not name were stored long ago (docs/format.md). All this is
        sent by the client, which may be wrong: so it decides only whether the request waits, for at
        most `wait_s`.
        """
        params = option(request, "ec_transfer_params")
        params = params if isinstance(params, dict) else {}
        if feature.identifier in params:
            return True
        return params.get("ecshare") != _NAMES_ALL and not self._placeholders.can_encode(feature)

    def _fail(self, request: "Request") -> bool:
        """Mark `request` to fail; return False, its answer to `ready`."""
        self._failing.add(request.request_id)
        return False

    def _release(self, request_id: str, needed: set[str]) -> None:
        """Release all items of a request except those `needed`.

        An item without waiters is dropped, and its pin is closed later. If the item is needed
        again, for example after a preemption, it is looked up again.
        """
        joined = self._identifiers.pop(request_id, set())
        if kept := joined & needed:
            self._identifiers[request_id] = kept
        for identifier in joined - needed:
            item = self._items.get(identifier)
            assert item is not None  # it exists as long as a request needs it
            self._saves.released(request_id, item)
            item.waiters.pop(request_id, None)
            item.retried_for.discard(request_id)
            if item.waiters:
                continue
            pin = self._items.drop(item)
            if pin is not None:
                self._loads.unpin_late(pin, item.key)


def _log_risks(vllm_config: "VllmConfig", config: EncoderConfig, facts: EncoderFacts) -> None:
    """Log the settings of this deployment that may cause requests, or the engine, to fail."""
    if not facts.role.is_producer and has_input_cache(vllm_config.model_config):
        # Inputs without pixels bypass the API server's half of that cache, but replace inputs with
        # pixels in the engine's half (vLLM 0.32, multimodal/cache/lru.py).
        logger.warning(
            "--mm-processor-cache-gb: set it to 0. This engine's cache of inputs keeps the latest "
            "input for each picture's hash, even one without pixels. If an embedding is then lost, "
            "requests that contain the picture fail, unless they give it another uuid, as "
            "ecshare's router does once P or D has failed."
        )
    if facts.has_remote_workers and facts.role.is_consumer:
        logger.warning(
            "Workers may be on other hosts than the scheduler. Each of them loads embeddings from "
            "the store while a step waits, so only embeddings in the store are promised. If the "
            "store fails for %g s during such a step, vLLM ends this engine.",
            config.promise_s,
        )


def _is_encoded(feature: "MultiModalFeatureSpec") -> bool:
    """Return whether an encoder computes the item's embedding.

    False if the client sends the embedding: vLLM treats those as a modality of their own.
    """
    return feature.modality != "prompt_embeds"


def _end(feature: "MultiModalFeatureSpec") -> int:
    """Return the position after the item's last placeholder token."""
    return feature.mm_position.offset + feature.mm_position.length
