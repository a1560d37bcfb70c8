# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: which media items are on this host, which must be encoded, which are lost.

vLLM takes "yes, I have it" as a promise without a way back: an item that is promised and then
cannot be loaded kills the engine. So an embedding is fetched into the host cache, verified and
pinned BEFORE this half says yes. Every hook runs on the scheduler thread, many times a second: it
submits, polls and looks into dictionaries; it never waits and never touches storage.

What becomes of an item (one per identifier that live requests need):

    ASKED    the store was asked; requests that need it wait, until `wait_s` is over
    READY    consumer: on this host, verified, pinned; it will be loaded, not encoded
    STORED   producer only: in the store already; it will not be encoded
    ABSENT   encode it (and store it, on a producer); without pixels, fail the request
"""

import heapq
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from ecshare.config import OPTIONS_PATH, EncoderConfig
from ecshare.messages import LoadOrder, Orders, Report, SaveOrder
from ecshare.plugin.identity import encoder_namespace, encoder_width
from ecshare.plugin.metrics import CounterStats, counter_stats
from ecshare.store.format import TensorFacts
from ecshare.transfer.engine import Done, Fetch, Lookup, Outcome, StoredObject, TransferEngine
from ecshare.transfer.staging import dtype_name
from ecshare.transfer.stats import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# A request may end while a step that loads its item is still on its way to a worker, so a pin
# outlives the request by far more than any step lasts. Once a worker has reported the load, only
# the other ranks may still be at it, in the same step.
_UNPIN_UNREPORTED_S = 60.0
_UNPIN_LOADED_S = 5.0
# Of so many recent items the placeholder metadata is kept, and that a load was ordered.
_REMEMBERED_ITEMS = 10_000


class _Phase(Enum):
    ASKED = auto()
    READY = auto()
    STORED = auto()
    ABSENT = auto()


@dataclass(slots=True)
class _Item:
    """One identifier that live requests need; see the module's docstring for the phases."""

    identifier: str
    key: str
    num_embeds: int
    deadline_s: float
    phase: _Phase = _Phase.ASKED
    stored: StoredObject | None = None
    is_save_ordered: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    waiters: set[str] = field(default_factory=set)


