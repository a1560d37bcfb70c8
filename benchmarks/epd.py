# SPDX-License-Identifier: Apache-2.0
"""Measure the split: encode, prefill and decode engines with a router in front of them.

Ours, and vLLM's own example connectors behind vLLM's own example proxy, on this CPU, in turns and
with the same requests: new pictures, then four of five requests that were asked before, then all
of them again. Beside them one engine without connectors is asked again and again for as few
pictures as its own caches hold: no stack can do with less CPU time. Medians over the rounds. Then
requests that arrive at half the rate that vLLM's stack has reached, whether they are answered or
not: how long does the first token take?

    python -m benchmarks.epd --proxy disagg_epd_proxy.py
    python -m benchmarks.epd --proxy disagg_epd_proxy.py --executor mp
    python -m benchmarks.epd --proxy disagg_epd_proxy.py --streamed --tokens 16 --requests 192
    python -m benchmarks.epd --proxy disagg_epd_proxy.py --gpu

The proxy is part of vLLM's source distribution: examples/disaggregated/disaggregated_encoder.
Without it only our stack is measured.

An engine runs scheduler and worker in one process, vLLM's default for one GPU, or with
`--executor mp` in two, its default on a CPU. The process that waits for the other then spins on a
core, which the other engines lack on this machine.

With `--gpu` all engines share one GPU, with CUDA graphs and the model runner that vLLM chooses.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_load import cpu_s_of
from benchmarks.epd_load import Reply, arriving, by_clients
from benchmarks.measure import in_turn, percentile
from benchmarks.places import host_folder
from benchmarks.report import Report, Table, arguments, command_line
from lab.models import make_qwen25_vl
from lab.servers.engines import (
    ON_A_GPU,
    RANK_APART,
    SMALL,
    SMALL_ENGINE,
    EngineProcess,
    ec_argument,
    example_argument,
    kv_argument,
    kv_example_argument,
)
from lab.servers.example_proxy import ExampleProxy
from lab.servers.openai_client import ask, picture, question
from lab.servers.proc import cpu_s_by_thread
from lab.servers.processes import Server
from lab.servers.router import RouterProcess

MODULE = "benchmarks.epd"
OUR_THREADS = ("ecshare", "kvshare")
REST = "all others"
OURS, IN_TREE = "ecshare, kvshare, our router", "vLLM's example connectors and proxy"
ALONE = "one engine, from its own caches"
NEW, MIXED, AGAIN = "new pictures", "80 % asked before", "all asked before"
PHASES = (NEW, MIXED, AGAIN)
CLIENTS = 8
REPEATS = 4
"""How often in turn the engine alone is asked for the same pictures."""
PICTURE_PIXELS = 448
ANSWER_TOKENS = 8
SHARE = 0.5
"""How many requests arrive at a rate: this share of those that vLLM's stack can answer."""
TEXT = "What is to be seen here, and what will happen next? Answer in a few words."


@dataclass(frozen=True)
class Load:
    """The kind of requests."""

    num_tokens: int = ANSWER_TOKENS
    streams: bool = False

    def request(self, number: int) -> dict[str, Any]:
        """Return a request about a picture of its own for each `number`."""
        text = f"Number {number}. {TEXT}"
        return question(text, [picture(number, PICTURE_PIXELS)], self.num_tokens)


