# SPDX-License-Identifier: Apache-2.0
"""Measure the memory of a router: after many requests, and with many streams at once."""

import asyncio
from collections.abc import Mapping

from benchmarks.report import Table
from lab.completions import NEW, TEXT, Requests, num_lost
from lab.http_load import Client, by_clients, post
from lab.servers.openai_client import counters
from lab.servers.proc import resident_bytes
from lab.servers.processes import Server

_PICTURE_BYTES = 1_000
_SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)
_MIB = 1 << 20


async def memory_over_time(router: Server, num_clients: int, num_requests: int) -> Table:
    """Read the memory of a router again and again while it answers."""
    table = Table(
        "Memory over time",
        ("requests", "resident MiB", "of it remembered MiB", "lost"),
        f"One router, {num_clients} clients; in turn a text and a new picture of "
        f"{_PICTURE_BYTES:,} bytes. `remembered`: what encode engines have reported, and which "
        "prompts are stored, each bounded by --max-index-mb.",
    )
    client, requests = Client(router.port.number), Requests(_PICTURE_BYTES)
    asked = lost = 0
    table.add(0, _resident_mib(router), _remembered_mib(router), 0)
    for share in _SHARES:
        number = int(num_requests * share) - asked
        messages = (requests.next(NEW if n % 2 else TEXT) for n in range(number))
        lost += num_lost(await by_clients(client.ask, messages, num_clients))
        asked += number
        table.add(asked, _resident_mib(router), _remembered_mib(router), lost)
    client.close()
    return table


async def memory_of_streams(fronts: Mapping[str, Server], engine: Server, number: int) -> Table:
    """Have each front forward `number` streams, which `engine` holds until all have begun."""
    table = Table(
        f"Memory of {number:,} streams at once",
        ("through", "resident MiB before", "with the streams", "kB a stream", "afterwards", "lost"),
        "Questions without a picture. Each stream has begun, and stays open until all have.",
    )
    requests = Requests(_PICTURE_BYTES)
    for name, front in fronts.items():
        client = Client(front.port.number)
        await client.ask(requests.next(TEXT))
        before = _resident_mib(front)
        begun = [asyncio.Event() for _ in range(number)]
        streams = [
            asyncio.create_task(client.ask(requests.next(TEXT, streams=True), each))
            for each in begun
        ]
        for each in begun:
            await each.wait()
        during = _resident_mib(front)
        await Client(engine.port.number).ask(post("/release", b""))
        replies = await asyncio.gather(*streams)
        after = _resident_mib(front)
        each_kb = round((during - before) * _MIB / number / 1e3)
        table.add(name, before, during, each_kb, after, num_lost(replies))
        client.close()
    return table


def _resident_mib(front: Server) -> float:
    (process,) = front.processes()
    return resident_bytes(process) / _MIB


def _remembered_mib(router: Server) -> float:
    return counters(router.base_url)["ecshare_router_index_bytes", ""] / _MIB
