# SPDX-License-Identifier: Apache-2.0
"""The cleaner over every back end, and over one that fails in the middle."""

import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreBusy, StoreDenied, StoreUnavailable
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.fsspec.store import FsspecStore, open_fsspec
from ecshare.store.keys import CLEANED_KEY, Key, Kind, manifest_key, new_uses_key, use_id_of
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.upkeep import clean as module
from ecshare.upkeep.budget import ALL, Budget
from ecshare.upkeep.clean import Cleaner
from ecshare.upkeep.uses import Uses, pack
from tests.bad_s3.server import BadS3
from tests.ecshare.store.azurite import Azurite
from tests.ecshare.store.conftest import Bucket, azure_config, azurite, gcs, gcs_config, seaweedfs
from tests.ecshare.upkeep.stores import NAMESPACE, kept, kv, note, put

__all__ = ["azurite", "gcs", "seaweedfs"]

NUM = 40
FOREIGN = Key("foreign/object")


async def check(store: ObjectStore) -> None:
    """Store a chain, note it, and clean the store to half of it; then once more, to a quarter."""
    chain = [kv(str(n)) for n in range(NUM)]
    for key in chain:
        await store.put(key, bytes(100))
    await store.put(FOREIGN, b"x")
    note = new_uses_key(Kind.KV)
    uses = Uses.of((use_id_of(key), 1, n + 1) for n, key in enumerate(chain))
    await store.put(note, pack(uses, note, None))
    # In the second run all counts as growth of the store, for which a third is kept free.
    for num, max_bytes in ((NUM // 2, NUM // 2 * 104), (NUM // 4, NUM // 4 * 156)):
        await Cleaner(store, Budget({ALL: max_bytes})).run()
        stays = await store.exists(chain)
        assert stays == [n < num for n in range(NUM)]
    left = {info.key async for info in store.list("")} - set(chain[: NUM // 4])
    assert left >= {FOREIGN, CLEANED_KEY}
    assert len(left) == 3, "and the index"
    await store.close()


async def test_memory_store_is_cleaned() -> None:
    await check(open_store(StoreConfig(url=f"memory://{uuid.uuid4().hex}/cache"), "options"))


async def test_fsspec_folder_is_cleaned(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    await check(open_fsspec(StoreConfig(url=f"file://{tmp_path}/cache"), "options"))


@pytest.mark.s3
async def test_s3_bucket_is_cleaned(seaweedfs: Bucket) -> None:
    store = open_store(seaweedfs.config(), "options")
    assert not isinstance(store, FsspecStore)
    await check(store)


@pytest.mark.s3
@pytest.mark.nightly
async def test_s3_bucket_is_cleaned_through_s3fs(seaweedfs: Bucket) -> None:
    await check(open_fsspec(seaweedfs.config(), "options"))


async def test_google_bucket_is_cleaned(gcs: BadS3) -> None:
    await check(open_store(gcs_config(gcs), "options"))


@pytest.mark.azure
@pytest.mark.nightly
async def test_azure_container_is_cleaned(azurite: Azurite) -> None:
    await check(open_store(azure_config(azurite), "options"))


class Failing(DirectoryStore):
    """Serves some calls of `delete`, then fails `num_failures` times."""

    num_served = 1
    num_failures = 1000
    error: Exception = StoreUnavailable("the disk is gone")

    async def delete(self, keys: Sequence[Key]) -> None:
        if self.num_served or not self.num_failures:
            self.num_served -= 1
            await super().delete(keys)
        else:
            self.num_failures -= 1
            raise self.error


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """A noted chain of 100 chunks, of which 10 are removed at once."""
    monkeypatch.setattr(module, "PAGE", 10)
    monkeypatch.setattr("ecshare.upkeep.calls._PAUSE_S", 0.0)
    chain = [kv(str(n)) for n in range(100)]
    for key in chain:
        put(tmp_path, key, hours=9)
    note(tmp_path, [(key, 1, n + 1) for n, key in enumerate(chain)])
    return chain


async def test_failure_during_removal_keeps_chain_beginnings_and_uses(
    tmp_path: Path, chain: list[Key]
) -> None:
    store = Failing(str(tmp_path))
    cleaner = Cleaner(store, Budget({ALL: 5000}))
    with pytest.raises(StoreUnavailable, match="the disk is gone"):
        await cleaner.run()
    assert (cleaner.report.num_removed, cleaner.report.num_to_remove) == (10, 52)
    assert kept(tmp_path) == set(chain[:90])
    store.num_failures = 0
    await Cleaner(store, Budget({ALL: 5000})).run()
    assert kept(tmp_path) == set(chain[:48])
    await store.close()


async def test_busy_store_is_retried(tmp_path: Path, chain: list[Key]) -> None:
    store = Failing(str(tmp_path))
    store.num_failures, store.error = 2, StoreBusy("slow down")
    await Cleaner(store, Budget({ALL: 5000})).run()
    assert kept(tmp_path) == set(chain[:48])
    await store.close()


class Locked(DirectoryStore):
    """Refuses to remove one object, after it has removed those before it."""

    locked = Key("none")

    async def delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key == self.locked:
                raise StoreDenied("Operation not permitted")
            await super().delete([key])


async def test_undeletable_object_keeps_at_most_its_batch(tmp_path: Path, chain: list[Key]) -> None:
    store = Locked(str(tmp_path))
    store.locked = chain[99]  # the first to go
    manifest = manifest_key(Kind.KV, NAMESPACE)
    put(tmp_path, manifest, hours=999)
    cleaner = Cleaner(store, Budget({ALL: 0}))
    with pytest.raises(StoreDenied, match="not permitted"):
        await cleaner.run()
    assert kept(tmp_path) == {*chain[90:], manifest}
    assert cleaner.report.num_removed == 90
    uses = list((tmp_path / "upkeep/1/uses/kv").iterdir())
    assert len(uses) == 1, "the note is merged"
    await store.close()


async def test_cleaner_stops_if_all_removals_are_refused(tmp_path: Path, chain: list[Key]) -> None:
    store = Failing(str(tmp_path))
    store.num_served, store.error = 0, StoreDenied("read only")
    with pytest.raises(StoreDenied, match="read only"):
        await Cleaner(store, Budget({ALL: 0})).run()
    assert store.num_failures > 990
    assert kept(tmp_path) == set(chain)
    await store.close()