@dataclass(frozen=True)
class Engines:
    """What all engines have in common."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    on_gpu: bool

    def make(self, name: str, model: Path, folder: Path, extra: Sequence[str]) -> EngineProcess:
        """Return an engine with `extra` arguments; its log is in `folder`."""
        common = ("--dtype=float32", *SMALL, *ON_A_GPU) if self.on_gpu else SMALL_ENGINE
        given = (*common, *self.arguments, *extra)
        return EngineProcess(
            name, model, folder, given, self.environment, runner_of_vllm=self.on_gpu
        )


@dataclass(frozen=True)
class Stack:
    """Engines of all stages, and the router or proxy in front of them."""

    front: Server
    engines: Sequence[EngineProcess]

    def cpu_s(self) -> float:
        """Return the CPU seconds that all processes of the stack have used until now."""
        return cpu_s_of((self.front, *self.engines))

    def cpu_s_by_thread(self) -> dict[tuple[str, str], float]:
        """Return the CPU seconds of our threads, and of all others together, by engine."""
        found: dict[tuple[str, str], float] = {}
        for engine in self.engines:
            for process in engine.processes():
                for thread, spent_s in cpu_s_by_thread(process).items():
                    key = engine.name, thread if thread.startswith(OUR_THREADS) else REST
                    found[key] = found.get(key, 0.0) + spent_s
        return found


@dataclass(frozen=True)
class Phase:
    """The figures of one stack for the requests of one phase of one round."""

    wall_s: float
    cpu_s: float
    numbers: Sequence[int]
    """Of the requests, in the order of the replies."""
    replies: Sequence[Reply]
    by_thread_s: Mapping[tuple[str, str], float]
    """CPU seconds by engine and thread."""

    @property
    def answered(self) -> list[Reply]:
        """Return the replies of the requests that were not lost."""
        return [reply for reply in self.replies if reply.tokens is not None]

    @property
    def per_s(self) -> float:
        """Return the answered requests per second."""
        return len(self.answered) / self.wall_s

    @property
    def cpu_each_s(self) -> float:
        """Return the CPU seconds for each answered request."""
        return self.cpu_s / max(1, len(self.answered))


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    parser = arguments(__doc__ or "", MODULE)
    parser.add_argument("--proxy", type=Path, help="vLLM's disagg_epd_proxy.py")
    parser.add_argument("--executor", choices=("uni", "mp"), help="of all engines (uni)")
    parser.add_argument("--gpu", action="store_true", help="engines on one GPU")
    parser.add_argument(
        "--engine-argument", action="append", default=[], help="of all engines; may be repeated"
    )
    parser.add_argument("--streamed", action="store_true", help="stream all answers")
    parser.add_argument("--tokens", type=int, help="of each answer (8)")
    parser.add_argument("--requests", type=int, help="of a phase (96)")
    options = parser.parse_args(words)
    rounds = options.rounds or (1 if options.quick else 5)
    num_requests = options.requests or (CLIENTS if options.quick else 96)
    load = Load(options.tokens or ANSWER_TOKENS, streams=options.streamed)
    settings = {"rounds": rounds, "requests a phase": num_requests, "clients": CLIENTS}
    settings |= {"answer tokens": load.num_tokens, "streamed": load.streams}
    environment = RANK_APART if options.executor == "mp" else {}
    name = "epd-mp" if options.executor == "mp" else "epd"
    name += "-gpu" if options.gpu else ""
    name += "-streamed" if options.streamed else ""
    engines = Engines(options.engine_argument, environment, options.gpu)
    report = Report(name, command_line(MODULE, options), settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
        stacks, plain = stack.enter_context(_stacks(folder, options.proxy, engines))
        requests = [_requests(turn, num_requests) for turn in range(rounds)]
        phases = _measure(stacks, requests, load)
        phases[ALONE, AGAIN] = _from_own_cache(plain, requests, load)
        report.add(_table(load, list(stacks), phases, _num_other(plain, phases, load)))
        report.add(_by_thread(list(stacks), phases))
        rates = {
            phase: SHARE * statistics.median(each.per_s for each in phases[name, phase])
            for phase in PHASES
            for name in list(stacks)[-1:]  # vLLM's, if it is there
        }
        later = [_requests(turn, num_requests) for turn in range(rounds, 2 * rounds)]
        report.add(_first_tokens(stacks, later, rates, load))
    print(f"\nwritten: {report.write(options.results).name}")


@contextmanager
def _stacks(
    folder: Path, proxy: Path | None, kind: Engines
) -> Iterator[tuple[dict[str, Stack], EngineProcess]]:
    """Start both stacks, each with a store of its own, and have each answer once.

    The engine beside them has no connectors.
    """
    model = make_qwen25_vl(folder / "model")
    with ExitStack() as stack:

        def start(name: str, *extra: str) -> EngineProcess:
            return kind.make(name, model, folder, extra).start_in(stack)

        plain = start("plain")
        host = stack.enter_context(host_folder())
        started = {OURS: _our_engines(folder, host, start)}
        if proxy is not None:
            started[IN_TREE] = _example_engines(folder, start)
        stacks = {}
        for name, engines in started.items():
            for engine in engines:
                engine.wait_ready()
            front = _front(folder, engines, None if name == OURS else proxy)
            stacks[name] = Stack(stack.enter_context(front), engines)
        for each in stacks.values():
            _ask_all(each, range(-CLIENTS, 0), Load())
        plain.wait_ready()
        yield stacks, plain


def _our_engines(folder: Path, host_cache: Path, start: Any) -> list[EngineProcess]:
    """Start E, P and D, which share a folder and, as on one host, a host cache in memory."""
    url, host = f"{folder}/ours", {"host_cache_dir": str(host_cache)}
    consumer = ec_argument("consumer", url, **host)
    # As the README says of P and D: requests arrive with and without their picture.
    sharing = (consumer, kv_argument("both", url, **host), "--mm-processor-cache-gb=0")
    return [
        start("our-encode", ec_argument("producer", url, **host)),
        start("our-prefill", *sharing),
        start("our-decode", *sharing),
    ]


def _example_engines(folder: Path, start: Any) -> list[EngineProcess]:
    """Start the same with vLLM's connectors. D has both: tokens without KV need the embedding."""
    embeddings, blocks = folder / "in-tree-ec", folder / "in-tree-kv"
    sharing = (
        example_argument("consumer", embeddings),
        kv_example_argument("both", blocks),
        "--disable-hybrid-kv-cache-manager",
    )
    return [
        start("in-tree-encode", example_argument("producer", embeddings)),
        start("in-tree-prefill", *sharing),
        start("in-tree-decode", *sharing),
    ]


