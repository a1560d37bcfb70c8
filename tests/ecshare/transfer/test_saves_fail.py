# SPDX-License-Identifier: Apache-2.0
"""Loads keep working while all saves fail."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ecshare.store.config import StoreConfig
from ecshare.store.format import TensorSpec
from ecshare.store.keys import Key, Kind, object_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Backfill, Fetch, Job, Lookup, Outcome, Put, StoredObject
from tests.bad_s3.faults import modes
from tests.bad_s3.server import BUCKET, bad_s3

FACTS = TensorSpec("U8", (10_000,))
STORED = [object_key(Kind.EC, "0" * 32, f"stored {number}") for number in range(5)]
NUM_ROUNDS = 20
SAVES_A_ROUND = 8  # twice as many as open a breaker


class Hosts:
    """Engines of one store with separate host caches."""

    def __init__(self, folder: Path, stack: ExitStack, **store: Any) -> None:
        self._folder = folder
        self._stack = stack
        self._store = store
        self._staging = Staging(torch.device("cpu"), 64 << 20)
        self._num_new = 0

    def start(self, name: str) -> TransferEngine:
        config = StoreConfig(host_cache_dir=str(self._folder / name), **self._store)
        engine = TransferEngine(config, "options")
        self._stack.callback(engine.close)
        return engine

    def put(self, key: Key) -> Put:
        slab = self._staging.reserve(FACTS)
        assert slab is not None
        self._staging.copy_out(slab, torch.zeros(FACTS.shape, dtype=torch.uint8))
        return Put(key, slab, keeps_unstored=False)

    def new(self) -> Put:
        self._num_new += 1
        return self.put(object_key(Kind.EC, "0" * 32, f"new {self._num_new}"))

    def store(self) -> None:
        assert outcomes(self.start("writer"), *map(self.put, STORED)) == [Outcome.OK] * len(STORED)


def outcomes(engine: TransferEngine, *jobs: Job[Any]) -> list[Outcome]:
    engine.submit(*jobs)
    ended = engine.drain(60)
    for done in ended:
        if isinstance(done.value, StoredObject):
            done.value.release()
    return [done.outcome for done in ended]


def check_loads(hosts: Hosts) -> None:
    """Load the stored objects from the store while all saves fail."""
    engine = hosts.start("reader")
    for number in range(NUM_ROUNDS):
        saves = [hosts.new() for _ in range(SAVES_A_ROUND)]
        assert outcomes(engine, *saves) == [Outcome.UNAVAILABLE] * SAVES_A_ROUND
        assert engine.open_breakers == {"write"}
        key = STORED[number % len(STORED)]
        engine.host.discard(key)
        assert outcomes(engine, Lookup((key,), 30, store_only=True)) == [Outcome.OK]
        assert outcomes(engine, Fetch(key, 30)) == [Outcome.OK], f"round {number}"


@pytest.fixture
def on_hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    with ExitStack() as stack:
        yield lambda **store: Hosts(tmp_path, stack, **store)


def fail_writes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_loads_work_while_saves_to_a_folder_fail(
    on_hosts: Callable[..., Hosts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    hosts = on_hosts(url=f"{tmp_path}/store")
    hosts.store()
    fail_writes(monkeypatch, number)
    check_loads(hosts)


@pytest.mark.parametrize("mode", ["put:403", "put:503", "put:full"])
def test_loads_work_while_saves_to_a_bucket_fail(on_hosts: Callable[..., Hosts], mode: str) -> None:
    with bad_s3() as server:
        hosts = on_hosts(url=f"s3://{BUCKET}/x", storage_options=server.storage_options)
        hosts.store()
        server.faults = modes(mode)
        check_loads(hosts)


def test_failed_backfills_open_the_write_breaker(
    on_hosts: Callable[..., Hosts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Successful existence checks do not mean that saves work."""
    hosts = on_hosts(url=f"{tmp_path}/store")
    hosts.store()
    engine = hosts.start("writer")
    for key in STORED:
        (tmp_path / "store" / key).unlink()
    fail_writes(monkeypatch, errno.ENOSPC)
    caplog.set_level(logging.INFO)
    for key in STORED[:4]:
        assert outcomes(engine, Backfill(key)) == [Outcome.UNAVAILABLE]
    assert engine.open_breakers == {"write"}
    said = [record.getMessage() for record in caplog.records if "are paused" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("store: saves failed repeatedly, and are paused for a while: No ")


def test_breaker_state_is_a_gauge(
    on_hosts: Callable[..., Hosts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = on_hosts(url=f"{tmp_path}/store")
    engine = hosts.start("writer")
    assert engine.take_counts("worker") == {}
    fail_writes(monkeypatch, errno.ENOSPC)
    outcomes(engine, *[hosts.new() for _ in range(4)])
    engine.stats.take()
    assert engine.take_counts("worker") == {"now/breaker_open/worker/write": 1.0}
