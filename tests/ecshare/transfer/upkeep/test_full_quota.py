# SPDX-License-Identifier: Apache-2.0
"""Engines on a bucket whose quota is used up: they load, room is made, and they save again."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ecshare.store.errors import ObjectMissing
from ecshare.store.format import TensorSpec, unseal
from ecshare.store.keys import Key, Kind, is_object_key, object_key
from ecshare.store.objects import read
from ecshare.store.open import open_store
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Fetch, Job, Lookup, Outcome, Put, StoredObject
from ecshare.transfer.upkeep import elected
from ecshare.transfer.upkeep.renewal import Record
from ecshare.upkeep import calls
from kvshare.config import KVConfig
from lab.servers.s3 import SeaweedFS
from tests.bad_s3.faults import quota
from tests.bad_s3.server import BUCKET, bad_s3, refused
from tests.ecshare.transfer.upkeep.test_noting import FACTS, NAMESPACE
from tests.waiting import wait_until

QUOTA = 1 << 20
SIZE = 100_000
MOST_BYTES = 5 * SIZE
SPEC = TensorSpec("U8", (SIZE,))


class Fleet:
    """Engines of one bucket, each on a host of its own."""

    def __init__(self, store: Mapping[str, Any], folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._staging = Staging(torch.device("cpu"), 64 << 20)
        self._numbers = itertools.count()
        self.engines: list[TransferEngine] = []

    def start(self, **options: Any) -> TransferEngine:
        host = f"{self._folder}/host-{len(self.engines)}"
        config = KVConfig(**self._store, host_cache_dir=host, **options)
        engine = TransferEngine(config, "options")
        self.engines.append(engine)
        engine.start_up(Record(Kind.KV, NAMESPACE, FACTS), write=True)
        return engine

    def save(self, engine: TransferEngine) -> Key | None:
        """Save a new object; return its key, or None if it could not be stored."""
        key = object_key(Kind.KV, NAMESPACE, f"{next(self._numbers)}", "t0of1")
        slab = self._staging.reserve(SPEC)
        assert slab is not None
        self._staging.copy_out(slab, torch.zeros(SPEC.shape, dtype=torch.uint8))
        ended = outcome(engine, Put(key, slab, keeps_unstored=False))
        assert ended in (Outcome.OK, Outcome.UNAVAILABLE)
        return key if ended is Outcome.OK else None

    def stored(self) -> set[Key]:
        """Return the keys of all objects, each of which is whole."""
        return asyncio.run(self._stored())

    async def _stored(self) -> set[Key]:
        store = open_store(KVConfig(**self._store), "options")
        listed = [info.key async for info in store.list("kv/")]
        # The rest are notes that an object will not be stored.
        keys = [key for key in listed if is_object_key(key) and not key.endswith(".gap")]
        for key in keys:
            with suppress(ObjectMissing):  # a cleaner has just removed it
                unseal(await read(store, key, 2 * SIZE), key)
        await store.close()
        return {*keys}


def outcome(engine: TransferEngine, job: Job[Any]) -> Outcome:
    engine.submit(job)
    (done,) = engine.drain(60)
    if isinstance(done.value, StoredObject):
        done.value.release()
    return done.outcome


@pytest.fixture
def fleet_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Mapping[str, Any]], Fleet]]:
    monkeypatch.setattr(elected, "SLOT_S", 0.5)
    monkeypatch.setattr(calls, "_PAUSE_S", 0.0)
    fleets: list[Fleet] = []

    def fleet(store: Mapping[str, Any]) -> Fleet:
        fleets.append(Fleet(store, tmp_path))
        return fleets[-1]

    yield fleet
    for engine in (engine for each in fleets for engine in each.engines):
        engine.close()


def check(fleet: Fleet, compare: Callable[[], object]) -> None:
    """`compare`: has the server compare what it has with the quota."""
    writer = fleet.start()
    keys = []
    while (key := fleet.save(writer)) is not None:
        keys.append(key)
        compare()
    assert len(keys) * SIZE > MOST_BYTES
    # A host without a cache, whose first requests meet the full bucket.
    reader = fleet.start()
    for key in keys:
        assert outcome(reader, Lookup((key,), 30)) is Outcome.OK
        assert fleet.save(reader) is None
        assert outcome(reader, Fetch(key, 30)) is Outcome.OK
    assert reader.open_breakers == {"write"}
    assert fleet.stored() == {*keys}, "no half of an object"

    cleaner = fleet.start(max_bytes=MOST_BYTES)
    wait_until(lambda: len(fleet.stored()) * SIZE <= MOST_BYTES)

    def saves_again() -> bool:
        compare()
        return fleet.save(cleaner) is not None

    wait_until(saves_again, pause_s=0.2)
    assert outcome(reader, Fetch(max(fleet.stored()), 30)) is Outcome.OK


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "QuotaExceeded"),
        pytest.param(507, "InsufficientStorage", marks=pytest.mark.nightly),
        pytest.param(400, "XMinioAdminBucketQuotaExceeded", marks=pytest.mark.nightly),
    ],
)
def test_engines_outlive_a_full_quota(
    fleet_of: Callable[[Mapping[str, Any]], Fleet], status: int, code: str
) -> None:
    with bad_s3() as server:
        server.faults = {"put": quota(QUOTA, refused(status, code))}
        options = {"url": f"s3://{BUCKET}/x", "storage_options": server.storage_options}
        # So long an engine waits at start for a store that takes no objects.
        check(fleet_of({**options, "io_timeout_s": 0.5}), lambda: None)


@pytest.mark.s3
@pytest.mark.nightly
def test_engines_outlive_a_full_quota_of_a_real_server(
    fleet_of: Callable[[Mapping[str, Any]], Fleet], tmp_path: Path
) -> None:
    with SeaweedFS(tmp_path) as server:
        options = {"url": server.url, "storage_options": server.storage_options}
        check(fleet_of({**options, "io_timeout_s": 5}), lambda: server.enforce_quota(QUOTA >> 20))
