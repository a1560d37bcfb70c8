# SPDX-License-Identifier: Apache-2.0
"""Prefetches objects into this host's cache: those that were used last."""

import time
from collections.abc import Sequence
from enum import StrEnum

from ecshare.store.errors import ObjectCorrupt, ObjectMissing
from ecshare.store.format import unseal
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key, Kind, kind_prefix, namespace_prefix, uses_prefix
from ecshare.store.objects import ObjectStore
from ecshare.upkeep.calls import Calls
from ecshare.upkeep.inventory import MOST_KEYS, Inventory, Role
from ecshare.upkeep.listing import list_into
from ecshare.upkeep.notes import NoteReader, Pace
from ecshare.upkeep.plan import hottest


class Brought(StrEnum):
    """The outcome for one object."""

    NEW = "new"
    THERE = "there already"
    UNFIT = "not brought"
    """Gone or damaged, without a MAC of our key, or compressed: only engines decompress."""
    FULL = "no room"


async def used_last(  # noqa: PLR0913 — of what, and on which terms
    store: ObjectStore,
    max_bytes: int,
    *,
    kinds: Sequence[Kind] = tuple(Kind),
    namespace: str = "",
    integrity: Integrity | None = None,
    timeout_s: float = 60.0,
    pace: Pace | None = None,
    most_objects: int = MOST_KEYS,
) -> list[Key]:
    """Return the keys of the objects that were used last, the latest first, of at most `max_bytes`
    in all. Writes nothing.

    `namespace`: if given, only its objects. `integrity`: notes without its MAC are ignored.
    `timeout_s`: for each call of the store. `most_objects`: the most in memory.

    Raises:
        StoreError: the store failed.
        TooManyObjects: they do not fit into memory.
    """
    calls, pace, inventory = Calls(store, timeout_s), pace or Pace(store), Inventory(most_objects)
    below = (
        namespace_prefix(each, namespace) if namespace else kind_prefix(each) for each in kinds
    )
    try:
        await list_into(inventory, calls, [*below, *map(uses_prefix, kinds)], rest=pace)
        now = int(time.time() // 60)
        ages = inventory.ages(now)
        await NoteReader(calls, kinds, integrity, pace).merge(inventory, ages, now)
        spaces = [n for n, space in enumerate(inventory.spaces) if space.role is Role.OBJECTS]
        return list(inventory.keys(hottest(ages.candidates(), spaces, max_bytes)))
    finally:
        inventory.close()


async def bring(
    store: ObjectStore, host: HostCache, key: Key, integrity: Integrity | None
) -> tuple[Brought, int]:
    """Fetch and verify the object under `key`, and publish it on this host; return the outcome, and
    the size.

    Raises:
        StoreUnavailable, StoreDenied: the store failed.
    """
    here = host.open(key)
    if here is not None:
        here.close()
        return Brought.THERE, here.num_bytes
    draft = host.receive(key, host.limit_bytes)
    try:
        await store.get(key, draft)
        sealed = unseal(draft.body, key, integrity=integrity, streamed=draft.checksum)
        if "packed" in sealed.spec.attributes:
            return Brought.UNFIT, 0
        num_bytes = len(draft.body)
        entry = draft.publish()
    except (ObjectMissing, ObjectCorrupt):
        return Brought.UNFIT, 0
    finally:
        draft.discard()
    if entry is None:
        return Brought.FULL, 0
    entry.close()
    return Brought.NEW, num_bytes
