# SPDX-License-Identifier: Apache-2.0
"""The cleaner on a folder: what it removes, what it keeps, and what its index holds."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreUnavailable
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.fsspec import store as fsspec_store
from ecshare.store.fsspec.store import open_fsspec
from ecshare.store.integrity import Integrity
from ecshare.store.keys import (
    CLEANED_KEY,
    PROBE_KEY,
    Key,
    Kind,
    gap_key,
    lease_key,
    manifest_key,
    new_clock_key,
    tp_size_key,
)
from ecshare.store.objects import ObjectInfo
from ecshare.upkeep import calls, inventory, notes
from ecshare.upkeep.budget import ALL, Budget
from ecshare.upkeep.clean import Cleaner, Report
from ecshare.upkeep.inventory import Inventory
from ecshare.upkeep.uses import Uses, pack, unpack
from tests.ecshare.upkeep.stores import (
    NAMESPACE,
    OTHER,
    Full,
    age,
    ec,
    files,
    kept,
    kv,
    note,
    opened,
    put,
)

DAYS = 24


async def clean(
    root: Path,
    max_bytes: dict[str, int] | None = None,
    ttl: dict[str, float] | None = None,
    **terms: Any,
) -> Report:
    store = opened(root)
    try:
        return await Cleaner(store, Budget(max_bytes or {}, ttl or {}), **terms).run()
    finally:
        await store.close()


async def test_oldest_objects_are_removed_until_the_budget_holds(tmp_path: Path) -> None:
    keys = [kv(str(n)) for n in range(10)]
    for n, key in enumerate(keys):
        put(tmp_path, key, hours=n + 1)
    report = await clean(tmp_path, {ALL: 500})
    assert kept(tmp_path) == set(keys[:4])  # slightly below
    assert (report.num_to_remove, report.num_removed) == (6, 6)
    (row,) = report.rows
    assert (row.num_bytes, row.removed_bytes) == (1000, 600)


async def test_recorded_use_keeps_an_old_object(tmp_path: Path) -> None:
    old, newer = kv("old"), kv("newer")
    put(tmp_path, old, hours=50)
    put(tmp_path, newer, hours=5)
    note(tmp_path, [(old, 1, 0)])
    await clean(tmp_path, {ALL: 150})
    assert kept(tmp_path) == {old}


async def test_narrowest_ttl_counts_from_the_last_use(tmp_path: Path) -> None:
    used, unused, picture = kv("used"), kv("unused"), ec("picture")
    other = kv("other", namespace=OTHER)
    for key in (used, unused, picture, other):
        put(tmp_path, key, hours=30)
    note(tmp_path, [(used, 3, 0)])
    await clean(tmp_path, ttl={"kv": 24, OTHER: 31})
    assert kept(tmp_path) == {used, picture, other}


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"kv": 110}, {"kv1", "ec1", "ec2", "other1", "other2"}),
        ({OTHER: 110}, {"kv1", "kv2", "ec1", "ec2", "other1"}),
        ({"ec": 0, OTHER: 110, ALL: 250}, {"kv1", "other1"}),
    ],
)
async def test_budgets_of_a_kind_and_of_a_namespace_spare_others(
    tmp_path: Path, limits: dict[str, int], left: set[str]
) -> None:
    keys = {f"{kind.__name__}{n}": kind(n) for kind in (kv, ec) for n in "12"}
    keys |= {f"other{n}": kv(n, namespace=OTHER) for n in "12"}
    if "kv" in limits:
        keys |= {f"other{n}": ec(n, namespace=OTHER) for n in "12"}
    for name, key in keys.items():
        put(tmp_path, key, hours=int(name[-1]))
    await clean(tmp_path, limits)
    assert kept(tmp_path) == {keys[name] for name in left}


async def test_chain_loses_its_end_first(tmp_path: Path) -> None:
    chain = [kv(str(n)) for n in range(10)]
    for key in chain:
        put(tmp_path, key, hours=30)
    note(tmp_path, [(key, 2, n + 1) for n, key in enumerate(chain)])
    for max_bytes, num in ((900, 8), (500, 4), (150, 1)):
        await clean(tmp_path, {ALL: max_bytes})
        assert kept(tmp_path) == set(chain[:num])


async def test_chunk_saved_after_its_note_does_not_outlive_those_before_it(
    tmp_path: Path,
) -> None:
    first, second = kv("first"), kv("second")
    put(tmp_path, first, hours=1)
    put(tmp_path, second, hours=0.9)
    note(tmp_path, [(first, 1, 1), (second, 1, 2)])
    await clean(tmp_path, {ALL: 150})
    assert kept(tmp_path) == {first}


async def test_all_shards_of_a_chunk_are_removed_together(tmp_path: Path) -> None:
    shards = [kv("chunk", f"t{n}of4") for n in range(4)]
    for key in (*shards, kv("young")):
        put(tmp_path, key, hours=3 if key in shards else 1)
    age(tmp_path / shards[0], 2)
    await clean(tmp_path, {ALL: 450})
    assert kept(tmp_path) == {kv("young")}


async def test_notes_become_an_index_that_the_next_run_uses(tmp_path: Path) -> None:
    used, other = kv("used"), kv("other")
    put(tmp_path, used, hours=50)
    put(tmp_path, other, hours=5)
    first = note(tmp_path, [(used, 1, 3)])
    assert (await clean(tmp_path, {ALL: 1000})).num_notes == 1
    (index,) = (name for name in files(tmp_path) if name.startswith("upkeep/1/uses/"))
    assert index != first
    # An index ages like a note.
    age(tmp_path / index, 3.5)
    assert (await clean(tmp_path, {ALL: 1000})).num_notes == 1
    await clean(tmp_path, {ALL: 150})
    assert kept(tmp_path) == {used}


async def test_use_of_an_object_not_stored_yet_is_kept_in_the_index(tmp_path: Path) -> None:
    chain = [kv(str(n)) for n in range(2)]
    note(tmp_path, [(key, 0, n) for n, key in enumerate(chain)])
    await clean(tmp_path)
    for key in chain:
        put(tmp_path, key, hours=0)
    await clean(tmp_path, {ALL: 240})  # of which a third is kept free
    assert kept(tmp_path) == {chain[0]}


async def test_clock_of_the_cleaners_host_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cleaner's own clock is a day behind that of the disk."""
    old, young = kv("old"), kv("young")
    put(tmp_path, old, hours=30)
    put(tmp_path, young, hours=2)
    real_s = time.time
    monkeypatch.setattr(time, "time", lambda: real_s() - 24 * 3600)
    await clean(tmp_path, ttl={ALL: 24})
    assert kept(tmp_path) == {young}


