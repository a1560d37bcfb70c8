# SPDX-License-Identifier: Apache-2.0
"""Write examples/monitoring/grafana.json and alerts.yml from one table, so that they cannot drift.

    python scripts/write_monitoring.py [--check]

Each metric, label and value of a label is looked up where it is defined: those of the connectors in
their tables, those of the router in docs/metrics.md, which a test compares with the router. With
`--check` nothing is written: exit status 1 if a file is not what would be written.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ecshare.encoder.metrics
import kvshare.metrics
from ecshare.plugin.metrics import MetricTable
from ecshare.transfer.stats import is_gauge

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "monitoring"
RUNBOOK = "https://github.com/ecshare/ecshare/blob/main/docs/runbook.md#alerts"
INTERVAL = "$__rate_interval"
# Prometheus adds the first one, a router with several workers the second one.
ADDED_LABELS = {"instance", "worker"}


@dataclass(frozen=True)
class Known:
    """What is known of a metric."""

    kind: str
    """counter, gauge or histogram"""
    labels: Mapping[str, Sequence[str]]
    """The values of each label."""


def of_connector(prefix: str, metrics: MetricTable) -> dict[str, Known]:
    """Return the metrics of a connector, by their whole names."""
    found = {}
    for family, metric in metrics.items():
        kind = "histogram" if metric.is_histogram else "gauge" if is_gauge(family) else "counter"
        suffix = "_total" if kind == "counter" else ""
        found[f"{prefix}_{metric.name}{suffix}"] = Known(kind, metric.labels)
    return found


def of_router() -> dict[str, Known]:
    """Return the router's metrics; any name in a row of the page may be a label or a value."""
    found = {}
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name, row in re.findall(r"^\| `(ecshare_router_\w+)` \|(.*)\|$", page, re.MULTILINE):
        begin = re.match(r" (Gauge|Histogram)\b", row)
        words = re.findall(r"`([^`]+)`", row)
        found[name] = Known(begin[1].lower() if begin else "counter", dict.fromkeys(words, words))
    return found


METRICS = {
    **of_connector("ecshare", ecshare.encoder.metrics.METRICS),
    **of_connector("kvshare", kvshare.metrics.METRICS),
    **of_router(),
}


# --- expressions ---


def checked(name: str, kind: str, by: str, where: Mapping[str, str]) -> str:
    """Return the selector of a series.

    Raises:
        ValueError: there is no such metric, label or value.
    """
    known = METRICS.get(name)
    if known is None or known.kind != kind:
        raise ValueError(f"there is no {kind} {name}")
    for label, values in [*where.items(), *((label, "") for label in by.split())]:
        if label not in known.labels and label not in ADDED_LABELS:
            raise ValueError(f"{name} has no label {label}")
        if missing := set(filter(None, values.split("|"))) - set(known.labels.get(label, ())):
            raise ValueError(f"{label} of {name} is never {min(missing)}")
    said = ",".join(f'{n}{"=~" if "|" in v else "="}"{v}"' for n, v in where.items())
    suffix = "_bucket" if kind == "histogram" else ""
    return f"{name}{suffix}{{{said}}}" if said else f"{name}{suffix}"


def by_labels(how: str, by: str) -> str:
    """Return an aggregation by the labels in `by`, which are separated by blanks."""
    return f"{how} by ({', '.join(by.split())}) " if by else how


def rate(name: str, by: str = "", over: str = INTERVAL, **where: str) -> str:
    """Return how much a counter rises a second, summed by `by`."""
    return f"{by_labels('sum', by)}(rate({checked(name, 'counter', by, where)}[{over}]))"


def rise(name: str, by: str, over: str, **where: str) -> str:
    """Return how much a counter has risen, summed by `by`."""
    return f"{by_labels('sum', by)}(increase({checked(name, 'counter', by, where)}[{over}]))"


def p95(name: str, by: str = "") -> str:
    """Return what 95 % of a histogram's observations stay below."""
    buckets = f"rate({checked(name, 'histogram', by, {})}[{INTERVAL}])"
    return f"histogram_quantile(0.95, {by_labels('sum', f'le {by}')}({buckets}))"


def gauge(name: str, how: str = "", by: str = "") -> str:
    """Return the value of a gauge, aggregated by `how` if that is given."""
    selector = checked(name, "gauge", by, {})
    return f"{by_labels(how, by)}({selector})" if how else selector


def of_all_workers(name: str, how: str = "sum") -> str:
    """Return the value of a router's gauge, of its workers together."""
    return f"{how} without (worker) ({checked(name, 'gauge', 'worker', {})})"


def share(name: str, part: str, whole: str) -> str:
    """Return which share of the events `whole` of a counter are `part`."""
    return f"{rate(name, event=part)} / {rate(name, event=whole)}"


def of_either(expression: Callable[[str], str]) -> str:
    """Return `expression` for both connectors."""
    return " or ".join(expression(prefix) for prefix in ("ecshare", "kvshare"))


# --- the board ---


