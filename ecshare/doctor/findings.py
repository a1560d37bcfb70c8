# SPDX-License-Identifier: Apache-2.0
"""One line of the doctor's report. Text from servers and buckets is escaped and truncated."""

from enum import Enum
from typing import NamedTuple

_MAX_TEXT_CHARS = 400


class Level(Enum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


class Finding(NamedTuple):
    """One line of the report, with its details."""

    topic: str
    level: Level
    text: str
    details: tuple[str, ...] = ()


def printable(text: str) -> str:
    """Return `text` on one line, truncated, with all unprintable characters escaped."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: _MAX_TEXT_CHARS + 1])
    return shown if len(text) <= _MAX_TEXT_CHARS else f"{shown[:_MAX_TEXT_CHARS]}..."


def readable_size(num_bytes: float) -> str:
    """Return a number of bytes in the largest unit of which there is one: "1.5 GB"."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:,.0f} B"
