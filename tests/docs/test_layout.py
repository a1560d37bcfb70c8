# SPDX-License-Identifier: Apache-2.0
"""docs/layout.md names every module, and nothing that is not there."""

import re

from tests.docs.pages import ROOT, first_column

PAGE = ROOT / "docs" / "layout.md"


def test_every_module_is_listed_and_no_other() -> None:
    listed = {name for name in first_column(PAGE) if name.endswith(".py")}
    there = {
        str(path.relative_to(ROOT))
        for package in ("ecshare", "kvshare")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == there


def test_files_named_in_the_drawings_exist() -> None:
    """`store/cloud.py` in a drawing is short for `ecshare/store/cloud.py`."""
    drawn = set(re.findall(r"\w+/[\w/]*\w+\.py", PAGE.read_text()))
    assert {name for name in drawn if not exists(name)} == set()


def exists(name: str) -> bool:
    return any((ROOT / folder / name).exists() for folder in (".", "ecshare", "ecshare/store"))
