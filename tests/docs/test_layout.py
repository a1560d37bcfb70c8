# SPDX-License-Identifier: Apache-2.0
"""docs/layout.md names every module and every counter, and nothing that is not there."""

import re

from tests.docs.pages import ROOT, first_column

PAGE = ROOT / "docs" / "layout.md"
COUNTERS = {
    "items": "ecshare_items_total",
    "blocks": "kvshare_blocks_total",
    "tokens": "kvshare_tokens_total",
}


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
    return (ROOT / name).exists() or (ROOT / "ecshare" / name).exists()


def test_every_counter_of_the_code_is_told() -> None:
    told = counters_of_the_page()
    for path in (*(ROOT / "ecshare").glob("*.py"), *(ROOT / "kvshare").glob("*.py")):
        for family, event in re.findall(r'"(items|blocks|tokens)/(\w+)"', path.read_text()):
            assert event in told[COUNTERS[family]], path


def test_no_counter_is_told_that_the_code_does_not_know() -> None:
    code = (ROOT / "ecshare" / "plugin" / "metrics.py").read_text()
    for counter, events in counters_of_the_page().items():
        promised = code.split(f"{counter} ")[1].split("_total")[0]
        assert events <= set(re.findall(r"\w+", promised))


def counters_of_the_page() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `(\w+_total)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {counter: set(re.findall(r"`(\w+)`", cell)) for counter, cell in rows}
