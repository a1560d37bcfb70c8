# SPDX-License-Identifier: Apache-2.0
"""`ecshare gc`: keeps stores within a budget, once or again and again."""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from ecshare.doctor.findings import printable
from ecshare.doctor.targets import Target
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, StoreError
from ecshare.store.integrity import open_integrity
from ecshare.store.open import open_store
from ecshare.store.secrets import masked_url
from ecshare.upkeep.budget import Budget, read_budget
from ecshare.upkeep.clean import Cleaner, Report

FAILED = 1
_TERMINATED = 128 + signal.SIGTERM
_SHOWN = 50
_LONGEST_MODEL = 40


def run(targets: Sequence[Target], options: argparse.Namespace) -> int:
    """Clean the stores of `targets` with the arguments in `options`; return the exit status.

    Raises:
        ConfigError: an argument or an option is wrong; names it.
    """
    budget = read_budget(options.max_bytes, options.ttl)
    stores = {config.store_id(): Target(config, path) for config, path in targets}
    for config, _ in stores.values():
        # Opening it would create it.
        if config.folder.startswith("/") and not os.path.isdir(config.folder):
            raise ConfigError(f"there is no folder {printable(config.folder)}")
    try:
        return asyncio.run(_until_stopped([*stores.values()], budget, options))
    except asyncio.CancelledError:
        return 0 if options.every else _TERMINATED


async def _until_stopped(
    targets: Sequence[Target], budget: Budget, options: argparse.Namespace
) -> int:
    """Clean until SIGTERM, or once; return the exit status.

    Raises:
        CancelledError: after SIGTERM.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    while True:
        status = 0
        for target in targets:
            status |= await _clean(target, budget, options)
        if not options.every:
            return status
        await asyncio.sleep(options.every * 60)


async def _clean(target: Target, budget: Budget, options: argparse.Namespace) -> int:
    config, path = target
    store = open_store(config, path)
    cleaner = Cleaner(
        store,
        budget,
        integrity=open_integrity(config.integrity_key, path),
        timeout_s=config.call_timeout_s,
        is_dry=options.dry_run,
    )
    try:
        report = await cleaner.run()
        if options.json or options.dry_run:
            await cleaner.name_models()
    except (StoreError, OSError) as exc:  # or no room for the names
        print(_failure(config, cleaner.report, exc), file=sys.stderr, flush=True)
        return FAILED
    finally:
        await store.close()
    _show(config, report, options)
    return 0


def _failure(config: StoreConfig, report: Report, exc: StoreError | OSError) -> str:
    done = f"{report.num_removed:,} of {report.num_to_remove:,} objects were removed"
    words = printable(str(exc))
    return f"ecshare gc: {printable(masked_url(config.url))}: {words}; {done}; run it again"


def _show(config: StoreConfig, report: Report, options: argparse.Namespace) -> None:
    url = printable(masked_url(config.url))
    if options.json:
        shown = {"url": url, "dry_run": options.dry_run, **msgspec.to_builtins(report)}
        print(json.dumps(shown), flush=True)  # all but ASCII is escaped: names are from the store
        return
    if options.dry_run:
        for line in table(report):
            print(line)
    removed = sum(row.removed_bytes for row in report.rows)
    has = sum(row.num_bytes for row in report.rows)
    verb = "would remove" if options.dry_run else "removed"
    others = report.num_others_removed + report.num_temporary_removed
    foreign = f"; {report.num_foreign:,} keys are not ecshare's" if report.num_foreign else ""
    print(
        f"{url}: {verb} {report.num_to_remove:,} objects, {size(removed)} of {size(has)}, and "
        f"{others:,} leftovers; read {report.num_notes:,} notes of use{foreign}",
        flush=True,
    )


def table(report: Report) -> list[str]:
    """Return a table with a line for each namespace. Names from the store are escaped."""
    rows = [("kind", "namespace", "model", "objects", "size", "to remove", "size")]
    for row in report.rows[:_SHOWN]:
        what = row.namespace or row.what
        if row.namespace and row.what != "objects":
            what = f"{row.namespace} ({row.what})"
        model = printable(row.model)[:_LONGEST_MODEL]
        counts = f"{row.num_objects:,}", size(row.num_bytes)
        rows.append(
            (row.kind, what, model, *counts, f"{row.num_removed:,}", size(row.removed_bytes))
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if n < 3 else cell.rjust(width)  # noqa: PLR2004 — three texts
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    more = len(report.rows) - _SHOWN
    return [*lines, f"and {more:,} more"] if more > 0 else lines


def size(num_bytes: int) -> str:
    """Return `num_bytes` in a readable unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:,} B"
