# SPDX-License-Identifier: Apache-2.0
"""The router as a process: it listens, says which engines are there, and stops on a signal."""

import asyncio
import logging
import signal
import time

import msgspec
from aiohttp import web

from ecshare.router.app import Router, make_runner
from ecshare.router.config import RouterConfig
from ecshare.router.connections import fitting, raise_open_files

logger = logging.getLogger("ecshare.router")


async def serve(config: RouterConfig) -> None:
    """Listen until a signal; requests in flight are then given a few seconds."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    config = _fitting(config)
    router = Router(config, time.monotonic)
    runner = make_runner(router, config)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as exc:
            where = f"--host {config.host} --port {config.port}"
            raise SystemExit(f"cannot listen on {where}: {exc}") from exc
        logger.info("listening on http://%s:%d", config.host, config.port)
        saying = asyncio.create_task(_say_who_answers(router))
        await stop.wait()
        saying.cancel()
    finally:
        await runner.cleanup()


def _fitting(config: RouterConfig) -> RouterConfig:
    """Return the options with as many connections as fit into the open files there may be."""
    open_files = raise_open_files()
    number = fitting(config.max_connections, open_files)
    if number < config.max_connections:
        logger.warning(
            "--max-connections %d counts as %d: this process may have %d open files (ulimit -n)",
            *(config.max_connections, number, open_files),
        )
    return msgspec.structs.replace(config, max_connections=number)


async def _say_who_answers(router: Router) -> None:
    """Log which engines do not answer. They may be started later: nothing depends on it."""
    asked = await router.ask_all()
    for stage, worker, is_healthy in asked:
        if not is_healthy:
            logger.warning("the %s engine %s does not answer GET /health yet", stage, worker.url)
    if all(is_healthy for _, _, is_healthy in asked):
        logger.info("all %d engines answer", len(asked))
