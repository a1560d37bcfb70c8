# SPDX-License-Identifier: Apache-2.0
"""Hedged requests: several servers may get the same call, so a slow one delays nobody."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def hedged(calls: Iterable[Callable[[], Coroutine[Any, Any, T]]], after_s: float) -> T:
    """Return the first result. A slow or failed call makes the next one start.

    That is when a call has failed, or `after_s` after the last start. No call outlives this one.

    Raises:
        ValueError: there are no calls.
        Exception: all calls failed; the last failure.
    """
    left = iter(calls)
    asked: set[asyncio.Task[T]] = set()
    failure: BaseException = ValueError("nobody to ask")
    try:
        while True:
            call = next(left, None)
            if call is not None:
                asked.add(asyncio.create_task(call()))
            if not asked:
                raise failure
            patience_s = None if call is None else after_s
            done, asked = await asyncio.wait(
                asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                failure = error
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        del failure  # breaks a cycle: its traceback refers to this frame
