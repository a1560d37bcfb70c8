# SPDX-License-Identifier: Apache-2.0
"""Run a fleet for hours while its store, its engines and its router fail again and again.

Encode, prefill and two decode engines share an S3 server behind a proxy that stalls; engines keep
the store within a budget; the router has two workers. Clients ask texts, new and known pictures and
next turns of conversations, streamed or not. Each answer is compared with that of an engine without
connectors, to which nothing happens. Memory, open files, disk and latency are read all the time.

    python -m benchmarks.soak --minutes 60 [--seed 7]

A client repeats a request that has failed, up to three times: a stream breaks if its decode engine
is killed, and no router answers while it starts. Nothing is lost if one of these is answered.
"""

import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import percentile
from benchmarks.report import Report, Table, arguments, command_line
from benchmarks.soak_plot import write_plots
from lab.faults.tcp_proxy import Proxy
from lab.models import make_qwen25_vl
from lab.servers.engines import SMALL_ENGINE, EngineProcess, ec_argument, kv_argument
from lab.servers.openai_client import Answer, RequestFailed, ask, picture, question
from lab.servers.proc import num_open_files, resident_bytes
from lab.servers.processes import LOOPBACK, Server
from lab.servers.router import RouterProcess
from lab.servers.s3 import SeaweedFS

MODULE = "benchmarks.soak"
CLIENTS = 3
TRIES = 4
SAMPLE_S = 5.0
STORE_BYTES = 64 << 20
NEAR = 1e-3
"""Of two choices whose log probabilities differ by less, kernels choose either in a batch."""
TOKENS = 8
SHARES = (0.02, 0.25, 0.5, 0.75, 1.0)
STORY = "The sea, the wind and the stars tell a long story to those who listen. " * 6


class Sample(NamedTuple):
    """What was read at one time, in seconds since the start."""

    at_s: float
    resident: Mapping[str, float]
    """MiB, by server; without those that are down."""
    open_files: Mapping[str, int]
    store_mib: float
    p50_ms: float | None
    """Of the answers since the sample before; None: there were none."""
    p95_ms: float | None


@dataclass
class Fleet:
    """The servers."""

    plain: EngineProcess
    encoder: EngineProcess
    prefiller: EngineProcess
    decoders: Sequence[EngineProcess]
    router: RouterProcess
    store: SeaweedFS
    proxy: Proxy

    def servers(self) -> dict[str, Server]:
        """Return the servers whose memory is read. Nothing kills the second decode engine."""
        return {
            "plain": self.plain,
            "encode": self.encoder,
            "prefill": self.prefiller,
            "decode-1": self.decoders[0],
            "decode-2": self.decoders[1],
            "router": self.router,
        }


@dataclass
class Log:
    """What happened; any thread."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    kinds: Counter[str] = field(default_factory=Counter)
    """Requests that were answered, by kind."""
    wrong: int = 0
    near: int = 0
    """Answers that differ where two tokens are as likely."""
    lost: int = 0
    repeated: Counter[str] = field(default_factory=Counter)
    """Requests that had to be repeated, by the fault at that time."""
    faults: Counter[str] = field(default_factory=Counter)
    fault: str = "none"
    """The one that goes on now, or was the last one within some seconds."""
    took_s: list[float] = field(default_factory=list)
    """Of the answers since the last sample."""


# --- requests ---


class Requests:
    """What clients ask, and the right answers. Any thread."""

    def __init__(self, plain: EngineProcess, seed: int) -> None:
        self._plain = plain
        self._random = random.Random(seed)
        self._numbers = itertools.count(1)
        self._known: list[int] = [0]
        self._lock = threading.Lock()

    def next(self) -> tuple[str, dict[str, Any], bool]:
        """Return the kind of a request, its body, and whether it is streamed."""
        with self._lock:
            kind = self._random.choice(("text", "new picture", "known picture", "next turn"))
            number = self._random.choice(self._known[-200:])
            if kind != "known picture":
                number = next(self._numbers)
            if kind == "new picture":
                self._known.append(number)
            streams = self._random.random() < 0.5
        pictures = [picture(number)] if kind.endswith("picture") else []
        body = question(f"Number {number}. {STORY}", pictures, TOKENS)
        if kind == "next turn":
            said = self.right(body).text
            body["messages"] += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "And then?"},
            ]
        return kind, body, streams

    def right(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer of the engine without connectors."""
        return ask(self._plain.base_url, {**body, "logprobs": True, "top_logprobs": 2})

    def is_near(self, right: Answer, tokens: Sequence[int]) -> bool:
        """Tell whether an answer first differs where the right one might have differed as well."""
        both = enumerate(zip(right.token_ids, tokens, strict=False))
        at = next((at for at, (one, other) in both if one != other), -1)
        if at < 0 or at >= len(right.logprobs):
            return False
        best = sorted(right.logprobs[at].values(), reverse=True)
        return len(best) > 1 and best[0] - best[1] < NEAR


