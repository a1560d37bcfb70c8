# SPDX-License-Identifier: Apache-2.0
"""`ecshare gc`: keeps stores within a budget, once or repeatedly."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import click
import msgspec

from ecshare.commands.arguments import STORE_HELP, Number, Stores, json_option, store_argument
from ecshare.commands.output import Counting, print_json, print_table
from ecshare.commands.running import FAILED, TERMINATED, run_async, shown_url
from ecshare.doctor.findings import printable, readable_size
from ecshare.doctor.targets import Target
from ecshare.store.errors import StoreError
from ecshare.store.integrity import open_integrity
from ecshare.store.open import open_store
from ecshare.upkeep.budget import Budget, read_budget
from ecshare.upkeep.clean import Cleaner, Report

_SHOWN = 50
_HEADER = ("kind", "namespace", "model", "objects", "size", "to remove", "size")


@dataclass(frozen=True)
class _Options:
    """The options of the command."""

    budget: Budget
    is_dry: bool
    as_json: bool


@click.command(epilog=STORE_HELP)
@store_argument
@click.option(
    "--max-bytes",
    metavar="[SCOPE=]SIZE",
    multiple=True,
    help="The most that may be stored, e.g. 500GB; with kv= or ec= of one kind, with tenant:NAME= "
    "of a tenant, with a namespace and = of that one. May be repeated.",
)
@click.option(
    "--ttl",
    metavar="[SCOPE=]HOURS",
    multiple=True,
    help="Remove what was not used for so many hours; scopes as above, the narrowest counts. May "
    "be repeated.",
)
@click.option(
    "--every",
    metavar="MINUTES",
    type=Number("a number of minutes above 0", 0.001, 1e6),
    help="Repeat it, with a pause of so many minutes.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; print a table of what would go.")
@json_option
def command(
    stores: Stores,
    max_bytes: Sequence[str],
    ttl: Sequence[str],
    every: float | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Keep a store within a budget: remove what was not used for longest.

    The ends of prompts are removed before their beginnings; old notes, temporary files and the like
    are removed too. It may be stopped and run again at any time, beside engines and other cleaners.

    Exit status: 0 done, 1 the store failed (run it again), 2 wrong usage, 143 stopped by SIGTERM
    (0 with --every).
    """
    options = _Options(read_budget(max_bytes, ttl), dry_run, as_json)
    targets = stores.distinct()
    return run_async(_repeat(targets, options, every), 0 if every else TERMINATED)


async def _repeat(targets: Sequence[Target], options: _Options, every: float | None) -> int:
    while True:
        status = 0
        for target in targets:
            status |= await _clean(target, options)
        if not every:
            return status
        await asyncio.sleep(every * 60)


async def _clean(target: Target, options: _Options) -> int:
    config, path = target
    store = open_store(config, path)
    cleaner = Cleaner(
        store,
        options.budget,
        integrity=open_integrity(config, path),
        timeout_s=config.call_timeout_s,
        is_dry=options.is_dry,
    )
    try:
        with Counting("keys listed and objects removed", is_shown=not options.as_json) as counting:
            report = await cleaner.run(counting.advance)
        if options.as_json or options.is_dry:
            await cleaner.name_models()
    except (StoreError, OSError) as exc:  # OSError: no disk space for the names of objects
        click.echo(_failure(shown_url(target), cleaner.report, exc), err=True)
        return FAILED
    finally:
        await store.close()
    _show(shown_url(target), report, options)
    return 0


def _failure(url: str, report: Report, exc: StoreError | OSError) -> str:
    done = f"{report.num_removed:,} of {report.num_to_remove:,} objects were removed"
    return f"ecshare gc: {url}: {printable(str(exc))}; {done}; run it again"


def _show(url: str, report: Report, options: _Options) -> None:
    if options.as_json:
        print_json({"url": url, "dry_run": options.is_dry, **msgspec.to_builtins(report)})
        return
    if options.is_dry:
        _show_table(report)
    removed = sum(row.removed_bytes for row in report.rows)
    has = sum(row.num_bytes for row in report.rows)
    verb = "would remove" if options.is_dry else "removed"
    others = report.num_others_removed + report.num_temporary_removed
    foreign = f"; {report.num_foreign:,} keys are not ecshare's" if report.num_foreign else ""
    parts = f"; listed in {report.num_parts} parts" if report.num_parts > 1 else ""
    click.echo(
        f"{url}: {verb} {report.num_to_remove:,} objects, {readable_size(removed)} of "
        f"{readable_size(has)}, and {others:,} leftovers; read {report.num_notes:,} notes of "
        f"use{foreign}{parts}"
    )


def _show_table(report: Report) -> None:
    """Print a line for each namespace."""
    rows = []
    for row in report.rows:
        what = row.namespace or row.what
        if row.namespace and row.what != "objects":
            what = f"{row.namespace} ({row.what})"
        counts = f"{row.num_objects:,}", readable_size(row.num_bytes)
        removed = f"{row.num_removed:,}", readable_size(row.removed_bytes)
        rows.append((row.kind, what, row.model, *counts, *removed))
    print_table(_HEADER, rows, 3, most=_SHOWN)
