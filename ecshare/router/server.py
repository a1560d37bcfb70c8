# SPDX-License-Identifier: Apache-2.0
"""The router process: listens, logs which engines answer, and stops on a signal."""

import asyncio
import logging
import signal
import time

import msgspec
from aiohttp import web

from ecshare.router.app import Router, make_runner
from ecshare.router.http.connections import fitting_connections, raise_open_files
from ecshare.router.loop import relieve_collector
from ecshare.router.options.config import RouterConfig
from ecshare.store.errors import ConfigError

logger = logging.getLogger("ecshare.router")


async def serve(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM. Requests in flight then have `drain_s` to end, or until a
    second signal.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    config = _with_fitting_connections(config)
    router = Router(config, time.monotonic)
    runner = make_runner(router, config)
    try:
        await runner.setup()
    except ConfigError as exc:
        raise SystemExit(str(exc)) from exc
    try:
        await _listen(runner, config.host, config.port)
        logger.info("listening on http://%s:%d", config.host, config.port)
        relieve_collector()
        logging_health = asyncio.create_task(_log_health(router))
        await stop.wait()
        logging_health.cancel()
        # It listens meanwhile: whoever balances the load learns from /ready that it stops.
        await router.in_flight.drain(config.drain_s, hurry)
    finally:
        await runner.cleanup()


async def _listen(runner: web.BaseRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as exc:
        raise SystemExit(f"cannot listen on --host {host} --port {port}: {exc}") from exc


def _with_fitting_connections(config: RouterConfig) -> RouterConfig:
    """Return the config with as many connections as the limit on open files allows."""
    open_files = raise_open_files()
    number = fitting_connections(config.max_connections, open_files)
    if number < config.max_connections:
        logger.warning(
            "--max-connections %d counts as %d: this process may have %d open files (ulimit -n)",
            *(config.max_connections, number, open_files),
        )
    return msgspec.structs.replace(config, max_connections=number)


async def _log_health(router: Router) -> None:
    """Log which engines do not answer. Nothing depends on it: they may start later."""
    asked = await router.client.watch.reports()
    for engine, is_healthy in asked.items():
        if not is_healthy:
            logger.warning(
                "the %s engine %s does not answer GET /health yet", engine.stage, engine.url
            )
    if all(asked.values()):
        logger.info("all %d engines answer", len(asked))
