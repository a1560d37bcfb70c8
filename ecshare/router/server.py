# SPDX-License-Identifier: Apache-2.0
"""The router process: listens, logs which engines answer, and stops when it is told to."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from ecshare.router.app import Router
from ecshare.router.http.connections import Runner, fitting_connections, raise_open_files
from ecshare.router.loop import relieve_collector, run
from ecshare.router.options.config import RouterConfig, share_of
from ecshare.router.siblings import Siblings
from ecshare.router.workers import READY, Worker, listening, run_workers
from ecshare.store.errors import ConfigError

logger = logging.getLogger("ecshare.router")


def serve(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM. Requests in flight then have `drain_s` to end, or until a
    second signal. Call it before any thread runs.

    Raises:
        SystemExit: it cannot start, with one sentence, or a worker has failed.
    """
    config = _with_fitting_connections(share_of(config))
    try:
        sockets = listening(config.host, config.port, config.workers)
    except OSError as exc:
        where = f"--host {config.host} --port {config.port}"
        raise SystemExit(f"cannot listen on {where}: {exc}") from exc

    def log_listening() -> None:
        processes = f", {config.workers} workers" if config.workers > 1 else ""
        logger.info("listening on http://%s:%d%s", config.host, config.port, processes)

    relieve_collector()
    if config.workers == 1:
        run(_until_told(config, sockets[0], Siblings(), log_listening, _on_signals))
        return
    try:
        worker = run_workers(sockets, log_listening)
    except OSError as exc:
        raise SystemExit(f"the workers cannot be started: {exc}") from exc
    if isinstance(worker, int):
        sys.exit(worker)
    siblings = Siblings(worker.folder, worker.number, config.workers)

    def tell_ready() -> None:
        worker.parent.send(READY)

    def on_told(told: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(worker.parent, _read_told, worker, told)

    run(_until_told(config, worker.sockets, siblings, tell_ready, on_told))


def _on_signals(told: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told)


def _read_told(worker: Worker, told: Callable[[], None]) -> None:
    """Stop as the first process says, or as it has ended itself."""
    if not worker.parent.recv(1):
        asyncio.get_running_loop().remove_reader(worker.parent)
    told()


async def _until_told(
    config: RouterConfig,
    sockets: Sequence[socket.socket],
    siblings: Siblings,
    on_listening: Callable[[], None],
    listen_to_stop: Callable[[Callable[[], None]], None],
) -> None:
    """Serve on `sockets` until what `listen_to_stop` is given is called."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    listen_to_stop(lambda: (hurry if stop.is_set() else stop).set())
    router = Router(config, time.monotonic, siblings)
    runner = Runner(router.running, config)
    try:
        await runner.setup()
    except ConfigError as exc:
        raise SystemExit(str(exc)) from exc
    try:
        for each in sockets:
            await web.SockSite(runner, each).start()
        on_listening()
        relieve_collector()
        logging_health = asyncio.create_task(_log_health(router))
        await stop.wait()
        logging_health.cancel()
        # It listens meanwhile: whoever balances the load learns from /ready that it stops.
        await router.in_flight.drain(config.drain_s, hurry)
    finally:
        await runner.cleanup()


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
