# SPDX-License-Identifier: Apache-2.0
"""The state of each media item that live requests need, and its jobs in the transfer engine.

One item per identifier, from the first request that needs it to the last one that releases it:

    ASKED    a look-up or fetch is in flight; requests that need the item wait, for `wait_s` at most
    READY    consumer: on this host, verified, pinned; it will be loaded, not encoded. If workers on
             other hosts load it, the store has it too
    STORED   producer only: in the store already; it will not be encoded
    ABSENT   encode it (and store it, on a producer). A request without pixels fails, unless it
             joined after the fetch had begun and has time left: the fetch is retried once for it

All code in this module runs on vLLM's scheduler thread and touches memory only. An item that the
host cache has in memory is READY at once, for a few items a step: waiting for the I/O thread would
cost the request a step. Other jobs are collected during a step and submitted together at its end,
because waking the I/O thread is the expensive part.
"""

import logging
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

from ecshare.encoder.facts import Embeddings, Role
from ecshare.plugin.adapters import AdapterContents, adapter_fingerprint
from ecshare.store.hostcache.cache import Entry
from ecshare.store.keys import Key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import (
    Backfill,
    Done,
    Fetch,
    Handle,
    Lookup,
    Outcome,
    Run,
    StoredObject,
    Tier,
)

logger = logging.getLogger(__name__)

_LOOKED_UP_AT_ONCE = 256
# Each item that is fetched or pinned holds a file descriptor. A quarter of the process's limit is
# enough for many steps, and leaves the rest to vLLM, to connections and to later pins.
_DESCRIPTORS_PART = 4
_FEWEST_ITEMS, _MOST_ITEMS = 64, 4096


class Phase(Enum):
    """See the module's docstring."""

    ASKED = auto()
    READY = auto()
    STORED = auto()
    ABSENT = auto()


@dataclass(slots=True, eq=False)
class Item:
    """One identifier that live requests need; see the module's docstring for the phases."""

    identifier: str
    num_embeds: int
    asked_s: float
    deadline_s: float
    is_announced: bool
    """True if another engine is storing it now, so that it is worth waiting for."""
    adapter: str = ""
    """The name of the LoRA adapter that its encoder runs with, if that changes the embedding."""
    key: Key | None = None
    """The key of its object; None if the item cannot be shared, or the key is not known yet."""
    phase: Phase = Phase.ASKED
    pin: Entry | None = None
    """The entry that keeps it in the host cache."""
    handle: Handle[Any] | None = None
    """The job in flight for it, if any."""
    metadata: dict[str, Any] = field(default_factory=dict)
    waiters: dict[str, float] = field(default_factory=dict)
    """The requests that need it, and when each joined, in monotonic seconds."""
    retried_for: set[str] = field(default_factory=set)
    """The waiters for which the fetch was retried."""
    is_new: bool = False
    """Whether the store has answered that it did not have the item."""
    is_worth_storing: bool = False
    """True if the save rules let one of the waiters store it."""

    @property
    def object_key(self) -> Key:
        """Return its key, which must be known."""
        assert self.key is not None
        return self.key


