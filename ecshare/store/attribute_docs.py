# SPDX-License-Identifier: Apache-2.0
"""Reads the docstrings of a class's fields from its source."""

import ast
import inspect
import textwrap

from msgspec import Struct


def attribute_docs(config: type[Struct]) -> dict[str, str]:
    """Return the string below each field of `config` and its bases that has one, in one line.

    Raises:
        OSError: the source is not there.
    """
    found: dict[str, str] = {}
    for owner in reversed(config.__mro__):
        if owner in (Struct, object) or not issubclass(owner, Struct):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match below:
                    case ast.Expr(ast.Constant(str(text))):
                        found[statement.target.id] = " ".join(text.split())
    return found
