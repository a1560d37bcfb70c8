# SPDX-License-Identifier: Apache-2.0
"""`ecshare top`: shows the load of running engines and routers, from their metrics."""

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from ecshare.commands.arguments import Number, json_option
from ecshare.commands.metrics_page import Endpoint, Page, Unreadable, fetch, read_url
from ecshare.commands.output import make_table, print_json, print_table
from ecshare.commands.running import FAILED, run_async
from ecshare.doctor.findings import printable, readable_size
from ecshare.store.errors import ConfigError
from ecshare.store.secrets import resolved

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,100}")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]{0,4000}[!-~])?")
_OWN_HEADERS = {"host", "connection", "accept-encoding", "content-length", "transfer-encoding"}
_PREFIXES = ("ecshare", "kvshare", "kvshare_tier")
# The router's own pages: a scraper of its metrics is not a client.
_PAGES = ("/live", "/ready", "/health", "/status", "/metrics", "/dashboard", "/dashboard/data")
_STAGES = ("encode", "prefill", "decode")

_Row = dict[str, Any]
"""The values of one target, by the names of --json; None: it has no such metric."""


@click.command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option(
    "--header",
    "headers",
    metavar="NAME=VALUE",
    multiple=True,
    help="Send this header, for example a router's key: authorization=env:VARIABLE, with "
    'VARIABLE="Bearer KEY". May be repeated.',
)
@click.option(
    "--every",
    metavar="SECONDS",
    type=Number("a number of seconds from 0.1 to 3600", 0.1, 3600),
    default=2.0,
    help="How often, and over how long rates are taken; default: 2.",
)
@click.option("--once", is_flag=True, help="Print once, also on a terminal.")
@json_option
def command(
    urls: Sequence[str], headers: Sequence[str], every: float, once: bool, as_json: bool
) -> int:
    """Show what running engines and routers do, from their /metrics, again and again.

    URL is that of an engine or a router: http://host:port. Where stdout is no terminal it prints
    once, after two polls.

    Exit status: 0 done, 1 a target gave no metrics when it printed once, 2 wrong usage, 130 after
    SIGINT, 143 after SIGTERM.
    """
    targets = [read_url(url) for url in dict.fromkeys(urls)]
    poller = _Poller(targets, _read_headers(headers), every)
    if once or as_json or not sys.stdout.isatty():
        return run_async(_print_once(poller, as_json))
    return run_async(_redraw(poller))


def _read_headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for argument in given:
        name, _, value = argument.partition("=")
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _OWN_HEADERS or not value:
            raise ConfigError(f"--header: {printable(name)!r} is no NAME=VALUE that can be sent")
        text = str(resolved({name: value}, "--header")[name])
        if not _HEADER_VALUE.fullmatch(text):
            raise ConfigError(f"--header: the value of {name} is empty, or not printable ASCII")
        headers[name] = text
    return headers


class _Poller:
    """Polls all targets at once, and keeps the last page of each."""

    def __init__(
        self, targets: Sequence[Endpoint], headers: Mapping[str, str], every: float
    ) -> None:
        self.every = every
        self._targets = targets
        self._headers = headers
        self._last: dict[Endpoint, Page] = {}

    async def poll(self) -> list[_Row]:
        """Return a row for each target. The row of a target without metrics has an `error`."""
        return await asyncio.gather(*map(self._poll_target, self._targets))

    async def _poll_target(self, target: Endpoint) -> _Row:
        before = self._last.pop(target, None)
        try:
            page = await fetch(target, self._headers)
        except Unreadable as exc:
            return {"target": target.name, "kind": "none", "error": str(exc)}
        self._last[target] = page
        pages = _Pages(page, before)
        is_router = page.has("ecshare_router_")
        row = _router(pages) if is_router else _engine(pages)
        return {"target": target.name, "kind": "router" if is_router else "engine", **row}


async def _print_once(poller: _Poller, as_json: bool) -> int:
    await poller.poll()
    await asyncio.sleep(poller.every)
    rows = await poller.poll()
    if as_json:
        for row in rows:
            print_json(row)
    else:
        for number, table in enumerate(_tables(rows)):
            if number:
                click.echo()
            print_table(table.header, table.rows, table.num_texts)
    return FAILED if any("error" in row for row in rows) else 0


