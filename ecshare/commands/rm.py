# SPDX-License-Identifier: Apache-2.0
"""`ecshare rm`: removes namespaces, models, tenants or media items from a store, now."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from ecshare.commands.arguments import STORE_HELP, Stores, json_option, store_argument
from ecshare.commands.output import Counting, print_json
from ecshare.commands.running import FAILED, calls_of, run_async, shown_url
from ecshare.commands.selecting import not_found, print_found, read_selection, selection_options
from ecshare.doctor.findings import printable, readable_size
from ecshare.doctor.targets import Target
from ecshare.store.errors import ConfigError, StoreError
from ecshare.store.keys import MEDIA_DIGESTS, Kind
from ecshare.upkeep.removal import MOST_EMBEDDINGS, Removal, embedding_ids
from ecshare.upkeep.selection import Selection

_MOST_ITEMS = 64
_READ_BYTES = 1 << 20

NOT_REACHED = (
    "host caches of engines: restart the hosts, or stop the engines and remove the folder "
    "host_cache_dir (/dev/shm/ecshare-* if it is not set)",
    "memory of running engines and routers: restart them",
    "older versions, replicas and backups that the store itself keeps",
)
OF_ITEMS = (
    "KV of prompts with these items: its names are digests of whole prompts; remove it by --model "
    "or --tenant, with --kind kv",
    "embeddings made with a LoRA adapter, or for requests with options of their own "
    f"(mm_processor_kwargs, media_io_kwargs), and items of more than {MOST_EMBEDDINGS:,} "
    "embeddings: remove them by --model or --tenant, with --kind ec",
)


class _Options(Struct, frozen=True):
    """The options of the command."""

    selection: Selection
    items: frozenset[str]
    """Identifiers of media items; empty: all objects."""
    is_sure: bool
    is_dry: bool
    as_json: bool


@click.command(epilog=STORE_HELP)
@store_argument
@selection_options
@click.option(
    "--media",
    "media",
    metavar="ID",
    multiple=True,
    help="Only embeddings of the media item that engines know as ID: a uuid, or vLLM's hash.",
)
@click.option(
    "--media-file",
    "files",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    help="Only embeddings of this picture, video or sound, as the router names it.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; print what would go.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def command(
    stores: Stores,
    media: Sequence[str],
    files: Sequence[str],
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Remove namespaces, all of a model or a tenant, or media items from a store.

    It removes what has all the given properties, after it has shown that and asked. It takes no
    patterns. Engines may keep running: they compute what they miss.

    Exit status: 0 removed, 1 the store failed or something is left (run it again), 2 wrong usage,
    nothing found, or no terminal to ask on.
    """
    selection = read_selection(**chosen)
    items = frozenset(media) | frozenset(name for file in files for name in names_of_file(file))
    if len(media) + len(files) > _MOST_ITEMS:
        raise ConfigError(f"--media, --media-file: at most {_MOST_ITEMS} at once")
    if selection.is_empty and not items:
        raise ConfigError("say what to remove: --namespace, --model, --tenant, or --media")
    if items:
        selection = msgspec.structs.replace(selection, kinds=_kinds_of_items(selection))
    options = _Options(selection, items, yes, dry_run, as_json)
    return run_async(_remove_all(stores.distinct(), options))


def names_of_file(path: str) -> list[str]:
    """Return the uuids that the router gives a media item with the bytes of this file.

    Raises:
        ConfigError: it cannot be read.
    """
    digests = [each.copy() for each in MEDIA_DIGESTS.values()]
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(_READ_BYTES):
                for digest in digests:
                    digest.update(piece)
    except OSError as exc:
        raise ConfigError(f"--media-file: {printable(path)}: {exc.strerror}") from exc
    return [digest.hexdigest() for digest in digests]


def _kinds_of_items(selection: Selection) -> tuple[Kind, ...]:
    if Kind.EC not in selection.kinds:
        raise ConfigError(f"--media: no names can be computed of KV: {OF_ITEMS[0]}")
    return (Kind.EC,)


