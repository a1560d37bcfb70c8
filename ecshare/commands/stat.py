# SPDX-License-Identifier: Apache-2.0
"""`ecshare stat`: shows and verifies one object."""

import re
from collections.abc import AsyncIterator
from typing import Any

import click
import msgspec

from ecshare.commands.arguments import STORE_HELP, Stores, json_option, store_argument
from ecshare.commands.output import print_json, readable_time
from ecshare.commands.running import FAILED, calls_of, run_async
from ecshare.doctor.findings import printable, readable_size
from ecshare.store.errors import ConfigError, ObjectCorrupt, ObjectForeign, ObjectMissing
from ecshare.store.format import unseal
from ecshare.store.integrity import Integrity, open_integrity
from ecshare.store.keys import Key, Kind, is_object_key, namespace_prefix
from ecshare.store.objects import ObjectInfo, read
from ecshare.upkeep.calls import Calls
from ecshare.upkeep.inventory import Role, role_of
from ecshare.upkeep.selection import Selection, read_namespace, read_namespaces

MOST_BYTES = 1 << 30
"""Larger objects are not read."""
_MOST_FOUND = 20
_INTACT = "intact"
_NOTHING_TO_VERIFY = {
    Role.GAPS: "a note that the object will not be stored",
    Role.BUFFER: "an entry of the buffers for vLLM before V1",
}
_SOUND = (_INTACT, *_NOTHING_TO_VERIFY.values())
_DIGITS = re.compile(r"[0-9a-f]{8,64}")


@click.command(epilog=STORE_HELP)
@store_argument
@click.argument("key")
@json_option
def command(stores: Stores, key: str, as_json: bool) -> int:
    """Show all about one object, and verify it.

    KEY is a whole key, as ls --objects prints it, or the first 8 or more hex digits of its name.

    Exit status: 0 it is intact, 1 it is damaged, not there, or the store failed, 2 wrong usage.
    """
    if not is_object_key(key) and not _DIGITS.fullmatch(key):
        raise ConfigError(
            f"KEY: {ascii(key)[:120]} is neither the key of an object nor 8 to 64 hex digits"
        )
    return run_async(_show_all(stores, key, as_json=as_json))


async def _show_all(stores: Stores, key: str, *, as_json: bool) -> int:
    num_found = num_bad = 0
    for target in stores.distinct():
        async with calls_of(target) as calls:
            integrity = open_integrity(target.config, target.path)
            num = 0
            async for info in _find(calls, key):
                num += 1
                if num > _MOST_FOUND:
                    continue
                fields = await _examine(calls, info, integrity)
                _print(fields, as_json=as_json)
                num_bad += fields["state"] not in _SOUND
            num_found += num
            if num > _MOST_FOUND:
                click.echo(f"ecshare stat: {num:,} objects match {key}", err=True)
    if not num_found:
        click.echo(f"ecshare stat: there is no object {key}", err=True)
    return 0 if num_found and not num_bad else FAILED


async def _find(calls: Calls, key: str) -> AsyncIterator[ObjectInfo]:
    """Yield the object under `key`, or all whose names begin with it."""
    if is_object_key(key):
        folders, name = [key.rpartition("/")[0]], key.rpartition("/")[2]
    else:
        folders, name = [], key
        async for each in read_namespaces(calls, Selection()):
            folders.append(f"{namespace_prefix(each.kind, each.digest)}{key[:2]}")
    for folder in folders:
        async for page in calls.pages(calls.store.list(f"{folder}/")):
            for info in page:
                if is_object_key(info.key) and _is_named(info.key.rpartition("/")[2], name):
                    yield info


def _is_named(found: str, asked: str) -> bool:
    return found == asked if len(asked) >= 64 and "." in asked else found.startswith(asked)


async def _examine(calls: Calls, info: ObjectInfo, integrity: Integrity | None) -> dict[str, Any]:
    kind, _, digest, *_ = info.key.split("/")
    namespace = await read_namespace(calls, Kind(kind), digest)
    return {
        "key": info.key,
        "kind": kind,
        "namespace": digest,
        "model": namespace.model if namespace else None,
        "tenant": namespace.tenant if namespace else None,
        "num_bytes": info.num_bytes,
        "stored_s": info.modified_s,
        **await _content(calls, info, integrity),
    }


async def _content(calls: Calls, info: ObjectInfo, integrity: Integrity | None) -> dict[str, Any]:
    role = role_of(info.key)
    if role in _NOTHING_TO_VERIFY:
        return {"state": _NOTHING_TO_VERIFY[role]}
    if info.num_bytes > MOST_BYTES:
        return {"state": "not read: larger than 1 GiB"}
    key = Key(info.key)
    try:
        body = await calls.steady(lambda: read(calls.store, key, MOST_BYTES))
    except ObjectMissing:
        return {"state": "gone"}
    except ObjectCorrupt as exc:
        return {"state": f"damaged: {exc}"}
    state = _INTACT
    try:
        sealed = unseal(body, key, integrity=integrity)
    except ObjectForeign as exc:
        state = f"not ours: {exc}"
        sealed = unseal(body, key)
    except ObjectCorrupt as exc:
        return {"state": f"damaged: {exc}"}
    return {"state": state, **msgspec.to_builtins(sealed.spec)}


def _print(fields: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(fields)
        return
    shown = dict(fields)
    shown["size"] = readable_size(shown.pop("num_bytes"))
    shown["stored"] = readable_time(shown.pop("stored_s"))
    for name, value in shown.items():
        text = value if isinstance(value, str) else ascii(value)
        click.echo(f"{name:12}{printable(text)}")
