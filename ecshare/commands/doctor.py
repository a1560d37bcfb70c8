# SPDX-License-Identifier: Apache-2.0
"""`ecshare doctor`: checks a store, and finds why engines do not share."""

import click
import msgspec

from ecshare.commands.arguments import STORE_HELP, Count, Stores, json_option, store_argument
from ecshare.commands.output import print_json
from ecshare.commands.running import run_async
from ecshare.doctor.examine import examine
from ecshare.doctor.findings import Finding, Level

_COLOURS = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "red"}


@click.command(epilog=STORE_HELP)
@store_argument
@click.option("--read-only", is_flag=True, help="Write nothing at all, not even a probe.")
@click.option(
    "--sample",
    metavar="N",
    type=Count(),
    default=20,
    show_default=True,
    help="Objects of each namespace to read and verify.",
)
@json_option
def command(stores: Stores, read_only: bool, sample: int, as_json: bool) -> int:
    """Check a store, and find out why engines do not share.

    It tests the store, examines this host's cache, verifies stored objects, and names the facts in
    which namespaces differ. It makes no folder.

    Exit status: 0 no problem, 1 a problem was found, 2 wrong usage.
    """
    return run_async(_doctor(stores, write=not read_only, sample=sample, as_json=as_json))


async def _doctor(stores: Stores, *, write: bool, sample: int, as_json: bool) -> int:
    status = 0
    async for finding in examine(stores.targets, stores.remarks, write=write, sample=sample):
        _show(finding, as_json=as_json)
        status |= finding.level is Level.PROBLEM
    return status


def _show(finding: Finding, *, as_json: bool) -> None:
    topic, level, text, details = finding
    if as_json:
        print_json(msgspec.to_builtins(finding._asdict()))
        return
    click.echo(click.style(f"{level.value:8}", fg=_COLOURS[level]) + f"{topic}: {text}")
    for line in details:
        click.echo(f"{'':10}{line}")
