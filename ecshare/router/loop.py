# SPDX-License-Identifier: Apache-2.0
"""What the router runs on: uvloop's event loop if it is installed, which takes less time, and a
garbage collector that seldom holds it up."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

from ecshare.store.loops import new_loop

_YOUNG_OBJECTS = 10_000


def relieve_collector() -> None:
    """Have the garbage collector look at objects only that come after this call, and less often.

    To look at all modules takes it some milliseconds, in which no request moves. Requests leave it
    little to find: their memory is freed with their last reference.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def run(program: Coroutine[Any, Any, None]) -> None:
    """Run `program` to its end, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(program)
