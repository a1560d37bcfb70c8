# SPDX-License-Identifier: Apache-2.0
"""Engines with a budget: one at a time cleans, and another goes on when it is gone."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecshare.encoder.config import EncoderConfig
from ecshare.store.keys import Kind, lease_key
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.upkeep import elected as module
from ecshare.transfer.upkeep.elected import elected, store_time_s
from kvshare.config import KVConfig
from tests.ecshare.transfer.upkeep.test_noting import FACTS, NAMESPACE
from tests.ecshare.upkeep.stores import age, ec, files, kv, opened, put
from tests.waiting import wait_until

Start = Callable[..., TransferEngine]
KINDS = {Kind.EC: EncoderConfig, Kind.KV: KVConfig}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start engines. Slots take half a second."""
    monkeypatch.setattr(module, "SLOT_S", 0.5)
    started: list[TransferEngine] = []

    def start(kind: Kind = Kind.KV, *, write: bool = True, **options: float) -> TransferEngine:
        host = f"{tmp_path}/host-{len(started)}"
        config = KINDS[kind](url=f"{tmp_path}/store", host_cache_dir=host, **options)
        engine = TransferEngine(config, "options")
        started.append(engine)
        engine.start_up(kind, NAMESPACE, FACTS, write=write)
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
    wait_until(lambda: not (root / objects[2]).exists())
    assert objects[3] not in files(root)
    assert files(root) >= {objects[0], objects[1], ec("other kind")}


def test_another_engine_goes_on_when_one_ends(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "store"
    engines = [start(max_bytes=150) for _ in range(3)]
    for n, engine in enumerate(engines):
        put(root, kv(f"kept {n}"), hours=1)
        put(root, kv(f"gone {n}"), hours=3 + n)
        wait_until(lambda n=n: not (root / kv(f"gone {n}")).exists())  # type: ignore[misc]
        engine.close()
        age(root / kv(f"kept {n}"), 100)
    assert not threads()


@pytest.mark.parametrize(("write", "options"), [(True, {}), (False, {"max_bytes": 1})])
def test_engine_without_a_budget_or_a_right_to_write_does_not_clean(
    start: Start, write: bool, options: dict[str, int]
) -> None:
    start(write=write, **options)
    assert not threads()


async def test_one_of_many_gets_a_slot(tmp_path: Path) -> None:
    stores = [opened(tmp_path) for _ in range(8)]
    won = await asyncio.gather(*(elected(store, Kind.KV) for store in stores))
    assert won.count(True) == 1
    assert await elected(stores[0], Kind.EC)
    slot = int(await store_time_s(stores[0]) // module.SLOT_S)
    # A slot may have ended meanwhile.
    assert files(tmp_path) & {lease_key(Kind.KV, slot), lease_key(Kind.KV, slot - 1)}
    assert not [name for name in files(tmp_path) if name.startswith("upkeep/1/clock/")]
    for store in stores:
        await store.close()


async def test_slots_are_those_of_the_stores_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real_s = opened(tmp_path), time.time()
    monkeypatch.setattr(time, "time", lambda: real_s + 50_000)
    assert abs(await store_time_s(store) - real_s) < 60
    await store.close()
