# SPDX-License-Identifier: Apache-2.0
"""The alerts and the dashboard query only existing series."""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import ecshare.encoder.metrics
import kvshare.metrics
from ecshare.plugin.metrics import MetricTable
from ecshare.router.http.context import STATUS_CLASSES
from ecshare.transfer.stats import is_gauge
from tests.docs.pages import ROOT, first_column

FOLDER = ROOT / "examples" / "monitoring"
PROGRAM = runpy.run_path(str(ROOT / "scripts" / "write_monitoring.py"))
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


def test_files_are_what_the_table_says() -> None:
    assert (FOLDER / "grafana.json").read_text() == PROGRAM["board"](), "make monitoring"
    assert (FOLDER / "alerts.yml").read_text() == PROGRAM["alerts"](), "make monitoring"


@pytest.mark.parametrize(
    ("name", "by", "where", "complaint"),
    [
        ("ecshare_item_total", "", {}, "no counter ecshare_item_total"),
        ("ecshare_save_queue_bytes", "", {}, "no counter"),
        ("ecshare_items_total", "kind", {}, "no label kind"),
        (
            "ecshare_items_total",
            "",
            {"event": "lost"},
            "event of ecshare_items_total is never lost",
        ),
        ("ecshare_router_answers_total", "", {"status": "6xx"}, "never 6xx"),
    ],
)
def test_a_name_that_no_code_defines_is_refused(
    name: str, by: str, where: Mapping[str, str], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        PROGRAM["rate"](name, by, **where)


@pytest.fixture(scope="session")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not here; Debian has it in the package prometheus")
    return found


def test_promtool_accepts_the_alerts_and_all_expressions(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{n}", "expr": expression.replace("$__rate_interval", "5m")}
        for n, expression in enumerate(expressions(FOLDER / "grafana.json"))
    ]
    assert len(rules) > 20
    board = tmp_path / "board.yml"
    board.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    for path in (FOLDER / "alerts.yml", board):
        subprocess.run([promtool, "check", "rules", path], check=True)


# For each alert: series of an hour in which it fires, and others in which it does not.
KV = 'instance="e",half="worker",direction="read"'
D = 'instance="r",stage="decode",engine="decode-1"'
CASES: list[tuple[str, dict[str, str], dict[str, str], dict[str, str]]] = [
    (
        "StoreIsPaused",
        {f"kvshare_breaker_open{{{KV}}}": "1x60"},
        {f"kvshare_breaker_open{{{KV}}}": "0x48 1x12"},
        {"instance": "e", "half": "worker", "direction": "read"},
    ),
    (
        "SharingGaveUp",
        {'ecshare_gave_up_total{instance="e",half="scheduler"}': "0x40 1x20"},
        {'ecshare_gave_up_total{instance="e",half="scheduler"}': "1x60"},
        {"instance": "e", "half": "scheduler"},
    ),
    (
        "ObjectsAreDamaged",
        {'kvshare_misses_total{instance="e",reason="corrupt"}': "0x20 3x40"},
        {'kvshare_misses_total{instance="e",reason="missing"}': "0+9x60"},
        {"instance": "e"},
    ),
    (
        "SavesAreDropped",
        {'ecshare_items_total{instance="e",event="dropped"}': "0+1x60"},
        {'kvshare_blocks_total{instance="e",event="dropped"}': "0x45 9x15"},
        {"instance": "e"},
    ),
    (
        "LoadsAreLate",
        {'ecshare_misses_total{instance="e",reason="late"}': "0+1x60"},
        {'ecshare_misses_total{instance="e",reason="late"}': "5x60"},
        {"instance": "e"},
    ),
    (
        "EngineGetsNoRequests",
        {f'ecshare_router_engine_available{{{D},worker="{n}"}}': "0x60" for n in (0, 1)},
        {f'ecshare_router_engine_available{{{D},worker="{n}"}}': f"{n}x60" for n in (0, 1)},
        {"instance": "r", "stage": "decode", "engine": "decode-1"},
    ),
    (
        "DecodeWorksAlone",
        {
            'ecshare_router_fallbacks_total{instance="r"}': "0+6x60",
            'ecshare_router_answers_total{instance="r",status="2xx"}': "0+100x60",
        },
        {
            'ecshare_router_fallbacks_total{instance="r"}': "0+4x60",
            'ecshare_router_answers_total{instance="r",status="2xx"}': "0+100x60",
        },
        {"instance": "r"},
    ),
    (
        "RouterAnswersErrors",
        {
            'ecshare_router_answers_total{instance="r",status="5xx"}': "0+2x60",
            'ecshare_router_answers_total{instance="r",status="2xx"}': "0+98x60",
        },
        {
            'ecshare_router_answers_total{instance="r",status="4xx"}': "0+50x60",
            'ecshare_router_answers_total{instance="r",status="5xx"}': "0x60",
        },
        {"instance": "r"},
    ),
    (
        "RouterIsFull",
        {
            'ecshare_router_in_flight_bytes{instance="r"}': "95x60",
            'ecshare_router_in_flight_limit_bytes{instance="r"}': "100x60",
        },
        {
            'ecshare_router_in_flight_bytes{instance="r"}': "80x60",
            'ecshare_router_in_flight_limit_bytes{instance="r"}': "100x60",
        },
        {"instance": "r"},
    ),
]


def test_alerts_fire_when_they_should_and_only_then(promtool: str, tmp_path: Path) -> None:
    rules = {rule.name: rule for group in PROGRAM["ALERTS"].values() for rule in group}
    assert [name for name, *_ in CASES] == list(rules)
    tests = []
    for name, fires, is_quiet, labels in CASES:
        summary = rules[name].summary
        for label, value in labels.items():
            summary = summary.replace(f"{{{{ $labels.{label} }}}}", value)
        told = {"summary": summary, "runbook_url": PROGRAM["RUNBOOK"]}
        for series, alerts in (
            (fires, [{"exp_labels": labels, "exp_annotations": told}]),
            (is_quiet, []),
        ):
            expected = {"eval_time": "50m", "alertname": name, "exp_alerts": alerts}
            inputs = [{"series": key, "values": values} for key, values in series.items()]
            tests.append({"interval": "1m", "input_series": inputs, "alert_rule_test": [expected]})
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    file = tmp_path / "tests.yml"
    file.write_text(
        json.dumps({"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests})
    )
    subprocess.run([promtool, "test", "rules", file], check=True)
