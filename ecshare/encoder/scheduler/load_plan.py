# SPDX-License-Identifier: Apache-2.0
"""What the workers are told to load, and the pins of all that they may still be loading."""

from collections.abc import Iterable

from ecshare.encoder.messages import LoadOrder
from ecshare.encoder.scheduler.items import Item
from ecshare.encoder.scheduler.pins import LatePins
from ecshare.store.hostcache.cache import Entry
from ecshare.store.keys import Key
from ecshare.store.recent import Recent

_MAX_UNREPORTED = 10_000


class LoadPlan:
    """The promises and the load orders of a step, and what became of those of earlier ones.

    vLLM is promised an item when a request asks for it, and has it loaded once it has a place for
    it, in the same step or not at all. An item stays pinned until its last load must be over, also
    if no request needs it any more.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, most_late_pins: int) -> None:
        """`most_late_pins`: so many pins are kept for loads that may be under way, at most."""
        self._promises: dict[str, LoadOrder] = {}
        self._orders: dict[str, LoadOrder] = {}
        self._unreported: Recent[str, None] = Recent(_MAX_UNREPORTED)
        self._late_pins = LatePins(most_late_pins)

    def promise(self, item: Item) -> None:
        """Note that a request may load the item in this step."""
        self._promises[item.identifier] = LoadOrder(item.identifier, item.object_key)

    def is_promised(self, identifier: str) -> bool:
        """Whether the item was promised in this step."""
        return identifier in self._promises

    def keep_promise(self, identifier: str) -> None:
        """Order the item to be loaded if it was promised, or else nothing."""
        if identifier in self._promises:
            self._orders[identifier] = self._promises[identifier]

    def order(self, item: Item) -> None:
        """Order the item to be loaded in this step."""
        self._orders[item.identifier] = LoadOrder(item.identifier, item.object_key)
        self._unreported[item.object_key] = None

    def take(self) -> tuple[LoadOrder, ...]:
        """Return the orders of this step, and begin the next one, in which nothing is promised."""
        orders, self._orders, self._promises = tuple(self._orders.values()), {}, {}
        return orders

    def reported(self, keys: Iterable[str]) -> None:
        """Note that a worker has loaded the objects under `keys`."""
        for key in keys:
            self._unreported.pop(key, None)

    def unpin_late(self, pin: Entry, key: Key | None) -> None:
        """Own the pin of the object under `key`, which no request needs any more."""
        self._late_pins.add(pin, is_reported=key not in self._unreported)

    def let_go(self) -> None:
        """Close the pins of loads that must be over."""
        self._late_pins.let_go()

    def close(self) -> None:
        """Close all pins."""
        self._late_pins.close()
