# SPDX-License-Identifier: Apache-2.0
"""Compare ways to choose one of two engines of a stage: by their likely caches, load, or turns.

Conversations about a picture, over two encode, two prefill and two decode engines, each with a host
cache of its own, as on hosts of their own. Three routers in front of them are asked in turns: ours
with --balance affinity, ours with --balance load, and one that goes round robin.

    python -m benchmarks.balance
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_load import cpu_s_of
from benchmarks.measure import in_turn, percentile
from benchmarks.report import Report, Table, arguments, command_line
from lab.models import make_qwen25_vl
from lab.servers.engines import SMALL_ENGINE, EngineProcess, ec_argument, kv_argument
from lab.servers.openai_client import ask, counters, picture
from lab.servers.processes import Server
from lab.servers.router import RouterProcess

MODULE = "benchmarks.balance"
ROUND_ROBIN = "round robin"
ROUTERS = {
    "--balance affinity": ("ecshare.router", ["--balance=affinity"]),
    "--balance load": ("ecshare.router", ["--balance=load"]),
    ROUND_ROBIN: ("benchmarks.turns_router", []),
}
EACH = 2
CLIENTS = 8
TURNS = 5
PICTURE_PIXELS = 448
ANSWER_TOKENS = 16
ROOM = "--num-gpu-blocks-override=512"
STORY = "The ship lay in the harbour, and nobody knew when the wind would turn again. " * 8
SOURCES = {
    "computed": "local_compute",
    "own cache": "local_cache_hit",
    "loaded": "external_kv_transfer",
}
"""vLLM's names of the sources of a prompt's tokens."""


class Router(RouterProcess):
    """One of the three routers."""

    def __init__(self, name: str, folder: Path, engines: Mapping[str, Sequence[Server]]) -> None:
        self._module, options = ROUTERS[name]
        super().__init__(name.strip("-").replace(" ", "-"), folder, engines, options)

    def command(self) -> list[str]:
        """Return the router's command line, with its own module."""
        return [self._module if word == "ecshare.router" else word for word in super().command()]


@dataclass(frozen=True)
class Fleet:
    """The engines, by stage, and the routers in front of them."""

    engines: Mapping[str, Sequence[EngineProcess]]
    routers: Mapping[str, Router]

    def cpu_s(self, name: str) -> float:
        """Return the CPU seconds that all engines and one router have used until now."""
        engines = [each for stage in self.engines.values() for each in stage]
        return cpu_s_of((self.routers[name], *engines))

    def prompt_tokens(self) -> dict[str, float]:
        """Return the number of prompt tokens that D has had until now, by their source."""
        pages = [counters(each.base_url) for each in self.engines["decoder"]]
        name = "vllm:prompt_tokens_by_source_total"
        return {what: sum(page[name, of] for page in pages) for what, of in SOURCES.items()}


