# SPDX-License-Identifier: Apache-2.0
"""How operations count for the store's breakers, however they end."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import StoreBusy, StoreUnavailable
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.transfer.client.breaker import CircuitBreaker
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient
from tests.waiting import Clock, until

PAUSE_S = 0.55


async def answers(_: ObjectStore) -> None:
    pass


async def fails(_: ObjectStore) -> None:
    raise StoreUnavailable("gone")


async def breaks(_: ObjectStore) -> None:
    raise RuntimeError("a bug")


async def stalls(_: ObjectStore) -> None:
    await asyncio.Event().wait()


class Stalled:
    """An operation on the store that ends when the test says how."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self._ends = asyncio.Event()
        self._end: Callable[[ObjectStore], Awaitable[None]] = answers

    async def __call__(self, store: ObjectStore) -> None:
        self.has_begun.set()
        await self._ends.wait()
        await self._end(store)

    def ends(self, how: Callable[[ObjectStore], Awaitable[None]]) -> None:
        self._end = how
        self._ends.set()


async def left(
    client: StoreClient, priority: Priority = Priority.LOAD, cost_bytes: int = 0
) -> Stalled:
    """Begin an operation whose job then stops waiting."""
    operation = Stalled()
    job = asyncio.create_task(client.ask(operation, priority, cost_bytes))
    await operation.has_begun.wait()
    job.cancel()
    await asyncio.wait([job])
    assert job.cancelled()
    return operation


@pytest.fixture
async def client(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StoreClient]:
    """Make a client with an open breaker and a due probe."""
    breaker = partial(CircuitBreaker, clock_s=clock.now_s)
    monkeypatch.setattr("ecshare.transfer.client.store_client.CircuitBreaker", breaker)
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    client = StoreClient(store, 10)
    for _ in range(4):
        with pytest.raises(StoreUnavailable, match="gone"):
            await client.ask(fails, Priority.LOAD)
    assert client.open_breakers == {"read"}
    clock.forward(PAUSE_S)
    yield client
    await store.close()


async def test_probe_of_a_cancelled_job_is_still_the_only_one(
    client: StoreClient, clock: Clock
) -> None:
    probe = await left(client)
    clock.forward(PAUSE_S)
    with pytest.raises(StoreUnavailable, match="are paused"):
        await client.ask(answers, Priority.LOAD)
    probe.ends(answers)
    await until(lambda: not client.open_breakers)


async def test_failed_probe_of_a_cancelled_job_counts(client: StoreClient, clock: Clock) -> None:
    probe = await left(client)
    probe.ends(fails)
    await until(lambda: not client.num_in_flight)
    clock.forward(PAUSE_S)  # the pause has doubled
    with pytest.raises(StoreUnavailable, match="are paused"):
        await client.ask(answers, Priority.LOAD)
    clock.forward(PAUSE_S)
    await client.ask(answers, Priority.LOAD)
    assert not client.open_breakers


async def test_probe_that_raised_a_bug_is_followed_by_another(
    client: StoreClient, clock: Clock
) -> None:
    with pytest.raises(RuntimeError):
        await client.ask(breaks, Priority.LOAD)
    clock.forward(PAUSE_S)
    await client.ask(answers, Priority.LOAD)
    assert not client.open_breakers


@pytest.fixture
async def well(tmp_path: Path) -> AsyncIterator[StoreClient]:
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    yield StoreClient(store, 10)
    await store.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_jobs_own_timeout_does_not_open_the_breaker(well: StoreClient) -> None:
    operations = [Stalled() for _ in range(8)]
    for each in operations:
        job = asyncio.create_task(well.ask(each, Priority.LOAD, 0, now_s() + 0.01))
        await each.has_begun.wait()
        await asyncio.wait([job])
        assert isinstance(job.exception(), TimeoutError)
    assert not well.open_breakers
    for each in operations:
        each.ends(answers)
    await until(lambda: not well.num_in_flight)
    assert not well.open_breakers


async def test_failure_counts_although_its_job_was_cancelled(well: StoreClient) -> None:
    operations = [await left(well) for _ in range(4)]
    assert not well.open_breakers
    for each in operations:
        each.ends(fails)
    await until(lambda: well.open_breakers == {"read"})


