# SPDX-License-Identifier: Apache-2.0
"""Runs several coroutines at once.

A TaskGroup does the same, but its exception group is a reference cycle. The cycle keeps all memory
of a failed request until the garbage collector runs.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results, in order.

    Raises:
        Exception: the first failure of a coroutine; the others are cancelled.
    """
    given = list(coroutines)
    if len(given) < 2:  # for one a task would cost much and do nothing
        return [await each for each in given]
    tasks = [asyncio.create_task(coroutine) for coroutine in given]
    try:
        return await asyncio.gather(*tasks)
    finally:
        _cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # breaks the cycle: task, its exception, this frame


def _cancel(tasks: list[asyncio.Task[T]]) -> None:
    for task in tasks:
        task.cancel()
