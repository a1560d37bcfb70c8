# SPDX-License-Identifier: Apache-2.0
"""`ecshare rekey`: replaces MACs of an old key by MACs of the new key."""

import click

from ecshare.commands.arguments import STORE_HELP, Stores, json_option, store_argument
from ecshare.commands.copying import copy_all
from ecshare.commands.export import the_only
from ecshare.commands.running import calls_of, run_async, shown_url
from ecshare.doctor.targets import Target
from ecshare.store.errors import ConfigError
from ecshare.store.integrity import Integrity, open_integrity
from ecshare.upkeep.moving import RekeyTarget, StoreSource
from ecshare.upkeep.selection import Selection


@click.command(epilog=STORE_HELP)
@store_argument
@json_option
def command(stores: Stores, as_json: bool) -> int:
    """Give objects with the MAC of accepted_integrity_key one of integrity_key.

    Run it before you retire the old key. It reads all objects of the namespaces that have the
    integrity_name of STORE (or its key's fingerprint), and replaces those of the old key. Engines
    may keep running, and it may be stopped and run again.

    Exit status: 0 done, 1 the store failed or an object is damaged, 2 wrong usage, 130 and 143
    after SIGINT and SIGTERM.
    """
    target = the_only(stores, "STORE")
    integrity = open_integrity(target.config, target.path)
    if integrity is None or not integrity.accepts_two:
        raise ConfigError(
            f"{target.path}: give STORE as JSON with integrity_key, the new one, and "
            "accepted_integrity_key, the old one"
        )
    return run_async(_rekey(target, integrity, as_json=as_json))


async def _rekey(target: Target, integrity: Integrity, *, as_json: bool) -> int:
    url = shown_url(target)
    async with calls_of(target) as calls:
        source = StoreSource(calls, Selection(integrities=frozenset([integrity.name])))
        await source.choose()
        if not source.chosen:
            raise ConfigError(
                f"{url}: no namespace has the integrity_name {integrity.name}; `ecshare doctor` "
                "shows those that there are, as `integrity`"
            )
        return await copy_all(
            source,
            RekeyTarget(calls, integrity),
            integrity,
            serves_many=calls.store.serves_many,
            names=(url, ""),
            as_json=as_json,
            verb="gave new MACs to",
        )
