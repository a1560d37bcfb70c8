# SPDX-License-Identifier: Apache-2.0
"""Docstrings name a function's errors in a `Raises:` section and nowhere else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PACKAGES = ("ecshare/store", "ecshare/plugin")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
# "Raises ValueError for ..." and "ConfigError: it is not." in running text.
INLINE = re.compile(
    r"\bRaises (?!:)|(?<![\w.])"
    r"(?:\w+Error|Object(?:Missing|Corrupt|Unreadable)|Store(?:Unavailable|Denied|Busy)): "
)
SPECIAL = ("__init__", "__call__", "__new__")
INHERITED = re.compile(r"(?:See|As) ")  # the docstring it refers to names them

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(
    body: list[ast.stmt], above: str = "", inside: str = ""
) -> Iterator[tuple[Function, str, bool]]:
    """Yield each function of a module or class, its docstring with that of its class, and whether
    it is public."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, ast.get_docstring(node) or "", node.name)
        elif isinstance(node, Function):
            is_public = not node.name.startswith("_") or node.name in SPECIAL
            docstring = "\n\n".join((ast.get_docstring(node) or "", above))
            yield node, docstring, is_public and not inside.startswith("_")


def raised(function: Function) -> set[str]:
    """Return the classes that the function's own `raise` statements name."""
    found = set()
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            named = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(named, ast.Name) and named.id[0].isupper():
                found.add(named.id)
        pending += ast.iter_child_nodes(node)
    return found - {"AssertionError", "NotImplementedError"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_errors_are_documented_in_a_raises_section(path: Path) -> None:
    for function, docstring, is_public in functions(ast.parse(path.read_text()).body):
        where = f"{path.name}:{function.lineno} {function.name}"
        prose = "\n".join(part.partition("Raises:")[0] for part in docstring.split("\n\n"))
        assert not INLINE.search(prose), where
        if is_public and raised(function) and not INHERITED.match(docstring):
            assert "Raises:" in docstring, where
