# SPDX-License-Identifier: Apache-2.0
"""Defines and reads the options that choose namespaces."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from ecshare.commands.output import print_table
from ecshare.doctor.findings import printable, readable_size
from ecshare.store.errors import ConfigError
from ecshare.store.keys import Kind, is_namespace
from ecshare.upkeep.removal import Found
from ecshare.upkeep.selection import Namespace, Selection

_SHOWN = 50
_HEADER = ("kind", "namespace", "model", "tenant", "objects", "size")


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the options that are the parameters of `read_selection`."""
    options = (
        click.option(
            "--namespace",
            "digests",
            metavar="HEX",
            multiple=True,
            help="A namespace: 32 hex digits. May be repeated, as may the next three.",
        ),
        click.option(
            "--model", "models", metavar="NAME", multiple=True, help="All namespaces of a model."
        ),
        click.option(
            "--tenant", "tenants", metavar="NAME", multiple=True, help="Those of a tenant."
        ),
        click.option(
            "--kind",
            "kinds",
            type=click.Choice([*map(str, Kind)]),
            multiple=True,
            help="Only embeddings (ec), or only KV (kv).",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_selection(
    digests: Sequence[str], models: Sequence[str], tenants: Sequence[str], kinds: Sequence[str]
) -> Selection:
    """Return the selection of these options.

    Raises:
        ConfigError: a digest is not that of a namespace, or a name is empty; names the option.
    """
    for digest in digests:
        if not is_namespace(digest):
            raise ConfigError(
                f"--namespace: {ascii(digest)[:80]} is no namespace of 32 hex digits; patterns are "
                "not taken"
            )
    for option, names in (("--model", models), ("--tenant", tenants)):
        if "" in names:
            raise ConfigError(f"{option}: the name is empty")
    chosen = tuple(Kind(kind) for kind in dict.fromkeys(kinds)) or tuple(Kind)
    return Selection(chosen, frozenset(digests), frozenset(models), frozenset(tenants))


def print_found(found: Sequence[Found]) -> None:
    """Print a line for each namespace."""
    rows = [
        (
            each.namespace.kind,
            each.namespace.digest,
            each.namespace.model,
            each.namespace.tenant,
            f"{each.num_objects:,}",
            readable_size(each.num_bytes),
        )
        for each in found
    ]
    print_table(_HEADER, rows, 4, most=_SHOWN)


def not_found(selection: Selection, known: Sequence[Namespace]) -> str:
    """Return that nothing is chosen, and which names exist; "" if the selection has no names."""
    texts = []
    for what, wanted, there in (
        ("namespace", selection.digests, []),
        ("model", selection.models, [each.model for each in known]),
        ("tenant", selection.tenants, [each.tenant for each in known]),
    ):
        if wanted:
            names = sorted({*there} - {""})[:_SHOWN]
            listed = f" (there: {', '.join(map(printable, names))})" if names else ""
            texts.append(f"{what} {', '.join(map(printable, sorted(wanted)))}{listed}")
    return f"nothing is stored of {' and '.join(texts)}" if texts else ""
