# SPDX-License-Identifier: Apache-2.0
"""Measure the default of KVShareConnector's `load` on engines like those of users.

Engines of one text model on this CPU have vLLM's V2 model runner, asynchronous scheduling and the
worker in a process of its own. Each has a host cache of its own. In turn they get prompts that
another engine has stored in a folder, and new ones. Medians.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.kv_engines import MODEL, VOCABULARY
from benchmarks.measure import Readings, in_turn
from benchmarks.report import Report, Table, arguments, command_line
from lab.models import make_qwen2
from lab.servers.engines import ON_V2, RANK_APART, SMALL_ENGINE, EngineProcess, kv_argument
from lab.servers.openai_client import Answer, ask, question

MODULE = "benchmarks.kv_load_policies"
WRITER, DEFAULT, ALWAYS, NEVER = "writer", "if_faster (default)", "always", "never"
POLICIES = (DEFAULT, ALWAYS, NEVER)
STORED, NEW = "stored", "new"
NUM_WORDS = 1200
# Longer than storing one more object takes.
_QUIET_S = 1.0


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    rounds = options.rounds or (2 if options.quick else 12)
    settings = {"rounds": rounds, "words": NUM_WORDS, **MODEL}
    report = Report("kv_load_policies", command_line(MODULE, options), settings)
    with tempfile.TemporaryDirectory(dir=options.disk) as folder, _engines(Path(folder)) as engines:
        expected = [_answer(engines[WRITER], turn) for turn in range(rounds)]
        _wait_stored(Path(folder) / "store")
        report.add(_in_turn(engines, expected))
    print(f"\nwritten: {report.write(options.results).name}")


@contextmanager
def _engines(folder: Path) -> Iterator[dict[str, EngineProcess]]:
    """Start the engines."""
    model = make_qwen2(folder / "model", **MODEL)
    ways = {
        WRITER: ("both", "if_faster"),
        DEFAULT: ("both", "if_faster"),
        ALWAYS: ("both", "always"),
        NEVER: ("producer", "if_faster"),
    }
    with ExitStack() as stack:
        engines = {}
        for number, (name, (role, load)) in enumerate(ways.items()):
            host = f"{folder}/host-{number}"
            sharing = kv_argument(role, f"{folder}/store", host_cache_dir=host, load=load)
            engines[name] = EngineProcess(
                f"engine-{number}",
                model,
                folder,
                (*SMALL_ENGINE, sharing),
                {**ON_V2, **RANK_APART},
            ).start_in(stack)
        for engine in engines.values():
            engine.wait_ready()
        yield engines


def _in_turn(engines: dict[str, EngineProcess], expected: Sequence[Answer]) -> Table:
    readings: Readings[tuple[str, str]] = Readings()
    num_loaded: Counter[str] = Counter()
    num_stored = sum(answer.usage["prompt_tokens"] for answer in expected)
    for turn, stored in enumerate(expected):
        for number, policy in enumerate(in_turn(POLICIES, turn), 1):
            with readings.timed((policy, NEW)):
                _answer(engines[policy], 1000 * number + turn)
            with readings.timed((policy, STORED)):
                found = _answer(engines[policy], turn)
            if found.token_ids != stored.token_ids:
                raise AssertionError(f"{policy}: other tokens than the engine that stored them")
            num_loaded[policy] += found.usage["prompt_tokens_details"]["cached_tokens"]
    table = Table(
        "Stored and new prompts in turn",
        ("load", "stored: ms", "x never", "loaded %", "new: ms"),
        f"Prompts of about {num_stored // len(expected)} tokens, one token answered. Nothing of "
        "them is in the reader's cache, or in its host's. The first load is a trial: 1,024 tokens.",
    )
    for policy in POLICIES:
        stored_s, new_s = readings.median((policy, STORED)), readings.median((policy, NEW))
        ratio = stored_s / readings.median((NEVER, STORED))
        loaded = round(100 * num_loaded[policy] / num_stored)
        table.add(policy, 1e3 * stored_s, ratio, loaded, 1e3 * new_s)
    return table


def _answer(engine: EngineProcess, number: int) -> Answer:
    words = " ".join(random.Random(number).choices(VOCABULARY, k=NUM_WORDS))
    return ask(engine.base_url, question(f"Number {number}. {words}", max_tokens=1))


def _wait_stored(store: Path) -> None:
    """Return when nothing has been stored for a while. Engines answer before they store."""
    before = -1
    while (now := sum(1 for path in store.rglob("*") if path.is_file())) != before:
        before = now
        time.sleep(_QUIET_S)


if __name__ == "__main__":
    main(sys.argv[1:])
