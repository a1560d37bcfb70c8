# SPDX-License-Identifier: Apache-2.0
"""Readers for the repository's prose."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
    ROOT / "deploy" / "README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "contrib").rglob("*.md")),
)


def fences(page: Path, language: str) -> list[str]:
    """Return the contents of the page's code blocks in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command in the page's bash blocks, without comments."""
    for block in fences(page, "bash"):
        pending = ""
        for line in block.replace("\\\n", " ").splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # within quotes: the command goes on in the next line
                continue
            pending = ""
            if words:
                yield words


def first_column(page: Path) -> set[str]:
    """Return every `name` that stands in the first cell of a table row of the page."""
    cells = re.findall(r"^\| (`[^|]*) \|", page.read_text(), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in `text` that parses as it stands."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            end = at + 1
        else:
            yield found
        at = text.find("{", end)
