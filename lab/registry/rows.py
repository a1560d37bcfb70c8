# SPDX-License-Identifier: Apache-2.0
"""Makes the rows of docs/model-table.md from the installed vLLM."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from lab.registry.classes import Declared, architectures, declared

UNTRIED = "not tried"


class Row(NamedTuple):
    """What is known of one architecture."""

    family: str
    takes_media: bool
    embeddings: str
    without_pixels: str
    kv: str


def rows_of_classes(tested: Collection[str]) -> dict[str, Row]:
    """Return a row for each architecture; `kv` has only what its class declares.

    `tested`: the architectures that tests run on engines.
    """
    return {name: _row(declared(name), name in tested) for name in architectures()}


def rows(tested: Collection[str], folder: Path) -> dict[str, Row]:
    """Return a row for each architecture. `folder`: for files, which the caller removes.

    Raises:
        RuntimeError: none of the models could be built.
    """
    from lab.registry.shapes import Shapes

    shapes, classes = Shapes(folder), architectures()
    known = {name: shapes.kv(name) for name in classes}
    if not any(known.values()):
        raise RuntimeError("no model of vLLM's registry could be built")
    # Some architectures are names of one class.
    of_class = {classes[name]: kv for name, kv in known.items() if kv}
    found = rows_of_classes(tested)
    for name, row in found.items():
        kv = known[name] or of_class.get(classes[name])
        # A hybrid's default configuration may have recurrent layers only, as no real one has.
        if kv and ("hybrid" in kv or "hybrid" not in row.kv):
            found[name] = row._replace(kv=kv)
    return found


def _row(of: Declared, is_tested: bool) -> Row:
    kv = f"{UNTRIED}, hybrid" if of.is_hybrid else UNTRIED
    if of.is_attention_free:
        kv = "no: the model has recurrent layers only"
    embeddings = without = ""
    if of.takes_media:
        embeddings = "tested" if is_tested else "expected"
        without = ", ".join(of.media_without_pixels) or "no"
        if of.has_cross_attention:
            embeddings, without = "no: encoder and decoder", "no"
        if of.missing:
            embeddings = without = "not known"
    if of.missing:
        needed = "a build for GPUs" if of.missing == "vllm" else f"`{of.missing}`"
        kv = f"not known: needs {needed}"
    return Row(of.family, of.takes_media, embeddings, without, kv)
