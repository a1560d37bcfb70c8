# SPDX-License-Identifier: Apache-2.0
"""Draws what was read over time, as lines in an SVG picture that any browser shows."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 900, 220, 60
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")

Lines = Mapping[str, Sequence[float | None]]


def write_plots(path: Path, minutes: Sequence[float], plots: Mapping[str, Lines]) -> None:
    """Write one plot for each entry, one below the other; each line has a value for each of
    `minutes`, or None where there is none.
    """
    parts = [
        f'<g transform="translate(0 {HEIGHT * number})">{_plot(title, minutes, lines)}</g>'
        for number, (title, lines) in enumerate(plots.items())
    ]
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(plots)}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _plot(title: str, minutes: Sequence[float], lines: Lines) -> str:
    values = [value for line in lines.values() for value in line if value is not None]
    top, last = max(values, default=1.0) or 1.0, max(minutes, default=1.0) or 1.0
    right, bottom = WIDTH - 2 * MARGIN, HEIGHT - 40

    def at(minute: float, value: float) -> str:
        x = MARGIN + right * minute / last
        return f"{x:.1f},{bottom - (bottom - 30) * value / top:.1f}"

    drawn = [
        f'<text x="{MARGIN}" y="18" font-weight="bold">{escape(title)}</text>',
        f'<path d="M{at(0, top)} L{at(0, 0)} L{at(last, 0)}" stroke="black" fill="none"/>',
        f'<text x="4" y="34">{top:,.0f}</text><text x="4" y="{bottom}">0</text>',
        f'<text x="{MARGIN + right - 40}" y="{bottom + 16}">{last:.0f} min</text>',
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path, is_down = "", True
        for minute, value in zip(minutes, line, strict=True):
            if value is not None:
                path += f"{'M' if is_down else 'L'}{at(minute, value)} "
            is_down = value is None
        drawn.append(f'<path d="{path}" stroke="{colour}" fill="none"/>')
        x = MARGIN + 160 + 110 * number
        drawn.append(f'<text x="{x}" y="18" fill="{colour}">{escape(name)}</text>')
    return "".join(drawn)
