# SPDX-License-Identifier: Apache-2.0
"""Measure the time to the first token about a picture whose embedding is stored or cached.

Engines of one small model on this CPU, equal except for their connector, are asked one request at a
time. The embedding is in vLLM's own encoder cache, in this host's cache, or only in the store; a
prompt of the same length without a picture is timed too. Medians.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine_load import PLAIN
from benchmarks.measure import Readings, in_turn
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.store.hostcache.folder import SHM
from lab.models import make_qwen25_vl
from lab.servers.engines import SMALL_ENGINE, EngineProcess, ec_argument, example_argument
from lab.servers.openai_client import ask, picture, question
from lab.servers.processes import Server
from lab.servers.router import RouterProcess

MODULE = "benchmarks.encoder_first_token"
PICTURE_PIXELS = 448
NUM_EMBEDS = 256
TEXT = "no picture, as much text"
ENCODED = "nowhere: it is encoded"
OWN, HOST, STORE = "in vLLM's encoder cache", "on this host", "in the store"
WRITER, READER = "ECShareConnector, ec_both", "ECShareConnector, ec_consumer on another host"
EXAMPLE = "ECExampleConnector, ec_both"
ROUTED = "our router before both of ours"
# Pictures that fill vLLM's encoder cache, which has as many embeddings as a step has tokens: 4,096.
# vLLM's endpoint that empties the cache, for developers, does not notify connectors.
NUM_OTHERS, NUM_AT_ONCE = 20, 4

What = tuple[str, str]
"""An engine, and the place of the picture."""


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    rounds = options.rounds or (1 if options.quick else 15)
    report = Report("encoder_first_token", command_line(MODULE, options), {"rounds": rounds})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
        hosts = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHM)))
        engines = stack.enter_context(started(folder, connectors(folder, hosts)))
        stages = {"encoder": [engines[WRITER]], "decoder": [engines[READER]]}
        router = stack.enter_context(RouterProcess("router", folder, stages))
        report.add(first_token(engines, router, folder / "store", rounds))
    print(f"\nwritten: {report.write(options.results).name}")


def connectors(folder: Path, hosts: Path) -> dict[str, Sequence[str]]:
    """Return the arguments of each engine's connectors. The hosts' caches are in `hosts`."""
    store = str(folder / "store")
    return {
        PLAIN: (),
        WRITER: (ec_argument("both", store, host_cache_dir=f"{hosts}/a"),),
        READER: (ec_argument("consumer", store, host_cache_dir=f"{hosts}/b"),),
        EXAMPLE: (example_argument("both", folder / "example"),),
    }


@contextmanager
def started(
    folder: Path, connectors: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, EngineProcess]]:
    """Start an engine for each connector."""
    model = make_qwen25_vl(folder / "model")
    with ExitStack() as stack:
        engines = {}
        for number, (name, extra) in enumerate(connectors.items()):
            engine = EngineProcess(f"engine-{number}", model, folder, (*SMALL_ENGINE, *extra))
            engines[name] = engine.start_in(stack)
        for engine in engines.values():
            engine.wait_ready()
        yield engines


@dataclass
class _Round:
    """One picture, which every engine is asked about."""

    number: int
    readings: Readings[What]
    num_tokens: dict[str, int] = field(default_factory=dict)
    """The tokens of the prompts, by the place of the picture."""
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def ask_everywhere(self, name: str, engine: EngineProcess, first: str) -> None:
        """Ask an engine until all its caches have the picture; `first`: its place at first."""
        self._ask(name, engine, first)
        self._ask(name, engine, OWN)
        if name != PLAIN:
            self._fill_with_others(engine)
            self._ask(name, engine, HOST)
        self._ask(name, engine, TEXT)

    def ask_routed(self, router: RouterProcess) -> None:
        """Ask through the router about a picture that it, E and D know."""
        untimed = _Round(self.number, Readings(), self.num_tokens, self.answers)
        untimed._ask(ROUTED, router, OWN)
        self._ask(ROUTED, router, OWN)
        self._ask(ROUTED, router, TEXT)

    def _fill_with_others(self, engine: EngineProcess) -> None:
        """Make vLLM's encoder cache evict the picture, for others that it evicted a round ago."""
        begin = -1 - self.number % 2 * NUM_OTHERS
        others = [picture(begin - n, PICTURE_PIXELS) for n in range(NUM_OTHERS)]
        for n in range(0, NUM_OTHERS, NUM_AT_ONCE):
            text = f"{self.number}, what is to be seen in these?"
            ask(engine.base_url, _request(text, *others[n : n + NUM_AT_ONCE]))

    def _ask(self, name: str, server: Server, where: str) -> None:
        text = f"{self.number} {where}, what is to be seen?"
        if where == TEXT:
            body = _request(text + NUM_EMBEDS * " the")
        else:
            body = _request(text, picture(self.number, PICTURE_PIXELS))
        with self.readings.timed((name, where)):
            answer = ask(server.base_url, body)
        self.num_tokens[where] = answer.usage["prompt_tokens"]
        if self.answers.setdefault(where, answer.token_ids) != answer.token_ids:
            raise AssertionError(f"{name}: another token than others answer")


def _request(text: str, *pictures: str) -> dict[str, Any]:
    """Return a request for one token. Its text comes first: pictures have no KV in common."""
    body = question(text, pictures, max_tokens=1)
    body["messages"][0]["content"].reverse()
    return body


def first_token(
    engines: Mapping[str, EngineProcess], router: RouterProcess, store: Path, rounds: int
) -> Table:
    """Ask each engine about one picture a round, with its embedding in each place."""
    readings: Readings[What] = Readings()
    others = [name for name in engines if name != READER]
    for turn in range(rounds + 2):
        # The first rounds warm up.
        each = _Round(turn, readings if turn > 1 else Readings())
        num_stored = _num_files(store)
        for name in in_turn(others, turn):
            each.ask_everywhere(name, engines[name], ENCODED)
        while _num_files(store) == num_stored:
            time.sleep(0.01)
        each.ask_everywhere(READER, engines[READER], STORE)
        each.ask_routed(router)
    table = Table(
        "Time to the first token",
        ("engine", "the embedding is", "ms", "x the same without connector"),
        f"A prompt of {each.num_tokens[OWN]} tokens, {NUM_EMBEDS} of them a picture's, or of "
        f"{each.num_tokens[TEXT]} tokens of text. One request at a time, one token answered. The "
        f"store is a folder. `{HOST}`: after vLLM's encoder cache dropped it; ECExampleConnector "
        f"reads a file in the page cache. `{STORE}` and `{HOST}` are compared with `{OWN}`. A "
        "picture that an engine is asked about first has to be decoded there, too. The router asks "
        "D without pixels; its row about a picture is compared with a text of as many tokens.",
    )
    for name in (*engines, ROUTED):
        for where in (TEXT, OWN, HOST, STORE, ENCODED):
            if (name, where) in readings:
                base = OWN if where in (HOST, STORE) else where
                base = TEXT if name == ROUTED else base
                took_s = readings.median((name, where))
                table.add(name, where, 1e3 * took_s, took_s / readings.median((PLAIN, base)))
    return table


def _num_files(folder: Path) -> int:
    """Count the stored objects, without those being written."""
    return sum(1 for path in folder.rglob("[!.]*") if path.is_file())


if __name__ == "__main__":
    main(sys.argv[1:])
