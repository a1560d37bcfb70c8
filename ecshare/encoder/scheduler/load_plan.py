# SPDX-License-Identifier: Apache-2.0
"""Orders loads, and keeps embeddings pinned while workers may still be loading them."""

from collections.abc import Iterable

from ecshare.encoder.messages import LoadOrder
from ecshare.encoder.scheduler.items import Item
from ecshare.encoder.scheduler.pins import LatePins
from ecshare.store.hostcache.cache import Entry
from ecshare.store.keys import Key
from ecshare.store.recent import Recent

_MAX_UNREPORTED = 10_000


class LoadPlan:
    """Holds the promises and load orders of a step, and the pins of loads that may be in flight.

    An item is promised to vLLM when a request is ready to use it. Its load is ordered when vLLM
    allocates a place for it, in the same step or not at all. An item stays pinned until its last
    load must have ended, even if no request needs it any more.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, most_late_pins: int) -> None:
        """`most_late_pins`: the largest number of pins of items that no request needs."""
        self._promises: dict[str, LoadOrder] = {}
        self._orders: dict[str, LoadOrder] = {}
        self._unreported: Recent[str, None] = Recent(_MAX_UNREPORTED)
        self._late_pins = LatePins(most_late_pins)

    def promise(self, item: Item) -> None:
        """Record that a request may have the item loaded in this step."""
        self._promises[item.identifier] = LoadOrder(item.identifier, item.object_key)

    @property
    def has_promised(self) -> bool:
        """Return whether anything was promised or ordered in this step."""
        return bool(self._promises or self._orders)

    def is_promised(self, identifier: str) -> bool:
        """Return whether the item was promised in this step."""
        return identifier in self._promises

    def keep_promise(self, identifier: str) -> None:
        """Order the load of the item if it was promised in this step; else do nothing."""
        if identifier in self._promises:
            self._orders[identifier] = self._promises[identifier]

    def order(self, item: Item) -> None:
        """Order the load of the item in this step."""
        self._orders[item.identifier] = LoadOrder(item.identifier, item.object_key)
        self._unreported[item.object_key] = None

    def take(self) -> tuple[LoadOrder, ...]:
        """Return the orders of this step. The next step begins without orders and promises."""
        orders, self._orders, self._promises = tuple(self._orders.values()), {}, {}
        return orders

    def reported(self, keys: Iterable[str]) -> None:
        """Record that a worker has loaded the objects under `keys`."""
        for key in keys:
            self._unreported.pop(key, None)

    def unpin_late(self, pin: Entry, key: Key | None) -> None:
        """Own the pin of the object under `key`, which no request needs any more, and close it
        once its load must have ended."""
        self._late_pins.add(pin, is_reported=key not in self._unreported)

    def let_go(self) -> None:
        """Close the pins of loads that must have ended."""
        self._late_pins.let_go()

    def close(self) -> None:
        """Close all pins."""
        self._late_pins.close()
