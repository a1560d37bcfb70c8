# SPDX-License-Identifier: Apache-2.0
"""Gap markers tell readers that an announced object is given up; invalid ones are ignored."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ecshare.store.config import StoreConfig
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal
from ecshare.store.keys import Key, Kind, gap_key, object_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Fetch, GiveUp, Outcome, Put
from tests.kvshare.gated import GatedFileSystem
from tests.nightly import gate_tries_only
from tests.waiting import wait_until

NAME = "0" * 32
KEY = object_key(Kind.KV, NAME, "a", "t0of1")
OTHER = object_key(Kind.KV, NAME, "b", "t0of1")
LONG_S = 60.0
SHORT_S = 1.0

Engines = Callable[..., TransferEngine]


@pytest.fixture
def start(tmp_path: Path) -> Engines:
    def start(host: str = "one", **options: Any) -> TransferEngine:
        config = StoreConfig(
            url=f"file://{tmp_path}/store", host_cache_dir=f"{tmp_path}/{host}", **options
        )
        return TransferEngine(config, "options")

    return start


def end_of(engine: TransferEngine, timeout_s: float, *, heeds: bool = True) -> Outcome:
    """Wait for the announced object; return the outcome."""
    engine.submit(Fetch(KEY, timeout_s, is_announced=True, may_be_given_up=heeds))
    (done,) = engine.drain(timeout_s / 2 if timeout_s > SHORT_S else LONG_S)
    return done.outcome


def note_of(key: Key, noted_s: object) -> bytes:
    body = bytearray(PROLOGUE_BYTES)
    seal(memoryview(body), TensorSpec("U8", (0,), {"time": noted_s}), gap_key(key))
    return bytes(body)


def write(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "store" / gap_key(KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(body)
    for folder in (path.parent, *path.parent.parents):
        if folder == tmp_path:
            break
        folder.chmod(0o700)
    path.chmod(0o600)


@pytest.mark.parametrize("host", ["one", "two"])
def test_waiting_reader_learns_that_the_object_is_given_up(start: Engines, host: str) -> None:
    writer, reader = start(), start(host)
    reader.submit(Fetch(KEY, LONG_S, is_announced=True, may_be_given_up=True))
    writer.submit(GiveUp(KEY))
    assert [done.outcome for done in writer.drain(LONG_S)] == [Outcome.OK]
    assert [done.outcome for done in reader.drain(LONG_S / 2)] == [Outcome.GIVEN_UP]
    writer.close()
    reader.close()


def test_all_shards_of_an_object_share_a_gap_marker() -> None:
    names = ("", "t0of1", "t3of4-s1")
    assert len({gap_key(object_key(Kind.KV, NAME, "a", name)) for name in names}) == 1


def test_new_gap_marker_replaces_an_expired_one(
    start: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path, note_of(KEY, time.time() - 1e6))
    writer, reader = start(), start("two")
    assert end_of(reader, SHORT_S) is Outcome.MISSING
    writer.submit(GiveUp(KEY))
    writer.drain(LONG_S)
    assert end_of(reader, LONG_S) is Outcome.GIVEN_UP
    writer.close()
    reader.close()


def test_stored_object_is_found_despite_a_gap_marker(start: Engines, tmp_path: Path) -> None:
    write(tmp_path, note_of(KEY, time.time()))
    engine = start()
    slab = Staging(torch.device("cpu"), 1 << 20).reserve(TensorSpec("U8", (1,), {}))
    assert slab is not None
    engine.submit(Put(KEY, slab))
    engine.drain(LONG_S)
    reader = start("two")
    assert end_of(reader, LONG_S) is Outcome.OK
    engine.close()
    reader.close()


def test_fetch_without_may_be_given_up_ignores_gap_markers(start: Engines) -> None:
    engine = start()
    engine.submit(GiveUp(KEY))
    engine.drain(LONG_S)
    assert end_of(engine, SHORT_S, heeds=False) is Outcome.MISSING
    engine.close()


OTHER_NOTES = {
    "old": note_of(KEY, time.time() - 1e4),
    "of the future": note_of(KEY, time.time() + 1e4),
    "text": note_of(KEY, "now"),
    "nothing": note_of(KEY, None),
    "true": note_of(KEY, True),
    "more than a float holds": note_of(KEY, 10**400),
    "less than a float holds": note_of(KEY, -(10**400)),
    "the largest": note_of(KEY, 1.7e308),
    "another's": note_of(OTHER, time.time()),
    "empty": b"",
    "zeros": b"\0" * PROLOGUE_BYTES,
    "large": note_of(KEY, time.time()) + b"\0" * (1 << 20),
}


@pytest.mark.parametrize("name", gate_tries_only(("old", "text", "another's"), OTHER_NOTES))
def test_invalid_gap_markers_are_ignored(start: Engines, tmp_path: Path, name: str) -> None:
    write(tmp_path, OTHER_NOTES[name])
    engine = start()
    assert end_of(engine, SHORT_S) is Outcome.MISSING
    engine.close()


def test_reader_with_a_key_accepts_only_gap_markers_of_that_key(
    start: Engines, tmp_path: Path
) -> None:
    write(tmp_path, note_of(KEY, time.time()))
    secret = bytes(range(32)).hex()
    engine = start(integrity_key=secret)
    assert end_of(engine, SHORT_S) is Outcome.MISSING
    writer = start("two", integrity_key=secret)
    writer.submit(GiveUp(KEY))
    writer.drain(LONG_S)
    assert end_of(engine, LONG_S) is Outcome.GIVEN_UP
    engine.close()
    writer.close()


def test_slow_polling_checks_the_gap_marker_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(_: object, operation: str, path: str) -> None:
        assert operation == "exists", "nothing is stored"
        asked.append(path.rpartition("/")[2])

    monkeypatch.setattr(GatedFileSystem, "pass_gate", note)
    engine = TransferEngine(
        StoreConfig(url="gated://bucket", host_cache_dir=f"{tmp_path}/host"), "options"
    )
    names = [key.rpartition("/")[2] for key in (KEY, gap_key(KEY))]
    job = Fetch(KEY, LONG_S, is_announced=True, may_be_given_up=True, longest_pause_s=0.15)
    engine.submit(job)
    wait_until(lambda: asked.count(names[0]) > 12)
    engine.close(0.0)
    after = [name for name in asked if name in names]
    tail = after[[n for n, name in enumerate(after) if name == names[0]][8] :]
    assert tail[:8] == names * 4
    GatedFileSystem.reset()
