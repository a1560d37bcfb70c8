# SPDX-License-Identifier: Apache-2.0
"""Fetches: one download a host, verification, and waiting for announced objects."""

import asyncio
import errno
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from msgspec import structs

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectMissing, ObjectUnreadable, StoreDenied, StoreUnavailable
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.hostcache import cache
from ecshare.store.keys import Key, Kind, object_key
from ecshare.store.objects import Buffer, ObjectInfo, ObjectStat, Sink
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import (
    Backfill,
    Done,
    Fetch,
    GiveUp,
    Handle,
    Job,
    Lookup,
    Outcome,
    Put,
    StoredObject,
    Tier,
)
from tests.waiting import wait_until

KEY = object_key(Kind.EC, "0" * 32, "a")
FACTS = TensorSpec("U8", (10_000,), {})


def sealed(key: str = KEY) -> bytes:
    body = memoryview(bytearray(PROLOGUE_BYTES + FACTS.num_bytes))
    seal(body, FACTS, key)
    return bytes(body)


class Scripted:
    """A store in memory that records requests, and fails or stalls on request.

    Real ones cannot damage the n-th response, or be slow for one engine only.
    """

    def __init__(self) -> None:
        self.objects: dict[Key, bytes] = {}
        self.gets: list[float] = []
        self.questions: list[Sequence[Key]] = []
        self.answer_s = 0.0
        self.stalled: set[str] = set()
        self.stalls_once_asked = False  # the first read of an object is answered, no other
        self.damage: list[Callable[[bytes], bytes]] = []
        self.is_read_only = False
        self.states_md5 = True

    @property
    def creates_once(self) -> bool:
        return True

    @property
    def serves_many(self) -> bool:
        return False

    async def get(self, key: Key, sink: Sink) -> None:
        self.gets.append(time.monotonic())
        answer_s = 60 if key in self.stalled else self.answer_s
        if self.stalls_once_asked:
            self.stalled.add(key)
        await asyncio.sleep(answer_s)
        if key not in self.objects:
            raise ObjectMissing(key)
        body = self.objects[key]
        if self.damage:
            body = self.damage.pop(0)(body)
        sink.begin(len(body))
        sink.write(0, body)

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        is_new = key not in self.objects
        if is_new or replace:
            self.objects[key] = bytes(body)
        return is_new

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        self.questions.append(keys)
        return [key in self.objects for key in keys]

    async def stat(self, key: Key) -> ObjectStat:
        if key not in self.objects:
            raise ObjectMissing(key)
        body = self.objects[key]
        return ObjectStat(len(body), hashlib.md5(body).hexdigest() if self.states_md5 else "")

    async def delete(self, keys: Sequence[Key]) -> None:
        if self.is_read_only:
            raise StoreDenied("read only")
        for key in keys:
            self.objects.pop(key, None)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        for key, body in self.objects.items():
            yield ObjectInfo(key, len(body), 0.0)

    async def close(self) -> None:
        pass


@pytest.fixture
def store() -> Scripted:
    return Scripted()


Start = Callable[..., TransferEngine]


@pytest.fixture
def start(tmp_path: Path, store: Scripted) -> Iterator[Start]:
    started = []

    def start(host: str = "host", **options: Any) -> TransferEngine:
        config = StoreConfig(
            url=f"file://{tmp_path}/none", host_cache_dir=str(tmp_path / host), **options
        )
        engine = TransferEngine(config, "options", store=store)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


def release(done: Done[Any]) -> None:
    assert done.value is not None
    done.value.release()


def publish(engine: TransferEngine, key: Key = KEY) -> None:
    """Put the object into the engine's host cache alone."""
    entry = engine.host.publish(key, sealed(key))
    assert entry is not None
    entry.close()


def finish(engine: TransferEngine, job: Job[Any], timeout_s: float = 20) -> Done[Any]:
    engine.submit(job)
    (done,) = engine.drain(timeout_s)
    if isinstance(done.value, StoredObject):
        release(done)
    return done


def until_answered(engine: TransferEngine) -> list[Done[Any]]:
    """Run three lookups one after another, so that the engine has started all earlier jobs; return
    those that have ended.
    """
    ended: list[Done[Any]] = []
    for _ in range(3):
        question = Handle(Lookup((KEY,), 10, store_only=True))
        engine.submit(question)
        ended += engine.drain(20, until=question)
    return [done for done in ended if not isinstance(done.job, Lookup)]


def flipped(body: bytes) -> bytes:
    return body[:5000] + bytes([body[5000] ^ 1]) + body[5001:]


