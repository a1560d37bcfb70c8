# SPDX-License-Identifier: Apache-2.0
"""Copies objects for `ecshare export`, `ecshare import` and `ecshare rekey`."""

import click
import msgspec

from ecshare.commands.output import Counting, print_json
from ecshare.commands.running import FAILED
from ecshare.doctor.findings import printable, readable_size
from ecshare.store.errors import StoreError
from ecshare.store.integrity import Integrity
from ecshare.upkeep.moving import Report, Source, Target, copy


async def copy_all(
    source: Source,
    target: Target,
    integrity: Integrity | None,
    *,
    serves_many: bool,
    names: tuple[str, str],
    as_json: bool,
    verb: str = "copied",
) -> int:
    """Copy, print the result, and return the exit status. `names`: those of source and target, the
    second one "" if they are the same. `verb`: what is done to objects.

    Raises:
        ClickException: source or target failed; the message has the number of copied objects.
    """
    report = Report()
    try:
        with Counting("objects", is_shown=not as_json) as counting:
            advance = counting.advance
            await copy(source, target, integrity, report, serves_many=serves_many, advance=advance)
    except (StoreError, OSError) as exc:
        words = printable(str(exc))
        raise click.ClickException(
            f"{words}; {report.num_copied:,} objects were done; run it again to go on"
        ) from exc
    if as_json:
        fields = {"source": names[0], "target": names[1], "checked_macs": integrity is not None}
        print_json(fields | msgspec.to_builtins(report))
    else:
        _show(report, integrity, names, verb)
    return FAILED if report.num_refused or not report.is_whole else 0


def _show(report: Report, integrity: Integrity | None, names: tuple[str, str], verb: str) -> None:
    macs = "" if integrity is not None else "; MACs were not checked, as no integrity_key was given"
    gone = f", {report.num_gone:,} gone meanwhile" if report.num_gone else ""
    where = f", to {names[1]}" if names[1] else ""
    click.echo(
        f"{names[0]}: {verb} {report.num_copied:,} objects, {readable_size(report.num_bytes)}"
        f"{where}; {report.num_there:,} were there{gone}{macs}"
    )
    for text in report.refused:
        click.echo(f"not copied: {printable(text)}", err=True)
    more = report.num_refused - len(report.refused)
    if more:
        click.echo(f"and {more:,} more", err=True)