class Items:
    """Holds all items of one scheduler half. Ownership: vLLM's scheduler thread."""

    def __init__(
        self,
        engine: TransferEngine,
        embeddings: Embeddings,
        *,
        role: Role,
        wait_s: float,
        in_store: bool = False,
    ) -> None:
        """Fetch `embeddings` through `engine`, each for `wait_s` at most.

        `in_store`: workers on other hosts load them too, so an item is READY only once it is in
        the store.
        """
        self._engine = engine
        self._embeddings = embeddings
        self._role = role
        self._wait_s = wait_s
        self._in_store = in_store
        self._items: dict[str, Item] = {}
        self._look_up: list[Item] = []
        self._submit: list[Handle[Any]] = []
        self._cancel: list[Handle[Any]] = []
        self._adapters = AdapterContents()
        self.limit = _most_items()
        """The largest number of items at a time, not counting those of the latest request."""
        self.unsaved: dict[str, Item] = {}
        """The absent items without a save order yet, by identifier."""

    def move(self, embeddings: Embeddings) -> None:
        """Fetch `embeddings` from now on."""
        self._embeddings = embeddings

    @property
    def has_room(self) -> bool:
        """Return whether another request may ask. True for an engine that only produces: it holds
        no descriptors."""
        return len(self._items) < self.limit or not self._role.is_consumer

    def __len__(self) -> int:
        return len(self._items)

    def get(self, identifier: str) -> Item | None:
        """Return the item, if a live request needs it."""
        return self._items.get(identifier)

    def ask(
        self,
        identifier: str,
        num_embeds: int,
        *,
        adapter: tuple[str, str] | None,
        is_announced: bool,
    ) -> Item:
        """Add an item that no live request has asked for, and start its look-up or fetch.

        `adapter`: name and path of the LoRA adapter that its encoder runs with. vLLM's own cache
        distinguishes embeddings by the adapter's name alone.
        """
        now_s = time.monotonic()
        item = Item(identifier, num_embeds, now_s, now_s + self._wait_s, is_announced)
        self._items[identifier] = item
        if adapter is None:
            item.key = self._embeddings.key(identifier, num_embeds, "")
            self._seek(item)
        else:
            item.adapter, path = adapter
            job = Run("adapter", partial(adapter_fingerprint, Path(path)))
            self._start(item, Handle(job, partial(self._identified, item)))
        return item

    def drop(self, item: Item) -> Entry | None:
        """Remove an item that no request needs any more; return its pin, which the caller releases.

        Its job, if one is in flight, is cancelled.
        """
        if self._items.get(item.identifier) is item:
            del self._items[item.identifier]
        self.unsaved.pop(item.identifier, None)
        if item.handle is not None:
            self._cancel.append(item.handle)
        pin, item.pin = item.pin, None
        return pin

    def retry_for(self, item: Item, request_id: str, *, is_announced: bool) -> bool:
        """Return whether a request that cannot encode an absent item shall still wait for it.

        The first fetch may have ended early, because requests that can encode the item do not wait
        for another engine to store it. `is_announced`: this request is to wait for that.
        """
        joined_s = item.waiters[request_id]
        left_s = joined_s + self._wait_s - time.monotonic()
        if joined_s <= item.asked_s or left_s <= 0 or not item.key or not self._role.is_consumer:
            return False
        if item.handle is None and request_id not in item.retried_for:
            item.retried_for.add(request_id)
            item.is_announced = is_announced
            self._start(item, self._fetching(item, left_s))
        return item.handle is not None

    def check_time(self, item: Item) -> None:
        """Mark an item as missed if its deadline has passed."""
        if item.phase is Phase.ASKED and time.monotonic() >= item.deadline_s:
            self._miss(item, "late")

    def flush(self) -> None:
        """Submit the collected jobs to the transfer engine."""
        if self._look_up:
            for start in range(0, len(self._look_up), _LOOKED_UP_AT_ONCE):
                items = tuple(self._look_up[start : start + _LOOKED_UP_AT_ONCE])
                keys = tuple(item.object_key for item in items)
                job = Lookup(keys, self._wait_s, store_only=True)
                self._submit.append(Handle(job, partial(self._looked_up, items)))
            self._look_up = []
        if self._submit:
            handles, self._submit = self._submit, []
            self._engine.submit(*handles)
        if self._cancel:
            handles, self._cancel = self._cancel, []
            self._engine.cancel(*handles)

    def _seek(self, item: Item) -> None:
        """Fetch the item's object; on an engine that only produces, look it up."""
        if not self._role.is_consumer:
            self._look_up.append(item)
            return
        fetch = self._fetching(item, max(0.0, item.deadline_s - time.monotonic()))
        if not self._engine.fetch_inline(fetch):
            self._start(item, fetch)

    def _fetching(self, item: Item, left_s: float) -> Handle[StoredObject]:
        limit_bytes = self._embeddings.max_bytes(item.num_embeds)
        accepts = partial(self._embeddings.fits, num_embeds=item.num_embeds)
        job = Fetch(
            item.object_key,
            left_s,
            limit_bytes,
            item.is_announced,
            accepts=accepts,
            in_store=self._in_store,
            may_be_given_up=True,
        )
        return Handle(job, partial(self._fetched, item, was_announced=item.is_announced))

    def _start(self, item: Item, handle: Handle[Any]) -> None:
        item.handle = handle
        self._submit.append(handle)

    def _is_wanted(self, item: Item) -> bool:
        """Return whether a request still needs this item."""
        return self._items.get(item.identifier) is item

    def _identified(self, item: Item, done: Done[str]) -> None:
        """Seek an item whose adapter was fingerprinted; mark it as missed if that failed."""
        item.handle = None
        if not self._is_wanted(item):
            return
        if done.value and self._adapters.learn(item.adapter, done.value):
            item.key = self._embeddings.key(item.identifier, item.num_embeds, done.value)
            self._seek(item)
        else:
            self._miss(item, "unidentified")

    def _looked_up(self, items: Sequence[Item], done: Done[tuple[bool, ...]]) -> None:
        for item, is_stored in zip(items, done.value or [False] * len(items), strict=True):
            if not self._is_wanted(item):
                continue
            if is_stored:
                self._found(item, Phase.STORED)
            else:
                self._miss(item, _reason(done.outcome))

    def _fetched(self, item: Item, done: Done[StoredObject], *, was_announced: bool) -> None:
        """Take the result of a fetch. `was_announced`: the item was announced when it began."""
        stored = done.value
        if self._is_wanted(item):
            item.handle = None
            if stored is not None and stored.entry is not None:
                self._take(item, stored, done)
                return  # the item owns it
            is_early = done.outcome is Outcome.MISSING and not was_announced
            if is_early and item.is_announced and item.phase is Phase.ASKED:
                self._seek(item)  # a request with an announcement has joined meanwhile
            else:
                # Loaded without an entry: the host cache had no room for it.
                self._miss(item, _reason(done.outcome if stored is None else Outcome.REJECTED))
        if stored is not None:
            stored.release()  # no load order names it

    def _take(self, item: Item, stored: StoredObject, done: Done[StoredObject]) -> None:
        self._found(item, Phase.READY)
        item.pin = stored.keep_pin()
        is_from_host = any(moved.tier is Tier.HOST for moved in done.moved)
        if self._role.is_producer and is_from_host and not self._in_store:
            # This engine announces it to other hosts, but the store may have lost it.
            self._submit.append(Handle(Backfill(item.object_key), self._backfilled))

    def _backfilled(self, done: Done[bool]) -> None:
        if done.value:
            self._engine.stats.add("items/saved")

    def _found(self, item: Item, phase: Phase) -> None:
        if item.phase is Phase.ASKED:
            self._count_wait(item)
        item.phase = phase
        self._engine.uses.add(item.object_key)
        self.unsaved.pop(item.identifier, None)

    def _miss(self, item: Item, reason: str) -> None:
        """Decide that the item is encoded. Only the first reason is counted."""
        if item.phase is not Phase.ASKED:
            return
        item.phase = Phase.ABSENT
        item.is_new = reason == Outcome.MISSING.value
        self._count_wait(item)
        self._engine.stats.add("items/missed")
        self._engine.stats.add(f"misses/{reason}")
        if item.key:
            self.unsaved[item.identifier] = item

    def _count_wait(self, item: Item) -> None:
        self._engine.stats.observe("wait_seconds", time.monotonic() - item.asked_s)


def _most_items() -> int:
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return _MOST_ITEMS
    return min(max(soft_limit // _DESCRIPTORS_PART, _FEWEST_ITEMS), _MOST_ITEMS)


def _reason(outcome: Outcome) -> str:
    """Return the name of a miss. A look-up that succeeded and found nothing is a miss too."""
    reason: str = (Outcome.MISSING if outcome is Outcome.OK else outcome).value
    return reason