def test_engines_of_one_host_share_a_download(store: Scripted, start: Start) -> None:
    store.objects[KEY] = sealed()
    store.answer_s = 0.2
    engines = [start() for _ in range(3)]
    for engine in engines:
        for _ in range(4):
            engine.submit(Fetch(KEY, 10))
    done = [each for engine in engines for each in engine.drain(20)]
    assert [each.outcome for each in done] == [Outcome.OK] * 12
    assert len(store.gets) == 1
    tiers = [moved.tier for each in done for moved in each.moved]
    assert tiers.count(Tier.STORE) == 1
    for each in done:
        release(each)


def test_each_host_downloads_once(store: Scripted, start: Start) -> None:
    store.objects[KEY] = sealed()
    for host in ("one", "two", "one"):
        assert finish(start(host), Fetch(KEY, 10)).outcome is Outcome.OK
    assert len(store.gets) == 2


def test_cancelled_download_is_taken_over_at_once(store: Scripted, start: Start) -> None:
    first, second = start(), start()
    job = Handle(Fetch(KEY, 60))
    store.answer_s = 100
    first.submit(job)
    wait_until(lambda: bool(store.gets))
    store.objects[KEY] = sealed()
    second.submit(Fetch(KEY, 60))
    assert until_answered(second) == []
    assert len(store.gets) == 1
    store.answer_s = 0.0
    first.cancel(job)
    (done,) = second.drain(20)
    assert done.outcome is Outcome.OK
    release(done)
    assert [each.outcome for each in first.drain(20)] == [Outcome.CANCELLED]


def test_fetch_cancelled_twice_ends_after_its_use_function(store: Scripted, start: Start) -> None:
    store.objects[KEY] = sealed()
    engine, begun, may_end = start(), threading.Event(), threading.Event()

    def use(_: StoredObject) -> None:
        begun.set()
        may_end.wait(20)

    job = Handle(Fetch(KEY, 30, is_announced=True, use=use))
    engine.submit(job)
    assert begun.wait(20)
    for _ in range(3):
        engine.cancel(job)
        assert until_answered(engine) == []
    may_end.set()
    assert [each.outcome for each in engine.drain(20)] == [Outcome.CANCELLED]


def test_hanging_download_of_another_process_is_repeated_at_half_time(
    store: Scripted, start: Start
) -> None:
    store.objects[KEY] = sealed()
    store.answer_s = 60
    first, second = start(io_timeout_s=100), start()
    hung = Handle(Fetch(KEY, 100))
    first.submit(hung)
    wait_until(lambda: bool(store.gets))
    store.answer_s = 0.0
    assert finish(second, Fetch(KEY, 3)).outcome is Outcome.OK
    first.cancel(hung)


def test_announced_object_is_awaited_in_host_cache_and_store(
    store: Scripted, start: Start, tmp_path: Path
) -> None:
    reader = start("reader")
    job = Fetch(KEY, 30, is_announced=True)
    reader.submit(job)
    assert until_answered(reader) == []
    store.objects[KEY] = sealed()
    (done,) = reader.drain(20)
    assert done.outcome is Outcome.OK
    release(done)
    # Also from the same host, while the store never gets it.
    asked = len(store.gets)
    writer, neighbour = start("same"), start("same")
    neighbour.submit(Fetch(OTHER, 30, is_announced=True))
    assert until_answered(neighbour) == []
    staging = Staging(torch.device("cpu"), 1 << 22)
    slab = staging.reserve(FACTS)
    assert slab is not None
    store.put = never  # type: ignore[method-assign]
    writer.submit(Put(OTHER, slab))
    (done,) = neighbour.drain(20)
    assert done.outcome is Outcome.OK
    assert [moved.tier for moved in done.moved] == [Tier.HOST]
    release(done)
    assert len(store.gets) > asked


