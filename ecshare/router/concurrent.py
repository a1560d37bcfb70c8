# SPDX-License-Identifier: Apache-2.0
"""Several coroutines at once. A TaskGroup does the same, but its group of exceptions is a reference
cycle, which keeps all that a failed request has in memory until the garbage collector looks."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results, in order. The first failure ends the others, and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        _cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # a task has its exception, which has this frame


def _cancel(tasks: list[asyncio.Task[T]]) -> None:
    for task in tasks:
        task.cancel()
