# SPDX-License-Identifier: Apache-2.0
"""Runs the work of a command in an event loop, and cancels it at SIGTERM."""

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import click

from ecshare.doctor.findings import printable
from ecshare.doctor.targets import Target
from ecshare.store.errors import StoreError
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.store.secrets import masked_url
from ecshare.upkeep.calls import Calls

FAILED = 1
"""The exit status of a command that failed, or found a problem."""
TERMINATED = 128 + signal.SIGTERM


def run_async(work: Coroutine[Any, Any, int], at_sigterm: int = TERMINATED) -> int:
    """Run `work` and return the exit status that it returns, or `at_sigterm` after SIGTERM.

    SIGTERM cancels `work` where it waits; SIGINT is a KeyboardInterrupt, as usual.
    """
    try:
        return asyncio.run(_until_sigterm(work))
    except asyncio.CancelledError:
        return at_sigterm


async def _until_sigterm(work: Coroutine[Any, Any, int]) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def shown_url(target: Target) -> str:
    """Return the url of a store for a message: escaped, without secrets."""
    return printable(masked_url(target.config.url))


@asynccontextmanager
async def calls_of(target: Target) -> AsyncIterator[Calls]:
    """Open the store of `target` for calls with retries; see `opened`."""
    async with opened(target) as store:
        yield Calls(store, target.config.call_timeout_s)


@asynccontextmanager
async def opened(target: Target) -> AsyncIterator[ObjectStore]:
    """Open the store of `target`, and close it at the end.

    Raises:
        ConfigError: it cannot be opened with these options; names the option.
        ClickException: a call of the store or of this host failed in the block; names the store.
    """
    store = open_store(target.config, target.path)
    try:
        yield store
    except BrokenPipeError:  # our output's reader, such as head, has ended
        raise
    except (StoreError, OSError) as exc:
        raise click.ClickException(f"{shown_url(target)}: {printable(str(exc))}") from exc
    finally:
        await store.close()
