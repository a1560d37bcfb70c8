# SPDX-License-Identifier: Apache-2.0
"""`ecshare ls`: lists the namespaces of a store, or their objects."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import click
import msgspec

from ecshare.commands.arguments import STORE_HELP, Count, Stores, json_option, store_argument
from ecshare.commands.output import print_json, print_table, readable_time
from ecshare.commands.running import calls_of, run_async, shown_url
from ecshare.commands.selecting import not_found, read_selection, selection_options
from ecshare.doctor.findings import printable
from ecshare.store.keys import is_object_key, namespace_prefix
from ecshare.store.objects import ObjectInfo
from ecshare.upkeep.calls import Calls
from ecshare.upkeep.selection import Namespace, Selection, read_namespaces

_SHOWN = 1000
_HEADER = ("kind", "namespace", "model", "tenant", "dtype", "epoch")


@click.command(epilog=STORE_HELP)
@store_argument
@selection_options
@click.option("--objects", is_flag=True, help="List the objects of these namespaces.")
@click.option("--limit", metavar="N", type=Count(1), help="List at most so many objects.")
@json_option
def command(stores: Stores, objects: bool, limit: int | None, as_json: bool, **chosen: Any) -> int:
    """List the namespaces that have a manifest, or with --objects what they contain.

    It reads manifests alone, so it is fast; for sizes use du.

    Exit status: 0 done, 1 the store failed, 2 wrong usage.
    """
    selection = read_selection(**chosen)
    return run_async(_list_all(stores, selection, objects=objects, limit=limit, as_json=as_json))


async def _list_all(
    stores: Stores, selection: Selection, *, objects: bool, limit: int | None, as_json: bool
) -> int:
    for target in stores.distinct():
        url = shown_url(target)
        async with calls_of(target) as calls:
            found = [each async for each in read_namespaces(calls, selection)]
            chosen = [each for each in found if selection.has(each)]
            if not chosen and not as_json:
                none = f"{url}: no engine has stored anything yet"
                click.echo(none if selection.is_empty else f"{url}: {not_found(selection, found)}")
            elif objects:
                await _print_objects(calls, chosen, limit, as_json=as_json)
            else:
                _print_namespaces(chosen, as_json=as_json)
    return 0


def _print_namespaces(namespaces: Sequence[Namespace], *, as_json: bool) -> None:
    if as_json:
        for each in namespaces:
            print_json(msgspec.to_builtins(each))
        return
    rows = [
        (each.kind, each.digest, each.model, each.tenant, each.dtype, each.epoch)
        for each in namespaces
    ]
    print_table(_HEADER, rows, len(_HEADER), most=_SHOWN)


async def _print_objects(
    calls: Calls, namespaces: Sequence[Namespace], limit: int | None, *, as_json: bool
) -> None:
    num = 0
    async for info in _objects(calls, namespaces):
        if num == limit:
            return
        num += 1
        if as_json:
            print_json({"key": info.key, "num_bytes": info.num_bytes, "stored_s": info.modified_s})
        else:
            stored = readable_time(info.modified_s)
            click.echo(f"{info.num_bytes:>14,}  {stored}  {printable(info.key)}")


async def _objects(calls: Calls, namespaces: Sequence[Namespace]) -> AsyncIterator[ObjectInfo]:
    for each in namespaces:
        async for page in calls.pages(calls.store.list(namespace_prefix(each.kind, each.digest))):
            for info in page:
                if is_object_key(info.key):
                    yield info
