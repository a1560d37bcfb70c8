# SPDX-License-Identifier: Apache-2.0
"""`python -m ecshare.router`: serve until SIGINT or SIGTERM."""

import asyncio
import logging
import signal
from collections.abc import Sequence

from aiohttp import web

from ecshare.router.app import make_runner
from ecshare.router.config import RouterConfig, parse_arguments

logger = logging.getLogger("ecshare.router")


async def serve(config: RouterConfig) -> None:
    """Listen until a signal; requests in flight are then given a few seconds."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = make_runner(config)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as exc:
            where = f"--host {config.host} --port {config.port}"
            raise SystemExit(f"cannot listen on {where}: {exc}") from exc
        logger.info("listening on http://%s:%d", config.host, config.port)
        await stop.wait()
    finally:
        await runner.cleanup()


def main(arguments: Sequence[str] | None = None, prog: str = "python -m ecshare.router") -> None:
    """Run the router until it is told to stop. `prog`: what its help calls it."""
    config = parse_arguments(arguments, prog)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(config))


if __name__ == "__main__":
    main()