async def _remove_all(targets: Sequence[Target], options: _Options) -> int:
    status, num_found = 0, 0
    for target in targets:
        async with calls_of(target) as calls:
            names = embedding_ids(options.items) if options.items else None
            removal = Removal(calls, options.selection, names)
            with Counting("objects listed", is_shown=not options.as_json) as counting:
                await removal.look(counting.advance)
            num_found += len(removal.found)
            url = shown_url(target)
            if removal.found:
                status |= await _remove(removal, options, url)
            elif not num_found and target is targets[-1]:
                raise ConfigError(f"{url}: {_nothing(removal, options)}")
    return status


def _nothing(removal: Removal, options: _Options) -> str:
    if options.items:
        return "no embeddings are stored of these items, or none that have such a name"
    unknown = f"; {_unknown(removal)}" if removal.num_unknown else ""
    return not_found(options.selection, removal.known) + unknown


def _unknown(removal: Removal) -> str:
    return (
        f"{removal.num_unknown:,} objects are of namespaces without a manifest, which may or may "
        "not be of those named: `ecshare doctor` lists them, --namespace removes them"
    )


async def _remove(removal: Removal, options: _Options, url: str) -> int:
    num = sum(each.num_objects for each in removal.found)
    size = readable_size(sum(each.num_bytes for each in removal.found))
    if not options.as_json:
        print_found(removal.found)
        if removal.num_unknown:
            click.echo(_unknown(removal))
    if options.is_dry:
        if not options.as_json:
            click.echo(f"{url}: would remove {num:,} objects, {size}")
        _report(removal, options, url)
        return 0
    _ask(f"{url}: remove {num:,} objects, {size}?", options)
    try:
        with Counting("objects removed", num, is_shown=not options.as_json) as counting:
            await removal.remove(counting.advance)
    except StoreError as exc:
        raise click.ClickException(
            f"{url}: {printable(str(exc))}; {removal.num_removed:,} objects were removed; run it "
            "again"
        ) from exc
    if not options.as_json:
        late = f", {removal.num_late:,} of them stored meanwhile" if removal.num_late else ""
        click.echo(f"{url}: removed {removal.num_removed:,} objects{late}")
    _report(removal, options, url)
    if removal.refusal is not None:
        click.echo(f"ecshare rm: {url}: {printable(str(removal.refusal))}", err=True)
    elif removal.num_left:
        click.echo(f"ecshare rm: {url}: engines go on storing there: stop them first", err=True)
    return FAILED if removal.num_left or removal.refusal is not None else 0


def _ask(question: str, options: _Options) -> None:
    """Return if the user is sure.

    Raises:
        ConfigError: there is no terminal to ask on.
        click.Abort: the user is not sure.
    """
    if options.is_sure:
        return
    if options.as_json or not sys.stdin.isatty():
        raise ConfigError("nothing was removed: there is no terminal to ask on; add --yes")
    click.confirm(question, abort=True)


def _report(removal: Removal, options: _Options, url: str) -> None:
    left = (*NOT_REACHED, *(OF_ITEMS if options.items else ()))
    if options.as_json:
        rows = [
            {
                "kind": each.namespace.kind,
                "namespace": each.namespace.digest,
                "model": each.namespace.model,
                "tenant": each.namespace.tenant,
                "num_objects": each.num_objects,
                "num_bytes": each.num_bytes,
            }
            for each in removal.found
        ]
        print_json(
            {
                "url": url,
                "dry_run": options.is_dry,
                "rows": rows,
                "num_removed": removal.num_removed,
                "num_late": removal.num_late,
                "num_left": removal.num_left,
                "num_unknown": removal.num_unknown,
                "not_reached": left,
            }
        )
        return
    click.echo("It does not reach:")
    for line in left:
        click.echo(f"  - {line}")
