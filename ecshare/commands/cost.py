# SPDX-License-Identifier: Apache-2.0
"""`ecshare cost`: computes what storing costs and saves, in money and in time."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from ecshare.commands.arguments import Count, Number, json_option
from ecshare.commands.costing import (
    CHUNK_TOKENS,
    PRICES,
    Dollars,
    Month,
    Prices,
    Times,
    Unit,
    dollars,
    embedding,
    month,
    pays_from_bytes_per_s,
    prompt,
    times,
)
from ecshare.commands.model_shape import Given, embedding_bytes, shape_options, token_bytes
from ecshare.commands.output import print_json, print_table
from ecshare.doctor.findings import printable, readable_size
from ecshare.store.errors import ConfigError

T = TypeVar("T")

_MOST_PRICE_BYTES = 1 << 16
_PRICE = re.compile(r"([a-z_]{1,16})=([0-9]{1,9}(?:\.[0-9]{1,9})?)", re.ASCII)
_POSITIVE = 1e-9


class PriceList(click.ParamType):  # type: ignore[type-arg]
    """Reads prices: the name of a list, a JSON file, or the prices themselves."""

    name = "prices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return `Prices`."""
        if isinstance(value, Prices) or value in PRICES:
            return PRICES.get(value, value)
        try:
            if "=" in value:
                return msgspec.convert(self._written(value), Prices)
            with Path(value).open("rb") as file:
                return msgspec.json.decode(file.read(_MOST_PRICE_BYTES), type=Prices)
        except OSError as exc:
            known = ", ".join(PRICES)
            words = f"{ascii(value)[:80]} is none of {known}, and no file: {exc.strerror}"
            self.fail(printable(words), param, ctx)
        except (ValueError, RecursionError) as exc:  # msgspec's errors are ValueErrors
            self.fail(printable(f"{ascii(value)[:80]}: {exc}"), param, ctx)

    def _written(self, text: str) -> dict[str, float]:
        found = [_PRICE.fullmatch(part) for part in text.split(",")]
        prices = {each[1]: float(each[2]) for each in found if each}
        if len(prices) != len(found):
            raise ValueError("write put=5,get=0.4,gb_month=0.023")
        return prices


class _Terms(NamedTuple):
    """What the arguments say of the store and of the GPUs."""

    prices: Prices
    hours: float
    gpu_hour: float
    bytes_per_s: float | None
    latency_s: float


class _Line(NamedTuple):
    """All results for one unit."""

    what: str
    unit: Unit
    once: Dollars
    month: Month | None
    times: Times | None


@click.command()
@shape_options
@click.option("--tokens", type=Count(1), help="Tokens of a prompt that are stored.")
@click.option(
    "--prefill-rate",
    type=Number("a number of tokens per second above 0", _POSITIVE),
    help="Tokens per second that your engine computes.",
)
@click.option("--gpus", type=Count(1), default=1, help="GPUs of an engine; default: 1.")
@click.option(
    "--gpu-hour",
    type=Number("a price, 0 or more"),
    default=2.5,
    help="Dollars for one GPU for an hour; default: 2.5.",
)
@click.option("--pictures", type=Count(), default=0, help="Pictures of a request.")
@click.option("--picture-tokens", type=Count(1), help="Embeddings of a picture.")
@click.option(
    "--encode-ms",
    type=Number("a number of milliseconds above 0", _POSITIVE),
    help="Milliseconds in which one GPU encodes a picture.",
)
@click.option(
    "--requests-a-day",
    type=Number("a number of requests, 0 or more", most=1e12),
    help="Print what a month takes, too.",
)
@click.option(
    "--hit-rate",
    metavar="PERCENT",
    type=Number("a percentage from 0 to 100", most=100),
    help="Of prompts and of pictures that were stored before.",
)
@click.option(
    "--hours",
    type=Number("a number of hours above 0", _POSITIVE, 1e6),
    default=24.0,
    help="How long an object is kept; default: 24.",
)
@click.option(
    "--chunk-tokens",
    type=Count(1),
    default=CHUNK_TOKENS,
    help=f"The engines' option of that name; default: {CHUNK_TOKENS}.",
)
@click.option(
    "--prices",
    type=PriceList(),
    default="s3",
    metavar="PRICES",
    help=f"{', '.join(PRICES)}, a file with such prices as JSON, or put=5,get=0.4,gb_month=0.023 "
    "(dollars for a million requests, and for a GB a month; gb_read for a GB that leaves the "
    "cloud). Default: s3.",
)
@click.option(
    "--gb-per-s",
    type=Number("a bandwidth in GB/s above 0", _POSITIVE),
    help="Print the times of loads from a store with this bandwidth, too; see `ecshare bench`.",
)
@click.option(
    "--latency-ms",
    type=Number("a number of milliseconds, 0 or more"),
    default=30.0,
    help="Of such a load, until its first byte; default: 30.",
)
@json_option
def command(
    tokens: int | None,
    prefill_rate: float | None,
    gpus: int,
    gpu_hour: float,
    pictures: int,
    picture_tokens: int | None,
    encode_ms: float | None,
    requests_a_day: float | None,
    hit_rate: float | None,
    hours: float,
    chunk_tokens: int,
    prices: Prices,
    gb_per_s: float | None,
    latency_ms: float,
    as_json: bool,
    **shape: Any,
) -> int:
    """Compute what storing costs and saves: for one prompt, for one picture, and in a month.

    Give a model, or its numbers, and --tokens or --pictures. Hits count as loads from the store:
    those from a host's cache are free.
    """
    given = Given(**shape)
    terms = _Terms(prices, hours, gpu_hour, gb_per_s and gb_per_s * 1e9, latency_ms / 1e3)
    if requests_a_day is not None and hit_rate is None:
        raise ConfigError("--hit-rate: missing; --requests-a-day needs it")
    share = (hit_rate or 0.0) / 100
    lines = []
    if tokens:
        rate = _needed(prefill_rate, "--prefill-rate", "--tokens")
        unit = prompt(tokens, token_bytes(given), rate, gpus, chunk_tokens)
        lines.append(_line("KV of a prompt", unit, terms, requests_a_day, share))
    if pictures:
        encode_s = _needed(encode_ms, "--encode-ms", "--pictures") / 1e3
        num_embeddings = _needed(picture_tokens, "--picture-tokens", "--pictures")
        unit = embedding(num_embeddings, embedding_bytes(given), encode_s)
        uses = None if requests_a_day is None else requests_a_day * pictures
        lines.append(_line("a picture", unit, terms, uses, share))
    if not lines:
        raise ConfigError("--tokens: missing, and no --pictures either: what is stored?")
    if as_json:
        for line in lines:
            print_json(_fields(line))
    else:
        _show(lines, tokens)
    return 0