def test_guessed_object_published_on_the_host_soon_after_is_found(
    store: Scripted, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecshare.transfer.fetch._GUESS_WAIT_S", 20.0)
    reader, neighbour = start("same"), start("same")
    assert finish(reader, Fetch(KEY, 30)).outcome is Outcome.MISSING
    asked = len(store.gets)
    reader.submit(Fetch(KEY, 30, is_guess=True))
    assert until_answered(reader) == []
    publish(neighbour)
    (done,) = reader.drain(10)
    assert [moved.tier for moved in done.moved] == [Tier.HOST]
    release(done)
    assert len(store.gets) == asked + 1


def test_in_store_fetch_misses_objects_only_on_this_host(store: Scripted, start: Start) -> None:
    engine = start()
    publish(engine)
    assert finish(engine, Fetch(KEY, 5)).outcome is Outcome.OK
    assert finish(engine, Fetch(KEY, 5, in_store=True)).outcome is Outcome.MISSING
    # As it is in the host cache, its upload is awaited, with fewer and fewer requests.
    engine.submit(Fetch(KEY, 30, is_announced=True, in_store=True))
    engine.drain(0.5)
    assert engine.in_flight
    assert len(store.questions) < 20
    store.objects[KEY] = sealed()
    (done,) = engine.drain(20)
    assert done.outcome is Outcome.OK
    release(done)
    assert not store.gets
    assert finish(engine, Fetch(KEY, 5, in_store=True)).outcome is Outcome.OK


def test_in_store_fetch_fails_if_the_store_cannot_confirm(store: Scripted, start: Start) -> None:
    engine = start()
    publish(engine)

    async def broken(keys: Sequence[Key]) -> list[bool]:
        raise StoreUnavailable("503")

    store.exists = broken  # type: ignore[method-assign]
    assert finish(engine, Fetch(KEY, 1, in_store=True)).outcome is Outcome.UNAVAILABLE
    engine.host.discard(KEY)
    store.objects[KEY] = sealed()
    # A successful download proves that the store has it.
    assert finish(engine, Fetch(KEY, 5, in_store=True)).outcome is Outcome.OK


OTHER = object_key(Kind.EC, "0" * 32, "other")


async def never(key: str, body: Buffer, file: str | None = None, *, replace: bool = False) -> bool:
    await asyncio.Event().wait()
    return True


def test_announced_object_is_polled_less_and_less_often(store: Scripted, start: Start) -> None:
    assert finish(start(), Fetch(KEY, 1.5, is_announced=True)).outcome is Outcome.MISSING
    assert 5 <= len(store.gets) <= 15
    pauses = [after - before for before, after in zip(store.gets, store.gets[1:], strict=False)]
    assert pauses[0] < pauses[-2]


def announced(engine: TransferEngine, timeout_s: float) -> list[Outcome]:
    """Fetch eight announced objects; return the outcomes."""
    keys = [object_key(Kind.EC, "0" * 32, str(number)) for number in range(8)]
    for key in keys:
        engine.submit(Fetch(key, timeout_s, 1 << 20, is_announced=True))
    return [done.outcome for done in engine.drain(20)]


def test_timeout_after_a_response_does_not_open_the_breaker(store: Scripted, start: Start) -> None:
    engine = start()
    store.answer_s = 0.6  # the second response would arrive after the deadline
    assert announced(engine, 1) == [Outcome.MISSING] * 8
    assert len(store.gets) == 16
    assert not engine.open_breakers


def test_store_that_never_responds_opens_the_breaker(store: Scripted, start: Start) -> None:
    """This holds also for jobs with a shorter deadline."""
    engine = start(io_timeout_s=0.5)
    store.answer_s = 60
    assert announced(engine, 0.05) == [Outcome.UNAVAILABLE] * 8
    assert not engine.open_breakers
    wait_until(lambda: engine.open_breakers == {"read"})


def test_store_that_stalls_for_io_timeout_s_opens_the_breaker(
    store: Scripted, start: Start
) -> None:
    engine = start(io_timeout_s=0.3)
    store.stalls_once_asked = True
    assert announced(engine, 1.5) == [Outcome.MISSING] * 8
    assert engine.open_breakers == {"read"}


def test_longest_pause_s_bounds_the_polling_pause(store: Scripted, start: Start) -> None:
    job = Fetch(KEY, 1.5, is_announced=True, longest_pause_s=0.01)
    assert finish(start(), job).outcome is Outcome.MISSING
    assert len(store.gets) > 15


def lies(number: int, timeout_s: float) -> list[Fetch]:
    """Make fetches of objects that are announced but never stored."""
    keys = [object_key(Kind.EC, "0" * 32, f"lie {each}") for each in range(number)]
    return [Fetch(key, timeout_s, is_announced=True, longest_pause_s=0.01) for key in keys]


def test_polling_rate_is_bounded_for_many_waiting_fetches(store: Scripted, start: Start) -> None:
    """Each fetch asks once at first, then all together 500 times a second."""
    engine = start()
    engine.submit(*lies(150, 2.0))
    assert [done.outcome for done in engine.drain(60)] == [Outcome.MISSING] * 150
    assert len(store.gets) < 150 + 2 * 500 + 150, "and once more at their deadlines"


def test_gap_marker_ends_a_fetch_among_many_waiting_ones(store: Scripted, start: Start) -> None:
    engine, other = start(), start("other")
    jobs = [structs.replace(job, may_be_given_up=True) for job in lies(60, 100)]
    waiting = [Handle(job) for job in jobs]
    engine.submit(*waiting)
    wait_until(lambda: len(store.gets) > 10 * len(jobs))
    other.submit(GiveUp(jobs[7].key))
    (done,) = engine.drain(20, until=waiting[7])
    assert done.outcome is Outcome.GIVEN_UP
    engine.cancel(*waiting)


def test_polls_of_missing_objects_do_not_delay_loads(store: Scripted, start: Start) -> None:
    """This holds also if the store is slow to report that they are missing."""
    store.objects[KEY] = sealed()
    engine = start(io_timeout_s=100)
    jobs = lies(100, 100)
    store.stalled = {job.key for job in jobs}
    waiting = [Handle(job) for job in jobs]
    engine.submit(*waiting)
    job = Handle(Fetch(KEY, 100))
    engine.submit(job)
    (done,) = engine.drain(20, until=job)
    assert done.outcome is Outcome.OK
    release(done)
    engine.cancel(*waiting)


def test_object_damaged_in_transit_is_fetched_again(store: Scripted, start: Start) -> None:
    store.objects[KEY] = sealed()
    store.damage = [flipped]
    assert finish(start(), Fetch(KEY, 10)).outcome is Outcome.OK
    assert KEY in store.objects


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda body: body[:-1],
        lambda body: body + b"x",
        lambda body: b"",
        lambda body: b"\0" * len(body),
        lambda _: sealed(OTHER),
        lambda body: body + bytes(1 << 20),
    ],
)
def test_damaged_object_is_removed_from_store_and_host(
    store: Scripted, start: Start, damage: Callable[[bytes], bytes]
) -> None:
    store.objects[KEY] = damage(sealed())
    limit_bytes = len(sealed()) + 100
    engine = start()
    assert finish(engine, Fetch(KEY, 10, limit_bytes)).outcome is Outcome.CORRUPT
    assert KEY not in store.objects
    assert finish(engine, Fetch(KEY, 10, limit_bytes)).outcome is Outcome.MISSING
    assert not list(engine.host.root.glob("[!.]*")), "nothing of it stays on this host"


