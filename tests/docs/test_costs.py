# SPDX-License-Identifier: Apache-2.0
"""The table of docs/costs.md equals the results of its program."""

import re
from typing import Any

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "costs.md").read_text()
ROW = re.compile(r"^\| `(?P<call>\w+\(.*?\))`: [^|]*\|(?P<figures>[^\n]*)\|$", re.MULTILINE)


def test_every_row_equals_the_programs_result() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102 - it is our own page
    rows = list(ROW.finditer(PAGE))
    assert len(rows) == 4
    for row in rows:
        said = tuple(float(figure) for figure in row["figures"].split("|"))
        assert said == eval(row["call"], names), row["call"]  # noqa: S307
