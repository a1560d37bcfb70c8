# SPDX-License-Identifier: Apache-2.0
"""`ecshare import`: copies a tar to a store."""

import os

import click

from ecshare.commands.arguments import STORE_HELP, Stores, json_option, store_argument
from ecshare.commands.copying import copy_all
from ecshare.commands.export import the_only
from ecshare.commands.running import calls_of, run_async, shown_url
from ecshare.doctor.findings import printable
from ecshare.doctor.targets import Target
from ecshare.store.integrity import open_integrity
from ecshare.upkeep.archive import open_tar
from ecshare.upkeep.moving import StoreTarget, TarSource


@click.command(name="import", epilog=STORE_HELP)
@click.argument("path", metavar="FILE.tar", type=click.Path(exists=True, dir_okay=False))
@store_argument
@json_option
def command(path: str, stores: Stores, as_json: bool) -> int:
    """Copy a tar of `ecshare export` to a store.

    Each object is verified, with an integrity_key in STORE also its MAC. Without one, import only
    tars that you trust. Stored objects are not replaced: run it again to continue.

    Exit status: 0 all was copied, 1 the store failed or something was not copied, 2 wrong usage,
    130 and 143 after SIGINT and SIGTERM.
    """
    return run_async(_import(path, the_only(stores, "STORE"), as_json=as_json))


async def _import(path: str, target: Target, *, as_json: bool) -> int:
    fd = open_tar(path)
    try:
        async with calls_of(target) as calls:
            return await copy_all(
                TarSource(fd),
                StoreTarget(calls),
                open_integrity(target.config, target.path),
                serves_many=calls.store.serves_many,
                names=(printable(path), shown_url(target)),
                as_json=as_json,
            )
    finally:
        os.close(fd)
