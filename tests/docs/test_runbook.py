# SPDX-License-Identifier: Apache-2.0
"""docs/runbook.md has each alert, names commands and metrics that exist, and its sums are right."""

import json
import re

import pytest

from ecshare.cli import main
from ecshare.commands.group import COMMANDS
from tests.docs.pages import ROOT, commands, first_column

PATH = ROOT / "docs" / "runbook.md"
PAGE = PATH.read_text()
ALERTS = PAGE.partition("\n## Alerts\n")[2]


def test_each_alert_has_a_row_and_each_row_an_alert() -> None:
    rules = (ROOT / "examples" / "monitoring" / "alerts.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    rows = re.findall(r"^\| `(\w+)` \|([^|]+)\|([^|]+)\|([^|]+)\|$", ALERTS, re.M)
    assert [name for name, *_ in rows] == alerts
    for name, _, look_at, _ in rows:
        assert look_at.count(";") >= 2, f"{name}: three things to look at"


def test_commands_and_metrics_exist() -> None:
    for command in re.findall(r"`ecshare ([a-z-]+)", PAGE):
        assert command in COMMANDS, command
    known = first_column(ROOT / "docs" / "metrics.md")
    for name in re.findall(r"`((?:ec|kv)share_\w+)`", PAGE):
        assert name in known, name
    for suffix in re.findall(r"`\*(_\w+)`", PAGE):
        assert {f"ecshare{suffix}", f"kvshare{suffix}"} <= known, suffix


def test_sizes_are_what_the_command_computes(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = [words for words in commands(PATH) if words[:2] == ["ecshare", "cost"]]
    with pytest.raises(SystemExit):
        main(words[1:])
    found = json.loads(capsys.readouterr().out)
    month, days = found["month"], 30
    puts, gets = month["num_puts"] / days, month["num_gets"] / days
    written_gb = month["written_gb"] / days
    sizes = {
        "*b*, without windows and states": f"{found['bytes'] // 4096:,} bytes",
        "written to the bucket a day": f"{written_gb:,.0f} GB",
        "in the bucket": f"{month['stored_gb']:,.0f} GB after a day",
        "puts": f"{puts:,.0f} a day, {puts / 86400:.1f} a second",
        "gets and look-ups": f"{gets:,.0f} a day, {gets / 86400:.1f} a second",
        "network out of an engine, at its busiest": f"{30000 * found['bytes'] / 4096e9:.1f} GB/s",
        "network into an engine": f"{found['pays_from_bytes_per_s'] / 1e9:.1f} GB/s",
    }
    rows = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", PAGE, re.M))
    assert {name: rows[name] for name in sizes} == sizes
