# SPDX-License-Identifier: Apache-2.0
"""What the store's health hears of an operation, however it ends."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreUnavailable
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.transfer.breaker import CircuitBreaker
from ecshare.transfer.priority import Priority
from ecshare.transfer.store_client import StoreClient
from tests.waiting import Clock

PAUSE_S = 0.55


async def answers(_: ObjectStore) -> None:
    pass


async def fails(_: ObjectStore) -> None:
    raise StoreUnavailable("gone")


async def breaks(_: ObjectStore) -> None:
    raise RuntimeError("a bug")


async def stalls(_: ObjectStore) -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def client(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StoreClient]:
    """With an open breaker, and a probe due."""
    breaker = partial(CircuitBreaker, clock_s=clock.now_s)
    monkeypatch.setattr("ecshare.transfer.store_client.CircuitBreaker", breaker)
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    client = StoreClient(store, 10)
    for _ in range(4):
        with pytest.raises(StoreUnavailable, match="gone"):
            await client.ask(fails, Priority.LOAD)
    assert client.open_breakers == {"read"}
    clock.forward(PAUSE_S)
    yield client
    await store.close()


async def stalled_probe(client: StoreClient) -> asyncio.Task[None]:
    """Begin an operation that does not end; return when the store has it."""
    begun = asyncio.Event()

    async def begins_and_stalls(store: ObjectStore) -> None:
        begun.set()
        await stalls(store)

    probe = asyncio.create_task(client.ask(begins_and_stalls, Priority.LOAD))
    await begun.wait()
    return probe


async def test_a_stalled_probe_is_the_only_one(client: StoreClient, clock: Clock) -> None:
    probe = await stalled_probe(client)
    clock.forward(PAUSE_S)
    with pytest.raises(StoreUnavailable, match="are paused"):
        await client.ask(answers, Priority.LOAD)
    probe.cancel()
    await asyncio.wait([probe])


async def test_a_probe_that_was_cancelled_makes_way_for_another(
    client: StoreClient, clock: Clock
) -> None:
    probe = await stalled_probe(client)
    clock.forward(PAUSE_S)
    probe.cancel()
    await asyncio.wait([probe])
    await client.ask(answers, Priority.LOAD)
    assert not client.open_breakers


async def test_a_probe_that_ended_by_a_bug_makes_way_for_another(
    client: StoreClient, clock: Clock
) -> None:
    with pytest.raises(RuntimeError):
        await client.ask(breaks, Priority.LOAD)
    clock.forward(PAUSE_S)
    await client.ask(answers, Priority.LOAD)
    assert not client.open_breakers


async def test_a_probe_that_ran_out_of_its_own_time_makes_way_for_another(
    client: StoreClient, clock: Clock
) -> None:
    deadline_s = time.monotonic() + 0.1
    with pytest.raises(TimeoutError):
        await client.ask(stalls, Priority.LOAD, 0, deadline_s, patience_s=1)
    clock.forward(PAUSE_S)
    await client.ask(answers, Priority.LOAD)
    assert not client.open_breakers


@pytest.fixture
async def well(tmp_path: Path) -> AsyncIterator[StoreClient]:
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    yield StoreClient(store, 10)
    await store.close()


@pytest.mark.parametrize(("left", "opens"), [(0.6, True), (0.4, False)])
async def test_a_job_that_ran_out_of_time_blames_the_store_if_that_had_half_of_it(
    well: StoreClient, left: float, opens: bool
) -> None:
    patience_s = 0.1
    for _ in range(4):
        deadline_s = time.monotonic() + left * patience_s
        with pytest.raises(TimeoutError):
            await well.ask(stalls, Priority.LOAD, 0, deadline_s, patience_s)
    assert bool(well.open_breakers) is opens


async def test_a_store_that_took_its_own_time_out_is_blamed_whoever_waited(
    tmp_path: Path,
) -> None:
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    client = StoreClient(store, timeout_s=0.01)
    for _ in range(4):
        with pytest.raises(TimeoutError):
            await client.ask(stalls, Priority.LOAD, 0, time.monotonic() + 60, patience_s=10_000)
    assert client.open_breakers == {"read"}
    await store.close()


async def fail(client: StoreClient, priority: Priority) -> None:
    for _ in range(4):
        with pytest.raises(StoreUnavailable, match="gone"):
            await client.ask(fails, priority)


async def test_saves_that_fail_cost_no_load_and_no_look_up(well: StoreClient) -> None:
    await fail(well, Priority.SAVE)
    assert well.open_breakers == {"write"}
    with pytest.raises(StoreUnavailable, match="saves failed repeatedly, and are paused"):
        await well.ask(answers, Priority.SAVE)
    for priority in (Priority.LOAD, Priority.LOOK_UP, Priority.POLL):
        await well.ask(answers, priority)
    assert well.open_breakers == {"write"}, "that loads work says nothing about saves"


@pytest.mark.parametrize("priority", [Priority.LOAD, Priority.LOOK_UP, Priority.POLL])
async def test_loads_and_look_ups_that_fail_cost_no_save(
    well: StoreClient, priority: Priority
) -> None:
    await fail(well, priority)
    assert well.open_breakers == {"read"}
    with pytest.raises(StoreUnavailable, match="loads and look-ups failed repeatedly"):
        await well.ask(answers, Priority.LOAD)
    await well.ask(answers, Priority.SAVE)
    assert well.open_breakers == {"read"}


@pytest.mark.parametrize(
    ("many", "other"), [(Priority.POLL, Priority.LOAD), (Priority.LOAD, Priority.POLL)]
)
async def test_loads_and_polls_never_wait_for_each_other(
    well: StoreClient, many: Priority, other: Priority
) -> None:
    stalled = [asyncio.create_task(well.ask(stalls, many, 50 << 20)) for _ in range(100)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await well.ask(answers, other, 50 << 20)
    for task in stalled:
        task.cancel()
    await asyncio.wait(stalled)