class EncoderScheduler:
    """Decides for each media item: load, encode, wait or fail.

    Ownership: everything belongs to vLLM's scheduler thread; the transfer engine has its own thread
    and meets this one in `poll`.
    """

    def __init__(self, vllm_config: "VllmConfig", config: EncoderConfig) -> None:
        """Start the I/O thread and check that the store answers.

        Raises:
            ConfigError: the store cannot be used; names the option and the fix.
        """
        role = vllm_config.ec_transfer_config
        assert role is not None  # or vLLM would not have made the connector
        self._is_producer: bool = role.is_ec_producer
        self._is_consumer: bool = role.is_ec_consumer
        self._wait_s = config.wait_s
        self._namespace = encoder_namespace(vllm_config, config.epoch)
        self._width = encoder_width(vllm_config)
        model_dtype = vllm_config.model_config.dtype
        assert isinstance(model_dtype, torch.dtype)  # a word only until vLLM has read the model
        self._dtypes = {dtype_name(model_dtype), "F32"}
        self._placeholders = PlaceholderMetadataResolver(vllm_config.model_config)
        self._engine = TransferEngine(config, OPTIONS_PATH)
        self._engine.start_up(
            self._namespace.kind,
            self._namespace.digest,
            self._namespace.facts,
            write=self._is_producer,
        )
        self._items: dict[str, _Item] = {}
        self._asked: dict[str, str] = {}  # key -> identifier, for each job in flight
        self._wanted: dict[str, set[str]] = {}  # request id -> identifiers
        self._loads: dict[str, LoadOrder] = {}
        self._loading: OrderedDict[str, None] = OrderedDict()  # keys ordered, not reported yet
        self._lost: set[str] = set()
        # A heap by the time to unpin; the number keeps equal times from comparing objects.
        self._unpinning: list[tuple[float, int, StoredObject]] = []
        self._num_let_go = 0
        self._metadata: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._stats = Stats()

    # --- hooks ---

    def ready(self, request: "Request", num_computed_tokens: int) -> bool:
        """Whether no item that `request` still needs is on its way. O(items), no I/O.

        Items that end before `num_computed_tokens` are covered by KV and need nothing. An item that
        is lost and cannot be encoded marks the request for `take_unavailable`.
        """
        features = request.mm_features
        needed = [feature for feature in features if _end(feature) > num_computed_tokens]
        if len(needed) < len(features) and request.request_id in self._wanted:
            self._release(request.request_id, {feature.identifier for feature in needed})
        if not needed:
            return True
        self._poll()
        # A list: every item is asked for at once, not one after the other.
        return all([self._is_settled(request.request_id, feature) for feature in needed])

    def has(self, identifier: str) -> bool:
        """Whether the item is loaded or stored rather than encoded. No I/O."""
        item = self._items.get(identifier)
        return item is not None and item.phase in (_Phase.READY, _Phase.STORED)

    def allocated(self, request: "Request", index: int) -> None:
        """Item `index` has a place in the encoder cache: load it, or count the encode."""
        item = self._items.get(request.mm_features[index].identifier)
        if item is not None and item.phase is _Phase.READY:
            self._loads[item.identifier] = LoadOrder(item.identifier, item.key)
            self._loading[item.key] = None
            if len(self._loading) > _REMEMBERED_ITEMS:
                self._loading.popitem(last=False)
            self._stats.add("items/loaded")
        elif item is not None and item.phase is _Phase.STORED:
            self._stats.add("items/stored")
        else:
            self._stats.add("items/encoded")

    def orders(self, scheduled: dict[str, int]) -> Orders:
        """Return what the workers shall do in a step that runs the requests of `scheduled`."""
        loads, self._loads = tuple(self._loads.values()), {}
        saves = self._save_orders(scheduled) if self._is_producer else ()
        self._unpin(time.monotonic())
        return Orders(loads, saves)

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """Let go of what `request` still holds; return the announcement of a producer, else None.

        The announcement is vLLM's `ec_transfer_params`: per identifier the placeholder metadata
        with which a consumer can do without the pixels.
        """
        self._lost.discard(request.request_id)
        self._release(request.request_id, set())
        if not self._is_producer or not request.mm_features:
            return None
        return self._announcement(request)

    def take_unavailable(self) -> set[str]:
        """Return the requests to fail, once each; re-sending one runs its encode again."""
        lost, self._lost = self._lost, set()
        if lost:
            self._stats.add("items/failed", len(lost))
        return lost

    def reported(self, report: Any) -> None:
        """Take the workers' counts and note what they loaded; what is no report is ignored."""
        if not isinstance(report, Report):
            return
        for name, count in report.counts.items():
            self._stats.add(name, count)
        for key in report.loaded:
            self._loading.pop(key, None)

    def take_stats(self) -> CounterStats | None:
        """Return the counts since the last call; None if there are none."""
        return counter_stats(self._stats.take())

    def close(self) -> None:
        """Unpin everything and stop the I/O thread."""
        for request_id in list(self._wanted):
            self._release(request_id, set())
        self._unpin(float("inf"))
        self._engine.close()

    # --- items ---

    def _is_settled(self, request_id: str, feature: "MultiModalFeatureSpec") -> bool:
        """Whether it is known what to do with one item of a request; asks the store if need be."""
        item = self._items.get(feature.identifier)
        if item is None:
            item = self._ask(feature)
        if request_id not in item.waiters:
            item.waiters.add(request_id)
            self._wanted.setdefault(request_id, set()).add(item.identifier)
            item.metadata = item.metadata or self._placeholder_metadata(feature)
        if item.phase is _Phase.ASKED and time.monotonic() >= item.deadline_s:
            self._miss(item, "late")
        if item.phase is _Phase.ASKED:
            return False
        is_lost = item.phase is _Phase.ABSENT and not self._can_encode(feature)
        # One identifier for two different contents: loading would hand this request rows that do
        # not fit its placeholders. vLLM fails such a request too.
        if is_lost or item.num_embeds != feature.mm_position.get_num_embeds():
            self._lost.add(request_id)
            return False
        return True

    def _ask(self, feature: "MultiModalFeatureSpec") -> _Item:
        """Begin to find out about an item nobody asked for yet."""
        num_embeds = feature.mm_position.get_num_embeds()
        # The number of embeddings is part of the name: an object of another length, left under the
        # same client-chosen identifier, must neither be loaded nor block the right one.
        key = self._namespace.key(f"{num_embeds}:{feature.identifier}")
        deadline_s = time.monotonic() + self._wait_s
        item = _Item(feature.identifier, key, num_embeds, deadline_s)
        self._items[item.identifier] = item
        if key not in self._asked:
            self._asked[key] = item.identifier
            self._engine.submit(
                Fetch(key, self._wait_s)
                if self._is_consumer
                else Lookup((key,), self._wait_s, store_only=True)
            )
        return item

    def _poll(self) -> None:
        for done in self._engine.poll():
            self._settle(done)

    def _settle(self, done: Done) -> None:
        """Move an item to the phase that the outcome of its job calls for."""
        job = done.job
        assert isinstance(job, Fetch | Lookup)
        key = job.key if isinstance(job, Fetch) else job.keys[0]
        item = self._items.get(self._asked.pop(key))
        stored = done.value if isinstance(done.value, StoredObject) else None
        if item is None or item.key != key:
            pass  # nobody waits any more
        elif stored is not None and stored.entry is not None and self._fits(stored.facts, item):
            item.phase, item.stored = _Phase.READY, stored
            return
        elif done.value == (True,):
            item.phase = _Phase.STORED
        elif item.phase is _Phase.ASKED:
            self._miss(item, "unfit" if stored else done.outcome.value)
        if stored is not None:
            stored.release()  # no worker was told of it

    def _fits(self, facts: TensorFacts, item: _Item) -> bool:
        """Whether a stored tensor is what the model expects for `item`; stores are not trusted."""
        return facts.shape == (item.num_embeds, self._width) and facts.dtype in self._dtypes

    def _miss(self, item: _Item, reason: str) -> None:
        item.phase = _Phase.ABSENT
        self._stats.add("items/missed")
        if reason not in (Outcome.MISSING.value, Outcome.OK.value):
            logger.debug("embedding %s counts as missing: %s", item.key, reason)

    def _can_encode(self, feature: "MultiModalFeatureSpec") -> bool:
        """Whether the request carries pixels (or sound), not placeholder metadata alone."""
        if feature.data is None:
            return False
        known = self._placeholders.fields_for(feature.modality)
        return any(
            value is not None
            for name, value in feature.data.get_data().items()
            if name not in known
        )

    def _release(self, request_id: str, needed: set[str]) -> None:
        """Let go of all items of a request but those `needed`; the last to let go unpins, later.

        An item that is needed again, after a preemption say, is asked for again.
        """
        wanted = self._wanted.pop(request_id, set())
        if kept := wanted & needed:
            self._wanted[request_id] = kept
        for identifier in wanted - needed:
            item = self._items[identifier]
            item.waiters.discard(request_id)
            if item.waiters:
                continue
            del self._items[identifier]
            if item.stored is not None:
                is_unreported = item.key in self._loading
                pinned_s = _UNPIN_UNREPORTED_S if is_unreported else _UNPIN_LOADED_S
                self._num_let_go += 1
                entry = (time.monotonic() + pinned_s, self._num_let_go, item.stored)
                heapq.heappush(self._unpinning, entry)

    def _unpin(self, now_s: float) -> None:
        """Unpin what is due."""
        while self._unpinning and self._unpinning[0][0] <= now_s:
            heapq.heappop(self._unpinning)[2].release()

    # --- producer ---

    def _save_orders(self, scheduled: dict[str, int]) -> tuple[SaveOrder, ...]:
        """Order each absent item of this step's requests to be stored, once.

        Also those that vLLM's own encoder cache holds and will not encode again: the store may have
        lost them since.
        """
        saves = []
        for item in self._items.values():
            if item.phase is _Phase.ABSENT and not item.is_save_ordered:
                if item.waiters.isdisjoint(scheduled):
                    continue
                item.is_save_ordered = True
                attributes = {"num_embeds": item.num_embeds, "metadata": item.metadata}
                saves.append(SaveOrder(item.identifier, item.key, attributes))
        return tuple(saves)

    def _placeholder_metadata(self, feature: "MultiModalFeatureSpec") -> dict[str, Any]:
        """Return what a consumer needs to size the placeholder, and remember it.

        vLLM leaves `feature.data` out where a later process has it cached, so it is remembered.
        """
        if not self._is_producer:
            return {}
        entry = collect_ec_item_metadata([feature], self._placeholders)[feature.identifier]
        metadata: dict[str, Any] = entry["metadata"] or self._metadata.get(feature.identifier, {})
        self._metadata[feature.identifier] = metadata
        self._metadata.move_to_end(feature.identifier)
        if len(self._metadata) > _REMEMBERED_ITEMS:
            self._metadata.popitem(last=False)
        return metadata

    def _announcement(self, request: "Request") -> dict[str, Any]:
        entries = collect_ec_item_metadata(request.mm_features, self._placeholders)
        for identifier, entry in entries.items():
            entry["metadata"] = entry["metadata"] or self._metadata.get(identifier, {})
        return entries


def _end(feature: "MultiModalFeatureSpec") -> int:
    """Return the position after the item's last placeholder token."""
    return feature.mm_position.offset + feature.mm_position.length
