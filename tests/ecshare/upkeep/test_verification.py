# SPDX-License-Identifier: Apache-2.0
"""Which objects a verification reads, and which it removes."""

import asyncio
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreDenied, StoreUnavailable
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.keys import Key
from ecshare.store.objects import Buffer, ObjectInfo, ObjectStore, Sink, read
from ecshare.store.open import open_store
from ecshare.upkeep.calls import Calls
from ecshare.upkeep.inventory import Inventory
from ecshare.upkeep.verification import Verification, Verified
from tests.ecshare.upkeep.stores import NAMESPACE, OTHER, ec, kv

PAYLOAD = 1000


def sealed(key: Key) -> bytearray:
    body = bytearray(PROLOGUE_BYTES + PAYLOAD)
    seal(memoryview(body), TensorSpec("U8", (PAYLOAD,), {}), key)
    return body


def flipped(key: Key) -> bytearray:
    body = sealed(key)
    body[-1] ^= 1
    return body


class Garbling(DirectoryStore):
    """Damages what it returns, on the way, as many times as `left` says."""

    left = 1_000_000

    async def get(self, key: Key, sink: Sink) -> None:
        """See ObjectStore."""
        if self.left == 0:
            return await super().get(key, sink)
        self.left -= 1
        num_bytes = os.path.getsize(f"{self._root}/{key}")
        sink.begin(num_bytes)
        sink.write(0, bytes(num_bytes))
        return None


class Keeping(DirectoryStore):
    """Refuses all removals."""

    async def delete(self, keys: Sequence[Key]) -> None:
        """See ObjectStore."""
        raise StoreDenied("removals are not allowed here")


def verify(store: ObjectStore, *, repair: bool = True, sample: int | None = None) -> Verified:
    async def run() -> Verified:
        inventory = Inventory()
        async for info in store.list(""):
            inventory.add(info)
        verification = Verification(Calls(store, 60.0), inventory, None, repair=repair)
        await verification.run(verification.choose(range(len(inventory.spaces)), sample))
        inventory.close()
        return verification.found

    return asyncio.run(run())


def put(store: ObjectStore, key: Key, body: Buffer) -> None:
    asyncio.run(store.put(key, body))


@pytest.mark.parametrize(("left", "why"), [(1, "valid when read once more"), (9, "on the way")])
def test_object_damaged_in_transit_stays(tmp_path: Path, left: int, why: str) -> None:
    store, key = Garbling(str(tmp_path)), kv("a")
    put(store, key, sealed(key))
    store.left = left
    found = verify(store)
    assert (found.num_damaged, found.num_removed) == (1, 0)
    assert why in found.damaged[0][1]
    assert (tmp_path / key).read_bytes() == sealed(key)


def test_object_stays_if_the_store_states_no_md5() -> None:
    async def run() -> bytes:
        store = open_store(StoreConfig(url=f"memory://{uuid.uuid4().hex}"), "options")
        await store.put(key, flipped(key))
        inventory = Inventory()
        inventory.add(ObjectInfo(key, 5, 0))
        verification = Verification(Calls(store, 60.0), inventory, None, repair=True)
        await verification.run(verification.choose([0], None))
        inventory.close()
        assert verification.found.num_damaged == 1
        assert "states no MD5" in verification.found.damaged[0][1]
        return bytes(await read(store, key, 1 << 20))

    key = kv("a")
    assert asyncio.run(run()) == flipped(key)


@pytest.mark.parametrize(
    "damage", [flipped, lambda _: b"", lambda key: sealed(key)[:-1], lambda _: sealed(kv("other"))]
)
def test_object_damaged_in_the_store_is_removed(
    tmp_path: Path, damage: Callable[[Key], bytearray]
) -> None:
    store, bad, good = DirectoryStore(str(tmp_path)), kv("a"), kv("b")
    put(store, bad, damage(bad))
    put(store, good, sealed(good))
    found = verify(store)
    assert (found.num_damaged, found.num_removed) == (1, 1)
    assert not (tmp_path / bad).exists()
    assert (tmp_path / good).exists()


def test_object_too_large_to_be_read_does_not_count_as_damaged(tmp_path: Path) -> None:
    store, key = DirectoryStore(str(tmp_path)), kv("a")
    put(store, key, sealed(key))
    (tmp_path / key).chmod(0o600)
    os.truncate(tmp_path / key, (512 << 20) + 1)
    found = verify(store)
    assert (found.num_large, found.num_damaged, found.num_read) == (1, 0, 0)
    assert (tmp_path / key).exists()


def test_refused_removal_does_not_end_the_verification(tmp_path: Path) -> None:
    store, keys = Keeping(str(tmp_path)), [kv("a"), kv("b")]
    for key in keys:
        put(store, key, flipped(key))
    found = verify(store)
    assert (found.num_damaged, found.num_removed) == (2, 0)
    assert "removals are not allowed here" in found.damaged[1][1]


def test_vanished_store_is_an_error_and_does_not_count_as_removed_objects(tmp_path: Path) -> None:
    async def run() -> None:
        root = tmp_path / "store"
        store, inventory = DirectoryStore(str(root)), Inventory()
        inventory.add(ObjectInfo(kv("a"), 5, 0))
        shutil.rmtree(root, ignore_errors=True)
        verification = Verification(Calls(store, 60.0), inventory, None, repair=True)
        with pytest.raises(StoreUnavailable, match="is gone"):
            await verification.run(verification.choose([0], None))
        inventory.close()

    asyncio.run(run())


@pytest.mark.parametrize(("sample", "expected"), [(1, 2), (3, 5), (9, 9), (None, 9)])
def test_sample_is_drawn_from_each_namespace(
    tmp_path: Path, sample: int | None, expected: int
) -> None:
    store = DirectoryStore(str(tmp_path))
    keys = [kv(f"{n}", namespace=OTHER) for n in range(7)] + [ec(f"{n}", NAMESPACE) for n in (1, 2)]
    for key in keys:
        put(store, key, sealed(key))
    assert verify(store, sample=sample).num_read == expected