def test_unusable_tensor_is_removed_from_store_and_host(store: Scripted, start: Start) -> None:
    """This holds also if it is in the host cache: its first reader may have accepted it."""
    store.objects[KEY] = sealed()
    engine = start()
    assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.OK
    unusable = Fetch(KEY, 10, accepts=lambda facts: facts.dtype == "I8")
    assert finish(engine, unusable).outcome is Outcome.CORRUPT
    assert KEY not in store.objects
    assert finish(engine, unusable).outcome is Outcome.MISSING
    assert not list(engine.host.root.glob("[!.]*")), "nothing of it stays on this host"


def test_damaged_object_that_cannot_be_removed_is_not_refetched(
    store: Scripted, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecshare.transfer.client.breaker.FIRST_BAD_S", 60.0)
    store.objects[KEY] = flipped(sealed())
    store.is_read_only = True
    engine = start()
    for _ in range(5):
        assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.CORRUPT
    assert len(store.gets) == 3, "twice, and once more to prove the damage"


def test_unreadable_object_is_not_removed_and_tried_once(
    store: Scripted, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is requested once, then not again for a while."""
    store.objects[KEY] = sealed()
    refused = Mock(side_effect=ObjectUnreadable("cannot be read: it is another user's"))
    monkeypatch.setattr(store, "get", refused)
    engine = start()
    for _ in range(5):
        assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.CORRUPT
    assert refused.call_count == 1
    assert KEY in store.objects


def test_reader_with_a_key_accepts_only_objects_of_that_key(store: Scripted, start: Start) -> None:
    staging = Staging(torch.device("cpu"), 1 << 22)
    keys = {
        "one": "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2",
        "two": "c57a20f9e84b1d36720fe9b58a3cd41690d7f2643b8e51acf4196d0e82b7a35f",
        "none": "",
    }
    outcomes = {}
    for writer, secret in keys.items():
        slab = staging.reserve(FACTS)
        assert slab is not None
        engine = start(f"writer-{writer}", integrity_key=secret)
        engine.submit(Put(KEY, slab))
        engine.drain(10)
        for reader in ("one", "none"):
            reading = start(f"{writer}-{reader}", integrity_key=keys[reader])
            body = store.objects[KEY]
            outcomes[writer, reader] = finish(reading, Fetch(KEY, 10)).outcome
            store.objects[KEY] = body
        del store.objects[KEY]
    assert outcomes["one", "one"] is Outcome.OK
    assert outcomes["two", "one"] is outcomes["none", "one"] is Outcome.CORRUPT
    assert outcomes["none", "none"] is Outcome.OK


HTML = b"<html><title>Maintenance</title></html>"
PROXIES = [
    lambda _: HTML,
    lambda body: b"",
    lambda body: body[: len(body) // 2],
    lambda body: body + b"x",
    flipped,
    lambda _: sealed(OTHER),
    lambda body: HTML.ljust(len(body)),
]


@pytest.mark.parametrize("proxy", PROXIES)
@pytest.mark.parametrize("states_md5", [True, False])
def test_object_damaged_by_every_response_is_not_removed(
    store: Scripted,
    start: Start,
    proxy: Callable[[bytes], bytes],
    states_md5: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A proxy, a network card or this host's memory may be at fault instead of the object."""
    store.objects[KEY] = sealed()
    store.states_md5 = states_md5
    store.damage = [proxy] * 10
    engine = start()
    assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.CORRUPT
    assert store.objects[KEY] == sealed()
    reason = "damaged on the way" if states_md5 else "states no MD5"
    assert reason in caplog.text or "at most" in caplog.text


def test_object_is_fetched_soon_after_transit_damage_ends(store: Scripted, start: Start) -> None:
    store.objects[KEY] = sealed()
    store.damage = [flipped] * 3
    engine = start()
    assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.CORRUPT
    assert not store.damage
    wait_until(lambda: finish(engine, Fetch(KEY, 10)).outcome is Outcome.OK)


def test_missing_object_does_not_count_as_a_successful_probe(
    store: Scripted, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all objects arrive damaged, a miss must not use up the breaker's probe."""
    monkeypatch.setattr("ecshare.transfer.client.breaker.FIRST_PAUSE_S", 1.0)
    damaged = [object_key(Kind.EC, "0" * 32, f"damaged {number}") for number in range(4)]
    missing = object_key(Kind.EC, "0" * 32, "missing")
    store.objects = {KEY: sealed(), **{key: flipped(sealed(key)) for key in damaged}}
    store.states_md5 = False
    engine = start()
    for key in damaged:
        assert finish(engine, Fetch(key, 10)).outcome is Outcome.CORRUPT
    assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.UNAVAILABLE
    wait_until(lambda: finish(engine, Fetch(missing, 10)).outcome is not Outcome.UNAVAILABLE)
    assert finish(engine, Fetch(missing, 10)).outcome is Outcome.MISSING
    assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.OK


def test_unproven_damage_is_replaced_by_the_next_save(store: Scripted, start: Start) -> None:
    """Replacing a good object with a good one is harmless, so it needs no proof."""
    store.states_md5 = False
    store.objects[KEY] = flipped(sealed())
    engine = start()
    assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.CORRUPT
    assert finish(engine, Lookup((KEY,), 10, store_only=True)).value == (False,)
    save(engine)
    assert store.objects[KEY] == sealed()
    assert finish(engine, Lookup((KEY,), 10, store_only=True)).value == (True,)
    engine.host.discard(KEY)
    assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.OK


def test_backfill_replaces_a_damaged_object(store: Scripted, start: Start) -> None:
    store.states_md5 = False
    engine = start()
    store.objects[KEY] = flipped(sealed())
    assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.CORRUPT
    assert engine.host.publish(KEY, memoryview(sealed())) is not None
    assert finish(engine, Backfill(KEY)).value is True
    assert store.objects[KEY] == sealed()


def test_unreadable_object_is_not_replaced(
    store: Scripted, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.objects[KEY] = theirs = flipped(sealed())
    refused = Mock(side_effect=ObjectUnreadable("cannot be read: it is another user's"))
    monkeypatch.setattr(store, "get", refused)
    engine = start()
    assert finish(engine, Fetch(KEY, 10)).outcome is Outcome.CORRUPT
    save(engine)
    assert store.objects[KEY] == theirs


def test_object_replaced_meanwhile_is_not_removed(
    store: Scripted, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.objects[KEY] = flipped(sealed())
    stated = store.stat

    async def replaced_then_stated(key: Key) -> ObjectStat:
        store.objects[key] = sealed()
        return await stated(key)

    monkeypatch.setattr(store, "stat", replaced_then_stated)
    assert finish(start(), Fetch(KEY, 10)).outcome is Outcome.CORRUPT
    assert store.objects[KEY] == sealed()


def test_number_of_removed_damaged_objects_is_bounded(
    store: Scripted, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds also for proven damage: an emptied store would be worse."""
    damaged, sound = (
        [Key(f"{KEY[:-2]}{number:02d}") for number in numbers]
        for numbers in (range(20), range(20, 40))
    )
    store.objects = {key: flipped(sealed(key)) for key in damaged}
    store.objects |= {key: sealed(key) for key in sound}
    engine = start()
    for pair in zip(damaged, sound, strict=True):
        assert [finish(engine, Fetch(key, 10)).outcome for key in pair] == [
            Outcome.CORRUPT,
            Outcome.OK,
        ]
    assert len(store.objects) == 40 - 9
    assert len([each for each in caplog.messages if "none is removed" in each]) == 1
    assert "is not removed" not in caplog.text, "there is no line for each object"


def test_damage_of_every_object_opens_the_breaker(
    store: Scripted, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [Key(f"{KEY[:-2]}{number:02d}") for number in range(8)]
    for key in keys:
        store.objects[key] = sealed(key)
    store.damage = [flipped] * 100
    engine = start()
    outcomes = [finish(engine, Fetch(key, 10)).outcome for key in keys]
    assert outcomes == [Outcome.CORRUPT] * 4 + [Outcome.UNAVAILABLE] * 4
    assert engine.open_breakers == {"read"}
    assert len(store.objects) == len(keys)
    assert len([each for each in caplog.messages if "are paused" in each]) == 1
    store.damage = []
    assert finish(engine, Fetch(keys[-1], 10, is_announced=True)).outcome is Outcome.OK
    assert not engine.open_breakers


def test_unreadable_objects_do_not_open_the_breaker(store: Scripted, start: Start) -> None:
    keys = [Key(f"{KEY[:-2]}{number:02d}") for number in range(9)]
    store.objects = {key: sealed(key) for key in keys}
    store.damage = [no_object] * 8
    engine = start()
    outcomes = [finish(engine, Fetch(key, 10)).outcome for key in keys]
    assert outcomes == [Outcome.CORRUPT] * 8 + [Outcome.OK]
    assert not engine.open_breakers


def no_object(body: bytes) -> bytes:
    raise ObjectUnreadable("a folder lies in its place")


@pytest.mark.parametrize("is_begun", [False, True])
def test_late_write_of_a_timed_out_fetch_raises_broken_pipe(
    store: Scripted, start: Start, is_begun: bool
) -> None:
    sinks: list[Sink] = []

    async def begun_only(key: Key, sink: Sink) -> None:
        if is_begun:
            sink.begin(8192)
        sinks.append(sink)
        await asyncio.Event().wait()

    store.get = begun_only  # type: ignore[method-assign]
    engine = start()
    assert finish(engine, Fetch(KEY, 0.05)).outcome is Outcome.UNAVAILABLE
    send = partial(sinks[0].write, 0, bytes(8192)) if is_begun else partial(sinks[0].begin, 8192)
    with pytest.raises(BrokenPipeError):
        send()
    assert not list(engine.host.root.glob("*.tmp*")), "it takes no room on this host"


def test_a_host_without_room_for_the_rest_of_an_object_misses_it(
    store: Scripted, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store has done nothing wrong, so its breaker stays closed."""
    store.objects[KEY] = sealed()
    engine = start()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache._DraftFile, "write", full)
        for _ in range(8):
            assert finish(engine, Fetch(KEY, 5)).outcome is Outcome.UNAVAILABLE
    assert not engine.open_breakers
    assert caplog.text.count("the host cache cannot be written") == 1
    assert "unexpectedly" not in caplog.text
    assert not list(engine.host.root.glob("*.tmp*")), "it takes no room on this host"
    assert finish(engine, Fetch(KEY, 5)).outcome is Outcome.OK


def save(engine: TransferEngine) -> None:
    slab = Staging(torch.device("cpu"), 1 << 22).reserve(FACTS)
    assert slab is not None
    slab.body[PROLOGUE_BYTES:] = bytes(FACTS.num_bytes)
    engine.submit(Put(KEY, slab))
    engine.drain(20)
