# SPDX-License-Identifier: Apache-2.0
"""Prefetching of the last used objects to this host, by the command and by a starting engine."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ecshare.cli import main
from ecshare.encoder.config import EncoderConfig
from ecshare.store.config import StoreConfig
from ecshare.store.format import TensorSpec
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Key, Kind, namespace_digest, object_key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Put
from ecshare.transfer.upkeep import filling
from ecshare.transfer.upkeep.renewal import Record
from tests.ecshare.upkeep.stores import age, note
from tests.waiting import wait_until

FACTS = {"model": "m"}
NAMESPACE = namespace_digest(FACTS)
RECORD = Record(Kind.EC, NAMESPACE, FACTS)
NUM_BYTES = 1 << 20
LEAST = 4 << 20
"""A limit of a host cache."""

ToHost = Callable[..., tuple[int, str, str]]


def ec(name: str, namespace: str = NAMESPACE) -> Key:
    return object_key(Kind.EC, namespace, name)


def put(root: Path, *keys: Key, hours: float = 0) -> None:
    """Store objects of 1 MiB, as an engine on another host has, so many hours ago."""
    config = StoreConfig(url=f"{root}/store", host_cache_dir=f"{root}/other")
    engine = TransferEngine(config, "options")
    staging = Staging(torch.device("cpu"), 2 * NUM_BYTES)
    for key in keys:
        slab = staging.reserve(TensorSpec("U8", (NUM_BYTES - 4096,), {}))
        assert slab is not None
        slab.payload.zero_()
        engine.submit(Put(key, slab))
        engine.drain(10)
        age(root / "store" / key, hours)
    engine.close()


def host(root: Path, limit: int = 64 << 20) -> HostCache:
    config = StoreConfig(url=f"{root}/store")
    return HostCache(root / "host", limit, config.store_id())


def here(root: Path, *keys: Key) -> list[bool]:
    cache = host(root)
    return [cache.has(key) for key in keys]


@pytest.fixture
def to_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> ToHost:
    """Run the command; return its status, and what it printed."""

    def run(*arguments: str, **options: object) -> tuple[int, str, str]:
        store = {"url": f"{tmp_path}/store", "host_cache_dir": f"{tmp_path}/host", **options}
        with pytest.raises(SystemExit) as ended:
            main(["warm", "--to-host", "--store", json.dumps(store), *arguments])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


def test_last_used_objects_are_prefetched_within_the_cache_limit(
    to_host: ToHost, tmp_path: Path
) -> None:
    put(tmp_path, ec("noted"), hours=90)
    put(tmp_path, ec("new"), hours=1)
    put(tmp_path, ec("old"), hours=80)
    note(tmp_path / "store", [(ec("noted"), 0.5, 0)])
    status, out, _ = to_host("--json", host_cache_bytes=2 * NUM_BYTES + 5000)
    assert (status, json.loads(out)["objects"]["new"]) == (0, 2)
    assert here(tmp_path, ec("noted"), ec("new"), ec("old")) == [True, True, False]
    _, out, _ = to_host("--json")
    assert json.loads(out)["objects"] == {
        "new": 1,
        "there already": 2,
        "not brought": 0,
        "no room": 0,
    }


def test_damaged_objects_are_not_prefetched(to_host: ToHost, tmp_path: Path) -> None:
    put(tmp_path, ec("good"), ec("bad"), ec("short"))
    bad, short = (tmp_path / "store" / ec(name) for name in ("bad", "short"))
    for path in (bad, short):
        path.chmod(0o600)
    bad.write_bytes(bad.read_bytes()[:-1] + b"x")
    short.write_bytes(b"x")
    status, out, _ = to_host()
    assert status == 0
    assert "not brought" in out
    assert here(tmp_path, ec("good"), ec("bad"), ec("short")) == [True, False, False]


def test_objects_without_a_mac_of_the_key_are_not_prefetched(
    to_host: ToHost, tmp_path: Path
) -> None:
    put(tmp_path, ec("forged"))
    assert to_host(integrity_key="k" * 64)[0] == 0
    assert here(tmp_path, ec("forged")) == [False]


def test_only_the_named_namespace_is_prefetched(to_host: ToHost, tmp_path: Path) -> None:
    other = ec("other", "0" * 32)
    put(tmp_path, ec("mine"), other)
    assert to_host("--namespace", NAMESPACE)[0] == 0
    assert here(tmp_path, ec("mine"), other) == [True, False]
    assert to_host("--namespace", "../x")[0] == 2


@contextmanager
def starting(root: Path, **options: object) -> Iterator[TransferEngine]:
    """Start an engine that only loads."""
    config = EncoderConfig(url=f"{root}/store", host_cache_dir=f"{root}/host", **options)  # type: ignore[arg-type]
    engine = TransferEngine(config, "options")
    try:
        engine.start_up(RECORD, write=False)
        yield engine
    finally:
        engine.close()


def test_engine_prefetches_the_last_used_objects_of_its_namespace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    other = ec("other", "0" * 32)
    put(tmp_path, ec("a"), ec("b"), other)
    put(tmp_path, ec("old"), hours=5)
    with starting(tmp_path, preload_bytes=2 * NUM_BYTES + 5000):
        wait_until(lambda: "preload_bytes: 2 new objects, 2.1 MB" in caplog.text)
    assert here(tmp_path, ec("a"), ec("b"), ec("old"), other) == [True, True, False, False]


def test_engine_prefetches_nothing_while_loads_are_in_flight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    put(tmp_path, ec("a"))
    begun = []
    monkeypatch.setattr("ecshare.transfer.upkeep.filling._BUSY_PAUSE_S", 0.001)
    monkeypatch.setattr(TransferEngine, "in_flight", 1, raising=False)
    original = TransferEngine.__init__

    def busy(self: TransferEngine, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        self.in_flight = 1
        begun.append(self)

    monkeypatch.setattr(TransferEngine, "__init__", busy)
    with starting(tmp_path, preload_bytes=10 * NUM_BYTES):
        with pytest.raises(AssertionError):
            wait_until(lambda: any(here(tmp_path, ec("a"))), 0.3)
        begun[0].in_flight = 0
        wait_until(lambda: any(here(tmp_path, ec("a"))))


def test_engine_starts_and_closes_although_the_store_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    put(tmp_path, ec("a"))
    path = tmp_path / "store" / ec("a")
    path.unlink()
    path.mkdir()
    with starting(tmp_path, preload_bytes=10 * NUM_BYTES):
        wait_until(lambda: "preload_bytes: " in caplog.text)


def test_an_engine_whose_namespace_does_not_fit_into_memory_starts_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "MOST_OBJECTS", 20)
    caplog.set_level("INFO")
    put(tmp_path, *(ec(str(n)) for n in range(9)))
    with starting(tmp_path, preload_bytes=NUM_BYTES):
        wait_until(lambda: "preload_bytes: " in caplog.text)
    assert (
        "no objects, 0.0 MB in the host cache; it ended: the store has more than 20" in caplog.text
    )
