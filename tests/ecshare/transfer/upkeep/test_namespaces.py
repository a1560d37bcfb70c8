# SPDX-License-Identifier: Apache-2.0
"""What an engine logs about other namespaces."""

import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.keys import Kind, manifest_key, namespace_digest, object_key
from ecshare.store.manifest import Manifest, write_manifest
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Fetch, Job, Lookup, LookupRounds, MultiLookup, StoredObject
from ecshare.transfer.upkeep import namespaces
from ecshare.transfer.upkeep.namespaces import NamespaceWatch
from ecshare.transfer.upkeep.renewal import Record
from tests.waiting import wait_until

FACTS = {"model": "qwen", "weights": "aa", "epoch": "", "dtype": "bfloat16"}
OLDER = FACTS | {"epoch": "1", "dtype": "float16"}
OTHER_MODEL = FACTS | {"model": "llava", "weights": "bb"}
KEY = object_key(Kind.EC, namespace_digest(FACTS), "absent")
DIFFERENCE = '\n    dtype: "bfloat16" != "float16"\n    epoch: "" != "1"'

Start = Callable[..., TransferEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start engines with the given facts, each with its own host cache."""
    started: list[TransferEngine] = []

    def start(facts: dict[str, Any], *, write: bool, kind: Kind = Kind.EC) -> TransferEngine:
        config = StoreConfig(
            url=f"{tmp_path}/store", host_cache_dir=f"{tmp_path}/host-{len(started)}"
        )
        engine = TransferEngine(config, "options")
        started.append(engine)
        engine.start_up(Record(kind, namespace_digest(facts), facts), write=write)
        return engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[int, str]]]:
    """Return level and text of log lines about namespaces since the last call."""
    caplog.set_level(logging.INFO, "ecshare.transfer.upkeep.namespaces")
    told = 0

    def said() -> list[tuple[int, str]]:
        nonlocal told
        # Other threads add to the list, so it is not cleared.
        records = caplog.records[told:]
        told += len(records)
        return [
            (record.levelno, record.getMessage())
            for record in records
            if record.name == "ecshare.transfer.upkeep.namespaces"
        ]

    return said


Said = Callable[[], list[tuple[int, str]]]


def run(engine: TransferEngine, job: Job[Any]) -> None:
    engine.submit(job)
    for done in engine.drain(10):
        if isinstance(done.value, StoredObject):
            done.value.release()


def test_engine_without_other_namespaces_logs_nothing(start: Start, said: Said) -> None:
    start(FACTS, write=True)
    start(FACTS, write=True)
    start(FACTS, write=False)
    start(OLDER, write=True, kind=Kind.KV)
    assert said() == []


@pytest.mark.parametrize("write", [True, False])
def test_differing_facts_of_the_nearest_namespace_are_logged(
    start: Start, said: Said, write: bool
) -> None:
    start(OTHER_MODEL, write=True)
    start(OLDER, write=True)
    said()
    start(FACTS, write=write)
    ((level, text),) = said()
    assert level == logging.WARNING
    assert namespace_digest(FACTS) in text
    assert text.endswith(DIFFERENCE)
    start(FACTS, write=write)
    ((level, text),) = said()
    assert level == (logging.INFO if write else logging.WARNING), (
        "the writer's manifest is stored now"
    )
    assert text.endswith(DIFFERENCE)


def test_reader_with_an_expired_manifest_logs_at_least_not_lately(
    start: Start, said: Said, tmp_path: Path
) -> None:
    start(OLDER, write=True)
    start(FACTS, write=True).close()
    said()
    (tmp_path / "store" / manifest_key(Kind.EC, namespace_digest(FACTS))).unlink()
    start(FACTS, write=False)
    ((_, text),) = said()
    assert "at least not lately" in text


def test_namespace_of_another_model_is_logged_as_info(start: Start, said: Said) -> None:
    start(OTHER_MODEL, write=True)
    start(FACTS, write=True)
    assert [level for level, _ in said()] == [logging.INFO]


def find_key() -> LookupRounds[bool]:
    (tier,) = yield (KEY,)
    return tier is not None


@pytest.mark.parametrize("job", [Fetch(KEY, 5), Lookup((KEY,), 5), MultiLookup(find_key, 5)])
def test_reader_started_first_logs_the_writers_namespace_on_a_miss(
    start: Start, said: Said, job: Job[Any]
) -> None:
    reader = start(FACTS, write=False)
    start(OLDER, write=True)
    assert said() == []
    run(reader, job)
    lines: list[tuple[int, str]] = []

    def is_told() -> bool:
        lines.extend(said())
        return bool(lines)

    wait_until(is_told, otherwise="nothing is said")
    ((level, text),) = lines
    assert level == logging.WARNING
    assert text.endswith(DIFFERENCE)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    yield store
    await store.close()


def digest_of(text: str) -> str:
    """Return the namespace of facts that are too deep for Python's JSON writer."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def watch_of(store: ObjectStore) -> NamespaceWatch:
    return NamespaceWatch(StoreClient(store, 10), Record(Kind.EC, namespace_digest(FACTS), FACTS))


async def test_same_difference_is_logged_once(store: ObjectStore, said: Said) -> None:
    await write_manifest(store, Kind.EC, namespace_digest(OLDER), OLDER)
    watch = watch_of(store)
    await watch.compare()
    await watch.compare()
    assert len(said()) == 1
    nearer = FACTS | {"epoch": "1"}
    await write_manifest(store, Kind.EC, namespace_digest(nearer), nearer)
    await watch.compare()
    ((_, text),) = said()
    assert text.endswith('other):\n    epoch: "" != "1"')


async def test_number_of_logged_differences_is_bounded(store: ObjectStore, said: Said) -> None:
    odd = {f"fact{number}": number for number in range(100)}
    await write_manifest(store, Kind.EC, namespace_digest(odd), odd)
    await watch_of(store).compare()
    ((_, text),) = said()
    assert text.endswith("and 94 more")
    assert text.count("\n") == 11


async def test_failing_store_skips_the_comparison(
    store: ObjectStore, said: Said, tmp_path: Path
) -> None:
    manifests = tmp_path / "store" / "ec" / "2" / "manifests"
    manifests.parent.mkdir(parents=True)
    manifests.touch()
    await watch_of(store).compare()
    assert said() == []


def deep(levels: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for _ in range(levels):
        facts = {"a": facts}
    return facts


@pytest.mark.parametrize("levels", range(900, 1000, 20))
def test_engine_starts_beside_a_deeply_nested_manifest(
    start: Start, tmp_path: Path, levels: int
) -> None:
    text = '{"a":' * levels + "{}" + "}" * levels
    path = tmp_path / "store" / manifest_key(Kind.EC, digest_of(text))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    start(FACTS, write=True)


async def test_incomparable_facts_skip_the_comparison(
    store: ObjectStore, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Manifest("0" * 32, deep(5000), 0.0)

    async def listed(*_: object) -> list[Manifest]:
        return [odd]

    monkeypatch.setattr(namespaces, "list_manifests", listed)
    await watch_of(store).compare()
    assert said() == []


def test_comparisons_become_rarer_with_more_misses(tmp_path: Path) -> None:
    watch = watch_of(open_store(StoreConfig(url=f"{tmp_path}/store"), "options"))
    due = [number for number in range(1, 5000) if watch.is_due(is_hit=False)]
    assert due == [1, 16, 256, 4096]
    assert not watch.is_due(is_hit=True)
    assert not any(watch.is_due(is_hit=False) for _ in range(100_000))
