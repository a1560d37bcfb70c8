# SPDX-License-Identifier: Apache-2.0
"""Write docs/model-table.md from vLLM's registry, so that the page cannot drift.

The tables are of one release, and each other release has a section with its differences. A run
writes the part of the installed release; it takes about two minutes, and no network.

    python -m lab.registry.page [--check]

With `--check` nothing is written: exit status 1 if the page is not what would be written.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "model-table.md"
BASE = "0.32"
"""The release that the tables describe."""

TOP = f"""\
# Table of vLLM's models

*Written by `make model-table` from vLLM's registry; tests fail when they differ.*

The architectures of vLLM {BASE} that generate text, without those of drafts. [models.md](models.md)
has what was run on real engines, and explains the columns.

- **Embeddings**: `tested` on real engines. `expected`: the class takes media as all others do, and
  nothing is known against it. `no: encoder and decoder`: vLLM never loads embeddings for such
  models.
- **Items without pixels**: the media for which the class declares metadata that replaces them. A
  processor may still report none.
- **KV**: what KVShareConnector decides about the layers that vLLM's code makes of the architecture,
  on a GPU, with the prefix cache on. The layers are those of the lab's small model, or of the
  default configuration. Other models of an architecture may have layers of other kinds: the log of
  each engine says what it shares. `in layout`: the connector asks vLLM for
  [this layout](kv.md#layer-sets-and-windows) of its KV cache. `not tried`: vLLM builds the model on
  GPUs only, or there is no configuration of it here. `hybrid`:
  [a hit ends with a state](kv.md#hybrid-models).
- `not known`: the class cannot be imported without what the row names.

A section at the end for each other release has the rows in which it differs.
"""
MEDIA = ("| architectures | embeddings | items without pixels | KV |", "|---|---|---|---|")
TEXT = ("| architectures | KV |", "|---|---|")
_TESTED = re.compile(r"^\| [^|]*: `[^`]+` \| `(\w+)` \|", re.MULTILINE)
_NAME = re.compile(r"`(\w+)`")

Cells = dict[str, tuple[str, ...]]
"""The cells after the first one, by architecture."""


def page(found: Mapping[str, Any], release: str, written: str) -> str:
    """Return the page `written`, updated by `found`, the rows of `release`.

    Raises:
        ValueError: the page lacks the tables, which the base release must write first.
    """
    sections = dict(_sections(written))
    if release == BASE:
        tables = ["## Models with media", "", *MEDIA, *_lines(found, with_media=True), ""]
        tables += ["## Models of text", "", *TEXT, *_lines(found, with_media=False), ""]
        head = "\n".join([TOP, *tables])
    else:
        head = written.partition("## vLLM ")[0]
        if "## Models of text" not in head:
            raise ValueError(f"write the tables with vLLM {BASE} first")
        sections[release] = _section(release, found, cells_of(head))
    return "\n".join([head.rstrip("\n"), *(f"\n{sections[each]}" for each in sorted(sections)), ""])


def _sections(written: str) -> Iterator[tuple[str, str]]:
    for part in written.split("\n## vLLM ")[1:]:
        yield part.partition("\n")[0], f"## vLLM {part}".rstrip("\n")


def _section(release: str, found: Mapping[str, Any], base: Cells) -> str:
    lines = [f"## vLLM {release}", ""]
    if lost := sorted(set(base) - set(found)):
        lines += [f"Without {', '.join(f'`{name}`' for name in lost)}.", ""]
    other = {name: row for name, row in found.items() if cells(row) != base.get(name)}
    for with_media, head in ((True, MEDIA), (False, TEXT)):
        if rows := list(_lines(other, with_media=with_media)):
            lines += [*head, *rows, ""]
    if len(lines) == 2:  # noqa: PLR2004 — the title and an empty line
        lines += ["The same.", ""]
    return "\n".join(lines).rstrip("\n")


def cells(row: Any) -> tuple[str, ...]:
    """Return the cells of `row` after the first one."""
    return (row.embeddings, row.without_pixels, row.kv) if row.takes_media else (row.kv,)


def _lines(found: Mapping[str, Any], *, with_media: bool) -> Iterator[str]:
    """Yield one row for all architectures of a family with equal cells."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(found, key=str.lower):
        row = found[name]
        if row.takes_media == with_media:
            groups.setdefault((row.family, *cells(row)), []).append(name)
    for (_, *rest), names in groups.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(rest)} |"


def cells_of(text: str) -> Cells:
    """Return the cells of all architectures in the tables of `text`."""
    found: Cells = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            names, *rest = (cell.strip() for cell in line.strip("| ").split(" | "))
            found |= dict.fromkeys(_NAME.findall(names), tuple(rest))
    return found


def tested() -> set[str]:
    """Return the architectures that docs/models.md lists as tested."""
    return set(_TESTED.findall((DOCS / "models.md").read_text()))


def changed_classes(found: Mapping[str, Any], release: str, written: str) -> Iterable[str]:
    """Yield the architectures whose class does not declare what the page states.

    Of the column KV it compares only what a class declares: whether the model is a hybrid.
    """
    known = cells_of(written.partition("## vLLM ")[0])
    section = dict(_sections(written)).get(release, "")
    lost, _, changes = section.partition("\n\n|")
    known |= cells_of(f"|{changes}")
    gone = set(_NAME.findall(lost)) if release != BASE else set()
    for name in sorted(set(found) | (set(known) - gone)):
        if name not in found or name not in known or name in gone:
            yield name
            continue
        is_hybrid = "hybrid" in cells(found[name])[-1]
        kept = cells(found[name])[:-1] == known[name][:-1]
        if not kept or ("hybrid" in known[name][-1]) != is_hybrid:
            yield name


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # the defaults of old models are short
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    # Imported here: vLLM reads the environment when it is imported.
    from vllm import __version__ as version

    import lab.model_inspection  # noqa: F401 — or each class starts a process
    from lab.registry.rows import rows

    release = ".".join(version.split(".")[:2])
    written = PAGE.read_text() if PAGE.exists() else ""
    with tempfile.TemporaryDirectory() as folder:
        wanted = page(rows(tested(), Path(folder)), release, written)
    if not options.check:
        PAGE.write_text(wanted)
    elif written != wanted:
        lines = set(wanted.splitlines()) ^ set(written.splitlines())
        print("docs/model-table.md is not up to date: run `make model-table`", file=sys.stderr)
        print("\n".join(sorted(lines)), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