@pytest.mark.parametrize("is_waited_for", [True, False])
async def test_store_that_never_responds_opens_the_breaker(
    tmp_path: Path, is_waited_for: bool
) -> None:
    """This holds with and without a job that waits for it."""
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    client = StoreClient(store, timeout_s=0.01)
    for _ in range(4):
        if is_waited_for:
            with pytest.raises(StoreBusy, match=r"the store took longer than 0\.01 s"):
                await client.ask(stalls, Priority.LOAD, 0, now_s() + 30)
        else:
            await left(client)
    await until(lambda: client.open_breakers == {"read"} and not client.num_in_flight)
    await store.close()


async def test_short_response_timeout_does_not_apply_to_transfers(tmp_path: Path) -> None:
    """Requests for objects have a longer timeout than others."""
    store = open_store(StoreConfig(url=f"{tmp_path}/store"), "options")
    client = StoreClient(store, timeout_s=30, answer_timeout_s=0.01)
    with pytest.raises(StoreBusy, match=r"the store took longer than 0\.01 s"):
        await client.ask(stalls, Priority.LOOK_UP)
    operation = await left(client, Priority.LOAD, cost_bytes=1)
    save = await left(client, Priority.SAVE)
    with pytest.raises(StoreBusy, match=r"the store took longer than 0\.01 s"):
        await client.ask(stalls, Priority.POLL)
    assert client.num_in_flight == 2
    operation.ends(answers)
    save.ends(answers)
    await until(lambda: not client.num_in_flight)
    await store.close()


async def test_operations_of_cancelled_jobs_count_as_in_flight(well: StoreClient) -> None:
    """Cancelled jobs must not raise the number of concurrent requests."""
    operations = [await left(well, Priority.LOOK_UP) for _ in range(4)]
    waiting = asyncio.create_task(well.ask(answers, Priority.LOOK_UP))
    given_up = Stalled()
    with pytest.raises(TimeoutError):
        await well.ask(given_up, Priority.LOOK_UP, 0, now_s() + 0.01)
    assert not waiting.done()
    operations[0].ends(answers)
    await waiting
    for each in operations[1:]:
        each.ends(fails)
    await until(lambda: not well.num_in_flight)
    assert not given_up.has_begun.is_set()


async def test_job_cancelled_twice_does_not_cancel_its_operation(well: StoreClient) -> None:
    operation = Stalled()
    job = asyncio.create_task(well.ask(operation, Priority.LOAD))
    await operation.has_begun.wait()
    job.cancel()
    job.cancel()
    await asyncio.wait([job])
    assert well.num_in_flight == 1
    operation.ends(answers)
    await until(lambda: not well.num_in_flight)


async def test_exception_in_an_abandoned_operation_is_not_logged(
    well: StoreClient, caplog: pytest.LogCaptureFixture
) -> None:
    (await left(well)).ends(breaks)
    await until(lambda: not well.num_in_flight)
    gc.collect()
    assert not caplog.records


async def test_failed_operation_releases_its_memory_at_once(well: StoreClient) -> None:
    """A failed save's slab is freed at once, not at the next garbage collection."""
    body = np.zeros(100, np.uint8)
    is_gone = weakref.ref(body)

    async def fails_with(view: memoryview) -> None:
        raise StoreUnavailable(f"{len(view)} bytes")

    async def save(view: memoryview) -> None:
        await well.ask(lambda _: fails_with(view), Priority.SAVE)

    gc.disable()
    try:
        with contextlib.suppress(StoreUnavailable):
            await save(body.data)
        del body
        await until(lambda: is_gone() is None)
    finally:
        gc.enable()


async def fail(client: StoreClient, priority: Priority) -> None:
    for _ in range(4):
        with pytest.raises(StoreUnavailable, match="gone"):
            await client.ask(fails, priority)


async def test_failed_saves_pause_only_saves(well: StoreClient) -> None:
    await fail(well, Priority.SAVE)
    assert well.open_breakers == {"write"}
    with pytest.raises(StoreUnavailable, match="saves failed repeatedly, and are paused"):
        await well.ask(answers, Priority.SAVE)
    for priority in (Priority.LOAD, Priority.LOOK_UP, Priority.POLL):
        await well.ask(answers, priority)
    assert well.open_breakers == {"write"}, "working loads do not mean that saves work"


@pytest.mark.parametrize("priority", [Priority.LOAD, Priority.LOOK_UP, Priority.POLL])
async def test_failed_loads_and_lookups_pause_no_saves(
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
