# SPDX-License-Identifier: Apache-2.0
"""What becomes of each media item that live requests need: the dialogue with the transfer engine.

One item per identifier, from the first request that needs it to the last one that lets it go:

    ASKED    the store was asked; requests that need it wait, until `wait_s` is over
    READY    consumer: on this host, verified, pinned; it will be loaded, not encoded. In the store
             too, where workers on other hosts are to load it
    STORED   producer only: in the store already; it will not be encoded
    ABSENT   encode it (and store it, on a producer); a request without pixels fails, unless it came
             later than the question and has time left: it is sought once more for that one

Everything here runs on vLLM's scheduler thread and touches memory only. What a host cache in memory
has is READY at once, a few items a step; to wait for the I/O thread would cost the request a step.
Other jobs are collected during a step and submitted together at its end, because waking the I/O
thread is what costs time.
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
# Each item that is fetched or pinned holds a descriptor. This part of those that the process may
# have is enough for many steps, and leaves the rest to vLLM, to connections and to later pins.
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
    """Somebody is storing it now: worth waiting for."""
    adapter: str = ""
    """The name of the LoRA adapter that its encoder runs with, if it counts."""
    key: Key | None = None
    """Its object's; empty for an item that cannot be shared, or not yet."""
    phase: Phase = Phase.ASKED
    pin: Entry | None = None
    """What keeps it in the host cache."""
    handle: Handle[Any] | None = None
    """The job that finds out about it, if one does."""
    metadata: dict[str, Any] = field(default_factory=dict)
    waiters: dict[str, float] = field(default_factory=dict)
    """The requests that need it, and since when: monotonic seconds."""
    retried_for: set[str] = field(default_factory=set)
    """Those of them for which it was sought once more."""
    is_worth_storing: bool = False
    """A request of these was reason enough to store it."""

    @property
    def object_key(self) -> Key:
        """Its key, once it is known."""
        assert self.key is not None
        return self.key


class Items:
    """All items of one scheduler half. Ownership: vLLM's scheduler thread."""

    def __init__(
        self,
        engine: TransferEngine,
        embeddings: Embeddings,
        *,
        role: Role,
        wait_s: float,
        in_store: bool = False,
    ) -> None:
        """Ask `engine` for `embeddings`, each for `wait_s` at most.

        `in_store`: workers elsewhere load them, too. An item is READY once the store has it.
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
        """So many items, and what one request more needs, are known at a time."""
        self.unsaved: dict[str, Item] = {}
        """The absent ones that nobody was told to store yet, by identifier."""

    @property
    def has_room(self) -> bool:
        """Whether another request may ask. A producer alone holds nothing, and always has room."""
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
        """Begin to find out about an item that nobody asked for yet.

        `adapter`: name and path of the LoRA adapter that its encoder runs with. vLLM tells
        embeddings in its own cache by the name alone.
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
        """Forget an item that nobody needs any more; return what it pins, for the caller to let go.

        What is still on its way is cancelled.
        """
        if self._items.get(item.identifier) is item:
            del self._items[item.identifier]
        self.unsaved.pop(item.identifier, None)
        if item.handle is not None:
            self._cancel.append(item.handle)
        pin, item.pin = item.pin, None
        return pin

    def retry_for(self, item: Item, request_id: str) -> bool:
        """Whether a request that cannot do without an absent item shall wait for it still.

        Others, which can encode it, have not waited for whoever stores it.
        """
        joined_s = item.waiters[request_id]
        left_s = joined_s + self._wait_s - time.monotonic()
        if joined_s <= item.asked_s or left_s <= 0 or not item.key or not self._role.is_consumer:
            return False
        if item.handle is None and request_id not in item.retried_for:
            item.retried_for.add(request_id)
            item.is_announced = True
            self._start(item, self._fetching(item, left_s))
        return item.handle is not None

    def check_time(self, item: Item) -> None:
        """Give up on an item whose time is over."""
        if item.phase is Phase.ASKED and time.monotonic() >= item.deadline_s:
            self._miss(item, "late")

    def flush(self) -> None:
        """Hand the jobs that were collected to the transfer engine."""
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
        """Have the item's object fetched, or on a producer only, looked up."""
        if not self._role.is_consumer:
            self._look_up.append(item)
            return
        fetch = self._fetching(item, max(0.0, item.deadline_s - time.monotonic()))
        if not self._engine.end_at_once(fetch):
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
        """Whether somebody waits for it still."""
        return self._items.get(item.identifier) is item

    def _identified(self, item: Item, done: Done[str]) -> None:
        """Go on with an item whose adapter's content is known, or is not."""
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
        """`was_announced`: it was announced when it was asked for."""
        stored = done.value
        if self._is_wanted(item):
            item.handle = None
            if stored is not None and stored.entry is not None:
                self._take(item, stored, done)
                return  # the item owns it
            is_early = done.outcome is Outcome.MISSING and not was_announced
            if is_early and item.is_announced and item.phase is Phase.ASKED:
                self._seek(item)  # somebody who was told of it joined meanwhile
            else:
                # Without an entry there was no room for it on this host.
                self._miss(item, _reason(done.outcome if stored is None else Outcome.REJECTED))
        if stored is not None:
            stored.release()  # no worker was told of it

    def _take(self, item: Item, stored: StoredObject, done: Done[StoredObject]) -> None:
        self._found(item, Phase.READY)
        item.pin = stored.keep_pin()
        is_from_host = any(moved.tier is Tier.HOST for moved in done.moved)
        if self._role.is_producer and is_from_host and not self._in_store:
            # It will be announced to other hosts, and the store may have lost it.
            self._submit.append(Handle(Backfill(item.object_key), self._made_up))

    def _made_up(self, done: Done[bool]) -> None:
        if done.value:
            self._engine.stats.add("items/saved")

    def _found(self, item: Item, phase: Phase) -> None:
        if item.phase is Phase.ASKED:
            self._count_wait(item)
        item.phase = phase
        self.unsaved.pop(item.identifier, None)

    def _miss(self, item: Item, reason: str) -> None:
        """Decide that the item is encoded; the first reason counts."""
        if item.phase is not Phase.ASKED:
            return
        item.phase = Phase.ABSENT
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
    """Name the miss; a look-up that worked and found nothing is one."""
    reason: str = (Outcome.MISSING if outcome is Outcome.OK else outcome).value
    return reason
