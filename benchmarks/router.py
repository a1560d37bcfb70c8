# SPDX-License-Identifier: Apache-2.0
"""Measure the router's own time, processor and memory, before engines that compute nothing.

The router has a core to itself; engines and clients share the others. Engines answer at once, so
the time that a request takes in addition to an engine's is the router's. The bare router
(lab/servers/bare_router_server.py) shows how much of it is due to the HTTP library and requests.

    python -m benchmarks.router --proxy disagg_epd_proxy.py

The proxy is part of vLLM's source distribution: examples/disaggregated/disaggregated_encoder.
Without it only our router is measured.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import in_turn, percentile
from benchmarks.report import Report, Table, arguments, command_line
from benchmarks.router_memory import memory_of_streams, memory_over_time
from ecshare.router.loop import relieve_collector
from lab.completions import KINDS, TEXT, Requests, num_lost
from lab.http_load import Client, Message, Reply, at_rate, by_clients
from lab.servers.bare_router import BareRouterProcess
from lab.servers.example_proxy import ExampleProxy
from lab.servers.proc import cpu_s
from lab.servers.processes import Server
from lab.servers.router import RouterProcess
from lab.servers.stand_in import StandIn

MODULE = "benchmarks.router"
ENGINE, ALONE, OURS = "no router", "our router, D only", "our router"
BARE, IN_TREE = "bare router", "vLLM's proxy"
STAGES = ("encode", "prefill", "decode")
RATE_PER_S = 200
CLIENTS = 16
PICTURE_BYTES = 200_000
EVENTS = 200
EVENT_MS = 5


@dataclass(frozen=True)
class Size:
    """The amounts to measure."""

    rounds: int
    num_at_rate: int
    """Requests of one reading at a steady rate."""
    num_at_once: int
    """Requests of one reading by clients that never wait."""
    num_in_all: int
    """Requests after which the memory is looked at."""
    num_streams: int
    num_of_events: int
    """Streams of EVENTS events of one reading."""


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    parser = arguments(__doc__ or "", MODULE)
    parser.add_argument("--proxy", type=Path, help="vLLM's disagg_epd_proxy.py")
    parser.add_argument(
        "--requests", type=int, help="after how many the memory is looked at (default: 100000)"
    )
    options = parser.parse_args(words)
    size = Size(
        rounds=options.rounds or (1 if options.quick else 5),
        num_at_rate=20 if options.quick else 400,
        num_at_once=CLIENTS if options.quick else 1000,
        num_in_all=options.requests or (200 if options.quick else 100_000),
        num_streams=20 if options.quick else 1000,
        num_of_events=CLIENTS if options.quick else 160,
    )
    settings = {"rounds": size.rounds, "requests": size.num_in_all, "streams": size.num_streams}
    report = Report("router", command_line(MODULE, options), settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
        core = stack.enter_context(_own_core())
        places = _servers(stack, folder, core, options.proxy)
        # The clients run in this process. Full collections stopped them for up to 100 ms.
        relieve_collector()
        report.add(asyncio.run(_added_latency(places, size)))
        del places[ENGINE]
        report.add(asyncio.run(_work_of_a_core(places, size)))
        report.add(asyncio.run(memory_over_time(places[OURS], CLIENTS, size.num_in_all)))
        more = ("--tokens", str(EVENTS), "--delay-ms", str(EVENT_MS))
        places = _servers(stack, folder / "events", core, options.proxy, more)
        del places[ENGINE]
        report.add(asyncio.run(_work_of_events(places, size)))
        places = _servers(stack, folder / "held", core, None, ("--holds",))
        engine = places.pop(ENGINE)
        report.add(asyncio.run(memory_of_streams(places, engine, size.num_streams)))
    print(f"\nwritten: {report.write(options.results).name}")


# --- servers ---


@contextmanager
def _own_core() -> Iterator[int]:
    """Keep one core free of this process and its children; yield the core's number."""
    all_cores = os.sched_getaffinity(0)
    core = min(all_cores)
    os.sched_setaffinity(0, all_cores - {core} or all_cores)
    try:
        yield core
    finally:
        os.sched_setaffinity(0, all_cores)


def _servers(
    stack: ExitStack, folder: Path, core: int, proxy: Path | None, more: Sequence[str] = ()
) -> dict[str, Server]:
    """Start engines with the options `more`, and the routers before them, by name."""
    engines = [StandIn(stage, folder, stage, more) for stage in STAGES]
    others = os.sched_getaffinity(0)
    for engine in engines:
        stack.enter_context(engine)
    stages = zip(("encoder", "prefiller", "decoder"), engines, strict=True)
    fronts: dict[str, Server] = {
        ALONE: RouterProcess("alone", folder, {"decoder": engines[-1:]}),
        OURS: RouterProcess("router", folder, {stage: [each] for stage, each in stages}),
        BARE: BareRouterProcess(folder, engines),
    }
    if proxy is not None:
        fronts[IN_TREE] = ExampleProxy(proxy, folder, engines)
    os.sched_setaffinity(0, {core})  # for child processes, which inherit it
    for front in fronts.values():
        front.start()
    os.sched_setaffinity(0, others)
    for front in fronts.values():
        stack.callback(front.stop)
        front.wait_ready()
    return {ENGINE: engines[-1], **fronts}


# --- time and processor ---


