# SPDX-License-Identifier: Apache-2.0
"""Orders the saves of a producer, and decides which items it may announce."""

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

# Far more items than vLLM's encoder cache has room for.
_MAX_WITHOUT_TENSOR = _MAX_DECLINED = 10_000
# The field of a request's `ec_transfer_params`; see `requested_save`.
_SAVE_FIELD = "ecshare_save"
# An object's header has little room, and the timestamps of a long video would fill it.
MAX_NOTED_CHARS = 2048


class SavePlan:
    """Orders the save of each absent item, once, if the rules or a request ask for it.

    An item may be announced if it is in the store, or will be. It must not be announced if its save
    was declined, or if the store has lost it and vLLM will not encode it, because its own cache has
    an entry for it.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, items: Items, stats: Stats, save_after: int) -> None:
        """Save absent items that at least `save_after` requests have contained. A request may ask
        for the save earlier, or ask not to cause it."""
        self._items = items
        self._stats = stats
        self._save_after = save_after
        self._sightings = Sightings() if save_after > 1 else None
        # Absent items that were not saved, because no request has yet justified a save.
        self._declined: Recent[str, None] = Recent(_MAX_DECLINED)
        # Items for which vLLM's encoder cache has an entry without a tensor: nothing was encoded,
        # because the store had them when the entry was allocated. vLLM does not report their
        # eviction. If they are evicted and needed again, it allocates a new entry.
        self._without_tensor: Recent[str, None] = Recent(_MAX_WITHOUT_TENSOR)
        # By request: the items that it must not announce.
        self._unannounced: dict[str, set[str]] = {}

    def forget_cached(self) -> None:
        """Forget what vLLM's encoder cache had: it was reset."""
        self._without_tensor.clear()

    def consider(self, request: "Request", item: Item) -> None:
        """Record that `request` contains `item`, and whether that justifies its save."""
        num_seen = self._sightings.add(item.identifier) if self._sightings is not None else 1
        asked = requested_save(option(request, "ec_transfer_params"), _SAVE_FIELD)
        if asked is False or not (asked or num_seen >= self._save_after):
            return
        item.is_worth_storing = True
        if item.identifier in self._declined and item.phase is Phase.ABSENT:
            self._items.unsaved[item.identifier] = item

    def orders(self, needed: Set[str]) -> tuple[SaveOrder, ...]:
        """Return the save orders of a step whose requests need the items `needed`.

        An order is made for each of them that is absent and worth storing, even if vLLM's own
        encoder cache has it and will not encode it again: the store may have lost it since.
        """
        unsaved, saves = self._items.unsaved, []
        for identifier in [each for each in unsaved if each in needed]:
            item = unsaved.pop(identifier)
            if not item.is_worth_storing:
                self._declined[identifier] = None
                self._stats.add("items/declined")
                continue
            self._declined.pop(identifier, None)
            attributes = {
                "num_embeds": item.num_embeds,
                "metadata": _stored_metadata(item.metadata),
            }
            saves.append(SaveOrder(item.identifier, item.object_key, attributes))
        return tuple(saves)

    def allocated(self, identifier: str, *, is_stored: bool) -> None:
        """Record that vLLM's encoder cache has an entry for the item. `is_stored`: the store has
        the item, so the entry stays without a tensor."""
        if is_stored:
            self._without_tensor[identifier] = None
        else:
            self._without_tensor.pop(identifier, None)

    def released(self, request_id: str, item: Item) -> None:
        """Record the state of an item that the request releases."""
        if item.phase in (Phase.READY, Phase.STORED):
            self._declined.pop(item.identifier, None)  # another engine has stored it
        elif item.phase is Phase.ABSENT and item.identifier in self._without_tensor:
            self._unannounced.setdefault(request_id, set()).add(item.identifier)

    def take_unannounced(self, request_id: str) -> Set[str]:
        """Return, once, which items of a request that has ended must not be announced: the
        store has lost them, and they will not be encoded again."""
        return self._unannounced.pop(request_id, frozenset())

    def has_declined(self, identifier: str) -> bool:
        """Return whether the item was absent, and no request has yet justified its save."""
        return identifier in self._declined


def _stored_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata to store in an item's object, for diagnosis; empty if it is too long."""
    return metadata if len(json.dumps(metadata, default=str)) <= MAX_NOTED_CHARS else {}
