# SPDX-License-Identifier: Apache-2.0
"""Prints tables, JSON, ages, times and progress. Text from stores and servers may be hostile.

Results go to stdout, progress and errors to stderr. Functions import rich when they need it: the
doctor runs without it.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from ecshare.doctor.findings import printable

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

_QUIET_S = 2.0
"""The progress of shorter work is not shown."""
_UNBOUNDED = 100_000
"""Columns of an output that is no terminal, so that no text is cut."""


def print_json(fields: Mapping[str, Any]) -> None:
    """Print one line of JSON. All but ASCII is escaped: names may come from a store."""
    print(json.dumps(fields), flush=True)


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int, most: int | None = None
) -> None:
    """Print a table of the first `most` rows. All cells are escaped, so they may come from a store.

    On a terminal that is too narrow texts are cut. `num_texts`: the first columns are texts, all
    others are numbers, which are aligned to the right and never cut.
    """
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    table = make_table(header, rows[:most], num_texts, is_terminal=is_terminal)
    console = Console(width=None if is_terminal else _UNBOUNDED, highlight=False)
    if is_terminal:
        console.print(table)
    else:
        with console.capture() as printed:
            console.print(table)
        print("\n".join(line.rstrip() for line in printed.get().splitlines()))
    if most is not None and len(rows) > most:
        print(f"and {len(rows) - most:,} more (--json has all)")


def make_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int, *, is_terminal: bool
) -> "Table":
    """Return the table of `print_table`, for rich to show."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD if is_terminal else None, pad_edge=False, header_style="bold")
    for n, title in enumerate(header):
        overflow: Literal["ellipsis", "ignore"] = "ellipsis" if n < num_texts else "ignore"
        side: Literal["left", "right"] = "left" if n < num_texts else "right"
        table.add_column(Text(title, justify=side), no_wrap=True, overflow=overflow)
    for row in rows:
        cells = [Text(printable(cell)) for cell in row]
        for cell in cells[num_texts:]:
            cell.justify = "right"
        table.add_row(*cells)
    return table


def readable_age(minutes: float) -> str:
    """Return a time in minutes, hours or days: "90 min", "36 h", "12 d"."""
    if minutes < 2 * 60:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.0f} h" if hours < 2 * 24 else f"{hours / 24:.0f} d"


def readable_time(seconds: float) -> str:
    """Return a time, given in seconds since 1970, as "2026-11-26 22:10 UTC"."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "an invalid time"


class Counting:
    """Shows progress on stderr, if that is a terminal and the work takes two seconds."""

    def __init__(self, words: str, total: float | None = None, *, is_shown: bool = True) -> None:
        """`words`: what is counted, such as "objects listed". `total`: the last count, if known."""
        self._words = words
        self._total = total
        self._done = 0.0
        self._begun_s = time.monotonic()
        self._is_shown = is_shown and sys.stderr.isatty()
        self._bar: Progress | None = None

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num: float = 1) -> None:
        """Count `num` more."""
        self._done += num
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif self._is_shown and time.monotonic() - self._begun_s >= _QUIET_S:
            self._start()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.completed:,.0f} {task.description}", markup=False),
            *([BarColumn()] if self._total else []),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.add_task(self._words, total=self._total, completed=int(self._done))
        self._bar.start()
