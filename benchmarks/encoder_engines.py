# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of the encoder-cache connector for a real engine that gains nothing from it.

Engines of one small model on this CPU, equal except for their connector, are loaded in turn. One
table has their request rates, with a new picture in each request; the other shows how evenly they
decode while their store has stopped. Medians.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise
from pathlib import Path

from benchmarks.engine_load import CLIENTS, PLAIN, ask_many, throughput
from benchmarks.measure import percentile
from benchmarks.report import Report, Table, arguments, command_line
from lab.models import make_qwen25_vl
from lab.servers.engines import SMALL_ENGINE, EngineProcess, ec_argument, example_argument
from lab.servers.openai_client import ask, picture, question, stream
from lab.servers.s3 import SeaweedFS

MODULE = "benchmarks.encoder_engines"
PICTURE_PIXELS = 448
KIND = (
    f"each with a picture of {PICTURE_PIXELS} x {PICTURE_PIXELS} that is nowhere stored, 8 tokens "
    "answered; an ec_both stores all of them"
)
DECODED_TOKENS = 2000  # longer than a request waits for the store, by default
PICTURE_EVERY_S = 0.5
UNDISTURBED, STOPPED = "answers", "is stopped"
CONSUMER = "ECShareConnector, ec_consumer, S3"

# Never the same picture twice, nor one that the model server has seen.
_numbers = count()


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    rounds = options.rounds or (1 if options.quick else 9)
    num_requests = CLIENTS if options.quick else 48
    tokens = 20 if options.quick else DECODED_TOKENS
    settings = {"rounds": rounds, "requests a round": num_requests, "clients": CLIENTS}
    report = Report("encoder_engines", command_line(MODULE, options), settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
        server = stack.enter_context(SeaweedFS(folder))
        engines = stack.enter_context(_engines(folder, server))
        report.add(throughput(engines, rounds, num_requests, _show_new_picture, KIND))
        report.add(_evenness(engines[CONSUMER], server, max(1, rounds // 3), tokens))
    print(f"\nwritten: {report.write(options.results).name}")


@contextmanager
def _engines(folder: Path, server: SeaweedFS) -> Iterator[dict[str, EngineProcess]]:
    """Start all engines, each as on a host of its own."""
    s3 = {"storage_options": server.storage_options}
    connectors = {
        PLAIN: (),
        CONSUMER: (_ours("consumer", server.url, folder / "a", **s3),),
        "ECShareConnector, ec_both, S3": (_ours("both", server.url, folder / "b", **s3),),
        "ECShareConnector, ec_both, folder": (_ours("both", f"{folder}/store", folder / "c"),),
        "ECExampleConnector, ec_both, folder": (example_argument("both", folder / "example"),),
    }
    model = make_qwen25_vl(folder / "model")
    with ExitStack() as stack:
        engines = {}
        for name, extra in connectors.items():
            log_name = name.replace(", ", "-").replace(" ", "-")
            engine = EngineProcess(log_name, model, folder, (*SMALL_ENGINE, *extra))
            engines[name] = engine.start_in(stack)
        for engine in engines.values():
            engine.wait_ready()
            ask_many(engine, CLIENTS, _show_new_picture)  # warms up
        yield engines


def _ours(role: str, url: str, host: Path, **options: object) -> str:
    return ec_argument(role, url, host_cache_dir=str(host), **options)


def _show_new_picture(engine: EngineProcess) -> None:
    _show_picture(engine, 8)


def _show_picture(engine: EngineProcess, max_tokens: int) -> None:
    url = picture(next(_numbers), PICTURE_PIXELS)
    ask(engine.base_url, question("what is to be seen here?", [url], max_tokens))


# --- evenness ---


def _evenness(engine: EngineProcess, server: SeaweedFS, rounds: int, tokens: int) -> Table:
    note = (
        f"Milliseconds between the tokens of two streams of {tokens} tokens, while a third client "
        f"shows a new picture every {PICTURE_EVERY_S:g} s. Stopped: SIGSTOP to the S3 server, so "
        "that it takes connections and never answers; the connector's options are the default "
        "ones. All gaps of all rounds together; the rounds take turns."
    )
    columns = ("the store", "gaps", "p50 ms", "p99 ms", "max ms", "p99 x undisturbed")
    table = Table("Decoding while the store is stopped", columns, note)
    gaps: dict[str, list[float]] = {UNDISTURBED: [], STOPPED: []}
    for _ in range(rounds):
        gaps[UNDISTURBED] += _gaps_ms(engine, tokens)
        server.pause()
        try:
            gaps[STOPPED] += _gaps_ms(engine, tokens)
        finally:
            server.resume()
    base = percentile(gaps[UNDISTURBED], 99)
    for name, all_ms in gaps.items():
        p99 = percentile(all_ms, 99)
        table.add(name, len(all_ms), percentile(all_ms, 50), p99, max(all_ms), p99 / base)
    return table


def _gaps_ms(engine: EngineProcess, tokens: int) -> list[float]:
    """Decode two streams beside a client that shows pictures; return the gaps of both."""
    body = question("tell me about the sea", max_tokens=tokens) | {"ignore_eos": True}

    def decode(_: int) -> list[float]:
        arrivals = [time.perf_counter() for chunk in stream(engine.base_url, body) if chunk]
        return [1e3 * (later - earlier) for earlier, later in pairwise(arrivals)]

    with ThreadPoolExecutor(3) as clients, _showing_pictures(engine):
        return [gap for gaps in clients.map(decode, range(2)) for gap in gaps]


@contextmanager
def _showing_pictures(engine: EngineProcess) -> Iterator[None]:
    is_over = threading.Event()

    def show() -> None:
        with ThreadPoolExecutor(16) as clients:
            asked = []
            while not is_over.wait(PICTURE_EVERY_S):
                asked.append(clients.submit(_show_picture, engine, 1))
            for each in asked:
                each.result()

    with ThreadPoolExecutor(1) as showing:
        shown = showing.submit(show)
        try:
            yield
        finally:
            is_over.set()
            shown.result()


if __name__ == "__main__":
    main(sys.argv[1:])
