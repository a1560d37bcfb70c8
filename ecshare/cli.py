# SPDX-License-Identifier: Apache-2.0
"""`python -m ecshare`, and the command `ecshare`."""

import argparse
import asyncio
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

from ecshare import __version__
from ecshare.doctor.examine import examine
from ecshare.doctor.findings import Level
from ecshare.doctor.targets import Remark, Target, read_argument
from ecshare.store.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exit status: 0 all is well, 1 a problem was found or a store
    failed, 2 wrong usage, 130 and 143 after SIGINT and SIGTERM."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal may not have every character
            stream.reconfigure(errors="backslashreplace")
    if given[:1] == ["router"]:
        _router(given[1:])
    parser = _parser()
    if not given:
        parser.print_help()
        sys.exit(0)
    options = parser.parse_args(given)
    if options.command == "router":
        _router([])
    try:
        targets, remarks = read_argument(options.store)
        if options.command == "gc":
            sys.exit(_gc(targets, options))
        sys.exit(asyncio.run(_doctor(targets, remarks, options)))
    except ConfigError as exc:
        parser.error(str(exc))
    except KeyboardInterrupt:
        sys.exit(130)


def _gc(targets: Sequence[Target], options: argparse.Namespace) -> int:
    # Not at the top: the doctor does not need numpy.
    try:
        from ecshare.commands.gc import run
    except ImportError as exc:
        raise ConfigError(f"{exc}: pip install numpy (ecshare's extra [gc])") from exc
    return run(targets, options)


def _router(arguments: Sequence[str]) -> NoReturn:
    # Not at the top: the router needs packages that the rest of the command line does not.
    from ecshare.router.__main__ import main as route

    route(arguments, prog="ecshare router")
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ecshare",
        description="Share vision embeddings and KV blocks between vLLM engines through object "
        "storage.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ecshare {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    # Only for the help: the router reads its own arguments, see main.
    commands.add_parser(
        "router",
        help="route chat completions over encode, prefill and decode engines",
        add_help=False,
    )
    doctor = commands.add_parser(
        "doctor",
        help="check a store, and find out why engines do not share",
        description="Check a store, and find out why engines do not share: test the store, examine "
        "this host's cache, verify stored objects, and name the facts in which namespaces differ. "
        "It makes no folder. Exit status: 0 no problem, 1 a problem was found, 2 wrong usage.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    doctor.add_argument(
        "store",
        help="a url; or the options of a connector or a tier, as JSON; or the JSON that an engine "
        "is given as --ec-transfer-config or --kv-transfer-config (a MultiConnector's, too); or "
        "@FILE with any of them",
    )
    doctor.add_argument(
        "--read-only", action="store_true", help="write nothing at all, not even a probe"
    )
    doctor.add_argument(
        "--sample",
        metavar="N",
        type=_count,
        default=20,
        help="objects of each namespace to read and verify",
    )
    _add_gc(commands)
    return parser


def _add_gc(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    gc = commands.add_parser(
        "gc",
        help="keep a store within a budget: remove what was not used for longest",
        description="Keep a store within a budget: remove what was not used for longest, the ends "
        "of prompts before their beginnings, and old notes, temporary files and the like. It may "
        "be stopped and run again at any time, beside engines and others of its kind. Exit status: "
        "0 done, 1 the store failed (run it again), 2 wrong usage, 143 stopped by SIGTERM.",
        allow_abbrev=False,
    )
    gc.add_argument("store", help="as for the doctor: a url, options as JSON, or @FILE")
    gc.add_argument(
        "--max-bytes",
        metavar="[SCOPE=]SIZE",
        action="append",
        default=[],
        help="the most that may be stored, e.g. 500GB; with kv= or ec= of one kind, with a "
        "namespace and = of that one; may be repeated",
    )
    gc.add_argument(
        "--ttl",
        metavar="[SCOPE=]HOURS",
        action="append",
        default=[],
        help="remove what was not used for so many hours; scopes as above, the narrowest counts",
    )
    gc.add_argument(
        "--every", metavar="MINUTES", type=_minutes, help="go on, with a pause of so many minutes"
    )
    gc.add_argument(
        "--dry-run", action="store_true", help="remove nothing; print a table of what would go"
    )
    gc.add_argument("--json", action="store_true", help="print a line of JSON for each run")


def _minutes(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text, re.ASCII) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return float(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


async def _doctor(
    targets: Sequence[Target], remarks: Sequence[Remark], options: argparse.Namespace
) -> int:
    status = 0
    findings = examine(targets, remarks, write=not options.read_only, sample=options.sample)
    async for topic, level, text, details in findings:
        print(f"{level.value:8}{topic}: {text}", flush=True)
        for line in details:
            print(f"{'':10}{line}")
        status |= level is Level.PROBLEM
    return status
