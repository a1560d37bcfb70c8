# SPDX-License-Identifier: Apache-2.0
"""`ecshare epoch`: tells running engines that the weights of a model are updated in place."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from ecshare.commands.arguments import STORE_HELP, Stores, json_option, store_argument
from ecshare.commands.export import the_only
from ecshare.commands.output import print_json, print_table
from ecshare.commands.running import calls_of, run_async
from ecshare.commands.selecting import not_found, read_selection
from ecshare.doctor.findings import printable
from ecshare.doctor.targets import Target
from ecshare.store.epochs import READ_EVERY_S, next_epoch, read_epoch, write_epoch
from ecshare.store.errors import ConfigError
from ecshare.store.integrity import Integrity, open_integrity
from ecshare.store.objects import ObjectStore
from ecshare.store.secrets import masked_url
from ecshare.upkeep.calls import Calls
from ecshare.upkeep.selection import Selection, read_namespaces

# An engine reads in its time, and then the store answers.
_SEEN_S = READ_EVERY_S + 2
_TRIES = 3


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--namespace", "digests", metavar="HEX", multiple=True, help="Its model."),
        click.option(
            "--model", "models", metavar="NAME", multiple=True, help="As engines name it."
        ),
    ):
        command = option(command)
    return command


@click.group()
def command() -> None:
    """Show or begin the epoch of a model, which counts updates of its weights in place."""


@command.command(epilog=STORE_HELP)
@store_argument
@_model_options
@json_option
def show(stores: Stores, digests: Sequence[str], models: Sequence[str], as_json: bool) -> int:
    """Show the epoch of each model.

    Exit status: 0 done, 1 the store failed, 2 wrong usage.
    """
    selection = read_selection(digests, models, (), ())
    return run_async(_show(the_only(stores, "STORE"), selection, as_json=as_json))


@command.command("next", epilog=STORE_HELP)
@store_argument
@_model_options
@json_option
@click.option("--no-wait", is_flag=True, help="Do not wait until engines have read it.")
def begin(
    stores: Stores, digests: Sequence[str], models: Sequence[str], as_json: bool, no_wait: bool
) -> int:
    """Begin a new epoch, BEFORE the weights of running engines change.

    Engines read it within seconds, and then neither load nor save until vLLM's caches are reset.
    Then they share in the new epoch. So: run this, update the weights, and reset the caches (with
    reset_prefix_cache and, for media, reset_encoder_cache), engine by engine. It waits until
    engines that run have read the epoch. Without --model the store must be of one model.

    Exit status: 0 done, 1 the store failed, 2 wrong usage.
    """
    selection = read_selection(digests, models, (), ())
    target = the_only(stores, "STORE")
    return run_async(_begin(target, selection, as_json=as_json, waits=not no_wait))


async def _show(target: Target, selection: Selection, *, as_json: bool) -> int:
    integrity = open_integrity(target.config, target.path)
    async with calls_of(target) as calls:
        models = await _models(target, calls, selection, integrity)
        numbers = [await read_epoch(calls.store, model, integrity) for model in models]
    if as_json:
        for model, number in zip(models, numbers, strict=True):
            print_json({"model": model, "epoch": number})
    else:
        rows = [(model, f"{number}") for model, number in zip(models, numbers, strict=True)]
        print_table(("model", "epoch"), rows, 1)
    return 0


async def _begin(target: Target, selection: Selection, *, as_json: bool, waits: bool) -> int:
    integrity = open_integrity(target.config, target.path)
    async with calls_of(target) as calls:
        models = await _models(target, calls, selection, integrity)
        if selection.is_empty and len(models) > 1:
            named = ", ".join(map(printable, models))
            raise ConfigError(f"name the model with --model; there are: {named}")
        begun = {model: await next_epoch(calls.store, model, integrity) for model in models}
        for model, number in begun.items():
            if as_json:
                print_json({"model": model, "epoch": number})
            else:
                click.echo(
                    f"{printable(model)}: epoch {number}. Running engines share nothing from now "
                    "on until their caches are reset: update the weights, then reset."
                )
        if waits:
            await _until_heard(calls.store, begun, integrity)
    return 0


async def _until_heard(
    store: ObjectStore, begun: Mapping[str, int], integrity: Integrity | None
) -> None:
    """Wait until running engines have read the epochs `begun`, by model.

    What removes or replaces one meanwhile, such as an engine that renews an older one, is answered
    by writing it again.

    Raises:
        ClickException: that helps nothing.
    """
    lost = dict(begun)
    for _ in range(_TRIES):
        await asyncio.sleep(_SEEN_S)
        for model, number in [*lost.items()]:
            if await read_epoch(store, model, integrity) >= number:
                del lost[model]
            else:
                await write_epoch(store, model, number, integrity)
        if not lost:
            return
    named = ", ".join(map(printable, lost))
    raise click.ClickException(
        f"somebody removes or replaces the epoch of {named}: do not update weights with it"
    )


async def _models(
    target: Target, calls: Calls, selection: Selection, integrity: Integrity | None
) -> list[str]:
    """Return the names of the models that are chosen.

    Raises:
        ConfigError: there is none, or its engines would not accept an epoch made with this key.
    """
    url = printable(masked_url(target.config.url))
    known = [each async for each in read_namespaces(calls, selection)]
    chosen = [each for each in known if selection.has(each) and each.model]
    if not chosen:
        none = "no engine has stored anything yet"
        raise ConfigError(f"{url}: {none if selection.is_empty else not_found(selection, known)}")
    key = integrity.name if integrity is not None else ""
    deaf = [each for each in chosen if each.integrity != key]
    for each in deaf:
        click.echo(
            f"warning: engines of namespace {each.digest} ({printable(each.model)}) have another "
            "integrity_key, or none, and do not hear this: run it with their options, too",
            err=True,
        )
    if len(deaf) == len(chosen):
        raise ConfigError(f"{url}: give STORE as JSON with the integrity_key of its engines")
    return sorted({each.model for each in chosen if each.integrity == key})
