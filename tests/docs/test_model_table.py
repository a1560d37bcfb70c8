# SPDX-License-Identifier: Apache-2.0
"""docs/model-table.md says what the registry of the installed vLLM gives."""

import subprocess
import sys

import pytest

from lab.registry import page as program
from lab.registry.rows import Row, rows_of_classes
from tests.docs.pages import ROOT
from tests.releases import VLLM

# Its classes do not import beside the transformers of later releases.
pytestmark = pytest.mark.skipif(VLLM < (0, 31), reason="the table begins with vLLM 0.31")

RELEASE = ".".join(map(str, VLLM))
GQA = Row("gqa", False, "", "", "yes")
SEES = Row("sees", True, "expected", "image", "not tried, hybrid")


def test_the_page_has_what_the_classes_of_this_release_declare() -> None:
    found = rows_of_classes(program.tested())
    written = program.PAGE.read_text()
    assert list(program.changed_classes(found, RELEASE, written)) == [], "run `make model-table`"


@pytest.mark.nightly
def test_the_page_has_what_kvshare_makes_of_the_layers() -> None:
    # In a process of its own: it sets up vLLM for all that follows.
    command = [sys.executable, "-m", "lab.registry.page", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


def test_architectures_of_one_family_share_a_row_if_the_same_is_known() -> None:
    found = {"B": GQA, "A": GQA, "C": GQA._replace(kv="no: windows"), "V": SEES}
    lines = program.page(found, program.BASE, "").splitlines()
    assert [line for line in lines if line.startswith("| `")] == [
        "| `V` | expected | image | not tried, hybrid |",
        "| `A`, `B` | yes |",
        "| `C` | no: windows |",
    ]


def test_another_release_has_a_section_with_what_it_lacks_and_changes() -> None:
    written = program.page({"A": GQA, "B": GQA, "V": SEES}, program.BASE, "")
    newer = {"A": GQA, "N": GQA, "V": SEES._replace(without_pixels="no")}
    both = program.page(newer, "0.99", written)
    assert both.startswith(written.rstrip("\n"))
    section = both.partition("## vLLM 0.99")[2]
    assert "Without `B`." in section
    assert program.cells_of(section) == {
        "V": ("expected", "no", "not tried, hybrid"),
        "N": ("yes",),
    }
    assert program.page(newer, "0.99", both) == both
    # A new base leaves what other releases wrote.
    assert program.page({"A": GQA}, program.BASE, both).endswith(section)


@pytest.mark.parametrize(
    ("found", "changed"),
    [
        ({"A": GQA, "V": SEES}, []),
        ({"A": GQA._replace(kv="not tried"), "V": SEES}, []),
        ({"A": GQA}, ["V"]),
        ({"A": GQA, "V": SEES, "N": GQA}, ["N"]),
        ({"A": GQA, "V": SEES._replace(embeddings="tested")}, ["V"]),
        ({"A": GQA._replace(kv="not tried, hybrid"), "V": SEES}, ["A"]),
    ],
    ids=["as it is", "layers are not built", "lost", "new", "media", "hybrid"],
)
def test_changed_classes_are_named(found: dict[str, Row], changed: list[str]) -> None:
    written = program.page({"A": GQA, "V": SEES}, program.BASE, "")
    assert list(program.changed_classes(found, program.BASE, written)) == changed
    assert list(program.changed_classes(found, "0.99", program.page(found, "0.99", written))) == []