async def _redraw(poller: _Poller) -> int:
    from rich.console import Group
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            tables = [
                make_table(each.header, each.rows, each.num_texts, is_terminal=True)
                for each in _tables(await poller.poll())
            ]
            live.update(Group(*tables), refresh=True)
            await asyncio.sleep(poller.every)


class _Pages(NamedTuple):
    """A page, and the one before it: rates are those between both."""

    page: Page
    before: Page | None

    def total(self, *names: str, **labels: str) -> float | None:
        """Return the sum over all series of these names; None: there are none."""
        return _sum(self.page.total(name, **labels) for name in names)

    def increase(self, *names: str, **labels: str) -> float | None:
        """Return how much these counters grew together since the page before."""
        if self.before is None:
            return None
        return _sum(self.page.increase(self.before, name, **labels) for name in names)

    def per_s(self, *names: str, **labels: str) -> float | None:
        """Return how much these counters grow together in a second."""
        grown = self.increase(*names, **labels)
        if grown is None or self.before is None:
            return None
        return grown / max(self.page.at_s - self.before.at_s, 1e-3)

    def mean_ms(self, *names: str, **labels: str) -> float | None:
        """Return the mean of these histograms since the page before; None: nothing was counted."""
        number = self.increase(*(f"{name}_count" for name in names), **labels)
        seconds = self.increase(*(f"{name}_sum" for name in names), **labels)
        return 1e3 * seconds / number if number and seconds is not None else None


def _sum(found: Any) -> float | None:
    values = [value for value in found if value is not None]
    return sum(values) if values else None


def _percent(part: float | None, whole: float | None) -> float | None:
    return min(100.0, 100 * part / whole) if part is not None and whole else None


def _engine(pages: _Pages) -> _Row:
    moved = [f"{prefix}_transfer_bytes_total" for prefix in _PREFIXES]
    took = [f"{prefix}_transfer_seconds" for prefix in _PREFIXES]
    events = ("ecshare_items_total", "kvshare_blocks_total", "kvshare_tier_chunks_total")
    host = pages.increase(*moved, direction="read", tier="host")
    store = pages.increase(*moved, direction="read", tier="store")
    loaded = pages.increase("kvshare_tokens_total", event="loaded")
    read = None if host is None and store is None else (host or 0) + (store or 0)
    return {
        "state": _state(pages),
        "running": pages.total("vllm:num_requests_running"),
        "waiting": pages.total("vllm:num_requests_waiting"),
        "prompt_tokens_per_s": pages.per_s("vllm:prompt_tokens_total"),
        "generated_tokens_per_s": pages.per_s("vllm:generation_tokens_total"),
        "loaded_tokens_per_s": pages.per_s("kvshare_tokens_total", event="loaded"),
        "hit_percent": _percent(loaded, pages.increase("kvshare_tokens_total", event="queried")),
        "loaded_items_per_s": pages.per_s("ecshare_items_total", event="loaded"),
        "read_bytes_per_s": pages.per_s(*moved, direction="read", tier="store"),
        "saved_bytes_per_s": pages.per_s(*moved, direction="write", tier="store"),
        "misses_per_s": pages.per_s(*events, event="missed"),
        "failures_per_s": _sum(
            pages.per_s(*events, event=event) for event in ("failed", "dropped")
        ),
        "breakers": _open_breakers(pages.page),
        "read_ms": pages.mean_ms(*took, direction="read", tier="store"),
        "write_ms": pages.mean_ms(*took, direction="write", tier="store"),
        "host_percent": _percent(host, read),
    }


def _state(pages: _Pages) -> str:
    if pages.total("ecshare_gave_up_total", "kvshare_gave_up_total"):
        return "gave up"
    is_awake = pages.total("vllm:engine_sleep_state", sleep_state="awake")
    return "asleep" if is_awake == 0 else "up"


def _open_breakers(page: Page) -> list[str]:
    """Return the directions, "read" and "write", in which a breaker is open."""
    return [
        direction
        for direction in ("read", "write")
        if any(page.total(f"{each}_breaker_open", direction=direction) for each in _PREFIXES)
    ]


