# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from ecshare.store.errors import StoreUnavailable
from ecshare.store.threads import Threads, Workers, gather_all


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads("test", 3)
    yield threads
    threads.close()


async def test_a_call_runs_elsewhere(threads: Threads) -> None:
    assert await threads.run(threading.get_ident) != threading.get_ident()


async def test_the_loop_goes_on_while_a_call_blocks(threads: Threads) -> None:
    released = threading.Event()
    blocked = asyncio.ensure_future(threads.run(released.wait, 20))
    assert await threads.run(lambda: "meanwhile") == "meanwhile"
    assert not blocked.done()
    released.set()
    assert await blocked


async def test_its_error_comes_back(threads: Threads) -> None:
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 4, 10])
async def test_each_keeps_the_order(threads: Threads, num_items: int) -> None:
    items = range(num_items)
    assert await threads.each(lambda item: item * 2, items) == [item * 2 for item in items]


async def test_each_uses_all_threads(threads: Threads) -> None:
    """They wait for one another: with fewer threads than three this would not end."""
    gather_all = threading.Barrier(3)
    assert await threads.each(lambda _: gather_all.wait(30) >= 0, range(6)) == [True] * 6


async def test_both_uses_two_threads(threads: Threads) -> None:
    met = threading.Barrier(2)
    await threads.run(threads.both, lambda: met.wait(30), lambda: met.wait(30))


async def test_both_waits_for_no_thread_that_is_busy(threads: Threads) -> None:
    """All threads do this at once: one that waited for another would wait for ever."""
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


async def test_whoever_stops_waiting_leaves_the_others_their_threads(threads: Threads) -> None:
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


async def test_together_keeps_the_order_and_takes_none() -> None:
    assert await gather_all(asyncio.sleep(0.01 / n, n) for n in (1, 2, 3)) == [1, 2, 3]
    assert await gather_all([]) == []


@pytest.mark.parametrize("by", ["failure", "cancellation"])
async def test_when_one_fails_the_others_have_ended_too(by: str) -> None:
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


def test_what_comes_after_the_end_is_cancelled() -> None:
    workers = Workers(1)
    workers.shutdown()
    with pytest.raises(asyncio.CancelledError):
        workers.submit(print)


def test_threads_that_cannot_be_started_are_no_end() -> None:
    def fail() -> None:
        raise OSError("no such device")

    workers = Workers(1, initializer=fail)
    with pytest.raises(RuntimeError, match="initializer"):
        workers.submit(print).result()
    with pytest.raises(RuntimeError, match="initializer"):
        workers.submit(print)
    workers.shutdown()