async def _added_latency(places: Mapping[str, Server], size: Size) -> Table:
    table = Table(
        f"Latency at {RATE_PER_S} requests/s",
        ("request", "through", "p50 ms", "p99 ms", "added p50 ms", "added p99 ms", "lost"),
        f"Unstreamed; pictures have {PICTURE_BYTES:,} bytes. From the request's first byte to the "
        "answer's last. `added`: more than the median without a router. `our router` asks "
        "encode, prefill and decode in turn: no encode for a known picture, and decode alone for "
        "what was asked before. All rounds together.",
    )
    clients = {name: Client(server.port.number) for name, server in places.items()}
    found: dict[tuple[str, str], list[Reply]] = {}
    requests = Requests(PICTURE_BYTES)
    for turn in range(-1, size.rounds):  # the first round warms up and is not kept
        number = size.num_at_rate if turn >= 0 else CLIENTS
        for kind in KINDS:
            for name in in_turn(list(places), turn):
                asked = [requests.next(kind) for _ in range(number)]
                replies = await at_rate(clients[name].ask, asked, RATE_PER_S)
                if turn >= 0:
                    found.setdefault((kind, name), []).extend(replies)
    for kind in KINDS:
        base_ms, _ = _percentiles_ms(found[kind, ENGINE])
        for name in places:
            taken = _percentiles_ms(found[kind, name])
            is_base = name == ENGINE
            added = [None if is_base else each_ms - base_ms for each_ms in taken]
            table.add(kind, name, *taken, *added, num_lost(found[kind, name]))
    for client in clients.values():
        client.close()
    return table


def _percentiles_ms(replies: Sequence[Reply]) -> tuple[float, float]:
    seconds = [reply.end_s for reply in replies if reply.status == 200]
    return 1e3 * percentile(seconds, 50), 1e3 * percentile(seconds, 99)


@dataclass(frozen=True)
class _Reading:
    """The figures of some requests."""

    per_s: float
    cpu_each_s: float
    num_lost: int


async def _read(front: Server, asked: Sequence[Message], client: Client) -> _Reading:
    (process,) = front.processes()
    before_s, began_s = cpu_s(process), time.perf_counter()
    replies = await by_clients(client.ask, asked, CLIENTS)
    took_s, used_s = time.perf_counter() - began_s, cpu_s(process) - before_s
    return _Reading(len(replies) / took_s, max(used_s, 1e-3) / len(replies), num_lost(replies))


async def _in_rounds(
    fronts: Mapping[str, Server], kinds: Sequence[str], streams: Sequence[bool], rounds: int
) -> dict[tuple[str, str], list[_Reading]]:
    """Return the readings of each kind and front, one a round: of a request for each of `streams`,
    which says whether it is streamed."""
    clients = {name: Client(front.port.number) for name, front in fronts.items()}
    requests = Requests(PICTURE_BYTES)
    readings: dict[tuple[str, str], list[_Reading]] = {}
    for turn in range(rounds):
        for kind in kinds:
            for name in in_turn(list(fronts), turn):
                asked = [requests.next(kind, streams=each) for each in streams]
                reading = await _read(fronts[name], asked, clients[name])
                readings.setdefault((kind, name), []).append(reading)
    for client in clients.values():
        client.close()
    return readings


async def _work_of_a_core(fronts: Mapping[str, Server], size: Size) -> Table:
    columns = ("request", "through", "requests/s", "CPU ms a request", "requests/CPU s", "x vLLM's")
    table = Table(
        "Requests of one core",
        (*columns, "lost"),
        f"{CLIENTS} clients that never wait; every second request is streamed. `requests/s` may be "
        "limited by engines and clients, which share the other cores; CPU time is the router's "
        "alone. `x`: requests per CPU second, the median over the rounds of each round's ratio.",
    )
    streams = [bool(number % 2) for number in range(size.num_at_once)]
    readings = await _in_rounds(fronts, KINDS, streams, size.rounds)
    for kind in KINDS:
        for name in fronts:
            ours, theirs = readings[kind, name], readings.get((kind, IN_TREE), [])
            ratios = [b.cpu_each_s / a.cpu_each_s for a, b in zip(ours, theirs, strict=False)]
            each_s = statistics.median(each.cpu_each_s for each in ours)
            table.add(
                *(kind, name, statistics.median(each.per_s for each in ours)),
                *(1e3 * each_s, 1 / each_s, statistics.median(ratios) if ratios else None),
                sum(each.num_lost for each in ours),
            )
    return table


async def _work_of_events(fronts: Mapping[str, Server], size: Size) -> Table:
    table = Table(
        f"Streams of {EVENTS} events",
        ("through", "streams/s", "CPU ms a stream", "x bare", "lost"),
        f"{CLIENTS} clients that never wait; a question without a picture. The engine writes an "
        f"event each {EVENT_MS} ms, so each is passed on by itself. `x`: CPU time, the median over "
        "the rounds of each round's ratio.",
    )
    readings = await _in_rounds(fronts, [TEXT], [True] * size.num_of_events, size.rounds)
    for name in fronts:
        ours = readings[TEXT, name]
        pairs = zip(ours, readings[TEXT, BARE], strict=True)
        table.add(
            *(name, statistics.median(each.per_s for each in ours)),
            1e3 * statistics.median(each.cpu_each_s for each in ours),
            statistics.median(a.cpu_each_s / b.cpu_each_s for a, b in pairs),
            sum(each.num_lost for each in ours),
        )
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
