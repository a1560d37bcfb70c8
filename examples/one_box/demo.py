# SPDX-License-Identifier: Apache-2.0
"""Run the split and compare it with one plain engine. Run by `make demo`.

    python -m examples.one_box.demo [--store folder|s3] [--model NAME_OR_FOLDER]

Starts encode, prefill and decode engines and the router with `engine.sh`, and one plain engine
beside them. Asks all the same questions, restarts the three on the same store, and asks again,
and then something new about an earlier picture. Until then the router is set to ask prefill each
time. Last, a router with its defaults is asked what it has been asked already.

Ends with status 1 if one token differs from the plain engine's, or a picture was encoded after
the restart, or the prefill or the decode engine computed more than one prompt token of a question
that was asked before (the last one, which is always computed), or the picture of the new question
was not loaded from the store, or the last router asked any other engine than decode.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import model_cache
from lab.servers import openai_client as client
from lab.servers.openai_client import Answer
from lab.servers.processes import POLL_S, Server, ServerFailed
from lab.servers.s3 import SeaweedFS

HERE = Path(__file__).resolve().parent
WORK = HERE.parents[1] / ".cache" / "demo"
LOGS = WORK / "logs"
STORE = WORK / "store"
HOST_CACHE = WORK / "host-cache"
ENGINES = ("encode", "prefill", "decode")
SIGN_OF_LIFE_S = 10.0

QUESTIONS = {
    "one picture": client.question("Describe this picture.", [client.picture(1)]),
    "the same again": client.question("How many people are there?", [client.picture(1)]),
    "two pictures": client.question("Compare them.", [client.picture(1), client.picture(2)]),
    "text only": client.question("Tell me a story about the sea, the wind and the stars. " * 20),
}
NEW_QUESTIONS = {
    "a new question": client.question("What comes next?", [client.picture(2)]),
}
ENCODED = ("ecshare_items_total", "encoded")
LOADED = ("ecshare_items_total", "loaded")
COMPUTED = ("vllm:prompt_tokens_by_source_total", "local_compute")
RECEIVED = ("vllm:prompt_tokens_by_source_total", "external_kv_transfer")


class Stage(Server):
    """One stage, started by engine.sh as a user would."""

    grace_s = 15.0
    ready_within_s = 600.0  # a real model takes its time

    def __init__(self, name: str, settings: dict[str, str], *options: str) -> None:
        super().__init__(name, LOGS)
        self._settings = settings
        self._options = options
        settings[f"{name.upper()}_PORT"] = str(self.port.number)

    def command(self) -> list[str]:
        """Return the command of the script."""
        return ["bash", str(HERE / "engine.sh"), self.name, *self._options]

    def environment(self) -> Mapping[str, str]:
        """Return the script's settings; `python` is this interpreter."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {"PATH": path, "VLLM_NO_USAGE_STATS": "1", **self._settings}


@dataclass(frozen=True)
class Result:
    """One question in one round, with the growth of each engine's counters meanwhile."""

    question: str
    round: str
    """"cold", "warm" (asked before the restart as well), "new" (after it only) or "known" (asked
    the same router before)."""
    answer: Answer
    streamed: Answer
    moved: dict[str, dict[tuple[str, str], float]]
    num_loaded: int
    """The number of pictures that P loaded for both answers. If D answered first, P reports a load
    only with its next step, which is for the second answer."""

    def count(self, what: tuple[str, str], *engines: str) -> int:
        """Return the growth of `what` on `engines` during the answer that was not streamed."""
        return int(sum(self.moved[engine].get(what, 0) for engine in engines))

    def faults(self, reference: Answer) -> Iterator[str]:
        """Yield each fault of the result, in words."""
        for how, answer in (("", self.answer), ("streamed, ", self.streamed)):
            if answer.token_ids != reference.token_ids:
                yield f"{how}tokens {answer.token_ids}, plain engine {reference.token_ids}"
        path = ("decode",) if self.round == "known" else ("prefill", "decode")
        if self.answer.path[-2:] != path:
            yield f"it went through {', '.join(self.answer.path)}"
        if self.round != "cold" and (encoded := self.count(ENCODED, *ENGINES)):
            yield f"{encoded} pictures were encoded again"
        if self.round == "new" and not self.num_loaded:
            yield "its picture was not loaded from the store"
        for engine in ("prefill", "decode") if self.round == "warm" else ():
            if (computed := self.count(COMPUTED, engine)) > 1:
                yield f"{engine} computed {computed} prompt tokens again, not only the last"


def bring_up(servers: Iterable[Server]) -> None:
    """Start all servers in parallel, wait for all, and show that time passes."""
    waiting = list(servers)
    for server in waiting:
        server.start()
    print(f"Starting {', '.join(server.name for server in waiting)} ...", flush=True)
    began_s = told_s = time.monotonic()
    while waiting:
        time.sleep(POLL_S)
        now_s = time.monotonic()
        for server in [each for each in waiting if each.is_ready()]:
            waiting.remove(server)
            print(f"  {server.name} is ready after {now_s - began_s:.0f} s", flush=True)
            told_s = now_s
        if waiting and now_s - told_s > SIGN_OF_LIFE_S:
            print(f"  {now_s - began_s:.0f} s", flush=True)
            told_s = now_s


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Run `servers` inside the block, and stop them after it."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        bring_up(servers)
        yield


