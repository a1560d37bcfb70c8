# SPDX-License-Identifier: Apache-2.0
"""Real engines under load, in turns."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from benchmarks.measure import Readings, in_turn
from benchmarks.report import Table
from lab.servers.engines import EngineProcess
from lab.servers.proc import cpu_s
from lab.servers.processes import Server

PLAIN = "no connector"
CLIENTS = 4

AskOne = Callable[[EngineProcess], None]
"""Sends one new request to an engine, and waits for its answer."""


def cpu_s_of(servers: Iterable[Server]) -> float:
    """Return the CPU seconds that all processes of these servers have used until now."""
    return sum(cpu_s(process) for server in servers for process in server.processes())


def throughput(
    engines: Mapping[str, EngineProcess], rounds: int, num_requests: int, ask_one: AskOne, what: str
) -> Table:
    """Have each engine answer `num_requests` a round; `what`: the kind of requests, for the table.

    `engines`: by their names; one of them is PLAIN.
    """
    note = (
        f"{num_requests} requests by {CLIENTS} clients, {what}. Engine, client and S3 server share "
        "the cores. `x plain`: median over the rounds of each round's ratio."
    )
    table = Table("Nothing is ever found", ("engine", "requests/s", "x plain"), note)
    readings: Readings[str] = Readings()
    names = list(engines)
    for turn in range(rounds):
        for name in in_turn(names, turn):
            started_s = time.perf_counter()
            ask_many(engines[name], num_requests, ask_one)
            readings.add(name, num_requests / (time.perf_counter() - started_s))
    for name in names:
        pairs = zip(readings.values(name), readings.values(PLAIN), strict=True)
        ratio = statistics.median(ours / plain for ours, plain in pairs)
        table.add(name, readings.median(name), ratio)
    return table


def ask_many(engine: EngineProcess, num_requests: int, ask_one: AskOne) -> None:
    """Send requests from CLIENTS at once; return when all are answered."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        for _ in clients.map(lambda _: ask_one(engine), range(num_requests)):
            pass
