# SPDX-License-Identifier: Apache-2.0
"""Engines with a budget: one at a time cleans, and another goes on when it is gone."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecshare.encoder.config import EncoderConfig
from ecshare.store.keys import Kind, lease_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.upkeep import elected as module
from ecshare.transfer.upkeep.elected import elected, store_time_s
from ecshare.transfer.upkeep.renewal import Record
from ecshare.upkeep.budget import ALL, Budget
from kvshare.config import KVConfig
from tests.ecshare.transfer.upkeep.test_noting import FACTS, NAMESPACE
from tests.ecshare.upkeep.stores import OTHER, Full, age, ec, files, kept, kv, opened, put, space
from tests.waiting import wait_until

Start = Callable[..., TransferEngine]
KINDS = {Kind.EC: EncoderConfig, Kind.KV: KVConfig}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start engines. Slots take half a second."""
    monkeypatch.setattr(module, "SLOT_S", 0.5)
    started: list[TransferEngine] = []

    def start(kind: Kind = Kind.KV, *, write: bool = True, **options: Any) -> TransferEngine:
        host = f"{tmp_path}/host-{len(started)}"
        config = KINDS[kind](url=f"{tmp_path}/store", host_cache_dir=host, **options)
        engine = TransferEngine(config, "options")
        started.append(engine)
        engine.start_up(Record(kind, NAMESPACE, FACTS), write=write)
        return engine

    yield start
    for engine in started:
        engine.close()


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "ecshare-gc"]


@pytest.mark.parametrize("options", [{"max_bytes": 250}, {"ttl_hours": 2.5}])
def test_engine_keeps_its_kind_within_the_budget(
    start: Start, tmp_path: Path, options: dict[str, float]
) -> None:
    root = tmp_path / "store"
    objects = [kv(str(n)) for n in range(4)]
    for n, key in enumerate(objects):
        put(root, key, hours=n + 1)
    put(root, ec("other kind"), hours=99)
    start(**options)
    wait_until(lambda: not {*objects[2:]} & files(root))
    assert files(root) >= {objects[0], objects[1], ec("other kind")}


def test_budget_of_a_tenant_covers_only_its_objects(start: Start, tmp_path: Path) -> None:
    """Engines of other tenants take turns of their own."""
    root = tmp_path / "store"
    own = {name: space(root, Kind.KV, tenant=name) for name in ("one", "two")}
    for namespace in (*own.values(), OTHER):
        for n in range(3):
            put(root, kv(str(n), namespace=namespace), hours=n + 1)
    for name in own:
        start(max_bytes=250, tenant=name)
    gone = {kv("2", namespace=namespace) for namespace in own.values()}
    wait_until(lambda: not gone & files(root))
    assert {kv(str(n), namespace=OTHER) for n in range(3)} <= files(root)
    assert {kv(str(n), namespace=each) for n in range(2) for each in own.values()} <= files(root)