async def test_note_with_a_future_time_counts_as_new(tmp_path: Path) -> None:
    one, two = kv("one"), kv("two")
    put(tmp_path, one, hours=-500)
    put(tmp_path, two, hours=10)
    note(tmp_path, [(two, 0, 0)], hours=-900)
    report = await clean(tmp_path, {ALL: 1000}, {ALL: 1})
    assert kept(tmp_path) == {one, two}
    assert report.num_notes == 1


async def test_old_leases_probes_notes_and_reports_are_removed(tmp_path: Path) -> None:
    gaps = [gap_key(kv(name)) for name in ("young", "old")]
    put(tmp_path, gaps[0], hours=0.5)
    put(tmp_path, gaps[1], hours=2)
    fresh = [
        "doctor-" + "0" * 16,
        "probe/bench-" + "0" * 16,
        lease_key(Kind.KV, 1),
        new_clock_key(),
        "router/1/ab/" + "ab" * 32,
    ]
    stale = [
        "doctor-" + "1" * 16,
        "probe/bench-" + "1" * 16,
        lease_key(Kind.KV, 2),
        lease_key(Kind.KV, 2, "acme"),
        new_clock_key(),
        "router/1/cd/" + "cd" * 32,
    ]
    old_format = [f"kv/1/{NAMESPACE}/aa/{'aa' * 32}", f"ec/1/manifests/{NAMESPACE}"]
    for key in fresh:
        put(tmp_path, key, hours=2)
    for key in (*stale, *old_format):
        put(tmp_path, key, hours=31 * DAYS)
    put(tmp_path, PROBE_KEY, hours=99 * DAYS)
    await clean(tmp_path)
    index = {name for name in files(tmp_path) if name.startswith("upkeep/1/uses/")}
    assert files(tmp_path) - index == {gaps[0], *fresh, PROBE_KEY, CLEANED_KEY}


