# SPDX-License-Identifier: Apache-2.0
"""Measure the gain and the cost of sharing KV for a real engine.

Engines of one text model on this CPU are equal except for their connector. First, one prompt after
the other, it measures the time to the first token if the prompt must be computed, and if another
engine has stored it. Then, with new requests, it measures the cost of look-ups in vain, and of
storing all prompts. Medians.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import s3fs

from benchmarks.engine_load import CLIENTS, PLAIN, ask_many, throughput
from benchmarks.measure import Readings, in_turn
from benchmarks.report import Report, Table, arguments, command_line
from lab.models import make_qwen2
from lab.servers.engines import (
    RANK_APART,
    SMALL_ENGINE,
    EngineProcess,
    kv_argument,
    kv_example_argument,
)
from lab.servers.openai_client import Answer, ask, question
from lab.servers.s3 import SeaweedFS

MODULE = "benchmarks.kv_engines"
# Large enough that computing a prompt takes much longer than a look-up. The model still stores
# seven times as much KV for the same computation as Qwen2.5-3B: 47 KB for each GFLOP, in float32.
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
# One core computes and the others are free, as vLLM itself ensures where there are enough cores.
ONE_CORE = {**RANK_APART, "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0)))}
BLOCK_TOKENS = 32
SHAPE = (f"--block-size={BLOCK_TOKENS}", "--max-num-batched-tokens=4096")
VOCABULARY = ("the", "sea", "wind", "stars", "stone", "house", "cat", "blue", "green", "people")
LONG_WORDS, SHORT_WORDS = 2000, 200
COMPUTED, AGAIN, STORED = "computed", "in its own cache", "stored by another engine"
KIND = f"each with a prompt of {SHORT_WORDS} words that nobody has met, 4 to 19 tokens answered"
# Longer than storing one more object takes.
_QUIET_S = 1.0

_numbers = count()


@dataclass(frozen=True)
class Pair:
    """Two engines that share through one store, as on two hosts."""

    first: EngineProcess
    second: EngineProcess
    num_stored: Callable[[], int]
    """Returns the number of objects in the store."""

    @property
    def engines(self) -> tuple[EngineProcess, EngineProcess]:
        """Return both engines."""
        return self.first, self.second

    def wait_stored(self) -> None:
        """Return when nothing has been stored for a while. Engines answer before they store."""
        before = -1
        while (now := self.num_stored()) != before:
            before = now
            time.sleep(_QUIET_S)


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    rounds = options.rounds or (1 if options.quick else 7)
    num_requests = CLIENTS if options.quick else 32
    num_words = SHORT_WORDS if options.quick else LONG_WORDS
    settings = {"rounds": rounds, "requests a round": num_requests, "clients": CLIENTS, **MODEL}
    report = Report("kv_engines", command_line(MODULE, options), settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
        server = stack.enter_context(SeaweedFS(folder))
        plain, pairs = stack.enter_context(_engines(folder, server))
        report.add(_first_token(plain, pairs, rounds, num_words))
        engines = {PLAIN: plain, **{name: pair.first for name, pair in pairs.items()}}
        report.add(throughput(engines, rounds, num_requests, _ask_something_new, KIND))
    print(f"\nwritten: {report.write(options.results).name}")


@contextmanager
def _engines(folder: Path, server: SeaweedFS) -> Iterator[tuple[EngineProcess, dict[str, Pair]]]:
    """Start all engines, each as on a host of its own."""
    model = make_qwen2(folder / "model", **MODEL)
    with ExitStack() as stack:

        def start(name: str, *extra: str) -> EngineProcess:
            arguments = *SMALL_ENGINE, *SHAPE, *extra
            return EngineProcess(name, model, folder, arguments, ONE_CORE).start_in(stack)

        def pair(name: str, *arguments: str, num_stored: Callable[[], int]) -> Pair:
            first, second = (
                start(f"{name}-{number}", argument) for number, argument in enumerate(arguments, 1)
            )
            return Pair(first, second, num_stored)

        def ours(name: str, url: str, num_stored: Callable[[], int], **options: object) -> Pair:
            hosts = [f"{folder}/{name}-host-{number}" for number in (1, 2)]
            sharing = [kv_argument("both", url, host_cache_dir=host, **options) for host in hosts]
            return pair(name, *sharing, num_stored=num_stored)

        plain = start("plain")
        store, example = folder / "store", folder / "example"
        s3 = s3fs.S3FileSystem(**server.storage_options, use_listings_cache=False)
        by_example = kv_example_argument("both", example)
        pairs = {
            "KVShareConnector, folder": ours("folder", f"{store}", lambda: _num_files(store)),
            "KVShareConnector, S3": ours(
                "s3",
                server.url,
                lambda: len(s3.find(server.url)),
                storage_options=server.storage_options,
            ),
            "ExampleConnector, folder": pair(
                "example", by_example, by_example, num_stored=lambda: _num_files(example)
            ),
        }
        for engine in (plain, *(each for pair in pairs.values() for each in pair.engines)):
            engine.wait_ready()
            ask_many(engine, CLIENTS, _ask_something_new)  # warms up
        yield plain, pairs


def _first_token(
    plain: EngineProcess, pairs: dict[str, Pair], rounds: int, num_words: int
) -> Table:
    readings: Readings[tuple[str, str]] = Readings()
    num_tokens = 0
    for turn in range(rounds + 1):
        kept = readings if turn else Readings()
        prompt = _words(num_words, next(_numbers))
        answer = _timed(plain, prompt, kept, (PLAIN, COMPUTED))
        num_tokens = answer.usage["prompt_tokens"]
        _timed(plain, prompt, kept, (PLAIN, AGAIN))
        names = list(pairs)
        for name in in_turn(names, turn):
            pair = pairs[name]
            _timed(pair.first, prompt, kept, (name, COMPUTED))
            pair.wait_stored()
            found = _timed(pair.second, prompt, kept, (name, STORED))
            _check(name, found, answer)
    table = Table(
        "Time to the first token",
        ("engine", "the prompt is", "ms", "x computed without connector"),
        f"A prompt of {num_tokens} tokens, a new one each round, one token answered. `{STORED}`: "
        "nothing of it lies in this host's cache; ExampleConnector reads this host's page cache. "
        "On a CPU to compute is slow: the ratios say little of a GPU, the milliseconds of "
        f"`{STORED}` are what a load costs.",
    )
    cold_s = readings.median((PLAIN, COMPUTED))
    rows = [(PLAIN, COMPUTED), (PLAIN, AGAIN)]
    rows += [(name, how) for name in pairs for how in (COMPUTED, STORED)]
    for row in rows:
        took_s = readings.median(row)
        table.add(*row, 1e3 * took_s, took_s / cold_s)
    return table


def _timed(
    engine: EngineProcess, prompt: str, readings: Readings[tuple[str, str]], what: tuple[str, str]
) -> Answer:
    with readings.timed(what):
        return ask(engine.base_url, question(prompt, max_tokens=1))


def _check(name: str, found: Answer, expected: Answer) -> None:
    if found.token_ids != expected.token_ids:
        raise AssertionError(f"{name}: other tokens than without a connector")
    num_computed = (
        found.usage["prompt_tokens"] - found.usage["prompt_tokens_details"]["cached_tokens"]
    )
    if num_computed > BLOCK_TOKENS:
        raise AssertionError(f"{name}: {num_computed} tokens of what was stored were computed")


def _num_files(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


def _ask_something_new(engine: EngineProcess) -> None:
    number = next(_numbers)
    # Any 16 requests have each length equally often: requests do not all end together.
    ask(engine.base_url, question(_words(SHORT_WORDS, number), max_tokens=4 + 5 * number % 16))


def _words(count: int, number: int) -> str:
    """Return `count` words. Prompts of other numbers begin with other words."""
    return f"Number {number}. " + " ".join(random.Random(number).choices(VOCABULARY, k=count))


if __name__ == "__main__":
    main(sys.argv[1:])