@dataclass(frozen=True)
class Panel:
    """A diagram: its lines, an expression for each legend."""

    title: str
    unit: str
    """As Grafana names it."""
    lines: Mapping[str, str]


_AVOIDED = rate("ecshare_encodes_avoided_total")
BOARD = {
    "Router": [
        Panel(
            "Answers by status",
            "reqps",
            {"{{status}}": rate("ecshare_router_answers_total", "status")},
        ),
        Panel(
            "Until a stream began, 95 %",
            "s",
            {"{{path}}": p95("ecshare_router_first_byte_seconds", "path")},
        ),
        Panel(
            "Whole completions, 95 %",
            "s",
            {"{{path}}": p95("ecshare_router_request_seconds", "path")},
        ),
        Panel(
            "Requests at engines",
            "short",
            {"{{engine}}": of_all_workers("ecshare_router_outstanding")},
        ),
        Panel(
            "Until engines began to answer, 95 %",
            "s",
            {"{{stage}}": p95("ecshare_router_call_first_byte_seconds", "stage")},
        ),
        Panel(
            "Engines that get no requests",
            "short",
            {
                "{{stage}}": "count by (stage) "
                f"({of_all_workers('ecshare_router_engine_available', 'max')} == 0)"
            },
        ),
        Panel(
            "Share that was avoided",
            "percentunit",
            {
                "encodes": share("ecshare_router_encodes_total", "avoided", "asked|avoided"),
                "prefills": share("ecshare_router_prefills_total", "avoided", "asked|avoided"),
            },
        ),
        Panel("Errors by kind", "reqps", {"{{kind}}": rate("ecshare_router_errors_total", "kind")}),
        Panel(
            "Retries and fall-backs",
            "reqps",
            {
                "{{stage}} again": rate("ecshare_router_retries_total", "stage"),
                "decode alone": rate("ecshare_router_fallbacks_total"),
            },
        ),
        Panel(
            "Memory of requests in flight",
            "bytes",
            {"{{instance}}": of_all_workers("ecshare_router_in_flight_bytes")},
        ),
        Panel(
            "Memory of indexes",
            "bytes",
            {"{{index}}": of_all_workers("ecshare_router_index_bytes")},
        ),
        Panel(
            "Media from urls",
            "reqps",
            {"{{event}}": rate("ecshare_router_media_fetches_total", "event")},
        ),
    ],
    "Engines": [
        Panel(
            "Share of media items that were not encoded",
            "percentunit",
            {
                "encodes avoided": f"{_AVOIDED} / ({_AVOIDED} + "
                f"{rate('ecshare_items_total', event='encoded')})"
            },
        ),
        Panel(
            "Share of looked-up prompt tokens that were loaded",
            "percentunit",
            {"loaded": share("kvshare_tokens_total", "loaded", "queried")},
        ),
        Panel(
            "Circuit breakers that are open",
            "short",
            {
                "media {{half}} {{direction}}": gauge(
                    "ecshare_breaker_open", "sum", "half direction"
                ),
                "KV {{half}} {{direction}}": gauge("kvshare_breaker_open", "sum", "half direction"),
            },
        ),
        Panel(
            "Waits, 95 %",
            "s",
            {
                "media": p95("ecshare_wait_seconds"),
                "KV {{stage}}": p95("kvshare_wait_seconds", "stage"),
            },
        ),
        Panel(
            "Transfers of embeddings, 95 %",
            "s",
            {"{{direction}} {{tier}}": p95("ecshare_transfer_seconds", "direction tier")},
        ),
        Panel(
            "Transfers of KV, 95 %",
            "s",
            {"{{direction}} {{tier}}": p95("kvshare_transfer_seconds", "direction tier")},
        ),
        Panel(
            "Bytes moved",
            "Bps",
            {
                "media {{direction}} {{tier}}": rate(
                    "ecshare_transfer_bytes_total", "direction tier"
                ),
                "KV {{direction}} {{tier}}": rate("kvshare_transfer_bytes_total", "direction tier"),
            },
        ),
        Panel(
            "Misses by reason",
            "short",
            {
                "media {{reason}}": rate("ecshare_misses_total", "reason"),
                "KV {{reason}}": rate("kvshare_misses_total", "reason"),
            },
        ),
        Panel(
            "Memory of saves in flight",
            "bytes",
            {
                "media": gauge("ecshare_save_queue_bytes", "sum"),
                "KV": gauge("kvshare_save_queue_bytes", "sum"),
            },
        ),
    ],
}
_ABREAST, _WIDTH, _HEIGHT = 3, 8, 8


