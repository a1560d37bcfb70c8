# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md lists exactly the packages of the code, and stays short."""

from tests.docs.pages import ROOT, first_column

PAGE = ROOT / "docs" / "architecture.md"
ROOTS = ("ecshare", "kvshare", "lab")


def test_page_lists_exactly_the_packages() -> None:
    listed = {name for name in first_column(PAGE) if name.partition("/")[0] in ROOTS}
    there = {
        str(path.parent.relative_to(ROOT))
        for root in ROOTS
        for path in (ROOT / root).rglob("__init__.py")
    }
    assert listed == there


def test_page_has_at_most_200_lines() -> None:
    assert len(PAGE.read_text().splitlines()) <= 200
