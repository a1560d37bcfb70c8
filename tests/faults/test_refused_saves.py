# SPDX-License-Identifier: Apache-2.0
"""A disk on which every save fails, while loads go on at the same time; without vLLM."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from ecshare.store.config import StoreConfig
from ecshare.store.format import TensorSpec
from ecshare.store.keys import Key, Kind, object_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Fetch, Handle, Outcome, Put, StoredObject
from tests.faults.disks import SmallDisk

pytestmark = pytest.mark.faults

FACTS = TensorSpec("U8", (400_000,))
NUM_STORED = 20
NUM_LOADS = 300


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk", 16 << 20)
    try:
        disk.mount()
    except PermissionError as exc:
        pytest.skip(f"{exc}: `make test-faults` gets the right from a user namespace")
    yield disk
    disk.unmount()


def key(name: object) -> Key:
    return object_key(Kind.EC, "0" * 32, str(name))


def put(staging: Staging, name: object) -> Put:
    slab = staging.reserve(FACTS)
    assert slab is not None
    staging.copy_out(slab, torch.ones(FACTS.shape, dtype=torch.uint8))
    return Put(key(name), slab, keeps_unstored=False)


def start(disk: SmallDisk, host: Path) -> TransferEngine:
    # Small, so that an object that was loaded once is loaded from the store again.
    config = StoreConfig(
        url=str(disk.folder / "store"), host_cache_dir=str(host), host_cache_bytes=1_000_000
    )
    return TransferEngine(config, "options")


@pytest.mark.parametrize("failing", [SmallDisk.full, SmallDisk.read_only])
def test_loads_succeed_while_every_save_fails(
    disk: SmallDisk, tmp_path: Path, failing: Callable[[SmallDisk], AbstractContextManager[None]]
) -> None:
    staging = Staging(torch.device("cpu"), 256 << 20)
    writer = start(disk, tmp_path / "writer")
    writer.submit(*[put(staging, number) for number in range(NUM_STORED)])
    assert {done.outcome for done in writer.drain(60)} == {Outcome.OK}
    writer.close()
    with failing(disk):
        engine = start(disk, tmp_path / "reader")
        ended = load_and_save(engine, staging)
        engine.close()
    kinds = Counter((type(done.job).__name__, done.outcome) for done in ended)
    assert kinds["Put", Outcome.UNAVAILABLE] == sum(
        number for (job, _), number in kinds.items() if job == "Put"
    )
    assert kinds["Put", Outcome.UNAVAILABLE] > NUM_LOADS
    assert kinds["Fetch", Outcome.OK] == NUM_LOADS, kinds


def load_and_save(engine: TransferEngine, staging: Staging) -> list[Done[Any]]:
    """One load after the other, each during a burst of saves."""
    rng = random.Random(5)
    ended: list[Done[Any]] = []
    for number in range(NUM_LOADS):
        saves = [put(staging, f"new {number} {each}") for each in range(rng.randrange(8))]
        engine.submit(*saves)
        if rng.random() < 0.5:
            ended += engine.drain(60)
        load = Handle(Fetch(key(rng.randrange(NUM_STORED)), 20))
        engine.submit(load)
        found = engine.drain(60, until=load)
        for done in found:
            if isinstance(done.value, StoredObject):
                done.value.release()
        ended += found
    return ended + engine.drain(60)
