# SPDX-License-Identifier: Apache-2.0
"""An inventory of a faulty listing, and of one that is too long for the memory."""

from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np
import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.keys import Kind, gap_key, lease_key, manifest_key, new_uses_key
from ecshare.store.objects import ObjectInfo
from ecshare.store.open import open_store
from ecshare.upkeep import inventory as module
from ecshare.upkeep.calls import Calls
from ecshare.upkeep.inventory import WHOLE, Inventory, Part, TooManyObjects
from ecshare.upkeep.listing import list_into
from tests.bad_s3.faults import modes
from tests.bad_s3.server import BUCKET, bad_s3
from tests.ecshare.upkeep.stores import ec, kv


@pytest.mark.parametrize(
    ("stated_s", "year"),
    [(-1e300, 1970), (float("nan"), 1970), (1.7e9, 2023), (1e12, 9999), (1e300, 9999)],
)
def test_every_time_has_a_date(stated_s: float, year: int) -> None:
    inventory = Inventory()
    inventory.add(ObjectInfo(kv("a"), -5, stated_s))
    _, sizes, minutes, _ = inventory.arrays()
    assert int(sizes[0]) == 0
    assert datetime.fromtimestamp(int(minutes[0]) * 60, UTC).year == year
    inventory.close()


@pytest.fixture
def held() -> Iterator[Inventory]:
    inventory = Inventory()
    yield inventory
    inventory.close()


def test_key_that_is_listed_twice_counts_once_with_its_last_line(held: Inventory) -> None:
    shards = [kv("chunk", f"t{n}of4") for n in range(4)]
    others = [ec("chunk"), gap_key(shards[0]), *(kv(str(n)) for n in range(3000))]
    small = [manifest_key(Kind.KV, "0" * 32), lease_key(Kind.KV, 1), new_uses_key(Kind.KV)]
    for n, key in enumerate((*shards, *others, *small)):
        held.add(ObjectInfo(key, n, 60.0 * n))
    for n, key in enumerate((shards[1], *others, *small)):
        held.add(ObjectInfo(key, 7000 + n, 6e6))
    held.drop_repeated()
    own = [*held.keys(np.arange(len(held)))]
    assert sorted(own) == sorted({*shards, *others})
    _, sizes, minutes, _ = held.arrays()
    found = dict(zip(own, zip(sizes.tolist(), minutes.tolist(), strict=True), strict=True))
    assert [found[key] for key in shards] == [(0, 0), (7000, 100_000), (2, 2), (3, 3)]
    assert {found[key][1] for key in others} == {100_000}
    lists = [*held.records.values(), held.leftovers, held.uses]
    assert [len(each) for each in lists] == [1, 1, 1]


async def test_server_that_lists_all_twice_doubles_nothing() -> None:
    with bad_s3() as server:
        config = StoreConfig(url=f"s3://{BUCKET}/x", storage_options=server.storage_options)
        store, inventory = open_store(config, "options"), Inventory()
        for n in range(5):
            await store.put(kv(str(n)), b"12345")
        server.faults = modes("list:twice")
        await list_into(inventory, Calls(store, 10), ["kv/", ""])
        assert len(inventory) == 5
        assert int(inventory.arrays()[1].sum()) == 25
        inventory.close()
        await store.close()


def test_parts_have_each_name_once_and_shards_together() -> None:
    keys = [kv(str(n), part) for n in range(200) for part in ("t0of2", "t1of2", "gap")]
    parts = [quarter for half in WHOLE.halves() for quarter in half.halves()]
    found = []
    for part in parts:
        inventory = Inventory(part=part)
        for key in keys:
            inventory.add(ObjectInfo(key, 1, 1.0))
        own = [*inventory.keys(np.arange(len(inventory)))]
        assert len(own) == 3 * len({key.partition(".")[0] for key in own})
        assert 60 < len(own) < 240
        found += own
        inventory.close()
    assert sorted(found) == sorted(keys)
    with pytest.raises(TooManyObjects, match="too many objects, even for 64 listings"):
        Part(3, 64).halves()


@pytest.mark.parametrize("num_namespaces", [1, 1000])
def test_memory_is_bounded_also_by_namespaces(num_namespaces: int) -> None:
    inventory = Inventory(most=1000)
    namespaces = [f"{n % num_namespaces:032x}" for n in range(1001)]
    lines = [ObjectInfo(kv("x", f"{n}", name), 1, 1.0) for n, name in enumerate(namespaces)]
    with pytest.raises(TooManyObjects, match="more than 1,000 objects"):
        any(map(inventory.add, lines))
    assert len(inventory) + 16 * len(inventory.spaces) <= 1016
    inventory.close()


def test_many_forged_notes_hide_no_manifest_and_no_leftover(
    held: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_OTHERS", 10)
    for key in [new_uses_key(Kind.KV) for _ in range(99)]:
        held.add(ObjectInfo(key, 1, 1.0))
    held.add(ObjectInfo(manifest_key(Kind.KV, "0" * 32), 1, 1.0))
    held.add(ObjectInfo(lease_key(Kind.KV, 1), 1, 1.0))
    assert (len(held.uses), len(held.records), len(held.leftovers)) == (10, 1, 1)