def _front(folder: Path, engines: Sequence[EngineProcess], proxy: Path | None) -> Server:
    if proxy is not None:
        return ExampleProxy(proxy, folder, engines)
    stages = zip(("encoder", "prefiller", "decoder"), engines, strict=True)
    return RouterProcess("our-router", folder, {stage: [engine] for stage, engine in stages})


# --- measuring ---


def _requests(turn: int, num_requests: int) -> dict[str, list[int]]:
    """Return the numbers of the requests of a round, by phase."""
    first = 2 * turn * num_requests
    asked = [first + number for number in range(num_requests)]
    mixed = [each if each % 5 else each + num_requests for each in asked]
    return {NEW: asked, MIXED: mixed, AGAIN: asked}


def _measure(
    stacks: Mapping[str, Stack], requests: Sequence[dict[str, list[int]]], load: Load
) -> dict[tuple[str, str], list[Phase]]:
    found: dict[tuple[str, str], list[Phase]] = {
        (name, phase): [] for name in stacks for phase in PHASES
    }
    for turn, asked in enumerate(requests):
        for phase, numbers in asked.items():
            for name in in_turn(list(stacks), turn):
                found[name, phase].append(_ask_all(stacks[name], numbers, load))
    return found


def _from_own_cache(
    plain: EngineProcess, requests: Sequence[dict[str, list[int]]], load: Load
) -> list[Phase]:
    """Ask `plain` for a few pictures at a time: once to fill its caches, then measured."""
    phases = []
    stack = Stack(plain, ())
    for asked in requests:
        parts = []
        for first in range(0, len(asked[AGAIN]), CLIENTS * REPEATS):
            few = asked[AGAIN][first : first + CLIENTS]
            _ask_all(stack, few, load)
            parts.append(_ask_all(stack, few * REPEATS, load))
        numbers = [number for part in parts for number in part.numbers]
        replies = [reply for part in parts for reply in part.replies]
        wall_s, cpu_s = sum(part.wall_s for part in parts), sum(part.cpu_s for part in parts)
        phases.append(Phase(wall_s, cpu_s, numbers, replies, {}))
    return phases


def _num_other(
    plain: EngineProcess, found: Mapping[tuple[str, str], Sequence[Phase]], load: Load
) -> dict[tuple[str, str], int]:
    """Return the number of answers that differ from those of `plain`, asked one at a time."""
    numbers = {number for phases in found.values() for one in phases for number in one.numbers}
    right = {number: ask(plain.base_url, load.request(number)).token_ids for number in numbers}
    return {
        key: sum(
            reply.tokens not in (None, right[number])
            for one in phases
            for number, reply in zip(one.numbers, one.replies, strict=True)
        )
        for key, phases in found.items()
    }


def _ask_all(stack: Stack, numbers: Sequence[int], load: Load) -> Phase:
    """Send all requests from CLIENTS at once."""
    bodies = [load.request(number) for number in numbers]
    cpu_s, threads_s, start_s = stack.cpu_s(), stack.cpu_s_by_thread(), time.perf_counter()
    replies = by_clients(stack.front.base_url, bodies, CLIENTS, streams=load.streams)
    wall_s = time.perf_counter() - start_s
    spent_s = {
        key: after_s - threads_s.get(key, 0.0) for key, after_s in stack.cpu_s_by_thread().items()
    }
    return Phase(wall_s, stack.cpu_s() - cpu_s, numbers, replies, spent_s)


