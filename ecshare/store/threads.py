# SPDX-License-Identifier: Apache-2.0
"""Runs blocking calls outside of the event loop, in a few threads of one store."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

A = TypeVar("A")
R = TypeVar("R")


def show_name() -> None:
    """Give the calling thread's name to the kernel, for tools such as top.

    Python does so itself from 3.14 on. Linux shows 15 characters.
    """
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(threading.current_thread().name[:15])


class Workers(ThreadPoolExecutor):
    """Threads that cancel work submitted after their end.

    If a process exits without closing its stores, these threads end before other threads do, and
    Python refuses further work. That is neither a failure of the store nor a bug.
    """

    def __init__(
        self, limit: int, name: str, on_thread_start: Callable[[], object] | None = None
    ) -> None:
        """Start no thread yet; `limit` at most. `on_thread_start`: called first in each."""

        def begin() -> None:
            show_name()
            if on_thread_start is not None:
                on_thread_start()

        super().__init__(limit, thread_name_prefix=name, initializer=begin)

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """See Executor.

        Raises:
            asyncio.CancelledError: the threads have ended.
        """
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as exc:
            # Python has no class for this error. Other errors, as for too many threads, pass.
            if "shutdown" not in str(exc):
                raise
            raise asyncio.CancelledError from exc


class Threads:
    """Runs blocking functions for coroutines, `limit` at once.

    A coroutine that is cancelled ends at once. A call that has begun continues in its thread until
    it returns, because Python cannot stop it. So a store that hangs uses up only its own threads.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._limit = limit
        self._executor = Workers(limit, f"ecshare-{name}")

    async def run(self, call: Callable[..., R], *args: object) -> R:
        """Return `call(*args)`.

        Raises:
            Exception: any error of `call`.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    async def each(
        self, call: Callable[[A], R], items: Sequence[A], num_together: int = 1
    ) -> list[R]:
        """Return `[call(item) for item in items]`, spread over the threads.

        `num_together`: so many calls take less time in one thread than in two.

        Raises:
            Exception: any error of `call`.
        """
        num_threads = min(self._limit, -(-len(items) // num_together))
        if num_threads == 0:
            return []

        def every_nth(first: int) -> list[R]:
            return [call(item) for item in items[first::num_threads]]

        results: list[R | None] = [None] * len(items)
        for first, part in enumerate(
            await gather_all(self.run(every_nth, first) for first in range(num_threads))
        ):
            results[first::num_threads] = part
        return results  # type: ignore[return-value]  # every slot was filled

    def both(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """Run both, within a call of `run`. Another thread runs `second` if one is free.

        If none is free, this thread runs both, so calls that occupy all threads cannot deadlock.

        Raises:
            Exception: any error of the two.
        """
        work = self._executor.submit(second)
        try:
            first()
        except BaseException:
            work.cancel()
            raise
        if work.cancel():
            second()
        else:
            work.result()

    def close(self) -> None:
        """Accept no more work. Do not wait for calls that hang."""
        self._executor.shutdown(wait=False, cancel_futures=True)


async def gather_all(calls: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Return the results in order. If one call fails, the others are cancelled.

    All calls have ended when this returns or raises. A TaskGroup's exception group would be a
    reference cycle, which keeps all memory of a failed call until the garbage collector runs.

    Raises:
        Exception: the error of the first call that failed.
    """
    given = list(calls)
    if len(given) < 2:  # a single call needs no task, which is expensive
        return [await each for each in given]
    tasks = [asyncio.create_task(call) for call in given]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        del task
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # breaks the cycle: task, its exception, this frame


async def end_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks, and return when they have ended. Their errors are dropped."""
    ended = [*tasks]
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
