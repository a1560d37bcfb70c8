# SPDX-License-Identifier: Apache-2.0
"""Engines write notes of use, if the store has a cleaner."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreDenied
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.integrity import Integrity
from ecshare.store.keys import CLEANED_KEY, Key, Kind, namespace_digest, object_key, use_id_of
from ecshare.store.objects import Buffer, read
from ecshare.transfer import engine as engine_module
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.upkeep import noting
from ecshare.transfer.upkeep.noting import NoteWriter
from ecshare.transfer.upkeep.renewal import Record
from ecshare.upkeep.budget import ALL, Budget
from ecshare.upkeep.clean import Cleaner
from ecshare.upkeep.record import UseRecord
from ecshare.upkeep.uses import LIMIT_BYTES, unpack
from tests.ecshare.upkeep.stores import files, kept, put
from tests.waiting import Clock, wait_until

FACTS = {"model": "qwen"}
NAMESPACE = namespace_digest(FACTS)
SECRET = "0123456789abcdef" * 4


def kv(name: str) -> Key:
    return object_key(Kind.KV, NAMESPACE, name.encode(), "t0of1")


def notes(root: Path) -> list[str]:
    return sorted(
        name
        for name in files(root)
        if name.startswith("upkeep/1/uses/") and not name.endswith(".tmp")
    )


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noting, "_CHECK_S", 0.01)
    monkeypatch.setattr(noting, "INTERVAL_S", 0.0)


class Refusing(DirectoryStore):
    """Lets engines write objects, but no notes."""

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        if key.startswith("upkeep/"):
            raise StoreDenied("Access Denied")
        return await super().put(key, body, replace=replace)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransferEngine]:
    config = StoreConfig(
        url=f"{tmp_path}/store", host_cache_dir=f"{tmp_path}/host", integrity_key=SECRET
    )
    engine = TransferEngine(config, "options")
    engine.start_up(Record(Kind.KV, NAMESPACE, FACTS), write=False)
    yield engine
    engine.close()


def test_object_used_by_a_running_engine_is_kept(
    often: None, engine: TransferEngine, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    put(root, kv("used"), hours=50)
    put(root, kv("unused"), hours=5)
    put(root, CLEANED_KEY, hours=7 * 24)
    engine.uses.add_chain([b"used", b"not stored"], 2)
    wait_until(lambda: notes(root))

    async def clean() -> None:
        store = DirectoryStore(str(root))
        cleaner = Cleaner(store, Budget({ALL: 180}), integrity=Integrity(SECRET.encode()))
        assert (await cleaner.run()).num_notes == 1
        await store.close()

    asyncio.run(clean())
    assert kept(root) == {kv("used")}


def test_no_note_is_written_to_a_store_without_a_cleaner(
    often: None, engine: TransferEngine, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    put(root, CLEANED_KEY, hours=9 * 24)
    for _ in range(3):
        engine.uses.add(b"used")
        wait_until(lambda: not len(engine.uses))
    assert not notes(root)


def test_engine_that_is_closed_writes_a_last_note(engine: TransferEngine, tmp_path: Path) -> None:
    put(tmp_path / "store", CLEANED_KEY, hours=0)
    engine.uses.add(b"used")
    engine.close()
    assert len(notes(tmp_path / "store")) == 1


class Hanging(DirectoryStore):
    """Never ends a write of a note."""

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        if key.startswith("upkeep/"):
            await asyncio.sleep(3600)
        return await super().put(key, body, replace=replace)


def test_last_note_does_not_wait_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_NOTE_S", 0.05)
    root = tmp_path / "store"
    put(root, CLEANED_KEY, hours=0)
    config = StoreConfig(url=str(root), host_cache_dir=f"{tmp_path}/host")
    engine = TransferEngine(config, "options", store=Hanging(str(root)))
    engine.start_up(Record(Kind.KV, NAMESPACE, FACTS), write=False)
    engine.uses.add(b"used")
    begun_s = time.monotonic()
    engine.close(timeout_s=120.0)
    assert time.monotonic() - begun_s < 60
    assert "ecshare-io" not in {each.name for each in threading.enumerate()}


async def test_note_has_ids_ages_and_positions(tmp_path: Path) -> None:
    put(tmp_path, CLEANED_KEY, hours=0)
    store, clock = DirectoryStore(str(tmp_path)), Clock()
    record = UseRecord(clock_s=clock.now_s)
    record.add_chain([b"a", b"b"], 16)
    clock.forward(240)
    record.add(kv("c"))
    writer = NoteWriter(store, record, Kind.KV, NAMESPACE, None, 10)
    await writer.write()
    await writer.write()
    (name,) = notes(tmp_path)
    found = unpack(await read(store, Key(name), LIMIT_BYTES), Key(name), None)
    ids = [use_id_of(kv(each)) for each in "abc"]
    rows = (found.ids.tolist(), found.ages.tolist(), found.positions.tolist())
    assert {*zip(*rows, strict=True)} == {*zip(ids, [4, 4, 0], [16, 32, 0], strict=True)}
    await store.close()


def test_engine_without_the_right_to_write_notes_keeps_serving(
    often: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    put(root, CLEANED_KEY, hours=0)
    config = StoreConfig(url=str(root), host_cache_dir=f"{tmp_path}/host")
    with caplog.at_level("INFO"):
        engine = TransferEngine(config, "options", store=Refusing(str(root)))
        engine.start_up(Record(Kind.KV, NAMESPACE, FACTS), write=True)
        engine.uses.add(b"used")
        wait_until(lambda: "are not noted: Access Denied" in caplog.text)
    engine.uses.add(b"used")
    wait_until(lambda: not len(engine.uses))
    assert caplog.text.count("are not noted") == 1, "it is said once"
    assert not engine.open_breakers
    engine.close()
