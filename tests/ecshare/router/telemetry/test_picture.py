# SPDX-License-Identifier: Apache-2.0
"""The picture of the dashboard in the docs: a router with traffic, as Chromium shows it.

`make dashboard-picture` writes it; otherwise the test throws it away.
"""

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.completions import AGAIN, KINDS, NEW, Requests
from lab.http_load import Client, by_clients, post
from lab.servers.router import RouterProcess
from lab.servers.stand_in import StandIn
from tests.conftest import LOGS
from tests.ecshare.router.telemetry.browser import Tab

KEY = "a-status-key-for-a-picture-01234"
PICTURE = os.environ.get("DASHBOARD_PICTURE")
MAX_BYTES = 150_000
DELAYS_MS = {"encoder": 180, "prefiller": 120, "decoder": 25}
FLEET = {"encoder": 1, "prefiller": 2, "decoder": 2}


@pytest.mark.browser
async def test_the_dashboard_shows_a_router_with_traffic(tab: Tab, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    with ExitStack() as stack:
        fleet = {
            name: [stack.enter_context(stand_in(name, n)) for n in range(number)]
            for name, number in FLEET.items()
        }
        router = stack.enter_context(
            RouterProcess("picture-router", LOGS, fleet, [f"--status-key=file:{tmp_path}/key"])
        )
        await send(router)
        fleet["decoder"][1].kill()
        await send(router)
        await tab.look(width=1200, height=900, dark=False)
        await tab.open(f"{router.base_url}/dashboard")
        await tab.run(f"sessionStorage.setItem('ecshare-status-key', '{KEY}'), ask()")
        await tab.until("document.querySelectorAll('.request').length > 20")
        await tab.until("document.querySelector('.bad')?.innerText")
        path = Path(PICTURE) if PICTURE else tmp_path / "dashboard.png"
        path.parent.mkdir(exist_ok=True)
        await tab.screenshot(path)
    assert 10_000 < path.stat().st_size < MAX_BYTES


def stand_in(name: str, number: int) -> StandIn:
    stage = {"encoder": "encode", "prefiller": "prefill", "decoder": "decode"}[name]
    options = [f"--delay-ms={DELAYS_MS[name]}", "--tokens=24"]
    return StandIn(f"picture-{name}-{number}", LOGS, stage, options)


async def send(router: RouterProcess) -> None:
    """Send requests of all kinds, and one that is refused."""
    requests, client = Requests(3_000), Client(router.port.number)
    kinds = [*KINDS, AGAIN, NEW, AGAIN] * 2
    messages = [requests.next(kind, streams=n % 3 > 0) for n, kind in enumerate(kinds)]
    try:
        await by_clients(client.ask, messages, 3)
        await client.ask(post("/v1/chat/completions", b'{"messages":1}'))
        await asyncio.sleep(0.1)
    finally:
        client.close()
