# SPDX-License-Identifier: Apache-2.0
"""Lists a store into an inventory."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from ecshare.store.objects import ObjectInfo
from ecshare.upkeep.calls import Calls, batched
from ecshare.upkeep.inventory import Inventory

_SLICE = 50  # lines: a hook of an engine waits no longer than for these

Advance = Callable[[int], None]
"""Receives how many more lines were read."""


async def _no_rest() -> None:
    pass


async def list_into(  # noqa: PLR0913 — what is listed, and how
    inventory: Inventory,
    calls: Calls,
    prefixes: Iterable[str],
    advance: Advance = lambda _: None,
    *,
    rest: Callable[[], Awaitable[object]] = _no_rest,
    listing: Callable[[str], AsyncIterator[ObjectInfo]] | None = None,
) -> None:
    """Add to `inventory` what the store has below `prefixes`, each key once.

    `rest`: is awaited from time to time. `listing`: lists a prefix; None: as the store does.

    Raises:
        StoreError: the store failed.
        TooManyObjects: they do not fit into the inventory.
    """
    for prefix in prefixes:
        async for page in calls.pages((listing or calls.store.list)(prefix)):
            for some in batched(page, _SLICE):
                for info in some:
                    inventory.add(info)
                await rest()
            advance(len(page))
    inventory.drop_repeated()