def _router(pages: _Pages) -> _Row:
    name = "ecshare_router"
    answers = f"{name}_answers_total"
    all_answers = pages.per_s(answers)
    own = _sum(pages.per_s(answers, route=route) for route in _PAGES)
    encodes, prefills = f"{name}_encodes_total", f"{name}_prefills_total"
    return {
        "state": "up",
        "in_progress": pages.total(f"{name}_requests_in_progress"),
        "requests_per_s": None if all_answers is None else all_answers - (own or 0),
        "errors_per_s": pages.per_s(f"{name}_errors_total"),
        "request_ms": pages.mean_ms(f"{name}_request_seconds"),
        "first_byte_ms": pages.mean_ms(f"{name}_first_byte_seconds"),
        "fallbacks_per_s": pages.per_s(f"{name}_fallbacks_total"),
        "encodes_avoided_percent": _percent(
            pages.increase(encodes, event="avoided"), pages.increase(encodes)
        ),
        "prefills_avoided_percent": _percent(
            pages.increase(prefills, event="avoided"),
            _sum(pages.increase(prefills, event=event) for event in ("asked", "avoided")),
        ),
        "stages": [
            {
                "stage": stage,
                "engines": len(pages.page.series(f"{name}_engine_available", stage=stage)),
                "available": pages.total(f"{name}_engine_available", stage=stage),
                "outstanding": pages.total(f"{name}_outstanding", stage=stage),
                "calls_per_s": pages.per_s(f"{name}_calls_total", stage=stage),
                "failed_per_s": pages.per_s(f"{name}_calls_total", stage=stage, outcome="failed"),
                "retries_per_s": pages.per_s(f"{name}_retries_total", stage=stage),
                "call_ms": pages.mean_ms(f"{name}_call_seconds", stage=stage),
            }
            for stage in _STAGES
            if pages.page.series(f"{name}_engine_available", stage=stage)
        ],
    }


class _Table(NamedTuple):
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    num_texts: int


_REQUESTS = ("running", "waiting", "prompt_tokens_per_s", "generated_tokens_per_s",
             "loaded_tokens_per_s", "hit_percent", "loaded_items_per_s")  # fmt: skip
_REQUESTS_HEADER = ("engine", "state", "run", "wait", "prompt/s", "output/s", "loaded/s", "hit %",
                    "items/s")  # fmt: skip
_STORE_HEADER = ("engine", "breaker", "read/s", "saved/s", "missed/s", "failed/s", "read ms",
                 "save ms", "host %")  # fmt: skip
_ROUTER = ("in_progress", "requests_per_s", "errors_per_s", "fallbacks_per_s", "request_ms",
           "first_byte_ms", "encodes_avoided_percent", "prefills_avoided_percent")  # fmt: skip
_ROUTER_HEADER = ("router", "open", "req/s", "err/s", "fall-b/s", "req ms", "first ms", "E avoid %",
                  "P avoid %")  # fmt: skip
_STAGE = ("outstanding", "calls_per_s", "failed_per_s", "retries_per_s", "call_ms")
_STAGE_HEADER = ("router", "stage", "engines", "open", "calls/s", "failed/s", "retry/s",
                 "call ms")  # fmt: skip


def _tables(rows: Sequence[_Row]) -> list[_Table]:
    """Return the tables that have rows."""
    engines = [row for row in rows if row["kind"] == "engine"]
    routers = [row for row in rows if row["kind"] == "router"]
    stages = [
        (row["target"], each["stage"], f"{_shown(each['available'])}/{each['engines']}",
         *_cells(each, _STAGE))
        for row in routers
        for each in row["stages"]
    ]  # fmt: skip
    all_tables = [
        _Table(
            _REQUESTS_HEADER,
            [(row["target"], row["state"], *_cells(row, _REQUESTS)) for row in engines],
            2,
        ),
        _Table(_STORE_HEADER, [_store_cells(row) for row in engines], 2),
        _Table(_ROUTER_HEADER, [(row["target"], *_cells(row, _ROUTER)) for row in routers], 1),
        _Table(_STAGE_HEADER, stages, 2),
        _Table(
            ("no metrics", "why"),
            [(row["target"], row["error"]) for row in rows if "error" in row],
            2,
        ),
    ]
    return [table for table in all_tables if table.rows]


def _store_cells(row: _Row) -> tuple[str, ...]:
    breaker = f"open: {', '.join(row['breakers'])}" if row["breakers"] else "closed"
    sizes = (row["read_bytes_per_s"], row["saved_bytes_per_s"])
    moved = ("-" if each is None else readable_size(each) for each in sizes)
    names = ("misses_per_s", "failures_per_s", "read_ms", "write_ms", "host_percent")
    return row["target"], breaker, *moved, *_cells(row, names)


def _cells(row: _Row, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_shown(row[name]) for name in names)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