def test_engine_cleans_a_store_that_does_not_fit_into_its_memory_in_parts(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_OBJECTS", 50)
    caplog.set_level("INFO")
    root = tmp_path / "store"
    objects = [kv(str(n)) for n in range(60)]
    for n, key in enumerate(objects):
        put(root, key, hours=1 if n < 30 else 5)
    start(ttl_hours=3)
    wait_until(lambda: "removed 30 of 30 objects" in caplog.text)
    assert "listed it in 2 parts, because it has so many objects" in caplog.text
    assert {*objects} & files(root) == {*objects[:30]}


def test_full_store_is_cleaned_without_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOT_S", 0.5)
    monkeypatch.setattr("ecshare.upkeep.calls._PAUSE_S", 0.0)
    for n in range(3):
        put(tmp_path, kv(str(n)), hours=n + 1)
    budget = Budget({ALL: 150})
    cleaner = module.ElectedCleaner(lambda: Full(str(tmp_path)), Kind.KV, budget, None, 10)
    wait_until(lambda: kept(tmp_path) == {kv("0")})
    cleaner.close()


def test_another_engine_cleans_when_one_ends(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "store"
    engines = [start(max_bytes=150) for _ in range(3)]
    for n, engine in enumerate(engines):
        put(root, kv(f"kept {n}"), hours=1)
        put(root, kv(f"gone {n}"), hours=3 + n)
        wait_until(lambda n=n: not (root / kv(f"gone {n}")).exists())  # type: ignore[misc]
        engine.close()
        age(root / kv(f"kept {n}"), 100)
    assert not threads()


HOLDER = """
import asyncio, logging, sys
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.keys import Kind
from ecshare.transfer.upkeep import elected
from ecshare.upkeep import clean
from ecshare.upkeep.budget import Budget

class Slow(DirectoryStore):
    async def delete(self, keys):
        if keys[0].startswith("kv/"):
            print("removing", flush=True)
            await asyncio.sleep(0.1)
        await super().delete(keys)

elected.SLOT_S, clean.PAGE = 0.5, 1
logging.basicConfig(level="INFO", stream=sys.stdout)
budget = Budget(ttl_hours={"kv": 1})
cleaner = elected.ElectedCleaner(lambda: Slow(sys.argv[1]), Kind.KV, budget, None, 10)
sys.stdin.read()
cleaner.close()
"""


@pytest.mark.nightly
async def test_lease_holder_that_was_stopped_does_not_go_on_with_its_old_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by SIGSTOP in the middle of its removals; meanwhile the objects are used again."""
    monkeypatch.setattr(module, "SLOT_S", 0.5)
    chain = [kv(str(n)) for n in range(50)]
    for key in chain:
        put(tmp_path, key, hours=5)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout
    assert holder.stdout.readline() == "removing\n"
    holder.send_signal(signal.SIGSTOP)
    stopped_s, store = time.monotonic(), opened(tmp_path)
    for key in chain:
        put(tmp_path, key, hours=0)
    while time.monotonic() < stopped_s + (module._MOST_SLOTS + 1) * module.SLOT_S:
        await asyncio.sleep(0.1)
    assert await elected(store, Kind.KV), "another one has its turn"
    await store.close()
    holder.send_signal(signal.SIGCONT)
    said = next(line for line in holder.stdout if "cleaned the store" in line)
    assert "of 50 objects" in said
    assert len({*chain} - kept(tmp_path)) < 5, said
    holder.communicate("")
    assert holder.returncode == 0


@pytest.mark.parametrize(("write", "options"), [(True, {}), (False, {"max_bytes": 1})])
def test_engine_without_a_budget_or_a_right_to_write_does_not_clean(
    start: Start, write: bool, options: dict[str, int]
) -> None:
    start(write=write, **options)
    assert not threads()


async def test_one_of_many_engines_is_elected_in_each_slot(tmp_path: Path) -> None:
    stores = [opened(tmp_path) for _ in range(8)]
    begun_in = int(await store_time_s(stores[0]) // module.SLOT_S)
    won = await asyncio.gather(*(elected(store, Kind.KV) for store in stores))
    ended_in = int(await store_time_s(stores[0]) // module.SLOT_S)
    assert 1 <= won.count(True) <= 1 + ended_in - begun_in
    assert await elected(stores[0], Kind.EC)
    assert await elected(stores[0], Kind.KV, "a tenant")
    slot = int(await store_time_s(stores[0]) // module.SLOT_S)
    # A slot may have ended meanwhile.
    assert files(tmp_path) & {lease_key(Kind.KV, slot), lease_key(Kind.KV, slot - 1)}
    assert not [name for name in files(tmp_path) if name.startswith("upkeep/1/clock/")]
    for store in stores:
        await store.close()


async def test_slots_follow_the_stores_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real_s = opened(tmp_path), time.time()
    monkeypatch.setattr(time, "time", lambda: real_s + 50_000)
    assert abs(await store_time_s(store) - real_s) < 60
    await store.close()
