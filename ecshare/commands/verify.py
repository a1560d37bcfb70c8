# SPDX-License-Identifier: Apache-2.0
"""`ecshare verify`: reads objects and verifies them."""

from collections.abc import Sequence
from typing import Any

import click
import msgspec
from msgspec import Struct

from ecshare.commands.arguments import STORE_HELP, Count, Stores, json_option, store_argument
from ecshare.commands.output import Counting, print_json
from ecshare.commands.running import FAILED, calls_of, run_async, shown_url
from ecshare.commands.selecting import read_selection, selection_options
from ecshare.doctor.findings import printable, readable_size
from ecshare.doctor.targets import Target
from ecshare.store.integrity import open_integrity
from ecshare.upkeep.selection import Selection
from ecshare.upkeep.survey import Survey
from ecshare.upkeep.verification import Verification, Verified

_SHOWN = 20


class _Options(Struct, frozen=True):
    """The options of the command."""

    selection: Selection
    sample: int | None
    repair: bool
    as_json: bool


@click.command(epilog=STORE_HELP)
@store_argument
@click.option(
    "--sample",
    metavar="N",
    type=Count(1),
    default=100,
    show_default=True,
    help="Objects of each namespace to read, chosen at random.",
)
@click.option("--all", "all_objects", is_flag=True, help="Read all objects.")
@click.option(
    "--repair",
    is_flag=True,
    help="Remove what is proven to be damaged in the store; engines make it again.",
)
@selection_options
@json_option
def command(
    stores: Stores,
    sample: int,
    all_objects: bool,
    repair: bool,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Read objects and verify them, as engines do: form, checksum, and MAC if there is a key.

    Objects that carry no MAC of the integrity key are counted, and neither damaged nor removed.
    What may have been damaged on the way to this host is not removed either.

    Exit status: 0 none is damaged, or all such were removed; 1 some are damaged, or the store
    failed; 2 wrong usage.
    """
    selection = read_selection(**chosen)
    options = _Options(selection, None if all_objects else sample, repair, as_json)
    return run_async(_verify_all(stores.distinct(), options))


async def _verify_all(targets: Sequence[Target], options: _Options) -> int:
    status = 0
    for target in targets:
        found = await _verify(target, options)
        status |= FAILED if found.num_damaged > found.num_removed else 0
    return status


async def _verify(target: Target, options: _Options) -> Verified:
    async with calls_of(target) as calls:
        integrity = open_integrity(target.config, target.path)
        survey = Survey(calls, options.selection, integrity)
        run = Verification(calls, survey.inventory, integrity, repair=options.repair)
        try:
            with Counting("keys listed") as counting:
                await survey.read(counting.advance)
            chosen = run.choose(survey.chosen_spaces(), options.sample)
            with Counting("objects read", len(chosen)) as counting:
                await run.run(chosen, counting.advance)
        finally:
            survey.close()
            # A run that was stopped, or failed, shows what it found.
            _show(shown_url(target), run.found, options)
    return run.found


def _show(url: str, found: Verified, options: _Options) -> None:
    if options.as_json:
        print_json({"url": url, **msgspec.to_builtins(found)})
        return
    for key, why in found.damaged[:_SHOWN]:
        click.echo(printable(f"damaged: {key}: {why}"))
    if found.num_damaged > _SHOWN:
        click.echo(f"and {found.num_damaged - _SHOWN:,} more (--json has up to 100,000)")
    more = [
        f"{num:,} {words}"
        for num, words in (
            (found.num_removed, "of them removed"),
            (found.num_foreign, "have no MAC of this integrity key"),
            (found.num_large, "are larger than 512 MiB and were not read"),
            (found.num_unreadable, "cannot be read by this user"),
            (found.num_gone, "removed meanwhile"),
        )
        if num
    ]
    click.echo(
        f"{url}: read {found.num_read:,} objects, {readable_size(found.num_bytes)}; "
        f"{'; '.join([f'{found.num_damaged:,} are damaged', *more])}"
    )
