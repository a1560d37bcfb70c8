# SPDX-License-Identifier: Apache-2.0
import asyncio
import gc
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, ObjectMissing, StoreUnavailable
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec
from ecshare.store.keys import Key, Kind, namespace_digest, object_key
from ecshare.store.objects import Buffer, ObjectInfo, ObjectStat, Sink
from ecshare.transfer.device.staging import Slab, Staging, as_tensor
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.fetch import open_object
from ecshare.transfer.jobs import (
    Backfill,
    Done,
    Fetch,
    Handle,
    Job,
    Lookup,
    Outcome,
    Put,
    StoredObject,
)
from ecshare.transfer.upkeep.renewal import Record
from tests.waiting import wait_until

NAMESPACE = "0" * 32
FACTS = TensorSpec("F32", (4, 8), {"num_embeds": 4})
TENSOR = torch.arange(32, dtype=torch.float32).view(4, 8)


def key(name: str) -> Key:
    return object_key(Kind.EC, NAMESPACE, name)


def config(tmp_path: Path, host: str = "host", **options: Any) -> StoreConfig:
    return StoreConfig(
        url=f"file://{tmp_path}/store", host_cache_dir=str(tmp_path / host), **options
    )


@pytest.fixture
def staging() -> Staging:
    return Staging(torch.device("cpu"), 1 << 22)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransferEngine]:
    engine = TransferEngine(config(tmp_path), "options")
    yield engine
    engine.close()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[TransferEngine]:
    """Start an engine on another host: the same store, another host cache."""
    engine = TransferEngine(config(tmp_path, "other-host"), "options")
    yield engine
    engine.close()


def filled(staging: Staging, tensor: torch.Tensor = TENSOR) -> Slab:
    slab = staging.reserve(FACTS)
    assert slab is not None
    staging.copy_out(slab, tensor)
    return slab


def finish(engine: TransferEngine, job: Job[Any]) -> Done[Any]:
    engine.submit(job)
    (done,) = engine.drain(10)
    assert done.job is job
    return done


def value(done: Done[Any]) -> StoredObject:
    assert done.outcome is Outcome.OK
    assert isinstance(done.value, StoredObject)
    return done.value


def stored_file(tmp_path: Path, name: str) -> Path:
    return tmp_path / "store" / key(name)


def test_stored_object_is_fetched_on_another_host(
    engine: TransferEngine, elsewhere: TransferEngine, staging: Staging
) -> None:
    assert finish(engine, Put(key("a"), filled(staging))).outcome is Outcome.OK
    stored = value(finish(elsewhere, Fetch(key("a"), 5)))
    assert stored.spec == FACTS
    assert torch.equal(as_tensor(stored.payload, stored.spec), TENSOR)
    assert stored.entry is not None
    stored.release()
    stored.release()


def test_fetch_on_the_same_host_reads_its_cache(
    engine: TransferEngine, staging: Staging, tmp_path: Path
) -> None:
    finish(engine, Put(key("a"), filled(staging)))
    stored_file(tmp_path, "a").unlink()
    value(finish(engine, Fetch(key("a"), 5))).release()


def test_host_cache_separates_objects_of_different_stores(
    engine: TransferEngine, staging: Staging, tmp_path: Path
) -> None:
    finish(engine, Put(key("a"), filled(staging)))
    moved = StoreConfig(url=f"{tmp_path}/new-store", host_cache_dir=str(tmp_path / "host"))
    newcomer = TransferEngine(moved, "options")
    assert finish(newcomer, Fetch(key("a"), 5)).outcome is Outcome.MISSING
    newcomer.close()
    same = StoreConfig(url=f"{tmp_path}/store/", host_cache_dir=str(tmp_path / "host"))
    (tmp_path / "store" / key("a")).unlink()
    neighbour = TransferEngine(same, "options")
    value(finish(neighbour, Fetch(key("a"), 5))).release()
    neighbour.close()