def ask_all(
    cluster: dict[str, Stage], questions: dict[str, dict[str, Any]], name_of_round: str
) -> list[Result]:
    """Ask each question twice, not streamed and streamed, and watch the engines' counters."""
    results = []
    for name, body in questions.items():
        before = {engine: client.counters(cluster[engine].base_url) for engine in ENGINES}
        answer = client.ask(cluster["router"].base_url, body)
        moved = {}
        for engine in ENGINES:
            after = client.counters(cluster[engine].base_url)
            moved[engine] = {key: n - before[engine].get(key, 0) for key, n in after.items()}
        streamed = client.ask(cluster["router"].base_url, body, stream=True)
        loaded = client.counters(cluster["prefill"].base_url).get(LOADED, 0)
        num_loaded = int(loaded - before["prefill"].get(LOADED, 0))
        results.append(Result(name, name_of_round, answer, streamed, moved, num_loaded))
        print(f"  {name_of_round}: {name}", flush=True)
    return results


COLUMNS = (
    *("request", "round", "tokens", "streamed", "encode", "prefill", "decode"),
    *("E encoded", "P loaded", "P computed", "D received", "D computed"),
)


def show(results: list[Result], reference: dict[str, Answer]) -> None:
    """Print the table; the cold and the warm line of a question are adjacent."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for question in reference:
        rows += [row(each, reference[question]) for each in results if each.question == question]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for line in rows:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
    print(
        "\nCold: nothing is stored yet. Warm: after a restart, with the same store. Known: the"
        "\nrouter was asked before and asks D alone. Until then it was told to ask P each time."
        "\nE, P and D are the encode, prefill and decode engines. Encoded and loaded are pictures;"
        "\ncomputed and received are prompt tokens. Times are the router's, for the answer not"
        "\nstreamed. Tokens are compared with the plain engine's."
    )


def row(result: Result, reference: Answer) -> tuple[str, ...]:
    """Return one line of the table."""
    times = (result.answer.stage_ms.get(stage) for stage in ENGINES)
    return (
        *(result.question, result.round),
        *(
            "equal" if answer.token_ids == reference.token_ids else "DIFFER"
            for answer in (result.answer, result.streamed)
        ),
        *("-" if ms is None else f"{ms:.0f} ms" for ms in times),
        str(result.count(ENCODED, "encode")),
        str(result.num_loaded),
        str(result.count(COMPUTED, "prefill")),
        str(result.count(RECEIVED, "decode")),
        str(result.count(COMPUTED, "decode")),
    )


def show_store(options: dict[str, Any]) -> None:
    """Print what is in the store, as a user would ask."""
    print("\nIn the store (ecshare du --by namespace):", flush=True)
    command = [sys.executable, "-m", "ecshare", "du", json.dumps(options), "--by", "namespace"]
    subprocess.run(command, check=False)


def run(model: str, options: dict[str, Any]) -> int:
    """Run the whole demo over one store; return the exit status."""
    # A host cache of our own, emptied with each restart: warm answers come from the store.
    settings = {
        "DEVICE": "cpu",  # where equal prompts give equal tokens, whatever DEVICE is outside
        "MODEL": model,
        "OPTIONS": json.dumps({**options, "host_cache_dir": str(HOST_CACHE)}),
    }
    cluster = {name: Stage(name, settings) for name in ENGINES}
    # The table is to show that P loads all but the last token itself, too.
    cluster["router"] = Stage("router", settings, "--prefill=always")
    plain = Stage("plain", settings)
    with running(plain, *cluster.values()):
        print("Asking the plain engine ...", flush=True)
        reference = {
            name: client.ask(plain.base_url, body)
            for name, body in {**QUESTIONS, **NEW_QUESTIONS}.items()
        }
        plain.stop()
        print("Asking through the router, with an empty store ...", flush=True)
        results = ask_all(cluster, QUESTIONS, "cold")
    shutil.rmtree(HOST_CACHE)
    print("Stopped all engines. The store stays as it is.", flush=True)
    with running(*cluster.values()):
        print("Asking again ...", flush=True)
        results += ask_all(cluster, QUESTIONS, "warm")
        results += ask_all(cluster, NEW_QUESTIONS, "new")
        cluster["router"].stop()
        with running(router := Stage("router", settings)):
            for body in QUESTIONS.values():
                client.ask(router.base_url, body)
            results += ask_all({**cluster, "router": router}, QUESTIONS, "known")
    show(results, reference)
    show_store(options)
    faults = [
        f"{result.question}, {result.round}: {fault}"
        for result in results
        for fault in result.faults(reference[result.question])
    ]
    print("", *(f"WRONG: {fault}" for fault in faults), sep="\n")
    print(f"Logs are in {LOGS}" if faults else "All as it should be.")
    return 1 if faults else 0


def main() -> int:
    """Read the command line and run; every failure is one message that names the log."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.one_box.demo", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--store", choices=("folder", "s3"), default="folder")
    parser.add_argument("--model", help="a folder or a name (default: a small one, made now)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shutil.rmtree(WORK, ignore_errors=True)
    HOST_CACHE.mkdir(parents=True, mode=0o700)
    model = arguments.model or str(model_cache.model(WORK.parent / "models"))
    try:
        with ExitStack() as stack:
            if arguments.store == "folder":
                options: dict[str, Any] = {"url": str(STORE)}
            else:
                server = stack.enter_context(SeaweedFS(LOGS))
                print(f"SeaweedFS serves S3 at {server.base_url}", flush=True)
                options = {"url": server.url, "storage_options": server.storage_options}
            return run(model, options)
    except (ServerFailed, client.RequestFailed) as failure:
        print(f"\n{failure}\nAll logs are in {LOGS}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
