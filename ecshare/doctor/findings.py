# SPDX-License-Identifier: Apache-2.0
"""One line of the doctor's report. Whatever a server or a bucket says is shown escaped and cut."""

import re
from enum import Enum
from typing import NamedTuple

_LONGEST_TEXT = 400
_HTTP_STATUS = re.compile(r"status code: (\d{3}(?: [A-Za-z-]+)*)")


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


class Finding(NamedTuple):
    """One line of the report, and what belongs below it."""

    topic: str
    level: Level
    text: str
    details: tuple[str, ...] = ()


def printable(text: str) -> str:
    """Return `text` on one line, cut, with escapes for all that a terminal could act on."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: _LONGEST_TEXT + 1])
    return shown if len(text) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}..."


def words(exc: BaseException) -> str:
    """Return what `exc` says to a person: the server's status instead of a client's account."""
    text = str(exc)
    status = _HTTP_STATUS.search(text)
    return f"the server answered {status[1]}" if status else printable(text)
