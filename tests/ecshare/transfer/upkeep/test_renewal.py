# SPDX-License-Identifier: Apache-2.0
"""A running writer renews its manifest and mark, so that no expiry rule removes them."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.keys import Kind, manifest_key, namespace_digest, tp_size_key
from ecshare.store.open import open_store
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Lookup, Outcome
from ecshare.transfer.upkeep import in_namespace, renewal
from ecshare.transfer.upkeep.renewal import Record
from lab.servers.s3 import SeaweedFS
from tests.bad_s3.faults import modes
from tests.bad_s3.server import BUCKET, Stored, bad_s3
from tests.expiry import renew_often
from tests.waiting import wait_until

FACTS = {"model": "qwen", "weights": "aa"}
NAMESPACE = namespace_digest(FACTS)
MANIFEST = manifest_key(Kind.KV, NAMESPACE)
MARK = tp_size_key(Kind.KV, NAMESPACE, 2)
LONG_AGO = 1_000_000_000

Start = Callable[..., TransferEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start engines. With the fixture `often` they renew their manifests all the time."""
    started: list[TransferEngine] = []

    def start(url: str, *, write: bool = True, **options: Any) -> TransferEngine:
        host = f"{tmp_path}/host-{len(started)}"
        engine = TransferEngine(StoreConfig(url=url, host_cache_dir=host, **options), "options")
        started.append(engine)
        engine.start_up(Record(Kind.KV, NAMESPACE, FACTS, MARK), write=write)
        return engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    renew_often(monkeypatch)


def failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the log records of failed writes."""
    return [record for record in caplog.records if record.name == renewal.logger.name]


def is_young(path: Path) -> bool:
    return path.exists() and path.stat().st_mtime > LONG_AGO + 1


def grow_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (LONG_AGO, LONG_AGO))


def test_start_renews_an_old_manifest_and_mark(start: Start, tmp_path: Path) -> None:
    """An expiry rule counts from the last write, which may be long before a late start."""
    store = tmp_path / "store"
    start(str(store)).close()
    grow_old(store / MANIFEST, store / MARK)
    start(str(store))
    assert is_young(store / MANIFEST)
    assert is_young(store / MARK)


@pytest.mark.usefixtures("often")
def test_running_engine_renews_manifest_and_mark(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "store"
    start(str(store))
    grow_old(store / MANIFEST, store / MARK)
    wait_until(lambda: is_young(store / MANIFEST) and is_young(store / MARK))


@pytest.mark.s3
@pytest.mark.usefixtures("often")
def test_manifest_and_mark_expired_in_a_bucket_are_written_again(
    start: Start, seaweed: SeaweedFS, tmp_path: Path
) -> None:
    url = f"{seaweed.url}/{tmp_path.name}"
    engine = start(url, storage_options=seaweed.storage_options)
    assert found(engine) == (True, True)
    asyncio.run(remove(StoreConfig(url=url, storage_options=seaweed.storage_options)))
    wait_until(lambda: found(engine) == (True, True))


def found(engine: TransferEngine) -> tuple[bool, ...]:
    """Return whether the store has the manifest, and whether it has the mark."""
    engine.submit(Lookup((MANIFEST, MARK), 10, store_only=True))
    (done,) = engine.drain(10)
    assert done.outcome is Outcome.OK
    assert isinstance(done.value, tuple)
    return done.value


async def remove(config: StoreConfig) -> None:
    """Remove both objects, as an expiry rule does."""
    store = open_store(config, "options")
    await store.delete([MANIFEST, MARK])
    await store.close()


@pytest.mark.usefixtures("often")
def test_reader_writes_nothing(start: Start, tmp_path: Path) -> None:
    start(str(tmp_path / "store"), write=False)
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("often")
def test_failed_renewal_is_logged_once_and_retried(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, renewal.logger.name)
    store = tmp_path / "store"
    start(str(store))
    store.rename(tmp_path / "unmounted")
    wait_until(lambda: len(failures(caplog)) >= 3)
    first, *others = failures(caplog)
    assert first.levelno == logging.WARNING
    assert first.getMessage() == (
        f"cannot store the manifest and the size mark of namespace {NAMESPACE}: "
        f"the folder {store} is gone"
    )
    assert {record.levelno for record in others} == {logging.DEBUG}
    (tmp_path / "unmounted").rename(store)
    grow_old(store / MANIFEST)
    wait_until(lambda: is_young(store / MANIFEST))


def test_engine_starts_with_a_folder_in_place_of_its_manifest(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    (store / MANIFEST).mkdir(parents=True)
    start(str(store))
    assert "cannot store the manifest" in caplog.text


def test_mark_is_written_despite_a_folder_in_place_of_the_manifest(
    start: Start, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    (store / MANIFEST).mkdir(parents=True)
    start(str(store))
    assert (store / MARK).is_file()


@pytest.fixture
def no_replacing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse replacing writes, as some bucket policies and sticky folders do."""

    def refuse(_: str, path: str, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "rename", refuse)


@pytest.mark.usefixtures("no_replacing")
def test_writer_that_may_not_replace_keeps_existing_manifests(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    for _ in range(2):
        start(str(store)).close()
    assert (store / MANIFEST).is_file()
    assert "cannot store the manifest" not in caplog.text


@pytest.mark.usefixtures("no_replacing", "often")
def test_writer_that_may_not_replace_writes_expired_manifests(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "store"
    start(str(store))
    for path in (store / MANIFEST, store / MARK):
        path.unlink()
    wait_until(lambda: (store / MANIFEST).exists() and (store / MARK).exists())


@pytest.mark.usefixtures("no_replacing")
def test_writer_that_may_not_replace_logs_a_damaged_manifest(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    (store / MANIFEST).parent.mkdir(parents=True)
    (store / MANIFEST).write_text("{}")
    start(str(store))
    assert "cannot store the manifest" in caplog.text


@pytest.mark.parametrize("refusal", ["conflict", "412", "304"])
def test_refused_manifest_does_not_count_as_written(
    start: Start, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    """In response to a replacing write, 409 and 412 do not mean that the object exists."""
    with bad_s3() as server:
        options = {"storage_options": server.storage_options, "io_timeout_s": 2.0}
        start(f"s3://{BUCKET}", **options).close()
        server.objects[MANIFEST] = Stored.of(b"damaged")
        server.faults = modes(f"put:{refusal}")
        start(f"s3://{BUCKET}", **options).close()
    assert "cannot store the manifest and the size mark" in caplog.text


@pytest.mark.usefixtures("often")
def test_failed_renewals_do_not_open_the_breaker(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There are no other requests: renewals alone must not open the breaker."""
    caplog.set_level(logging.DEBUG, renewal.logger.name)
    store = tmp_path / "store"
    engine = start(str(store))
    store.rename(tmp_path / "unmounted")
    wait_until(lambda: len(failures(caplog)) >= 10)
    assert not engine.open_breakers


def test_closed_engine_stops_its_renewal(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    async def renew(*_: object, **__: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(in_namespace, "renew", renew)
    start(str(tmp_path / "store")).close()
    assert ended
