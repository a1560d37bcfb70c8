# SPDX-License-Identifier: Apache-2.0
"""Which items a producer has stored or will store, and so announces."""

import json
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from ecshare.encoder.messages import SaveOrder
from ecshare.encoder.scheduler.items import Item, Items, Phase
from ecshare.plugin.compat import option
from ecshare.plugin.sightings import Sightings, requested_save
from ecshare.store.recent import Recent
from ecshare.transfer.stats import Stats

if TYPE_CHECKING:
    from vllm.v1.request import Request

# vLLM's encoder cache has room for no more items than this, by far.
_MAX_PHANTOMS = _MAX_DECLINED = 10_000
# The field of a request's `ec_transfer_params`; see `requested_save`.
_SAVE_FIELD = "ecshare_save"
# An object's header has little room; a long video's times would fill it.
MAX_NOTED_CHARS = 2048


class SavePlan:
    """Orders each absent item to be stored, once, if a request is reason enough.

    An item may be announced if it is in the store or will be. It is not if it was declined, or if
    the store has lost it and vLLM will not encode it, believing that it has the embedding.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, items: Items, stats: Stats, save_after: int) -> None:
        """Store absent `items` that so many requests have had; a request may say otherwise."""
        self._items = items
        self._stats = stats
        self._save_after = save_after
        self._sightings = Sightings() if save_after > 1 else None
        # Identifiers of items that were absent and that no request was reason enough to store.
        self._declined: Recent[str, None] = Recent(_MAX_DECLINED)
        # Identifiers that vLLM's encoder cache counts as its own though no tensor is there: they
        # were stored when they came, so nothing was encoded. vLLM does not say when it forgets
        # them, only by allocating them anew.
        self._phantoms: Recent[str, None] = Recent(_MAX_PHANTOMS)
        self._unannounced: dict[str, set[str]] = {}  # request id -> identifiers

    def consider(self, request: "Request", item: Item) -> None:
        """Note whether `request` is reason enough to store `item`, if that is absent."""
        num_seen = self._sightings.add(item.identifier) if self._sightings is not None else 1
        asked = requested_save(option(request, "ec_transfer_params"), _SAVE_FIELD)
        if asked is False or not (asked or num_seen >= self._save_after):
            return
        item.is_worth_storing = True
        if item.identifier in self._declined and item.phase is Phase.ABSENT:
            self._items.unsaved[item.identifier] = item

    def orders(self, wanted: Set[str]) -> tuple[SaveOrder, ...]:
        """Order the absent items among `wanted`, those of this step's requests, to be stored.

        Also those that vLLM's own encoder cache holds and will not encode again: the store may have
        lost them since.
        """
        unsaved, saves = self._items.unsaved, []
        for identifier in [each for each in unsaved if each in wanted]:
            item = unsaved.pop(identifier)
            if not item.is_worth_storing:
                self._declined[identifier] = None
                self._stats.add("items/declined")
                continue
            self._declined.pop(identifier, None)
            attributes = {"num_embeds": item.num_embeds, "metadata": _noted(item.metadata)}
            saves.append(SaveOrder(item.identifier, item.object_key, attributes))
        return tuple(saves)

    def allocated(self, identifier: str, *, is_stored: bool) -> None:
        """Note that the item has a place in vLLM's encoder cache, empty if it `is_stored`."""
        if is_stored:
            self._phantoms[identifier] = None
        else:
            self._phantoms.pop(identifier, None)

    def released(self, request_id: str, item: Item) -> None:
        """Note what is known of an item that the request lets go of."""
        if item.phase in (Phase.READY, Phase.STORED):
            self._declined.pop(item.identifier, None)  # somebody else has stored it
        elif item.phase is Phase.ABSENT and item.identifier in self._phantoms:
            self._unannounced.setdefault(request_id, set()).add(item.identifier)

    def take_unannounced(self, request_id: str) -> Set[str]:
        """Return which items of a request that has ended the store has lost, for good."""
        return self._unannounced.pop(request_id, frozenset())

    def has_declined(self, identifier: str) -> bool:
        """Whether the item was absent, and no request has been reason enough to store it."""
        return identifier in self._declined


def _noted(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return what is noted in the object of an item's metadata: for people, and in little room."""
    return metadata if len(json.dumps(metadata, default=str)) <= MAX_NOTED_CHARS else {}
