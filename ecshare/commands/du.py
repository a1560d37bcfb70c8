# SPDX-License-Identifier: Apache-2.0
"""`ecshare du`: counts objects and bytes by model, kind, namespace, day, or last use."""

from collections.abc import Sequence
from typing import Any

import click

from ecshare.commands.arguments import STORE_HELP, Stores, json_option, store_argument
from ecshare.commands.output import Counting, print_json, print_table, readable_age, readable_time
from ecshare.commands.running import calls_of, run_async, shown_url
from ecshare.commands.selecting import read_selection, selection_options
from ecshare.doctor.findings import readable_size
from ecshare.doctor.targets import Target
from ecshare.store.integrity import open_integrity
from ecshare.upkeep.selection import Selection
from ecshare.upkeep.survey import By, Group, Survey

_SHOWN = 100
_NUMBERS = ("objects", "size", "stored", "last use")


@click.command(epilog=STORE_HELP)
@store_argument
@click.option(
    "--by",
    type=click.Choice([*map(str, By)]),
    default=str(By.MODEL),
    show_default=True,
    help="How to group objects. Days are those on which they were stored (UTC).",
)
@selection_options
@json_option
def command(stores: Stores, by: str, as_json: bool, **chosen: Any) -> int:
    """Show how much a store has.

    It lists the store once, and reads manifests and notes of use; it writes nothing. Last use is
    known where the store is cleaned (see gc); elsewhere it is the time of storing.

    Exit status: 0 done, 1 the store failed, 2 wrong usage.
    """
    selection = read_selection(**chosen)
    return run_async(_show_all(stores.distinct(), By(by), selection, as_json=as_json))


async def _show_all(
    targets: Sequence[Target], by: By, selection: Selection, *, as_json: bool
) -> int:
    show = _print_json if as_json else _print_text
    for target in targets:
        async with calls_of(target) as calls:
            survey = Survey(calls, selection, open_integrity(target.config, target.path))
            try:
                with Counting("keys listed") as counting:
                    await survey.read(counting.advance)
                await survey.describe()
                show(shown_url(target), by, survey.groups(by), survey)
            finally:
                survey.close()
    return 0


def _print_json(url: str, by: By, groups: Sequence[Group], survey: Survey) -> None:
    for group in groups:
        space = group.namespace
        more = {"kind": space.kind, "model": space.model, "tenant": space.tenant} if space else {}
        first, last = group.stored
        print_json(
            {
                "url": url,
                str(by): group.name,
                **more,
                "num_objects": group.num_objects,
                "num_bytes": group.num_bytes,
                "first_stored_s": first * 60,
                "last_stored_s": last * 60,
                "last_used_s": (survey.now - group.used) * 60,
            }
        )


def _print_text(url: str, by: By, groups: Sequence[Group], survey: Survey) -> None:
    names = ("kind", "namespace", "model", "tenant") if by is By.NAMESPACE else (str(by),)
    rows = [(*_texts(group, by), *_numbers(group)) for group in groups]
    if rows:
        print_table((*names, *_NUMBERS), rows, len(names), most=_SHOWN)
    num = sum(group.num_objects for group in groups)
    total = readable_size(sum(group.num_bytes for group in groups))
    foreign = survey.inventory.num_foreign
    others = f"; {foreign:,} keys are not ecshare's" if foreign else ""
    click.echo(f"{url}: {num:,} objects, {total}{others}")


def _texts(group: Group, by: By) -> tuple[str, ...]:
    if by is not By.NAMESPACE:
        return (group.name or "(none)",)
    space = group.namespace
    if space is None:  # notes and the like
        return ("", group.name, "", "")
    return (space.kind, group.name, space.model, space.tenant)


def _numbers(group: Group) -> tuple[str, str, str, str]:
    first, last = (readable_time(minute * 60).partition(" ")[0] for minute in group.stored)
    stored = first if first == last else f"{first} to {last}"
    age = readable_age(group.used)
    return f"{group.num_objects:,}", readable_size(group.num_bytes), stored, f"{age} ago"
