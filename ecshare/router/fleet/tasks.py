# SPDX-License-Identifier: Apache-2.0
"""The end of tasks."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def end_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks, and return when they have ended. Their errors are dropped."""
    ended = [*tasks]
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
