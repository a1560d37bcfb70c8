# SPDX-License-Identifier: Apache-2.0
"""The same question to several servers, so that a slow one holds nobody up."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def first_good(
    questions: Iterable[Callable[[], Coroutine[Any, Any, T]]], after_s: float
) -> T:
    """Return the first answer. Each further server is asked when one has failed, or the last one
    has been asked `after_s` ago.

    Raises the last failure where all fail, and ValueError where there is nobody to ask. No call
    outlives this one.
    """
    left = iter(questions)
    asked: set[asyncio.Task[T]] = set()
    failure: BaseException = ValueError("nobody to ask")
    try:
        while True:
            question = next(left, None)
            if question is not None:
                asked.add(asyncio.create_task(question()))
            if not asked:
                raise failure
            patience_s = None if question is None else after_s
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
        del failure  # it has this frame, which has it