def test_fetched_object_is_available_to_other_processes_of_the_host(
    engine: TransferEngine, elsewhere: TransferEngine, staging: Staging
) -> None:
    finish(engine, Put(key("a"), filled(staging)))
    value(finish(elsewhere, Fetch(key("a"), 5))).release()
    opened = open_object(elsewhere.host, key("a"))
    assert opened is not None
    assert torch.equal(as_tensor(opened.payload, opened.spec), TENSOR)
    opened.release()
    assert open_object(elsewhere.host, key("b")) is None


def test_missing_object_is_a_miss(engine: TransferEngine) -> None:
    assert finish(engine, Fetch(key("none"), 5)).outcome is Outcome.MISSING


def test_damaged_object_is_removed_and_can_be_stored_again(
    engine: TransferEngine, elsewhere: TransferEngine, staging: Staging, tmp_path: Path
) -> None:
    finish(engine, Put(key("a"), filled(staging)))
    path = stored_file(tmp_path, "a")
    body = bytearray(path.read_bytes())
    body[PROLOGUE_BYTES + 3] ^= 1
    path.unlink()  # a new file, since the host cache may have a hard link to the old one
    path.write_bytes(body)
    assert finish(elsewhere, Fetch(key("a"), 5)).outcome is Outcome.CORRUPT
    assert finish(elsewhere, Fetch(key("a"), 5)).outcome is Outcome.MISSING
    finish(engine, Put(key("a"), filled(staging)))
    value(finish(elsewhere, Fetch(key("a"), 5))).release()


def test_lookup_checks_host_and_store_in_key_order(
    engine: TransferEngine, elsewhere: TransferEngine, staging: Staging, tmp_path: Path
) -> None:
    finish(engine, Put(key("a"), filled(staging)))
    finish(engine, Put(key("b"), filled(staging)))
    keys = (key("x"), key("a"), key("b"), key("x"))
    assert finish(elsewhere, Lookup(keys, 5)).value == (False, True, True, False)
    stored_file(tmp_path, "b").unlink()
    assert finish(engine, Lookup(keys, 5)).value == (False, True, True, False)
    assert finish(engine, Lookup(keys, 5, store_only=True)).value == (False, True, False, False)


def test_backfill_stores_a_lost_object_from_the_host_cache(
    engine: TransferEngine, elsewhere: TransferEngine, staging: Staging, tmp_path: Path
) -> None:
    finish(engine, Put(key("a"), filled(staging)))
    assert finish(engine, Backfill(key("a"))).value is False
    stored_file(tmp_path, "a").unlink()
    assert finish(engine, Backfill(key("a"))).value is True
    found = value(finish(elsewhere, Fetch(key("a"), 5)))
    assert torch.equal(as_tensor(found.payload, found.spec), TENSOR)
    assert finish(engine, Backfill(key("b"))).outcome is Outcome.MISSING


def test_backfill_skips_an_object_being_stored_on_this_host(
    engine: TransferEngine, staging: Staging, tmp_path: Path
) -> None:
    finish(engine, Put(key("a"), filled(staging)))
    stored_file(tmp_path, "a").unlink()
    storing = engine.host.claim(Key(f"{key('a')}.storing"))
    assert storing is not None
    assert finish(engine, Backfill(key("a"))).value is False
    assert not stored_file(tmp_path, "a").exists()
    storing.release()
    assert finish(engine, Backfill(key("a"))).value is True


def test_put_holds_a_claim_while_it_stores(
    tmp_path: Path, staging: Staging, failing: "Failing"
) -> None:
    engine = TransferEngine(config(tmp_path, io_timeout_s=1.0), "options", store=failing)
    failing.stalls = True
    engine.submit(Put(key("a"), filled(staging)))
    wait_until(lambda: failing.calls, otherwise="the store is not asked")
    assert engine.host.claim(Key(f"{key('a')}.storing")) is None
    assert [done.outcome for done in engine.drain(10)] == [Outcome.UNAVAILABLE]
    engine.close()
    assert engine.host.claim(Key(f"{key('a')}.storing")) is not None


def test_fetch_with_a_full_host_cache_serves_this_process(
    engine: TransferEngine, staging: Staging, tmp_path: Path
) -> None:
    finish(engine, Put(key("a"), filled(staging)))
    cramped = TransferEngine(config(tmp_path, "cramped", host_cache_bytes=1), "options")
    stored = value(finish(cramped, Fetch(key("a"), 5)))
    assert stored.entry is None
    assert torch.equal(as_tensor(stored.payload, stored.spec), TENSOR)
    stored.release()
    cramped.close()