@dataclass(frozen=True)
class Run:
    """The figures of one router for the conversations of one round."""

    per_s: float
    """Answers per second."""
    cpu_each_s: float
    """CPU seconds for each answer."""
    seconds: Sequence[float]
    """The seconds that each answer took."""
    prompt_tokens: Mapping[str, float]
    """Prompt tokens of D, by their source."""


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    parser = arguments(__doc__ or "", MODULE)
    options = parser.parse_args(words)
    rounds = options.rounds or (1 if options.quick else 5)
    num_talks = CLIENTS // 2 if options.quick else 3 * CLIENTS
    settings = {"rounds": rounds, "conversations a round": num_talks, "clients": CLIENTS}
    report = Report("balance", command_line(MODULE, options), settings)
    found: dict[str, list[Run]] = {name: [] for name in ROUTERS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
        fleet = stack.enter_context(_fleet(folder))
        first = 0
        for turn in range(-1, rounds):
            for name in in_turn(list(ROUTERS), turn):
                run = _talk(fleet, name, range(first, first + num_talks))
                first += num_talks
                if turn >= 0:  # the first round warms up all engines and routers
                    found[name].append(run)
    report.add(_table(found))
    print(f"\nwritten: {report.write(options.results).name}")


@contextmanager
def _fleet(folder: Path) -> Iterator[Fleet]:
    model = make_qwen25_vl(folder / "model")
    with ExitStack() as stack:

        def start(name: str, *connectors: str) -> EngineProcess:
            arguments = (*SMALL_ENGINE, ROOM, *connectors)
            return EngineProcess(name, model, folder, arguments).start_in(stack)

        def engine(stage: str, number: int) -> EngineProcess:
            name = f"{stage}-{number}"
            url, host = f"{folder}/store", {"host_cache_dir": f"{folder}/{name}-host"}
            if stage == "encoder":
                return start(name, ec_argument("producer", url, **host))
            sharing = ec_argument("consumer", url, **host), kv_argument("both", url, **host)
            flags = "--enable-prompt-tokens-details", "--mm-processor-cache-gb=0"
            return start(name, *sharing, *flags)

        stages = ("encoder", "prefiller", "decoder")
        engines = {stage: [engine(stage, number) for number in range(EACH)] for stage in stages}
        for each in (each for stage in engines.values() for each in stage):
            each.wait_ready()
        routers = {name: stack.enter_context(Router(name, folder, engines)) for name in ROUTERS}
        yield Fleet(engines, routers)


def _talk(fleet: Fleet, name: str, numbers: Sequence[int]) -> Run:
    """Hold conversations, with CLIENTS at once."""
    url = fleet.routers[name].base_url
    before, cpu_s, start_s = fleet.prompt_tokens(), fleet.cpu_s(name), time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        talks = list(clients.map(lambda number: _one_talk(url, number), numbers))
    took_s, seconds = time.perf_counter() - start_s, [each for talk in talks for each in talk]
    after = fleet.prompt_tokens()
    return Run(
        len(seconds) / took_s,
        (fleet.cpu_s(name) - cpu_s) / len(seconds),
        seconds,
        {what: after[what] - before[what] for what in SOURCES},
    )


def _one_talk(url: str, number: int) -> list[float]:
    """Return the seconds of each answer of a conversation."""
    shown = {"type": "image_url", "image_url": {"url": picture(number, PICTURE_PIXELS)}}
    dialogue: list[dict[str, Any]] = []
    seconds = []
    for turn in range(TURNS):
        asked = {"type": "text", "text": f"{number}.{turn}: What do you see now?"}
        begin = [{"type": "text", "text": f"{number}: {STORY}"}, shown] if turn == 0 else []
        dialogue.append({"role": "user", "content": [*begin, asked]})
        body = {"messages": dialogue, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        start_s = time.perf_counter()
        answer = ask(url, body)
        seconds.append(time.perf_counter() - start_s)
        dialogue.append({"role": "assistant", "content": answer.text})
    return seconds


def _table(found: Mapping[str, Sequence[Run]]) -> Table:
    table = Table(
        "Conversations over two engines of each stage",
        (
            *("engines are chosen", "answers/s", "x round robin", "CPU s an answer"),
            *("x its CPU", "p50 ms", "p95 ms", *(f"D's tokens: {what}" for what in SOURCES)),
        ),
        f"{TURNS} turns about one picture of {PICTURE_PIXELS} x {PICTURE_PIXELS}, {ANSWER_TOKENS} "
        f"tokens answered, {CLIENTS} clients. Engines, router and clients share the cores; the "
        "store is a folder. `x`: the median over the rounds of each round's ratio. CPU seconds of "
        "engines and router together. `D's tokens`: the share of all tokens of D's prompts, by "
        "where they came from, as vLLM counts.",
    )
    for name, runs in found.items():
        pairs = list(zip(runs, found[ROUND_ROBIN], strict=True))
        seconds = [each for run in runs for each in run.seconds]
        tokens = {what: sum(run.prompt_tokens[what] for run in runs) for what in SOURCES}
        table.add(
            name,
            statistics.median(run.per_s for run in runs),
            statistics.median(a.per_s / b.per_s for a, b in pairs),
            statistics.median(run.cpu_each_s for run in runs),
            statistics.median(a.cpu_each_s / b.cpu_each_s for a, b in pairs),
            1e3 * statistics.median(seconds),
            1e3 * percentile(seconds, 95),
            *(tokens[what] / sum(tokens.values()) for what in SOURCES),
        )
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