async def test_orphaned_namespace_loses_its_manifest_and_marks(tmp_path: Path) -> None:
    of_orphan = [manifest_key(Kind.KV, OTHER), tp_size_key(Kind.KV, OTHER, 2)]
    living = [manifest_key(Kind.KV, NAMESPACE), tp_size_key(Kind.KV, NAMESPACE, 1), kv("used")]
    renewed = manifest_key(Kind.EC, OTHER)
    for key in (*of_orphan, *living, kv("dead", namespace=OTHER)):
        put(tmp_path, key, hours=40)
    put(tmp_path, renewed, hours=5)
    note(tmp_path, [(kv("used"), 1, 0)])
    await clean(tmp_path, ttl={ALL: 2})
    assert kept(tmp_path) == {*living, renewed}


async def test_temporary_files_of_killed_writers_are_removed_after_an_hour(tmp_path: Path) -> None:
    key = kv("x")
    put(tmp_path, key, hours=1)
    folder = Path(key).parent
    stale, fresh = f"{folder}/.{'0' * 16}.7.tmp", f"{folder}/.{'1' * 16}.7.tmp"
    put(tmp_path, stale, hours=1.1)
    put(tmp_path, fresh, hours=0.5)
    put(tmp_path, f"{folder}/.hidden", hours=50)
    foreign = f"other/.{'0' * 16}.7.tmp"
    put(tmp_path, foreign, hours=50)
    report = await clean(tmp_path)
    assert kept(tmp_path) == {key, fresh, f"{folder}/.hidden", foreign}
    assert report.num_temporary_removed == 1


FOREIGN = (
    "readme.txt",
    "ec/2/readme.txt",
    f"kv/2/{NAMESPACE}/aa/{'ab' * 32}",
    f"kv/3/{NAMESPACE}/aa/{'aa' * 32}",
    f"kv/2/{NAMESPACE}/aa/{'aa' * 32}.a.b",
    f"mm/2/{NAMESPACE}/aa/{'aa' * 32}",
    "doctor-1",
    "probe/bench-1",
    "upkeep/2/uses/x",
    f"upkeep/1/other/{'a' * 32}",
    "upkeep/1/lease/mine",
    "upkeep/1/clock/readme.txt",
    "upkeep/1/uses/kv/readme.txt",
)


async def test_foreign_keys_are_kept_and_counted(tmp_path: Path) -> None:
    for key in FOREIGN:
        put(tmp_path, key, hours=999 * DAYS)
    (tmp_path / "ec" / "2" / NAMESPACE).mkdir()
    os.symlink("/", tmp_path / "ec" / "2" / NAMESPACE / "aa")
    report = await clean(tmp_path, {ALL: 0}, {ALL: 0})
    assert files(tmp_path) >= set(FOREIGN)
    assert report.num_foreign == len(FOREIGN)
    assert report.rows == []


async def test_buffers_for_vllm_before_v1_are_held_for_an_hour(tmp_path: Path) -> None:
    part = "1f-0123456789ab-0123456789"
    young, old = kv("young", part), kv("old", part)
    put(tmp_path, young, hours=0.5)
    put(tmp_path, old, hours=2)
    await clean(tmp_path, {ALL: 0}, {ALL: 0.1})
    assert kept(tmp_path) == {young}


