# SPDX-License-Identifier: Apache-2.0
"""Queued jobs hold no descriptors, pins or memory."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ecshare.store.config import StoreConfig
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key, Kind, object_key
from ecshare.store.objects import Buffer
from ecshare.transfer.announced import absence_notes
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import (
    Backfill,
    Done,
    Fetch,
    GiveUp,
    Handle,
    Outcome,
    Put,
    Run,
    StoredObject,
)
from ecshare.transfer.packing import Packing
from tests.kvshare.gated import GatedFileSystem

SPEC = TensorSpec("U8", (1000,))
KEYS = [object_key(Kind.KV, "0" * 32, f"chunk {number}", "t0of1") for number in range(50)]


@pytest.fixture(autouse=True)
def _store() -> Iterator[None]:
    GatedFileSystem.reset()
    yield
    GatedFileSystem.reset()


class CountingPacking(Packing):
    """Packs nothing, and counts the calls."""

    num_packed = 0

    def __init__(self) -> None:
        """Skip the import of zstandard."""

    def pack(self, body: Buffer, key: Key, integrity: Integrity | None) -> Buffer:
        self.num_packed += 1
        return body


@pytest.fixture
def packing() -> CountingPacking:
    return CountingPacking()


@pytest.fixture
def engine(tmp_path: Path, packing: CountingPacking) -> Iterator[TransferEngine]:
    config = StoreConfig(
        url="gated://in-turn", host_cache_dir=str(tmp_path / "host"), io_timeout_s=60
    )
    engine = TransferEngine(config, "options", packing=packing)
    yield engine
    GatedFileSystem.open_gates()
    engine.close()


def publish(engine: TransferEngine) -> None:
    """Put all objects into the host cache."""
    for key in KEYS:
        body = bytearray(PROLOGUE_BYTES + SPEC.num_bytes)
        seal(memoryview(body), SPEC, key)
        entry = engine.host.publish(key, body)
        assert entry is not None
        entry.close()


def num_opened(engine: TransferEngine) -> int:
    """Return how many descriptors of this process are files of the host cache."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(link.readlink()).startswith(f"{engine.host.root}/")
    return found


def drain_copy_threads(engine: TransferEngine) -> None:
    """Wait until both copy threads and the I/O thread have worked off their queues."""
    both, num_passed = threading.Barrier(2), 0

    def passed(_: Done[int]) -> None:
        nonlocal num_passed
        num_passed += 1

    engine.submit(*(Handle(Run("pass by", both.wait), passed) for _ in range(2)))
    while num_passed < 2:
        engine.wait_idle()


def test_waiting_backfills_hold_no_descriptors(engine: TransferEngine) -> None:
    publish(engine)
    before = num_opened(engine)
    GatedFileSystem.close_gate("exists")
    engine.submit(*map(Backfill, KEYS))
    drain_copy_threads(engine)
    # An open entry has two, because it is mapped; all claims share one.
    assert num_opened(engine) - before <= 2 * 8 + 1
    GatedFileSystem.open_gates()
    assert [done.value for done in engine.drain(30)] == [True] * len(KEYS)
    assert num_opened(engine) == before


def test_waiting_saves_hold_no_descriptors_or_packed_bytes(
    engine: TransferEngine, packing: CountingPacking
) -> None:
    staging, before = Staging(torch.device("cpu"), 1 << 22), num_opened(engine)
    GatedFileSystem.close_gate("put", "move", "exists")
    for key in KEYS:
        slab = staging.reserve(SPEC)
        assert slab is not None
        staging.copy_out(slab, torch.zeros(SPEC.shape, dtype=torch.uint8))
        engine.submit(Put(key, slab))
    for _ in ("sealed", "packed"):
        drain_copy_threads(engine)
    assert all(map(engine.host.has, KEYS))
    assert packing.num_packed == 16
    assert num_opened(engine) - before == 1  # for all claims
    assert engine.host.claim(Key(f"{KEYS[-1]}.storing")) is None
    GatedFileSystem.open_gates()
    assert [done.outcome for done in engine.drain(30)] == [Outcome.OK] * len(KEYS)
    assert num_opened(engine) == before


def test_host_loads_waiting_for_a_thread_hold_no_descriptors(engine: TransferEngine) -> None:
    publish(engine)
    before, may_go_on, most = num_opened(engine), threading.Event(), 2 * 16

    def use(_: StoredObject) -> None:
        may_go_on.wait(30)

    engine.submit(*(Fetch(key, 60, use=use) for key in KEYS))
    drain_copy_threads(engine)
    assert 0 < num_opened(engine) - before <= most
    may_go_on.set()
    assert [done.outcome for done in engine.drain(30)] == [Outcome.OK] * len(KEYS)
    assert num_opened(engine) == before


def test_late_gap_markers_are_dropped(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a store hangs, each failed save adds a marker, and each marker takes long."""
    GatedFileSystem.close_gate("put", "move", "exists")
    with monkeypatch.context() as hurry:
        hurry.setattr(absence_notes, "_VALID_S", 0.1)
        engine.submit(*map(GiveUp, KEYS))
        outcomes = [done.outcome for done in engine.drain(30)]
    assert outcomes == [Outcome.UNAVAILABLE] * len(KEYS)
    GatedFileSystem.open_gates()
    engine.submit(GiveUp(KEYS[0]))
    # Its turn comes after those of all others.
    assert [done.outcome for done in engine.drain(30)] == [Outcome.OK]
    assert 0 < len(GatedFileSystem.store) <= 4, "expired markers were written"
