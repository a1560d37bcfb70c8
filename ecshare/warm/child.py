# SPDX-License-Identifier: Apache-2.0
"""Runs an engine for as long as a block lasts."""

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from ecshare.warm.corpus import WarmError

_STDERR = 2
_POLL_S = 0.5
_GRACE_S = 60.0


@asynccontextmanager
async def running(
    command: str, answers: Callable[[], Awaitable[object]], within_s: float
) -> AsyncIterator[None]:
    """Run `command`, and the block once it `answers`; end it and its children afterwards.

    `answers` raises WarmError until the command serves. The command's output goes to stderr.

    Raises:
        WarmError: the command cannot be run, has ended, or does not answer in time.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdout=_STDERR, start_new_session=True
        )
    except (OSError, ValueError) as exc:
        raise WarmError(f"--start: {exc}") from exc
    try:
        await _wait_until_ready(process, answers, within_s)
        yield
    finally:
        await _end(process)


async def _wait_until_ready(
    process: asyncio.subprocess.Process, answers: Callable[[], Awaitable[object]], within_s: float
) -> None:
    reason = ""
    try:
        async with asyncio.timeout(within_s):
            while process.returncode is None:
                try:
                    await answers()
                except WarmError as exc:
                    reason = str(exc)
                else:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise WarmError(
            f"--start: the engine does not answer after {within_s:,.0f} s: {reason}"
        ) from None
    raise WarmError(f"--start: the engine ended with status {process.returncode}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process, and then the remaining processes of its session."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
