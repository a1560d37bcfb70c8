# SPDX-License-Identifier: Apache-2.0
"""How much slower an engine's look-ups and loads are while its store is cleaned.

A transfer engine loads objects of 64 KiB from the store, one after the other, and looks up 16 keys
at a time. Meanwhile the store is listed and sorted again and again: by nobody, by the thread with
which engines with a budget clean (`max_bytes`), or by a program (`ecshare gc --every`).

    python -m benchmarks.cleaning_beside [--objects N]
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from benchmarks.cleaning import Place, bucket, folder, note_uses
from benchmarks.measure import Readings, in_turn, percentile
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.store.config import StoreConfig
from ecshare.store.format import TensorSpec
from ecshare.store.keys import Kind, object_key
from ecshare.store.open import open_store
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Fetch, Handle, Job, Lookup, Outcome, Put
from ecshare.transfer.upkeep.background import Background
from ecshare.transfer.upkeep.elected import _REST
from ecshare.upkeep.budget import Budget
from ecshare.upkeep.clean import Cleaner

MODULE = "benchmarks.cleaning_beside"
NAMESPACE = "f" * 32
LOADED = tuple(object_key(Kind.KV, NAMESPACE, f"loaded {n}", "t0of1") for n in range(64))
ABSENT = tuple(object_key(Kind.KV, NAMESPACE, f"absent {n}", "t0of1") for n in range(16))
OBJECT_BYTES = 64 << 10
WITHIN_S = 30.0
NOBODY, THREAD, PROGRAM = "nobody", "a thread of the engine", "ecshare gc --every"
ALL_BYTES = 1 << 50
"""A budget within which everything is kept."""


class Engine:
    """A transfer engine whose host cache holds two objects, so that loads come from the store."""

    def __init__(self, config: StoreConfig, host: str) -> None:
        own = StoreConfig(
            url=config.url,
            storage_options=config.storage_options,
            host_cache_dir=host,
            host_cache_bytes=2 * OBJECT_BYTES + (8 << 10),
        )
        self._engine = TransferEngine(own, "options")
        self._staging = Staging(torch.device("cpu"), 32 << 20)

    def store(self) -> None:
        """Store what `load` loads."""
        for key in LOADED:
            slab = self._staging.reserve(TensorSpec("U8", (OBJECT_BYTES,), {}))
            assert slab is not None
            self._do(Put(key, slab))

    def load(self, number: int) -> None:
        """Load one object, and release it."""
        done = self._do(Fetch(LOADED[number % len(LOADED)], WITHIN_S))
        assert done.value is not None
        done.value.release()

    def look_up(self) -> None:
        """Ask for 16 keys that are not there."""
        assert not any(self._do(Lookup(ABSENT, WITHIN_S)).value or ())

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def _do(self, job: Job) -> Done:  # type: ignore[type-arg]
        handle = Handle(job)
        self._engine.submit(handle)
        (done,) = self._engine.drain(WITHIN_S, until=handle)
        assert done.outcome is Outcome.OK, done
        return done


@contextmanager
def cleaned_by(who: str, place: Place) -> Iterator[None]:
    """Clean the store meanwhile."""
    if who == THREAD:
        thread = Background("ecshare-gc", _clean(place.config))
        yield
        thread.close()
    elif who == PROGRAM:
        words = ("gc", place.argument, "--max-bytes", str(ALL_BYTES), "--every", "1s")
        command = [sys.executable, "-m", "ecshare", *words]
        with subprocess.Popen(command, stdout=-3, stderr=-3) as program:
            yield
            program.terminate()
    else:
        yield


async def _clean(config: StoreConfig) -> None:
    store = open_store(config, "options")
    while True:
        await Cleaner(store, Budget({"": ALL_BYTES}, {}), rest=_REST).run()


def measure(place: Place, num: int, rounds: int, table: Table) -> None:
    """Measure all on one place."""
    place.fill()
    asyncio.run(note_uses(place.config, num))
    readings = Readings[tuple[str, str]]()
    with ExitStack() as stack:
        host = stack.enter_context(tempfile.TemporaryDirectory())
        engine = Engine(place.config, host)
        stack.callback(engine.close)
        engine.store()
        for turn in range(rounds + 1):
            for who in in_turn((NOBODY, THREAD, PROGRAM), turn):
                into = readings if turn else Readings[tuple[str, str]]()  # the first warms up
                with cleaned_by(who, place):
                    for number in range(200):
                        with into.timed((who, "load of 64 KiB")):
                            engine.load(number)
                        with into.timed((who, "look-up of 16 keys")):
                            engine.look_up()
    for what in ("load of 64 KiB", "look-up of 16 keys"):
        plain = readings.median((NOBODY, what))
        for who in (NOBODY, THREAD, PROGRAM):
            median = readings.median((who, what))
            late = percentile(readings.values((who, what)), 95)
            table.add(place.name, what, who, 1e3 * median, 1e3 * late, median / plain)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print and keep the table."""
    parser = arguments(__doc__ or "", MODULE)
    parser.add_argument("--objects", type=int, help="of each store (100,000)")
    options = parser.parse_args(argv)
    num = options.objects or (1_000 if options.quick else 100_000)
    rounds = options.rounds or (1 if options.quick else 10)
    table = Table(
        "Look-ups and loads while the store is cleaned",
        ("store", "what", "cleaned by", "median ms", "p95 ms", "x nobody"),
        "The thread rests nine times as long as it computes, and shares the interpreter's lock "
        "with the engine. The program takes what it gets of the cores.",
    )
    for make in (folder, bucket):
        with make(num) as place:
            measure(place, num, rounds, table)
    settings = {"objects": num, "rounds": rounds}
    report = Report("cleaning-beside", command_line(MODULE, options), settings)
    report.add(table)
    report.write(options.results)


if __name__ == "__main__":
    main()
