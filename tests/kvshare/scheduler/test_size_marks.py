# SPDX-License-Identifier: Apache-2.0
"""Engines look up chunks of the tensor-parallel sizes that are marked in the store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.keys import Kind, namespace_digest, tp_size_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Lookup
from ecshare.transfer.upkeep.renewal import Record
from kvshare.scheduler.tp_sizes import StoredTpSizes
from tests.expiry import expire, renew_often, wait_until_there

FACTS = {"model": "m"}
NAMESPACE = namespace_digest(FACTS)
POSSIBLE = (1, 2, 4, 8)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransferEngine]:
    config = StoreConfig(url=f"file://{tmp_path}/store", host_cache_dir=f"{tmp_path}/host")
    engine = TransferEngine(config, "options")
    yield engine
    engine.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sizes(engine: TransferEngine, clock: Clock) -> StoredTpSizes:
    return StoredTpSizes(NAMESPACE, 2, POSSIBLE, engine, clock)


def write(engine: TransferEngine, size: int) -> None:
    """Write the mark as an engine of that size does at start."""
    mark = tp_size_key(Kind.KV, NAMESPACE, size)
    engine.start_up(Record(Kind.KV, NAMESPACE, FACTS, mark), write=True)


def look(engine: TransferEngine, sizes: StoredTpSizes) -> int:
    """Look for marks and return how many keys the store was asked for."""
    sizes.look(10)
    ended = engine.drain(10)
    return sum(len(done.job.keys) for done in ended if isinstance(done.job, Lookup))


def test_own_tp_size_is_first_of_the_known_ones(
    engine: TransferEngine, sizes: StoredTpSizes
) -> None:
    assert sizes.known == (2,)
    write(engine, 1)
    write(engine, 2)
    write(engine, 8)
    assert look(engine, sizes) == 3
    assert sizes.known[0] == 2
    assert {*sizes.known} == {1, 2, 8}


def test_marks_written_later_are_found_after_30_s(
    engine: TransferEngine, sizes: StoredTpSizes, clock: Clock
) -> None:
    assert look(engine, sizes) == 3
    write(engine, 4)
    assert look(engine, sizes) == 0, "it asked less than 30 s ago"
    assert 4 not in sizes.known
    clock.now_s += 31
    assert look(engine, sizes) == 3
    assert sizes.known == (2, 4)
    clock.now_s += 31
    assert look(engine, sizes) == 2, "known sizes are not asked for"


def test_mark_of_a_running_engine_is_renewed_after_expiry(
    engine: TransferEngine,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines that start later find it, too."""
    renew_often(monkeypatch)
    write(engine, 4)
    wait_until_there(expire(tmp_path / "store"))
    newcomer = StoredTpSizes(NAMESPACE, 2, POSSIBLE, engine, clock)
    look(engine, newcomer)
    assert newcomer.known == (2, 4)


def test_marks_of_another_namespace_are_ignored(
    engine: TransferEngine, sizes: StoredTpSizes
) -> None:
    other = {"model": "other"}
    digest = namespace_digest(other)
    engine.start_up(Record(Kind.KV, digest, other, tp_size_key(Kind.KV, digest, 4)), write=True)
    look(engine, sizes)
    assert sizes.known == (2,)


def test_consumer_writes_no_mark(engine: TransferEngine, sizes: StoredTpSizes) -> None:
    mark = tp_size_key(Kind.KV, NAMESPACE, 4)
    engine.start_up(Record(Kind.KV, NAMESPACE, FACTS, mark), write=False)
    look(engine, sizes)
    assert sizes.known == (2,)


def test_model_with_one_tp_size_causes_no_lookup(engine: TransferEngine, clock: Clock) -> None:
    assert look(engine, StoredTpSizes(NAMESPACE, 1, (1,), engine, clock)) == 0


@pytest.mark.parametrize("size", [-1, 0, 1, 2, 3, 4, 16, 1 << 80])
def test_announced_tp_size_is_used_only_if_possible(sizes: StoredTpSizes, size: int) -> None:
    expected = (2, size) if size in (1, 4) else (2,)
    assert sizes.with_announced(size) == expected
    assert sizes.known == (2,)
