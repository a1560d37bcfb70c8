# SPDX-License-Identifier: Apache-2.0
"""Each benchmark runs to its end and has a number in every row. The values are not checked."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nightly import nightly

REPOSITORY = Path(__file__).parents[2]
# Marks rows that explain why they have no number.
EXCUSES = ("cannot use S3", "cannot serve hybrids")
NEEDS_NAMESPACES = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-rmn", "true"], capture_output=True, check=False).returncode
    != 0,
    reason="the system gives no network and mount namespace",
)


@pytest.mark.s3
@pytest.mark.parametrize(
    "program",
    [
        "router",
        *nightly("codecs", "store", "in_flight", "gpu", "load_or_compute", "evictions", "cleaning"),
        *nightly("cleaning_beside"),
        pytest.param("router_hostile", marks=[NEEDS_NAMESPACES, pytest.mark.nightly]),
        # They start no engine, but loading and configuring vLLM takes as long.
        pytest.param("kv_cache", marks=[pytest.mark.engine, pytest.mark.models]),
        pytest.param("encoder_cache", marks=[pytest.mark.engine, pytest.mark.models]),
        pytest.param("encoder_engines", marks=[pytest.mark.engine, pytest.mark.models]),
        pytest.param("encoder_first_token", marks=[pytest.mark.engine, pytest.mark.models]),
        pytest.param("kv_engines", marks=[pytest.mark.engine, pytest.mark.models]),
        pytest.param("kv_load_policies", marks=[pytest.mark.engine, pytest.mark.models]),
        pytest.param("warm", marks=[pytest.mark.engine, pytest.mark.models]),
        pytest.param("epd", marks=[pytest.mark.engine, pytest.mark.models]),
        pytest.param("soak", marks=[pytest.mark.engine, pytest.mark.models]),
        pytest.param("balance", marks=[pytest.mark.engine, pytest.mark.models]),
    ],
)
def test_every_row_of_a_benchmark_has_numbers(program: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{program}", "--quick", "--results", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (shown,) = tmp_path.glob(f"*-{program.replace('_', '-')}.md")
    (kept,) = tmp_path.glob(f"*-{program.replace('_', '-')}.json")
    report = json.loads(kept.read_text())
    assert report["command"] == f"python -m benchmarks.{program} --quick"
    assert report["tables"]
    for table in report["tables"]:
        assert table["rows"]
        assert table["title"] in shown.read_text()
        for row in table["rows"]:
            check(dict(zip(table["columns"], row, strict=True)))


def check(row: dict[str, Any]) -> None:
    # Times and rates are floats; sizes and counts are integers or part of the row's name. A table
    # of counts alone has them in the column `number`.
    figures = {name: cell for name, cell in row.items() if isinstance(cell, float) and name != "MB"}
    if not figures:
        is_excused = any(excuse in str(cell) for cell in row.values() for excuse in EXCUSES)
        assert is_excused or isinstance(row.get("number"), int), row
    for name, figure in figures.items():
        assert math.isfinite(figure), row
        # A difference of two short measurements can be negative beside other tests.
        assert figure > 0 or name.startswith("added") or name == "store MiB", (name, row)
