# SPDX-License-Identifier: Apache-2.0
"""Count our files that a request passes through in the router.

The router runs in this process, before engines that compute nothing. Each kind of request is traced
once others have warmed it up. As in `trace_paths`, a change of file is a call in another file than
the previous call.

    python -m benchmarks.router_paths [--calls]
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from aiohttp import web

from benchmarks.trace_paths import Trace, show
from ecshare.router.app import Router
from ecshare.router.http.connections import Runner
from ecshare.router.options.config import RouterConfig
from ecshare.router.types import Stage
from lab.completions import AGAIN, KNOWN, NEW, TEXT, Requests
from lab.http_load import Client
from lab.servers.stand_in import StandIn

PICTURE_BYTES = 200_000
REST_S = 0.05


async def paths(folder: Path) -> dict[str, Trace]:
    """Return the calls of each kind of request."""
    with ExitStack() as stack:
        engines = [stack.enter_context(StandIn(stage, folder, stage)) for stage in Stage]
        encoder, prefiller, decoder = ((engine.base_url,) for engine in engines)
        config = RouterConfig(encoders=encoder, prefillers=prefiller, decoders=decoder)
        runner = Runner(Router(config, time.monotonic).running, config)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = Client(runner.addresses[0][1])
        try:
            return await _traced(client)
        finally:
            client.close()
            await runner.cleanup()


async def _traced(client: Client) -> dict[str, Trace]:
    requests = Requests(PICTURE_BYTES)
    found: dict[str, Trace] = {}
    for kind in (TEXT, NEW, KNOWN, AGAIN):
        for streams in (False, True):
            for _ in range(20):
                await client.ask(requests.next(kind, streams=streams))
            await asyncio.sleep(REST_S)  # what goes on behind a request has ended
            trace = Trace()
            sys.setprofile(trace.note)
            reply = await client.ask(requests.next(kind, streams=streams))
            sys.setprofile(None)
            assert reply.status == 200, reply
            found[f"{kind}, streamed" if streams else kind] = trace
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Print the figures of each kind; with `--calls` every call, too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", action="store_true", help="each call, in the order of time")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        show(asyncio.run(paths(Path(folder))), calls=options.calls)


if __name__ == "__main__":
    main()