def test_poll_does_not_wait_and_in_flight_counts_jobs(engine: TransferEngine) -> None:
    assert engine.poll() == []
    engine.submit(Lookup((key("a"),), 5))
    assert engine.in_flight == 1
    assert len(engine.drain(10)) == 1
    assert engine.in_flight == 0


def test_idle_wait_ends_with_a_job_and_calls_its_handler(engine: TransferEngine) -> None:
    told: list[Outcome] = []
    engine.submit(Handle(Lookup((key("a"),), 5), lambda done: told.append(done.outcome)))
    while engine.in_flight:
        engine.wait_idle()
    assert told == [Outcome.OK]


def test_idle_wait_goes_on_until_it_is_enough(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecshare.transfer.engine._IDLE_WAIT_S", 30.0)
    told: list[Outcome] = []
    for name in "abc":
        engine.submit(Handle(Lookup((key(name),), 5), lambda done: told.append(done.outcome)))
    engine.wait_idle(lambda: len(told) == 2)
    assert len(told) == 2


def test_idle_wait_ends_in_time_although_jobs_end_again_and_again(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class ManyEnds:
        def get(self, timeout: float) -> tuple[None, None]:
            waits.append(timeout)
            assert len(waits) < 100, "it goes on for ever"
            if not timeout:
                raise queue.Empty
            time.sleep(0.001)
            return None, None

    monkeypatch.setattr(engine, "_done", ManyEnds())
    monkeypatch.setattr(engine, "_end", lambda *_: None)
    engine.wait_idle(lambda: False)
    assert waits[0] == 0.003
    assert waits[-1] == 0
    monkeypatch.undo()


def test_idle_wait_waits_although_no_job_runs(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job is due in a moment, because announced chunks are polled."""
    waits: list[float] = []

    class NoEnds:
        def get(self, timeout: float) -> None:
            waits.append(timeout)
            raise queue.Empty

    monkeypatch.setattr(engine, "_done", NoEnds())
    engine.wait_idle()
    assert len(waits) == 1
    monkeypatch.undo()


def test_closed_engine_rejects_jobs(engine: TransferEngine, staging: Staging) -> None:
    engine.close()
    engine.close()
    assert finish(engine, Fetch(key("a"), 5)).outcome is Outcome.REJECTED
    assert finish(engine, Put(key("a"), filled(staging))).outcome is Outcome.REJECTED


def test_start_up_writes_the_manifest_or_raises_config_error(tmp_path: Path) -> None:
    engine = TransferEngine(config(tmp_path), "options")
    facts = {"model": "m"}
    digest = namespace_digest(facts)
    engine.start_up(Record(Kind.EC, digest, facts), write=True)
    assert (tmp_path / "store" / "ec" / "2" / "manifests" / digest).is_file()
    engine.close()
    (tmp_path / "plain-file").touch()
    blocked = StoreConfig(
        url=f"file://{tmp_path}/plain-file/store", host_cache_dir=str(tmp_path / "host")
    )
    with pytest.raises(ConfigError, match=r"options\.url"):
        TransferEngine(blocked, "options").probe(write=True)


class Failing:
    """A store that fails or stalls on request; real ones cannot fail on the n-th call."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.stalls = False
        self.num_ended = 0
        self.is_closed = False

    async def _act(self) -> None:
        self.calls += 1
        try:
            if self.stalls:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            assert not self.is_closed
            self.num_ended += 1

    @property
    def creates_once(self) -> bool:
        return True

    @property
    def serves_many(self) -> bool:
        return False

    async def get(self, key: str, sink: Sink) -> None:
        await self._act()
        raise ObjectMissing(key)

    async def put(self, key: str, body: Buffer, *, replace: bool = False) -> bool:
        await self._act()
        return True

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        await self._act()
        return [False for _ in keys]

    async def stat(self, key: str) -> ObjectStat:
        await self._act()
        raise ObjectMissing(key)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._act()

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        nothing: tuple[ObjectInfo, ...] = ()
        for found in nothing:
            yield found

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def failing() -> Failing:
    return Failing()


@pytest.fixture
def unlucky(tmp_path: Path, failing: Failing) -> Iterator[TransferEngine]:
    engine = TransferEngine(config(tmp_path, io_timeout_s=0.05), "options", store=failing)
    yield engine
    engine.close()


def test_config_error_shows_the_url_without_its_login(tmp_path: Path, failing: Failing) -> None:
    failing.error = StoreUnavailable("gone")
    options = StoreConfig(url="ftp://me:hidden@host/x", host_cache_dir=str(tmp_path / "host"))
    engine = TransferEngine(options, "options", store=failing)
    with pytest.raises(ConfigError, match=r"options\.url: .*host/x") as caught:
        engine.probe(write=True)
    assert "hidden" not in str(caught.value)
    engine.close()


def test_store_errors_and_exceptions_become_outcomes(
    unlucky: TransferEngine, failing: Failing, staging: Staging
) -> None:
    for error in (StoreUnavailable("gone"), RuntimeError("a bug")):
        failing.error = error
        assert finish(unlucky, Fetch(key("a"), 5)).outcome is Outcome.UNAVAILABLE
        assert finish(unlucky, Put(key("b"), filled(staging))).outcome is Outcome.UNAVAILABLE


def test_failed_put_removes_only_its_own_host_cache_entry(
    unlucky: TransferEngine, failing: Failing, staging: Staging
) -> None:
    assert finish(unlucky, Put(key("a"), filled(staging))).outcome is Outcome.OK
    failing.error = StoreUnavailable("gone")
    for name in ("a", "b"):
        job = Put(key(name), filled(staging), keeps_unstored=False)
        assert finish(unlucky, job).outcome is Outcome.UNAVAILABLE
    value(finish(unlucky, Fetch(key("a"), 5))).release()
    assert finish(unlucky, Fetch(key("b"), 5)).outcome is Outcome.UNAVAILABLE


def test_stalled_store_costs_a_few_timeouts_then_nothing(
    unlucky: TransferEngine, failing: Failing
) -> None:
    failing.stalls = True
    for _ in range(4):
        assert finish(unlucky, Lookup((key("a"),), 0.01)).outcome is Outcome.UNAVAILABLE
    calls = failing.calls
    for _ in range(20):
        assert finish(unlucky, Lookup((key("a"),), 60)).outcome is Outcome.UNAVAILABLE
    assert failing.calls <= calls + 1


def test_idle_wait_ends_before_a_stalled_job(unlucky: TransferEngine, failing: Failing) -> None:
    failing.stalls = True
    unlucky.submit(Lookup((key("a"),), 60))
    unlucky.wait_idle()
    assert unlucky.in_flight == 1


def test_cancelled_save_keeps_its_memory_until_the_put_ends(
    tmp_path: Path, failing: Failing, staging: Staging
) -> None:
    engine = TransferEngine(config(tmp_path, io_timeout_s=3600), "options", store=failing)
    failing.stalls = True
    job = Handle(Put(key("a"), filled(staging)))
    engine.submit(job)
    wait_until(lambda: failing.calls)
    engine.cancel(job)
    assert [done.outcome for done in engine.drain(10)] == [Outcome.CANCELLED]
    assert staging.used_bytes
    engine.close()
    assert not staging.used_bytes


def test_save_that_timed_out_frees_its_memory_without_the_garbage_collector(
    unlucky: TransferEngine, failing: Failing, staging: Staging
) -> None:
    failing.stalls = True
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            job = Put(key(str(number)), filled(staging))
            assert finish(unlucky, job).outcome is Outcome.UNAVAILABLE
            del job
        wait_until(lambda: not staging.used_bytes)
    finally:
        gc.enable()


def test_abandoned_operations_end_with_their_engine(tmp_path: Path, failing: Failing) -> None:
    engine = TransferEngine(config(tmp_path, io_timeout_s=3600), "options", store=failing)
    failing.stalls = True
    for number in range(3):
        job = Handle(Lookup((key(str(number)),), 0.01))
        engine.submit(job)
        engine.cancel(job)
        engine.drain(10)
    wait_until(lambda: failing.calls == 3)
    engine.close()
    assert failing.num_ended == 3
    assert failing.is_closed


def test_misses_do_not_open_the_breaker(unlucky: TransferEngine, failing: Failing) -> None:
    for _ in range(20):
        assert finish(unlucky, Fetch(key("a"), 5)).outcome is Outcome.MISSING
    assert failing.calls == 20


def test_memory_of_a_timed_out_save_is_not_reused_while_it_is_sent(
    unlucky: TransferEngine, failing: Failing, staging: Staging
) -> None:
    failing.stalls = True
    slab = filled(staging)
    body = slab.body
    assert finish(unlucky, Put(key("a"), slab)).outcome is Outcome.UNAVAILABLE
    sent = bytes(body)
    filled(staging, torch.zeros(4, 8))
    assert bytes(body) == sent


def test_fetch_passes_the_object_to_its_use_function(
    engine: TransferEngine, elsewhere: TransferEngine, staging: Staging
) -> None:
    finish(engine, Put(key("cat"), filled(staging)))
    taken = torch.zeros(4, 8)
    given: list[StoredObject] = []

    def use(stored: StoredObject) -> None:
        given.append(stored)
        taken.copy_(as_tensor(stored.payload, stored.spec))

    done = finish(elsewhere, Fetch(key("cat"), 5.0, use=use))
    assert (done.outcome, done.value) == (Outcome.OK, None)
    assert torch.equal(taken, TENSOR)
    with pytest.raises(ValueError, match="released"):
        bytes(given[0].payload)
    assert finish(elsewhere, Fetch(key("dog"), 5.0, use=use)).outcome is Outcome.MISSING


def test_cancelled_fetch_ends_after_its_use_function(
    engine: TransferEngine, staging: Staging
) -> None:
    """The memory that `use` writes to must not be given to others before."""
    finish(engine, Put(key("cat"), filled(staging)))
    is_using, may_end = threading.Event(), threading.Event()
    ends: list[str] = []

    def use(stored: StoredObject) -> None:
        is_using.set()
        may_end.wait(10)
        ends.append("used")

    job = Handle(Fetch(key("cat"), 5.0, use=use))
    engine.submit(job)
    assert is_using.wait(10)
    engine.cancel(job)
    assert engine.drain(0.2) == []
    may_end.set()
    (done,) = engine.drain(10)
    assert (done.outcome, ends) == (Outcome.CANCELLED, ["used"])


def test_every_thread_runs_the_start_function_first(tmp_path: Path, staging: Staging) -> None:
    """A new thread uses device 0: its first CUDA call would create a context there."""
    begun: list[str] = []
    seen: list[str] = []

    def name_thread() -> None:
        begun.append(threading.current_thread().name)

    class Copied:
        """A stand-in for the event of a copy from a device, which any thread may wait for."""

        def synchronize(self) -> None:
            seen.append(threading.current_thread().name)
            assert seen[-1] in begun

    engine = TransferEngine(config(tmp_path), "options", on_thread_start=name_thread)
    try:
        slab = filled(staging)
        slab.copied = Copied()  # type: ignore[assignment]
        assert finish(engine, Put(key("a"), slab)).outcome is Outcome.OK
        load = Fetch(key("a"), 10, use=lambda _: seen.append(threading.current_thread().name))
        assert finish(engine, load).outcome is Outcome.OK
    finally:
        engine.close()
    assert {name.rpartition("_")[0] or name for name in seen} == {
        "ecshare-io",
        "ecshare-copy",
        "ecshare-load",
    }
    assert set(seen) <= set(begun)


def test_failed_thread_start_function_is_only_logged(
    tmp_path: Path, staging: Staging, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no such device")

    engine = TransferEngine(config(tmp_path), "options", on_thread_start=fail)
    try:
        assert engine.probe(write=True)
        assert finish(engine, Put(key("a"), filled(staging))).outcome is Outcome.OK
    finally:
        engine.close()
    assert "no such device" in caplog.text
