# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecshare.store.errors import StoreUnavailable
from ecshare.store.threads import Threads, Workers, gather_all


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads("test", 3)
    yield threads
    threads.close()


async def test_call_runs_in_another_thread(threads: Threads) -> None:
    assert await threads.run(threading.get_ident) != threading.get_ident()


async def test_event_loop_runs_while_a_call_blocks(threads: Threads) -> None:
    released = threading.Event()
    blocked = asyncio.ensure_future(threads.run(released.wait, 20))
    assert await threads.run(lambda: "meanwhile") == "meanwhile"
    assert not blocked.done()
    released.set()
    assert await blocked


async def test_exception_of_a_call_is_raised(threads: Threads) -> None:
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 4, 10])
async def test_each_keeps_the_order(threads: Threads, num_items: int) -> None:
    items = range(num_items)
    assert await threads.each(lambda item: item * 2, items) == [item * 2 for item in items]


async def test_each_uses_all_threads(threads: Threads) -> None:
    """The calls wait for one another, and would hang with fewer than three threads."""
    gather_all = threading.Barrier(3)
    assert await threads.each(lambda _: gather_all.wait(30) >= 0, range(6)) == [True] * 6


@pytest.mark.parametrize(("num_items", "num_threads"), [(1, 1), (4, 1), (5, 2), (99, 3)])
async def test_each_uses_one_thread_for_what_takes_less_time_together(
    threads: Threads, num_items: int, num_threads: int
) -> None:
    wait = threading.Barrier(num_threads)
    used: set[int] = set()

    def call(item: int) -> int:
        if threading.get_ident() not in used:
            used.add(threading.get_ident())
            wait.wait(30)
        return item

    assert await threads.each(call, range(num_items), 4) == [*range(num_items)]
    assert len(used) == num_threads


async def test_both_uses_two_threads(threads: Threads) -> None:
    met = threading.Barrier(2)
    await threads.run(threads.both, lambda: met.wait(30), lambda: met.wait(30))


async def test_both_does_not_deadlock_when_all_threads_are_busy(threads: Threads) -> None:
    """All threads call it at once: waiting for a free one would deadlock."""
    met, done = threading.Barrier(3), list[int]()

    def call() -> None:
        met.wait(30)
        threads.both(lambda: met.wait(30), lambda: done.append(1))

    await asyncio.gather(*(threads.run(call) for _ in range(3)))
    assert done == [1, 1, 1]


@pytest.mark.parametrize("failing", [0, 1])
async def test_both_raises_what_either_raises(threads: Threads, failing: int) -> None:
    calls: list[Callable[[], object]] = [lambda: None, lambda: None]
    calls[failing] = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        await threads.run(threads.both, *calls)


async def test_cancelled_calls_leave_a_thread_for_others(threads: Threads) -> None:
    begun, released = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        begun.release()
        released.wait(20)

    hung = [asyncio.ensure_future(threads.run(hang)) for _ in range(2)]
    for _ in hung:
        await asyncio.to_thread(begun.acquire, timeout=20)
    for each in hung:
        each.cancel()
        with pytest.raises(asyncio.CancelledError):
            await each
    assert await threads.run(lambda: 1) == 1
    released.set()


async def test_gather_all_keeps_the_order_and_accepts_no_items() -> None:
    assert await gather_all(asyncio.sleep(0.01 / n, n) for n in (1, 2, 3)) == [1, 2, 3]
    assert await gather_all([]) == []


@pytest.mark.parametrize("by", ["failure", "cancellation"])
async def test_gather_all_ends_all_tasks_when_one_fails(by: str) -> None:
    ended, all_run = [], asyncio.Barrier(3)

    async def goes_on() -> None:
        await all_run.wait()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def fails() -> None:
        await all_run.wait()
        if by == "cancellation":
            caller.cancel()
        else:
            raise StoreUnavailable("gone")

    caller = asyncio.ensure_future(gather_all([goes_on(), fails(), goes_on()]))
    with pytest.raises(StoreUnavailable if by == "failure" else asyncio.CancelledError):
        await caller
    assert ended == [True, True]


@pytest.mark.skipif(not Path("/proc/thread-self/comm").exists(), reason="Linux only")
def test_tools_see_the_names_of_threads() -> None:
    workers = Workers(1, "ecshare-a-long-name")
    shown = workers.submit(Path("/proc/thread-self/comm").read_text).result()
    workers.shutdown()
    assert shown == "ecshare-a-long-\n"


def test_submit_after_shutdown_is_cancelled() -> None:
    workers = Workers(1, "few")
    workers.shutdown()
    with pytest.raises(asyncio.CancelledError):
        workers.submit(print)


def test_failed_thread_initializer_raises_in_every_submit() -> None:
    def fail() -> None:
        raise OSError("no such device")

    workers = Workers(1, "few", fail)
    with pytest.raises(RuntimeError, match="initializer"):
        workers.submit(print).result()
    with pytest.raises(RuntimeError, match="initializer"):
        workers.submit(print)
    workers.shutdown()
