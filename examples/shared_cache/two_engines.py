# SPDX-License-Identifier: Apache-2.0
"""Two plain vLLM engines, one after the other: the second reuses what the first computed.

python -m examples.shared_cache.two_engines [--url URL] [--model MODEL]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab import model_cache

ROOT = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).with_name("engine.py")
QUESTION = "What is in this picture? Look at it closely, and describe every shape in it."
NEW_QUESTION = "Which colour is the sky in this picture?"

COUNTS = ("pictures_encoded", "pictures_loaded", "tokens_prefilled", "tokens_reused")

Report = dict[str, Any]


class Engine:
    """An engine in a process of its own, with a host cache of its own, as if on another host."""

    def __init__(self, name: str, scratch: Path, model: str, url: str) -> None:
        self.name = name
        self._log = scratch / "engines.log"
        options = {"url": url, "host_cache_dir": str(scratch / f"host-cache-{name}")}
        self._command = [sys.executable, str(ENGINE), model, json.dumps(options)]

    def ask(self, *questions: str) -> list[Report]:
        """Start the engine, ask it, and end it; print and return its reports."""
        environment = os.environ | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
        with self._log.open("a") as log:
            ended = subprocess.run(
                [*self._command, *questions],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                check=False,
            )
        if ended.returncode != 0:
            sys.exit(f"the {self.name} engine failed; its log is {self._log}")
        reports = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        for report in reports:
            print(row(self.name, report["question"][:30], *(report[name] for name in COUNTS)))
        return reports


def row(*cells: str | int) -> str:
    """Return a line of the table."""
    engine, question, *counts = cells
    return f"{engine:8}{question:32}{''.join(f'{count:>10}' for count in counts)}".rstrip()


def main() -> int:
    """Run both engines; 1 if the second one computed what it could have reused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="folder or bucket; default: a temporary folder")
    parser.add_argument("--model", help="default: a tiny one with random weights")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="ecshare-"))
    url = options.url or str(scratch / "store")
    model = options.model or str(model_cache.model(ROOT / ".cache" / "models"))
    print(f"starting two engines, one after the other; their log is {scratch}/engines.log")
    print(row("", "", "pictures", "", "tokens", ""))
    print(row("engine", "question", "encoded", "loaded", "computed", "reused"), flush=True)
    (first,) = Engine("first", scratch, model, url).ask(QUESTION)
    again, new = Engine("second", scratch, model, url).ask(QUESTION, NEW_QUESTION)
    print("same answer:", "yes" if again["answer"] == first["answer"] else "no")
    if again["pictures_encoded"] or again["tokens_prefilled"] > 1 or new["pictures_encoded"]:
        print(f"it computed what was stored; the log is {scratch}/engines.log", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
