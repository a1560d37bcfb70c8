# SPDX-License-Identifier: Apache-2.0
"""`python -m ecshare`, and the command `ecshare`."""

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

from ecshare.commands.group import run


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exit status: 0 all is well, 1 a problem was found or something
    failed, 2 wrong usage, 130 and 143 after SIGINT and SIGTERM."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal may not have every character
            stream.reconfigure(errors="backslashreplace")
    if given[:1] == ["router"]:
        _router(given[1:])
    sys.exit(run(given))


def _router(arguments: Sequence[str]) -> NoReturn:
    # Not at the top: the router needs packages that the rest of the command line does not.
    from ecshare.router.__main__ import main as route

    route(arguments, prog="ecshare router")
    sys.exit(0)
