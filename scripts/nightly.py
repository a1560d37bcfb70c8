# SPDX-License-Identifier: Apache-2.0
"""Runs every suite that the gate has no time for, one after the other. Run by `make nightly`.

A suite that fails, hangs or runs nothing does not stop the others. At the end one table shows the
result of each, and how to run it alone. The output of each is also kept below .cache/nightly.
Ctrl-C ends the running suite with all its processes; the table is still printed.

    python -m scripts.nightly [--seed N] [--vllm VERSIONS] [SUITE...]
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lab.servers.processes import REAPER
from lab.servers.reaper import descendants

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "nightly"
GRACE_S = 60.0
"""Between Ctrl-C and SIGKILL: pytest reports where it was, and stops what it has started."""
OUTCOMES = ("passed", "failed", "skipped")
# The last line of pytest, also with -q; the matrix has several.
PYTEST_SAYS = re.compile(r"^=* ?((?:\d+ \w+(?:, )?)+) in \d+(?:\.\d+)?s\b")
KINDS = {"passed": "passed", "failed": "failed", "error": "failed", "errors": "failed"}
KINDS |= {"skipped": "skipped", "xfailed": "passed"}
GPU_KIT_SAYS = re.compile(r"^(\d+) ok, (\d+) skipped, (\d+) FAILED$")
GPU_KIT_SKIPS = "gpu kit: all is skipped"


@dataclass(frozen=True)
class Suite:
    """A command that tests something, and its time limit."""

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Result:
    """The result of a suite; `verdict` is "ok", "skipped" or why it counts as failed."""

    suite: Suite
    verdict: str
    counts: Counter[str]
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Return whether the suite passed or was skipped."""
        return self.verdict in ("ok", "skipped")


def suites(seed: str, vllm: str = "") -> list[Suite]:
    """Return the suites beyond `make test`; `seed` is for fuzz tests, `vllm` for the matrix."""
    releases = (f"VLLM={vllm}",) if vllm else ()
    commands = {
        "cases": (("test-cases",), 60),
        "fuzz": (("fuzz", f"SEED={seed}"), 90),
        "models": (("test-models",), 180),
        "faults": (("test-faults",), 180),
        "browser": (("test-browser",), 20),
        "gpu": (("test-gpu",), 60),
        "release": (("release", "REHEARSE=1"), 60),
        "matrix": (("test-matrix", *releases), 600),
    }
    return [
        Suite(name, ("make", "--no-print-directory", *targets), 60.0 * minutes)
        for name, (targets, minutes) in commands.items()
    ]


def run(suite: Suite) -> Result:
    """Run one suite; show its output, and keep it in a file.

    Raises:
        KeyboardInterrupt: Ctrl-C; all its processes have ended.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(REAPER), "0", *suite.command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "PY_COLORS": "0"},  # `counted` parses pytest's last line
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
    )
    log = LOGS / f"{suite.name}.log"
    reader = threading.Thread(target=_show, args=(process, log))
    reader.start()
    is_late = False
    try:
        process.wait(suite.limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        _end(process)
        reader.join()
    counts = counted(log.read_text(errors="replace"))
    why = f"stopped after {suite.limit_s / 60:.3g} min" if is_late else ""
    verdict = why or _verdict(process.returncode, counts)
    return Result(suite, verdict, counts, time.monotonic() - started_s)


def _show(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout is not None
    with log.open("wb") as kept, process.stdout:
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            kept.write(piece)
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs: by SIGINT, and after GRACE_S or a second Ctrl-C by SIGKILL."""
    assert process.stdin is not None
    try:
        # The command leads a session, and so a group, of its own.
        for leader in descendants(process.pid)[:1] if process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGINT)
            process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        process.stdin.close()  # the reaper then ends all that is left
        process.wait()


def counted(text: str) -> Counter[str]:
    """Count the outcomes in the last lines of pytest and of the GPU kit."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if match := PYTEST_SAYS.match(line):
            for number, kind in re.findall(r"(\d+) (\w+)", match[1]):
                if kind in KINDS:
                    found[KINDS[kind]] += int(number)
        elif match := GPU_KIT_SAYS.match(line):
            found += Counter(passed=int(match[1]), skipped=int(match[2]), failed=int(match[3]))
        elif line.startswith(GPU_KIT_SKIPS):
            found["skipped"] += 1
    return found


def _verdict(status: int, counts: Counter[str]) -> str:
    if status != 0:
        return "failed" if counts["failed"] else f"failed with status {status}"
    if counts["failed"]:
        return "failed, and its status does not say so"
    if counts["passed"]:
        return "ok"
    return "skipped" if counts["skipped"] else "ran nothing"


def table(results: Sequence[Result]) -> str:
    """Return the table, one line a suite."""
    rows: list[tuple[str, ...]] = [("suite", *OUTCOMES, "minutes", "verdict", "to run it alone")]
    for each in results:
        numbers = (str(each.counts[name]) for name in OUTCOMES)
        command = shlex.join(word for word in each.suite.command if not word.startswith("--no-"))
        rows.append((each.suite.name, *numbers, f"{each.seconds / 60:.1f}", each.verdict, command))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < at < 5 else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def run_all(chosen: Sequence[Suite]) -> int:
    """Run suites and print the table; 0 if all is good, 130 after Ctrl-C, otherwise 1."""
    results: list[Result] = []
    status = 0
    try:
        for suite in chosen:
            print(f"\n== {suite.name}: {shlex.join(suite.command)}", flush=True)
            results.append(run(suite))
    except KeyboardInterrupt:
        status = 130
        rest = chosen[len(results) :]
        words = ("interrupted", *["not run"] * len(rest))
        results += [Result(*each, Counter()) for each in zip(rest, words, strict=False)]
    print(f"\n{table(results)}", flush=True)
    return status or int(not all(each.is_good for each in results))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `run_all`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    today = f"{datetime.now(UTC):%Y%m%d}"
    parser.add_argument("--seed", default=today, help="of the fuzz tests; default: today's")
    parser.add_argument("--vllm", default="", help="releases for the matrix; default: all we serve")
    names = [suite.name for suite in suites("")]
    parser.add_argument("suite", nargs="*", metavar="SUITE", help=f"of {', '.join(names)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.suite) - set(names):
        parser.error(f"there is no suite {sorted(unknown)[0]}; there are {', '.join(names)}")
    # A shell makes background programs ignore Ctrl-C. SIGTERM ends this program in the same way.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    wanted = set(options.suite or names)
    return run_all([each for each in suites(options.seed, options.vllm) if each.name in wanted])


if __name__ == "__main__":
    sys.exit(main())
