# SPDX-License-Identifier: Apache-2.0
"""`ecshare bench`: measures a store from this host, and computes load times of a model's KV."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from ecshare.commands.arguments import (
    STORE_HELP,
    Count,
    Number,
    Stores,
    json_option,
    store_argument,
)
from ecshare.commands.costing import CHUNK_TOKENS, Times, prompt, times
from ecshare.commands.export import the_only
from ecshare.commands.measuring import Limits, Measurement, Reading
from ecshare.commands.model_shape import Given, shape_options, token_bytes
from ecshare.commands.output import Counting, print_json, print_table
from ecshare.commands.running import opened, run_async, shown_url
from ecshare.doctor.findings import printable, readable_size
from ecshare.doctor.targets import Target
from ecshare.store.errors import ConfigError
from ecshare.upkeep.budget import read_size

_HEADER = ("", "at once", "number", "MB/s", "per s", "p50 ms", "p99 ms")
_ASKED_FROM_BYTES = 10 * 10**9
_MOST_BYTES = 10**13
_MOST_SIZE = 256 << 20
_ROUNDS = 2  # look-ups in sequence before a load: see kv.md


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def __init__(self, most: int) -> None:
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        option = param.opts[0] if param else ""
        size = value if isinstance(value, int) else read_size(value, option)
        if not 0 < size <= self._most:
            words = f"{printable(str(value))!r} is not a size from 1 B to"
            self.fail(f"{words} {readable_size(self._most)}", param, ctx)
        return size


@click.command(epilog=STORE_HELP)
@store_argument
@click.option(
    "--size",
    type=_Size(_MOST_SIZE),
    help="Of an object; default: that of the model's chunks on one GPU, or 8 MiB.",
)
@click.option(
    "--seconds",
    type=Number("a number of seconds from 0.01 to 600", 0.01, 600),
    default=12.0,
    help="How long to measure, about; default: 12.",
)
@click.option(
    "--most",
    type=_Size(_MOST_BYTES),
    default="2GB",
    help="The most bytes to move; default: 2GB. Half of them may be stored for that time.",
)
@click.option("--yes", is_flag=True, help="Do not ask before moving more than 10 GB.")
@shape_options
@click.option("--gpus", type=Count(1), default=1, help="GPUs of an engine; default: 1.")
@click.option("--tokens", type=Count(1), default=8000, help="Of a prompt; default: 8,000.")
@click.option(
    "--prefill-rate",
    type=Number("a number of tokens per second above 0", 1e-9),
    help="Tokens per second that your engine computes.",
)
@json_option
def command(
    stores: Stores,
    size: int | None,
    seconds: float,
    most: int,
    yes: bool,
    gpus: int,
    tokens: int,
    prefill_rate: float | None,
    as_json: bool,
    **shape: Any,
) -> int:
    """Measure how fast this host reads and writes a store, with the engines' own client.

    It stores objects of random bytes below probe/, and removes them at the end, also after SIGINT.
    With a model, it also says how long a prompt's KV would take to load. An engine on this host
    that uses the store makes it slower.

    Exit status: 0 done, 1 the store failed or kept objects, 2 wrong usage, 130 and 143 after SIGINT
    and SIGTERM.
    """
    given = Given(**shape)
    kv_bytes = token_bytes(given) if given.has_kv else None
    if size is None:
        size = min(-(-kv_bytes * CHUNK_TOKENS // gpus), _MOST_SIZE) if kv_bytes else 8 << 20
    target = the_only(stores, "STORE")
    if 4 * size > most:
        raise ConfigError(f"--most: less than four objects of {readable_size(size)}")
    if most > _ASKED_FROM_BYTES and not yes:
        _ask(most)
    limits = Limits(size, seconds, most)

    async def work() -> int:
        readings, is_clean = await _measure(target, limits)
        _show(readings, target, size, as_json)
        if kv_bytes:
            loads = _loads(readings, kv_bytes, tokens, gpus, prefill_rate)
            _show_loads(loads, tokens, prefill_rate, as_json)
        return 0 if is_clean else 1

    return run_async(work())


async def _measure(target: Target, limits: Limits) -> tuple[list[Reading], bool]:
    """Return the readings, and whether all stored objects were removed."""
    async with opened(target) as store:
        measurement = Measurement(store, target.config, limits)
        left = ""
        try:
            with Counting("operations") as counting:
                readings = await measurement.run(counting.advance)
        finally:
            if left := await measurement.remove():
                words = "some objects are left below probe/; `ecshare gc` removes them after a day"
                click.echo(f"ecshare bench: {words}: {printable(left)}", err=True)
        return readings, not left


def _ask(most: int) -> None:
    words = f"This may move {readable_size(most)} to and from the store. Clouds may charge for it."
    if not sys.stdin.isatty():
        raise ConfigError(f"--most: {words} Give --yes")
    click.confirm(f"{words} Go on?", abort=True, err=True)


def _show(readings: Sequence[Reading], target: Target, size: int, as_json: bool) -> None:
    if as_json:
        for each in readings:
            print_json({**each._asdict(), "bytes": size})
        return
    rows = [
        (
            each.what,
            each.at_once,
            f"{each.number:,}",
            f"{each.mb_per_s:,.1f}" if each.mb_per_s else "",
            f"{each.per_s:,.1f}",
            f"{each.p50_ms:,.2f}",
            f"{each.p99_ms:,.2f}",
        )
        for each in readings
    ]
    click.echo(f"{shown_url(target)}: objects of {readable_size(size)}")
    print_table(_HEADER, rows, 2)


def _loads(
    readings: Sequence[Reading], kv_bytes: int, tokens: int, gpus: int, rate: float | None
) -> Times:
    """Return the times of a prompt that is loaded alone, at the measured rates."""
    look_up_s = next(each.p50_ms for each in readings if each.what == "look-up") / 1e3
    bytes_per_s = max(each.mb_per_s for each in readings if each.what == "read") * 1e6
    return times(prompt(tokens, kv_bytes, rate or 1.0, gpus), bytes_per_s, _ROUNDS * look_up_s)


def _show_loads(loads: Times, tokens: int, rate: float | None, as_json: bool) -> None:
    same = tokens / loads.load_s
    if as_json:
        computed = loads.compute_s if rate else None
        fields = {"what": "prompt", "tokens": tokens, "load_s": loads.load_s}
        print_json({**fields, "as_tokens_per_s": same, "compute_s": computed})
        return
    words = f"a prompt of {tokens:,} tokens loads in {loads.load_s:,.3g} s"
    if rate:
        click.echo(f"{words}; your engine computes it in {loads.compute_s:,.3g} s")
    else:
        click.echo(f"{words}; an engine that computes {same:,.0f} tokens/s takes as long")
