# SPDX-License-Identifier: Apache-2.0
"""The alerts and the dashboard query only existing series."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ecshare.encoder.metrics
import kvshare.metrics
from ecshare.plugin.metrics import MetricTable
from ecshare.router.http.context import STATUS_CLASSES
from ecshare.transfer.stats import is_gauge
from tests.docs.pages import ROOT, first_column

FOLDER = ROOT / "examples" / "monitoring"
FILES = (FOLDER / "alerts.yml", FOLDER / "grafana.json")
GROUPED = re.compile(r"by \(([^)]*)\) \((?:(?:rate|increase)\()?((?:ec|kv)share_\w+)")
# Selectors of the expressions; those of connectors are looked up in their tables.
ROUTERS = {"event": {"asked", "avoided"}, "status": set(STATUS_CLASSES)}


def expressions(path: Path) -> Iterator[str]:
    if path.suffix == ".json":
        panels = json.loads(path.read_text())["panels"]
        yield from (target["expr"] for panel in panels for target in panel.get("targets", []))
    else:
        yield from re.findall(r"^ *expr: (.*)$", path.read_text(), re.M)


def names_of(prefix: str, metrics: MetricTable) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return every series of a connector, with the values of its labels."""
    found = {}
    for family, metric in metrics.items():
        suffix = "_bucket" if metric.is_histogram else "" if is_gauge(family) else "_total"
        found[f"{prefix}_{metric.name}{suffix}"] = dict(metric.labels)
    return found


CONNECTORS = names_of("ecshare", ecshare.encoder.metrics.METRICS) | names_of(
    "kvshare", kvshare.metrics.METRICS
)
DOCUMENTED = first_column(ROOT / "docs" / "metrics.md")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_series_exists(path: Path) -> None:
    found = [
        (name, selector)
        for expression in expressions(path)
        for name, selector in re.findall(r"\b((?:ec|kv)share_\w+)(?:\{([^}]*)\})?", expression)
    ]
    assert len(found) > 10
    for name, selector in found:
        assert name.removesuffix("_bucket") in DOCUMENTED, name
        is_routers = name.startswith("ecshare_router_")
        assert is_routers or name in CONNECTORS, name
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            known = ROUTERS[label] if is_routers else CONNECTORS[name][label]
            assert set(values.split("|")) <= set(known), (name, label)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_series_are_grouped_by_their_own_labels(path: Path) -> None:
    for expression in expressions(path):
        for by, name in re.findall(
            r"by \(([^)]*)\) \((?:(?:rate|increase)\()?((?:ec|kv)share_\w+)", expression
        ):
            own = set(by.replace(" ", "").split(",")) - {"le", "instance"}
            if name in CONNECTORS:
                assert own <= set(CONNECTORS[name]), (name, own)
            else:
                row = row_of(name.removesuffix("_bucket"))
                assert all(f"`{label}`" in row for label in own), (name, own)


def row_of(name: str) -> str:
    page = (ROOT / "docs" / "metrics.md").read_text()
    (row,) = re.findall(rf"^\| `{name}` \|(.*)\|$", page, re.M)
    return str(row)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_brackets_are_closed(path: Path) -> None:
    for expression in expressions(path):
        for one, other in ("()", "[]", "{}"):
            assert expression.count(one) == expression.count(other), expression


def test_panels_neither_overlap_nor_share_a_number() -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(cells)) == len(cells)