def _needed(value: T | None, option: str, by: str) -> T:
    if value is None:
        raise ConfigError(f"{option}: missing; {by} needs it")
    return value


def _line(what: str, unit: Unit, terms: _Terms, uses_a_day: float | None, hit_rate: float) -> _Line:
    once = dollars(unit, terms.prices, terms.hours, terms.gpu_hour)
    uses = None if uses_a_day is None else month(unit, once, terms.hours, uses_a_day, hit_rate)
    loads = times(unit, terms.bytes_per_s, terms.latency_s) if terms.bytes_per_s else None
    return _Line(what, unit, once, uses, loads)


def _fields(line: _Line) -> dict[str, Any]:
    unit, once = line.unit, line.once
    return {
        "what": line.what,
        "objects": unit.num_objects,
        "bytes": unit.num_bytes,
        "dollars": msgspec.to_builtins(once),
        "loads_that_pay": _finite(once.loads_that_pay),
        "hit_rate_that_pays": _finite(once.hit_rate_that_pays),
        "pays_from_bytes_per_s": pays_from_bytes_per_s(unit),
        "month": msgspec.to_builtins(line.month),
        "times": msgspec.to_builtins(line.times),
    }


def _finite(value: float) -> float | None:
    """Return `value`; None for infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


_Row = Callable[[_Line], tuple[str, ...]]


def _show(lines: list[_Line], tokens: int | None) -> None:
    _print(lines, ("", "objects", "size", "compute $/M", "store $/M", "of it space", "look-ups $/M",
                   "load $/M", "loads that pay"), _once_cells)  # fmt: skip
    if lines[0].month:
        click.echo()
        _print(lines, ("a month", "puts", "gets", "stored", "written", "read", "store $", "saved $",
                       "pays from hits"), _month_cells)  # fmt: skip
    click.echo()
    for line in lines:
        pays = f"{readable_size(pays_from_bytes_per_s(line.unit))}/s"
        words = f"{line.what}: computed in {line.unit.compute_s:,.3g} s, as a load at {pays} takes"
        if line.times:
            words = f"{words}; loaded in {line.times.load_s:,.3g} s: {_verdict(line, tokens)}"
        click.echo(words)


def _print(lines: list[_Line], header: tuple[str, ...], cells: _Row) -> None:
    print_table(header, [(line.what, *cells(line)) for line in lines], 1)


def _once_cells(line: _Line) -> tuple[str, ...]:
    once = line.once
    each = (once.compute, once.store, once.space, once.look_up, once.load)
    size = readable_size(line.unit.num_bytes)
    loads = once.loads_that_pay
    pays = f"{loads:,.1f}" if math.isfinite(loads) else "never"
    return f"{line.unit.num_objects:,}", size, *(f"{1e6 * price:,.0f}" for price in each), pays


def _month_cells(line: _Line) -> tuple[str, ...]:
    uses, share = line.month, line.once.hit_rate_that_pays
    assert uses is not None
    sizes = (readable_size(1e9 * gb) for gb in (uses.stored_gb, uses.written_gb, uses.read_gb))
    money = (f"{each:,.2f}" for each in (uses.store_dollars, uses.saved_dollars))
    pays = f"{share:.0%}" if math.isfinite(share) else "never"
    return f"{uses.num_puts:,.0f}", f"{uses.num_gets:,.0f}", *sizes, *money, pays


def _verdict(line: _Line, tokens: int | None) -> str:
    assert line.times is not None
    share = line.times.pays_from_share
    if not math.isfinite(share):
        return "computing is faster, however long the prefix" if tokens else "encoding is faster"
    if line.what == "a picture" or not tokens:
        return "loading is faster" if share < 1 else "encoding is faster"
    return f"loading is faster from {math.ceil(share * tokens):,} tokens on"
