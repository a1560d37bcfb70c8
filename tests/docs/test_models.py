# SPDX-License-Identifier: Apache-2.0
"""The table of docs/models.md lists what the tests of engines try."""

import re

from tests.docs.pages import ROOT
from tests.engines.test_families_stages import FAMILIES

PAGE = (ROOT / "docs" / "models.md").read_text()
ROW = re.compile(
    r"^\| [^|]*: `([^`]+)` \| `\w+` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE
)


def test_every_row_says_what_is_tried() -> None:
    rows = {name: (media, without, kv[:2]) for name, media, without, kv in ROW.findall(PAGE)}
    tried = {}
    for name, family in FAMILIES.items():
        without = [modality for modality, told in family.told.items() if told]
        kv = "ye" if family.shares_kv else "no"
        tried[name] = (", ".join(family.told), ", ".join(without) or "no", kv)
    assert rows == tried