def _client(fleet: Fleet, requests: Requests, log: Log, is_over: threading.Event) -> None:
    while not is_over.is_set():
        kind, body, streams = requests.next()
        right = requests.right(body)
        began_s = time.monotonic()
        answer = _answered(fleet.router.base_url, body, log, streams=streams)
        took_s = time.monotonic() - began_s
        with log.lock:
            if answer is None:
                log.lost += 1
                continue
            log.kinds[kind] += 1
            log.took_s.append(took_s)
            if answer.token_ids != right.token_ids:
                if requests.is_near(right, answer.token_ids):
                    log.near += 1
                else:
                    log.wrong += 1


def _answered(url: str, body: dict[str, Any], log: Log, *, streams: bool) -> Answer | None:
    for turn in range(TRIES):
        with log.lock:
            fault = log.fault
        try:
            return ask(url, body, stream=streams)
        except (RequestFailed, HTTPException, OSError, ValueError):
            with log.lock:
                log.repeated[fault if fault != "none" else log.fault] += 1
        time.sleep(2.0 * (turn + 1))
    return None


# --- faults ---


def _faults(fleet: Fleet) -> dict[str, Callable[[random.Random], None]]:
    """Return what may happen, by name. Each call returns when all is well again."""

    def stall(chance: random.Random) -> None:
        fleet.proxy.stall()
        time.sleep(chance.uniform(2, 10))
        fleet.proxy.resume()

    def kill_store(chance: random.Random) -> None:
        fleet.store.kill()
        time.sleep(chance.uniform(1, 5))
        fleet.store.start()
        fleet.store.wait_ready()

    def kill(server: Server) -> Callable[[random.Random], None]:
        def killed(chance: random.Random) -> None:
            server.kill()
            time.sleep(chance.uniform(0, 5))
            server.start()
            server.wait_ready()

        return killed

    def hang(chance: random.Random) -> None:
        server = chance.choice((fleet.encoder, fleet.prefiller, fleet.decoders[0]))
        server.pause()
        time.sleep(chance.uniform(2, 10))
        server.resume()

    def restart(_: random.Random) -> None:
        fleet.router.stop()
        fleet.router.start()
        fleet.router.wait_ready()

    return {
        "the store is silent": stall,
        "the store is killed": kill_store,
        "encode is killed": kill(fleet.encoder),
        "prefill is killed": kill(fleet.prefiller),
        "decode-1 is killed": kill(fleet.decoders[0]),
        "an engine is stopped": hang,
        "the router is restarted": restart,
    }


def _fail_again_and_again(
    fleet: Fleet, log: Log, is_over: threading.Event, seed: int, pause_s: tuple[float, float]
) -> None:
    chance = random.Random(seed)
    faults = _faults(fleet)
    while not is_over.wait(chance.uniform(*pause_s)):
        name = chance.choice(sorted(faults))
        with log.lock:
            log.fault = name
            log.faults[name] += 1
        faults[name](chance)
        is_over.wait(5.0)  # what was under way may still fail because of it
        with log.lock:
            log.fault = "none"


# --- the fleet ---