async def test_cleaner_of_one_kind_keeps_the_other_and_its_notes(tmp_path: Path) -> None:
    put(tmp_path, kv("x"), hours=5)
    put(tmp_path, ec("x"), hours=50)
    noted = note(tmp_path, [(ec("x"), 1, 0)], hours=60)
    report = await clean(tmp_path, {"kv": 0, "ec": 0}, kinds=[Kind.KV])
    assert kept(tmp_path) == {ec("x")}
    assert noted in files(tmp_path)
    assert report.num_notes == 0


async def test_dry_run_ignores_the_time_of_a_file_from_the_future(tmp_path: Path) -> None:
    put(tmp_path, kv("fresh"), hours=1)
    put(tmp_path, "readme.txt", hours=-999 * DAYS)
    assert (await clean(tmp_path, ttl={ALL: 24}, is_dry=True)).num_to_remove == 0


async def test_invalid_sizes_and_times_of_a_listing_are_clamped() -> None:
    inventory = Inventory()
    for n, (size, at) in enumerate([(1 << 63, 0.0), (1 << 64, nan), (-5, inf), (1 << 99, -inf)]):
        inventory.add(ObjectInfo(kv(str(n)), size, at))
    _, sizes, minutes, _ = inventory.arrays()
    assert int(sizes.sum()) == 3 << 44
    assert not minutes.any()
    inventory.close()


async def test_dry_run_changes_nothing(tmp_path: Path) -> None:
    for n in range(4):
        put(tmp_path, kv(str(n)), hours=n)
    note(tmp_path, [(kv("3"), 0, 0)])
    before = files(tmp_path)
    report = await clean(tmp_path, {ALL: 200}, is_dry=True)
    assert files(tmp_path) == before
    assert (report.num_to_remove, report.num_removed) == (3, 0)


async def test_hostile_notes_change_only_the_order(tmp_path: Path) -> None:
    key = Integrity(b"k" * 32)
    objects = [kv(str(n)) for n in range(4)]
    for n, each in enumerate(objects):
        put(tmp_path, each, hours=n + 1)
    note(tmp_path, [(objects[3], 1, 0)], integrity=key)
    forged = note(tmp_path, [(objects[2], 0, 0)])
    put(tmp_path, "upkeep/1/uses/kv/junk", hours=0, num_bytes=5000)
    put(tmp_path, "upkeep/1/uses/kv/" + "0" * 32, hours=0, num_bytes=0)
    (tmp_path / "upkeep/1/uses/kv" / ("1" * 32)).mkdir()
    stale = note(tmp_path, [(objects[2], 0, 0)], hours=49)
    with (tmp_path / "upkeep/1/uses/kv" / ("2" * 32)).open("wb") as sparse:
        sparse.truncate(1 << 40)
    await clean(tmp_path, {ALL: 250}, integrity=key)
    assert kept(tmp_path) == {objects[0], objects[3]}
    # What cannot be read may be another's: it goes when it is old.
    assert forged in files(tmp_path)
    assert stale not in files(tmp_path)


async def test_two_cleaners_at_once_lose_no_use(tmp_path: Path) -> None:
    used = [kv(f"used {n}") for n in range(50)]
    for key in used:
        put(tmp_path, key, hours=90)
    for n in range(100):
        put(tmp_path, kv(f"unused {n}"), hours=10)
    for n, key in enumerate(used):
        note(tmp_path, [(key, 1, n)])
    for _ in range(5):
        await asyncio.gather(*(clean(tmp_path, {ALL: 5200}) for _ in range(2)))
    assert kept(tmp_path) >= set(used)
    await clean(tmp_path, {ALL: 5000}, {ALL: 20})
    assert set(used) >= kept(tmp_path) >= set(used[:48])


async def test_cleaner_reads_the_index_of_another_that_removed_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = kv("used")
    put(tmp_path, used, hours=90)
    put(tmp_path, kv("unused"), hours=10)
    note(tmp_path, [(used, 1, 0)])
    store = opened(tmp_path)
    cleaner = Cleaner(store, Budget({ALL: 150}))
    listing = cleaner._list

    async def overtaken(*arguments: Any) -> Any:
        temporary = await listing(*arguments)
        await clean(tmp_path)
        return temporary

    monkeypatch.setattr(cleaner, "_list", overtaken)
    await cleaner.run()
    await store.close()
    assert kept(tmp_path) == {used}


