# SPDX-License-Identifier: Apache-2.0
"""Arguments and options that several commands take."""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from ecshare.doctor.findings import printable
from ecshare.doctor.targets import Remark, Target, read_argument
from ecshare.store.errors import ConfigError


class Stores(NamedTuple):
    """What the argument STORE of a command names."""

    targets: Sequence[Target]
    """At least one."""
    remarks: Sequence[Remark]

    def distinct(self) -> list[Target]:
        """Return the first target of each store.

        Raises:
            ConfigError: a folder does not exist; to open it would create it.
        """
        found = {target.config.store_id(): target for target in reversed(self.targets)}
        for config, _ in found.values():
            if config.folder.startswith("/") and not os.path.isdir(config.folder):
                raise ConfigError(f"there is no folder {printable(config.folder)}")
        return [*reversed(found.values())]


# Since click 8.3 ParamType is generic; before it is not.
class StoreType(click.ParamType):  # type: ignore[type-arg]
    """Reads a STORE as `Stores`."""

    name = "store"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the stores."""
        if isinstance(value, Stores):
            return value
        try:
            return Stores(*read_argument(value))
        except ConfigError as exc:
            self.fail(str(exc), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return that files or folders are to be completed."""
        kind = "file" if incomplete.startswith("@") else "dir"
        return [CompletionItem(incomplete, type=kind)]


class Number(click.ParamType):  # type: ignore[type-arg]
    """A decimal number in a range. Neither `nan` nor `1e9`: a typing error is not a number."""

    def __init__(self, words: str, least: float = 0.0, most: float = 1e9) -> None:
        """`words`: the range in words, such as "a number of minutes above 0"."""
        self.name = "number"
        self._words = words
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number as a float."""
        text = str(value)
        is_number = re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text, re.ASCII)
        if not is_number or not self._least <= float(text) <= self._most:
            self.fail(f"{text!r} is not {self._words}", param, ctx)
        return float(text)


class Count(click.ParamType):  # type: ignore[type-arg]
    """A whole number of at least `least`."""

    name = "count"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number as an int."""
        text = str(value)
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < self._least:
            self.fail(f"{text!r} is not a whole number, {self._least} or more", param, ctx)
        return int(text)


STORE_HELP = (
    "STORE is a url; or the options of a connector or a tier, as JSON; or the JSON that an engine "
    "is given as --ec-transfer-config or --kv-transfer-config (a MultiConnector's, too); or @FILE "
    "with any of them."
)

store_argument = click.argument("stores", metavar="STORE", type=StoreType())
"""The parameter `stores` is a `Stores`."""

store_option = click.option("--store", "stores", metavar="STORE", type=StoreType(), help=STORE_HELP)
"""The parameter `stores` is a `Stores`, or None."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object on each line."
)