@contextmanager
def _fleet(folder: Path) -> Iterator[Fleet]:
    model = make_qwen25_vl(folder / "model")
    with ExitStack() as stack:
        plain = EngineProcess("plain", model, folder, SMALL_ENGINE).start_in(stack)
        store = SeaweedFS(folder)
        stack.enter_context(store)
        proxy = stack.enter_context(Proxy(LOOPBACK, store.port.number))
        reached = {"storage_options": store.storage_options | {"endpoint_url": proxy.url}}
        short = {"wait_s": 3.0, "io_timeout_s": 3.0, "max_bytes": STORE_BYTES}

        def start(name: str, role: str) -> EngineProcess:
            options = {**reached, **short, "host_cache_dir": f"{folder}/{name}-host"}
            options |= {"host_cache_bytes": STORE_BYTES // 2}
            connectors = [ec_argument(role, store.url, **options)]
            if role == "consumer":
                connectors += [kv_argument("both", store.url, **options)]
                connectors += ["--mm-processor-cache-gb=0"]
            engine = EngineProcess(name, model, folder, (*SMALL_ENGINE, *connectors))
            return engine.start_in(stack)

        encoder = start("encode", "producer")
        prefiller, *decoders = (
            start(name, "consumer") for name in ("prefill", "decode-1", "decode-2")
        )
        for engine in (plain, encoder, prefiller, *decoders):
            engine.wait_ready()
        stages = {"encoder": [encoder], "prefiller": [prefiller], "decoder": decoders}
        router = RouterProcess("router", folder, stages, ("--workers=2", "--drain-s=5"))
        stack.enter_context(router)
        yield Fleet(plain, encoder, prefiller, decoders, router, store, proxy)


def _sample(fleet: Fleet, log: Log, began_s: float) -> Sample:
    resident: dict[str, float] = {}
    files: dict[str, int] = {}
    for name, server in fleet.servers().items():
        try:
            processes = server.processes()
            resident[name] = sum(map(resident_bytes, processes)) / (1 << 20)
            files[name] = sum(map(num_open_files, processes))
        except (OSError, AssertionError, ValueError):  # it is being killed or started
            resident.pop(name, None)
    with log.lock:
        took_ms, log.took_s = [1e3 * each for each in log.took_s], []
    store_mib = sum(path.stat().st_size for path in _files(fleet.store.folder)) / (1 << 20)
    at_s = time.monotonic() - began_s
    p50_ms, p95_ms = (percentile(took_ms, share) if took_ms else None for share in (50, 95))
    return Sample(at_s, resident, files, store_mib, p50_ms, p95_ms)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path
        except OSError:
            continue


# --- reporting ---


def _summary(log: Log) -> Table:
    table = Table(
        "Requests",
        ("what", "number"),
        f"{CLIENTS} clients. `repeated`: tries that failed, by the fault at that time; a request "
        f"is lost after {TRIES}. `other tokens`: answers that differ from those of an engine "
        f"without connectors; `near`: where its two best tokens differ by less than {NEAR:g} in "
        "their log probability, so that the order of additions in a batch decides.",
    )
    for kind, number in sorted(log.kinds.items()):
        table.add(f"answered: {kind}", number)
    table.add("lost", log.lost)
    table.add("other tokens", log.wrong)
    table.add("other tokens, near", log.near)
    for fault, number in sorted(log.faults.items()):
        table.add(f"fault: {fault}", number)
    for fault, number in sorted(log.repeated.items()):
        table.add(f"repeated: {fault}", number)
    return table


def _over_time(samples: Sequence[Sample]) -> Table:
    names = ("plain", "decode-2", "router")
    table = Table(
        "Over time",
        (
            *("minute", *(f"{name} MiB" for name in names), *(f"{name} files" for name in names)),
            *("store MiB", "p50 ms", "p95 ms"),
        ),
        "Medians of the samples around each time. Nothing kills `plain` and `decode-2`; `router` "
        f"is all of its processes. Engines may store {STORE_BYTES >> 20} MiB; the S3 server frees "
        "the space of removed objects by and by.",
    )
    for share in SHARES:
        end = max(1, round(share * len(samples)))
        around = samples[max(0, end - max(1, len(samples) // 20)) : end]
        table.add(
            around[-1].at_s / 60,
            *(_middle(each.resident.get(name) for each in around) for name in names),
            *(_middle(each.open_files.get(name) for each in around) for name in names),
            statistics.median(each.store_mib for each in around),
            _middle(each.p50_ms for each in around),
            _middle(each.p95_ms for each in around),
        )
    return table


def _middle(values: Iterable[float | None]) -> float | str:
    """Return the median of the values that are known: a server that is down has none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else "none"


def main(words: Sequence[str]) -> None:
    """Run, print, write the result files. Ends with status 1 if a request was lost or an answer was
    wrong.
    """
    parser = arguments(__doc__ or "", MODULE)
    parser.add_argument("--minutes", type=float, help="(60)")
    parser.add_argument("--seed", type=int, help="of requests and faults (7)")
    options = parser.parse_args(words)
    minutes = options.minutes or (0.5 if options.quick else 60.0)
    seed = options.seed or 7
    report = Report("soak", command_line(MODULE, options), {"minutes": minutes, "seed": seed})
    log, is_over, samples = Log(), threading.Event(), list[Sample]()
    with tempfile.TemporaryDirectory(dir=options.disk) as folder, _fleet(Path(folder)) as fleet:
        requests = Requests(fleet.plain, seed)
        began_s = time.monotonic()
        pause_s = (3.0, 8.0) if options.quick else (10.0, 40.0)
        threads = [
            threading.Thread(target=_client, args=(fleet, requests, log, is_over), daemon=True)
            for _ in range(CLIENTS)
        ]
        failing = threading.Thread(
            target=_fail_again_and_again, args=(fleet, log, is_over, seed, pause_s), daemon=True
        )
        for thread in (*threads, failing):
            thread.start()
        while time.monotonic() < began_s + 60 * minutes:
            time.sleep(SAMPLE_S)
            samples.append(_sample(fleet, log, began_s))
            assert all(thread.is_alive() for thread in (*threads, failing)), "a thread has failed"
        is_over.set()
        for thread in (*threads, failing):
            thread.join()
    report.add(_summary(log))
    report.add(_over_time(samples))
    path = report.write(options.results)
    write_plots(
        path.with_suffix(".svg"),
        [each.at_s / 60 for each in samples],
        {
            "MiB of memory": {
                name: [each.resident.get(name) for each in samples]
                for name in ("plain", "encode", "prefill", "decode-1", "decode-2", "router")
            },
            "open files": {
                name: [each.open_files.get(name) for each in samples]
                for name in ("plain", "decode-2", "router")
            },
            "MiB in the store": {"store": [each.store_mib for each in samples]},
            "ms of a request": {
                "p50": [each.p50_ms for each in samples],
                "p95": [each.p95_ms for each in samples],
            },
        },
    )
    print(f"\nwritten: {path.name}")
    if log.lost or log.wrong:
        sys.exit(f"{log.lost} requests were lost, {log.wrong} answers were wrong")


if __name__ == "__main__":
    main(sys.argv[1:])