async def test_run_beyond_its_time_limit_stops_removing_and_keeps_uses(tmp_path: Path) -> None:
    put(tmp_path, kv("x"), hours=5)
    put(tmp_path, kv("y"), hours=50)
    note(tmp_path, [(kv("y"), 1, 0)])
    report = await clean(tmp_path, {ALL: 0}, most_s=0)
    assert (report.is_whole, report.num_removed) == (False, 0)
    await clean(tmp_path, {ALL: 150})
    assert kept(tmp_path) == {kv("y")}


async def test_store_without_times_is_not_cleaned() -> None:
    store = open_fsspec(StoreConfig(url="memory://without-times"), "options")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsspec_store, "modified_s", lambda _: 0.0)
        await store.put(kv("x"), b"x")
        with pytest.raises(StoreUnavailable, match="does not state when"):
            await Cleaner(store, Budget({ALL: 0})).run()
    assert await store.exists([Key(kv("x"))]) == [True]
    await store.close()


async def test_full_disk_is_cleaned_although_writes_fail_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_PAUSE_S", 0.0)
    for n in range(10):
        put(tmp_path, kv(str(n)), hours=n)
    report = await Cleaner(Full(str(tmp_path)), Budget({ALL: 500})).run()
    assert report.num_removed == 6
    assert kept(tmp_path) == {kv(str(n)) for n in range(4)}


