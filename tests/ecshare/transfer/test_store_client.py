# SPDX-License-Identifier: Apache-2.0
"""What the store's health hears of an operation, however it ends."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreUnavailable
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.transfer.priority import Urgency
from ecshare.transfer.store_client import StoreAccess

PAUSE_S = 0.55


async def answers(_: ObjectStore) -> None:
    pass


async def fails(_: ObjectStore) -> None:
    raise StoreUnavailable("gone")


async def breaks(_: ObjectStore) -> None:
    raise RuntimeError("a bug")


async def stalls(_: ObjectStore) -> None:
    await asyncio.sleep(60)


@pytest.fixture
async def access(tmp_path: Path) -> AsyncIterator[StoreAccess]:
    """With an open breaker, and a probe due."""
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    access = StoreAccess(store, 10)
    for _ in range(4):
        with pytest.raises(StoreUnavailable, match="gone"):
            await access.ask(fails, Urgency.LOAD)
    assert access.open_breakers == {"read"}
    await asyncio.sleep(PAUSE_S)
    yield access
    await store.close()


async def test_a_stalled_probe_is_the_only_one(access: StoreAccess) -> None:
    probe = asyncio.create_task(access.ask(stalls, Urgency.LOAD))
    await asyncio.sleep(PAUSE_S)
    with pytest.raises(StoreUnavailable, match="left alone"):
        await access.ask(answers, Urgency.LOAD)
    probe.cancel()
    await asyncio.wait([probe])


async def test_a_probe_that_was_cancelled_makes_way_for_another(access: StoreAccess) -> None:
    probe = asyncio.create_task(access.ask(stalls, Urgency.LOAD))
    await asyncio.sleep(PAUSE_S)
    probe.cancel()
    await asyncio.wait([probe])
    await access.ask(answers, Urgency.LOAD)
    assert not access.open_breakers


async def test_a_probe_that_ended_by_a_bug_makes_way_for_another(access: StoreAccess) -> None:
    with pytest.raises(RuntimeError):
        await access.ask(breaks, Urgency.LOAD)
    await asyncio.sleep(PAUSE_S)
    await access.ask(answers, Urgency.LOAD)
    assert not access.open_breakers


async def test_a_probe_that_ran_out_of_its_own_time_makes_way_for_another(
    access: StoreAccess,
) -> None:
    deadline_s = time.monotonic() + 0.1
    with pytest.raises(TimeoutError):
        await access.ask(stalls, Urgency.LOAD, deadline_s=deadline_s, is_answered=True)
    await asyncio.sleep(PAUSE_S)
    await access.ask(answers, Urgency.LOAD)
    assert not access.open_breakers


@pytest.fixture
async def well(tmp_path: Path) -> AsyncIterator[StoreAccess]:
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    yield StoreAccess(store, 10)
    await store.close()


async def fail(access: StoreAccess, urgency: Urgency) -> None:
    for _ in range(4):
        with pytest.raises(StoreUnavailable, match="gone"):
            await access.ask(fails, urgency)


async def test_saves_that_fail_cost_no_load_and_no_look_up(well: StoreAccess) -> None:
    await fail(well, Urgency.SAVE)
    assert well.open_breakers == {"write"}
    with pytest.raises(StoreUnavailable, match="saves failed repeatedly and are left alone"):
        await well.ask(answers, Urgency.SAVE)
    for urgency in (Urgency.LOAD, Urgency.LOOK_UP, Urgency.POLL):
        await well.ask(answers, urgency)
    assert well.open_breakers == {"write"}, "that loads work says nothing about saves"


@pytest.mark.parametrize("urgency", [Urgency.LOAD, Urgency.LOOK_UP, Urgency.POLL])
async def test_loads_and_look_ups_that_fail_cost_no_save(
    well: StoreAccess, urgency: Urgency
) -> None:
    await fail(well, urgency)
    assert well.open_breakers == {"read"}
    with pytest.raises(StoreUnavailable, match="loads and look-ups failed repeatedly"):
        await well.ask(answers, Urgency.LOAD)
    await well.ask(answers, Urgency.SAVE)
    assert well.open_breakers == {"read"}


@pytest.mark.parametrize(
    ("many", "other"), [(Urgency.POLL, Urgency.LOAD), (Urgency.LOAD, Urgency.POLL)]
)
async def test_loads_and_polls_never_wait_for_each_other(
    well: StoreAccess, many: Urgency, other: Urgency
) -> None:
    stalled = [asyncio.create_task(well.ask(stalls, many, 50 << 20)) for _ in range(100)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await well.ask(answers, other, 50 << 20)
    for task in stalled:
        task.cancel()
    await asyncio.wait(stalled)