def board() -> str:
    """Return grafana.json."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, diagrams in BOARD.items():
        place = {"x": 0, "y": top, "w": _ABREAST * _WIDTH, "h": 1}
        named = {"id": len(panels) + 1, "title": row, "type": "row", "collapsed": False}
        panels.append(named | {"gridPos": place, "panels": []})
        for n, panel in enumerate(diagrams):
            x, y = n % _ABREAST * _WIDTH, top + 1 + n // _ABREAST * _HEIGHT
            place = {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT}
            panels.append(diagram(len(panels) + 1, panel) | {"gridPos": place})
        top = panels[-1]["gridPos"]["y"] + _HEIGHT
    variable = {"name": "datasource", "label": "Data source", "type": "datasource"}
    said = {
        "title": "ecshare",
        "uid": "ecshare",
        "tags": ["vllm", "ecshare"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable | {"query": "prometheus"}]},
        "annotations": {"list": []},
        "panels": panels,
    }
    return json.dumps(said, indent=1) + "\n"


def diagram(number: int, panel: Panel) -> dict[str, Any]:
    """Return a panel as Grafana has it, without its place."""
    most = {"max": 1} if panel.unit == "percentunit" else {}
    return {
        "id": number,
        "title": panel.title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, **most}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "expr": expression, "legendFormat": legend}
            for n, (legend, expression) in enumerate(panel.lines.items())
        ],
    }


# --- the alerts ---


@dataclass(frozen=True)
class Alert:
    """A rule. docs/runbook.md says what to do at each."""

    name: str
    expression: str
    lasts: str
    """How long it holds before it is told; "": at once."""
    summary: str


ALERTS = {
    "ecshare-engines": [
        Alert(
            "StoreIsPaused",
            of_either(
                lambda of: gauge(f"{of}_breaker_open", "max", "instance half direction") + " == 1"
            ),
            "5m",
            "{{ $labels.instance }} leaves the store alone ({{ $labels.half }}, "
            "{{ $labels.direction }}): it fails or is slow. Requests are computed without it.",
        ),
        Alert(
            "SharingGaveUp",
            of_either(lambda of: rise(f"{of}_gave_up_total", "instance half", "15m") + " > 0"),
            "",
            "The {{ $labels.half }} of {{ $labels.instance }} met a bug and shares nothing until "
            "a restart. Its log has the reason.",
        ),
        Alert(
            "ObjectsAreDamaged",
            of_either(
                lambda of: rise(f"{of}_misses_total", "instance", "1h", reason="corrupt") + " > 0"
            ),
            "",
            "{{ $labels.instance }} read damaged objects. They count as missing; find out who "
            "writes them.",
        ),
        Alert(
            "SavesAreDropped",
            rate("ecshare_items_total", "instance", "10m", event="dropped")
            + " > 0 or "
            + rate("kvshare_blocks_total", "instance", "10m", event="dropped")
            + " > 0",
            "30m",
            "{{ $labels.instance }} does not save all it computes: the store is too slow, or "
            "buffer_bytes too small.",
        ),
        Alert(
            "LoadsAreLate",
            of_either(
                lambda of: rate(f"{of}_misses_total", "instance", "10m", reason="late") + " > 0"
            ),
            "30m",
            "Requests of {{ $labels.instance }} wait for all of wait_s in vain.",
        ),
    ],
    "ecshare-router": [
        Alert(
            "EngineGetsNoRequests",
            of_all_workers("ecshare_router_engine_available", "max") + " == 0",
            "2m",
            "The router sends nothing to {{ $labels.engine }}: it fails or hangs.",
        ),
        Alert(
            "DecodeWorksAlone",
            rate("ecshare_router_fallbacks_total", "instance", "10m")
            + " / "
            + rate("ecshare_router_answers_total", "instance", "10m", status="2xx")
            + " > 0.05",
            "10m",
            "Decode answers more than 5 % of requests alone, because encode or prefill fails.",
        ),
        Alert(
            "RouterAnswersErrors",
            rate("ecshare_router_answers_total", "instance", "5m", status="5xx")
            + " / "
            + rate("ecshare_router_answers_total", "instance", "5m")
            + " > 0.01",
            "5m",
            "More than 1 % of answers are errors of ours.",
        ),
        Alert(
            "RouterIsFull",
            f"max_over_time({gauge('ecshare_router_in_flight_bytes')}[5m]) / "
            f"{gauge('ecshare_router_in_flight_limit_bytes')} > 0.9",
            "5m",
            "Requests in flight take nearly all of --max-in-flight-mb; beyond it they are "
            "answered 429.",
        ),
    ],
}


def alerts() -> str:
    """Return alerts.yml."""
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Rules for Prometheus, written by `make monitoring`. docs/metrics.md has each metric.",
        "groups:",
    ]
    for group, rules in ALERTS.items():
        lines += [f"  - name: {group}", "    rules:"]
        for rule in rules:
            lines += [f"      - alert: {rule.name}", f"        expr: {rule.expression}"]
            lines += [f"        for: {rule.lasts}"] if rule.lasts else []
            lines += ["        annotations:", f'          summary: "{rule.summary}"']
            lines += [f"          runbook_url: {RUNBOOK}"]
    return "\n".join([*lines, ""])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    is_check, status = parser.parse_args().check, 0
    for name, content in {"grafana.json": board(), "alerts.yml": alerts()}.items():
        path = FOLDER / name
        if not is_check:
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            print(f"{name} is not up to date: run `make monitoring`", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
