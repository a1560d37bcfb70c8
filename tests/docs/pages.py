# SPDX-License-Identifier: Apache-2.0
"""The repository's prose, as the tests read it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
)


def fences(page: Path, language: str) -> list[str]:
    """Return the contents of the page's code blocks in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def first_column(page: Path) -> set[str]:
    """Return every `name` that stands in the first cell of a table row of the page."""
    cells = re.findall(r"^\| (`[^|]*) \|", page.read_text(), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