def _first_tokens(
    stacks: Mapping[str, Stack],
    requests: Sequence[dict[str, list[int]]],
    rates: Mapping[str, float],
    load: Load,
) -> Table:
    table = Table(
        "Requests that arrive at a rate",
        (
            *("requests", "stack", "requests/s", "first token p50 ms", "x vLLM's"),
            *("first token p99 ms", "x vLLM's p99", "lost"),
        ),
        f"At {SHARE:g} x the requests a second that vLLM's stack has answered above, streamed, "
        "with exponentially distributed times between two arrivals, the same for both. From the "
        "request's first byte to the first event with a token. All rounds together.",
    )
    found: dict[tuple[str, str], list[Reply]] = {}
    for turn, asked in enumerate(requests):
        for phase, numbers in asked.items():
            bodies = [load.request(number) for number in numbers]
            for name in in_turn(list(stacks), turn):
                replies = arriving(stacks[name].front.base_url, bodies, rates[phase], turn)
                found.setdefault((name, phase), []).extend(replies)
    for phase in PHASES:
        base = _percentiles_ms(found.get((IN_TREE, phase), ()))
        for name in stacks:
            took = _percentiles_ms(found[name, phase])
            both = zip(took, base, strict=True)
            ratios = [ours_ms / their_ms if their_ms else None for ours_ms, their_ms in both]
            num_lost = sum(reply.tokens is None for reply in found[name, phase])
            table.add(phase, name, rates[phase], took[0], ratios[0], took[1], ratios[1], num_lost)
    return table


def _percentiles_ms(replies: Sequence[Reply]) -> tuple[float, float]:
    seconds = [reply.first_s for reply in replies if reply.tokens is not None] or [0.0]
    return 1e3 * percentile(seconds, 50), 1e3 * percentile(seconds, 99)


# --- reporting ---


def _table(
    load: Load,
    names: Sequence[str],
    found: dict[tuple[str, str], list[Phase]],
    num_other: dict[tuple[str, str], int],
) -> Table:
    table = Table(
        "Requests through encode, prefill and decode",
        (
            *("requests", "stack", "requests/s", "x vLLM's", "CPU s a request", "x vLLM's CPU"),
            *("p50 ms", "lost", "other tokens"),
        ),
        f"A picture of {PICTURE_PIXELS} x {PICTURE_PIXELS} and a short question each, "
        f"{load.num_tokens} tokens answered, {CLIENTS} clients. Engines, router and clients share "
        "the cores. `x`: the median over the rounds of each round's ratio. CPU seconds of engines "
        "and router together. `lost`: no answer, or an error, in all rounds. `other tokens`: "
        "answers, of all rounds, that differ from those of one engine without connectors, which "
        "was asked one at a time.",
    )
    for phase in PHASES:
        for name in (*names, *((ALONE,) if phase == AGAIN else ())):
            ours = found[name, phase]
            base = found.get((IN_TREE, phase)) or ours
            pairs = list(zip(ours, base, strict=True))
            is_alone = len(names) == 1
            table.add(
                *(phase, name, statistics.median(each.per_s for each in ours)),
                None if is_alone else statistics.median(a.per_s / b.per_s for a, b in pairs),
                statistics.median(each.cpu_each_s for each in ours),
                None
                if is_alone
                else statistics.median(a.cpu_each_s / b.cpu_each_s for a, b in pairs),
                1e3 * statistics.median(reply.took_s for each in ours for reply in each.answered),
                sum(len(each.replies) - len(each.answered) for each in ours),
                num_other[name, phase],
            )
    return table


def _by_thread(names: Sequence[str], found: dict[tuple[str, str], list[Phase]]) -> Table:
    table = Table(
        "CPU by thread",
        ("requests", "engine", "thread", "CPU ms a request"),
        f"Medians over the rounds. `{REST}`: vLLM's threads, with the connectors' hooks, and those "
        "of libraries. Threads of ours by their names; below 0.05 ms they are left out.",
    )
    for phase in PHASES:
        for name in names:
            phases = found[name, phase]
            for key in sorted({key for each in phases for key in each.by_thread_s}):
                spent_s = statistics.median(
                    each.by_thread_s.get(key, 0.0) / max(1, len(each.answered)) for each in phases
                )
                if spent_s >= 5e-5:
                    table.add(phase, *key, 1e3 * spent_s)
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
