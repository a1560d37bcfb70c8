# SPDX-License-Identifier: Apache-2.0
"""`ecshare export`: copies namespaces to a tar, or to another store."""

import contextlib
from typing import Any

import click

from ecshare.commands.arguments import STORE_HELP, Stores, StoreType, json_option, store_argument
from ecshare.commands.copying import copy_all
from ecshare.commands.running import calls_of, run_async, shown_url
from ecshare.commands.selecting import not_found, read_selection, selection_options
from ecshare.doctor.findings import printable
from ecshare.doctor.targets import Target
from ecshare.store.errors import ConfigError
from ecshare.store.integrity import open_integrity
from ecshare.upkeep.archive import TarWriter
from ecshare.upkeep.calls import Calls
from ecshare.upkeep.moving import StoreSource, StoreTarget, TarTarget
from ecshare.upkeep.selection import Selection


class _TargetType(StoreType):
    """Reads the target: the name of a tar as text, or a store as `Stores`."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        is_tar = isinstance(value, str) and value.endswith(".tar") and "://" not in value
        return value if is_tar and value[:1] not in "{@" else super().convert(value, param, ctx)


@click.command(epilog=STORE_HELP)
@store_argument
@click.argument("target", metavar="FILE.tar|STORE2", type=_TargetType())
@selection_options
@json_option
def command(stores: Stores, target: str | Stores, as_json: bool, **chosen: Any) -> int:
    """Copy namespaces to a tar or to another store; all of them, if none are named.

    Each object is verified, with an integrity_key in STORE also its MAC. What the target has is not
    sent: run it again to continue. A tar is FILE.tar.part until it is complete.

    Exit status: 0 all was copied, 1 a store failed or something was not copied, 2 wrong usage, 130
    and 143 after SIGINT and SIGTERM.
    """
    selection = read_selection(**chosen)
    source = the_only(stores, "STORE")
    if isinstance(target, str):
        return run_async(_to_tar(source, target, selection, as_json=as_json))
    other = the_only(target, "STORE2")
    if other.config.store_id() == source.config.store_id():
        raise ConfigError("STORE and STORE2 are the same store")
    return run_async(_to_store(source, other, selection, as_json=as_json))


def the_only(stores: Stores, name: str) -> Target:
    """Return the store of the argument `name`.

    Raises:
        ConfigError: it names several stores, or a folder that does not exist.
    """
    targets = stores.distinct()
    if len(targets) > 1:
        raise ConfigError(f"{name} names {len(targets)} stores; name one")
    return targets[0]


async def _to_tar(source: Target, path: str, selection: Selection, *, as_json: bool) -> int:
    async with calls_of(source) as calls:
        chosen = await _chosen(calls, source, selection)
        with contextlib.closing(TarWriter(path)) as writer:
            try:
                status = await copy_all(
                    chosen,
                    TarTarget(writer),
                    open_integrity(source.config, source.path),
                    serves_many=calls.store.serves_many,
                    names=(shown_url(source), printable(path)),
                    as_json=as_json,
                )
                writer.finish()
            except BaseException:
                if writer.num_bytes:
                    part = printable(writer.part)
                    click.echo(f"{part} is kept: run it again to go on, or remove it", err=True)
                raise
            return status


async def _to_store(source: Target, other: Target, selection: Selection, *, as_json: bool) -> int:
    async with calls_of(source) as calls, calls_of(other) as there:
        return await copy_all(
            await _chosen(calls, source, selection),
            StoreTarget(there),
            open_integrity(source.config, source.path),
            serves_many=calls.store.serves_many and there.store.serves_many,
            names=(shown_url(source), shown_url(other)),
            as_json=as_json,
        )


async def _chosen(calls: Calls, source: Target, selection: Selection) -> StoreSource:
    chosen = StoreSource(calls, selection)
    await chosen.choose()
    if not chosen.chosen:
        what = not_found(selection, chosen.known)
        raise ConfigError(f"{shown_url(source)}: {what or 'no namespace has a manifest'}")
    return chosen