async def test_cleaner_of_a_full_disk_with_a_fast_clock_removes_nothing_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time of the store is known, so ages count from the latest object."""
    monkeypatch.setattr(calls, "_PAUSE_S", 0.0)
    for n in range(3):
        put(tmp_path, kv(str(n)), hours=100 + n)
    report = await Cleaner(Full(str(tmp_path)), Budget(ttl_hours={ALL: 1.5})).run()
    assert report.num_removed == 1
    assert kept(tmp_path) == {kv("0"), kv("1")}


async def test_endless_listing_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(prefix: str, temporary: object) -> AsyncIterator[ObjectInfo]:
        while not prefix:
            yield ObjectInfo(Key("not/ours"), 1, 1.0)
            await asyncio.sleep(0)

    monkeypatch.setattr(inventory, "MOST_KEYS", 5_000)
    store = DirectoryStore(str(tmp_path))
    monkeypatch.setattr(store, "list_into", endless)
    with pytest.raises(StoreUnavailable, match="more than 5,000 keys"):
        await Cleaner(store, Budget(), is_dry=True).run()


async def test_room_is_made_for_the_growth_since_the_last_run(tmp_path: Path) -> None:
    for n in range(10):
        put(tmp_path, kv(str(n)), hours=n)
    assert (await clean(tmp_path, {ALL: 1000})).num_removed == 0
    age(tmp_path / CLEANED_KEY, 2.5)
    # 300 bytes came in 150 minutes.
    report = await clean(tmp_path, {ALL: 1000})
    assert kept(tmp_path) == {kv(str(n)) for n in range(6)}
    assert report.num_removed == 4


async def test_store_that_does_not_grow_may_fill_its_budget(tmp_path: Path) -> None:
    for n in range(10):
        put(tmp_path, kv(str(n)), hours=n + 1)
    for _ in range(3):
        assert (await clean(tmp_path, {ALL: 1000})).num_removed == 0


async def test_room_for_growth_is_at_most_a_third_of_the_budget(tmp_path: Path) -> None:
    put(tmp_path, CLEANED_KEY, hours=1)
    for n in range(10):
        put(tmp_path, kv(str(n)), hours=0)
    report = await clean(tmp_path, {ALL: 1000})
    assert report.num_removed == 4


async def test_store_with_too_many_objects_is_cleaned_in_parts_to_the_same_budget(
    tmp_path: Path,
) -> None:
    """Notes and manifests are those of the whole store: no part may remove what another needs."""
    chain = [kv(str(n)) for n in range(300)]
    for key in chain:
        put(tmp_path, key, hours=9)
    put(tmp_path, kv("last", namespace=OTHER), hours=0.5)
    manifests = [manifest_key(Kind.KV, each) for each in (NAMESPACE, OTHER)]
    for key in (*manifests, manifest_key(Kind.KV, "0" * 32)):
        put(tmp_path, key, hours=200)
    noted = note(tmp_path, [(key, 0.5, 0) for key in chain[:60]])
    report = await clean(tmp_path, {"kv": 15_000}, {"kv": 48}, most_objects=100)
    assert report.num_parts >= 4
    left = kept(tmp_path)
    assert left >= {*chain[:60], kv("last", namespace=OTHER), *manifests}
    assert 14_000 <= 100 * len(left & {*chain, kv("last", namespace=OTHER)}) <= 15_000
    assert len(left) == report.rows[0].num_objects - report.rows[0].num_removed + 1 + 2
    assert (report.num_removed, report.num_notes) == (300 - (len(left) - 3), 1)
    assert noted not in files(tmp_path)
    assert sum(map(len, indexes(tmp_path))) == 60, "each use is in the index of its part alone"
    # What the notes said is in the indexes, whatever the parts of the next run are.
    assert (await clean(tmp_path, ttl={"kv": 3})).num_parts == 1
    assert kept(tmp_path) == {*chain[:60], kv("last", namespace=OTHER), *manifests}


def indexes(root: Path) -> list[Uses]:
    keys = [Key(name) for name in files(root) if name.startswith("upkeep/1/uses/")]
    return [unpack(memoryview((root / key).read_bytes()), key, None) for key in keys]


async def test_run_in_parts_that_fails_keeps_the_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = [kv(str(n)) for n in range(100)]
    for key in chain:
        put(tmp_path, key, hours=9)
    noted = note(tmp_path, [(key, 1, 0) for key in chain])
    cleaner = Cleaner(opened(tmp_path), Budget(), most_objects=80)
    listing, num_listed = cleaner._list, 0

    async def once(*arguments: Any) -> Any:
        nonlocal num_listed
        temporary = await listing(*arguments)
        num_listed += 1
        if num_listed == 2:
            raise StoreUnavailable("the disk is gone")
        return temporary

    monkeypatch.setattr(cleaner, "_list", once)
    with pytest.raises(StoreUnavailable, match="disk is gone"):
        await cleaner.run()
    assert noted in files(tmp_path)
    await clean(tmp_path, ttl={ALL: 3})
    assert kept(tmp_path) == set(chain)


async def test_millions_of_forged_uses_take_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be of now, of names that nobody stores, with any position."""
    monkeypatch.setattr(notes, "_MOST_UNMATCHED", 1000)
    monkeypatch.setattr(notes, "_MOST_NOTES", 20)
    put(tmp_path, kv("x"), hours=5)
    rng, key = np.random.default_rng(1), Key("upkeep/1/uses/kv/" + "0" * 32)
    for n in range(40):
        ids, ages = rng.integers(0, 1 << 64, 5000, np.uint64), np.zeros(5000, np.uint32)
        forged = Uses(ids, ages, rng.integers(0, 1 << 32, 5000, np.uint32))
        key = Key(f"{key[:-2]}{n:02d}")
        put(tmp_path, key, hours=-1e6 if n % 2 else 1e6 / 2)
        (tmp_path / key).write_bytes(pack(forged, key, None))
    report = await clean(tmp_path, ttl={ALL: 48})
    assert report.num_notes == 20
    assert kept(tmp_path) == {kv("x")}
    left = [name for name in files(tmp_path) if name.startswith("upkeep/1/uses/")]
    known = max(left, key=lambda name: (tmp_path / name).stat().st_mtime)
    assert len(left) == 20 + 1
    assert len(unpack(memoryview((tmp_path / known).read_bytes()), Key(known), None)) == 1000
