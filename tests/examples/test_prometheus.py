# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus, set up as the page says, finds what the dashboard and the alerts ask for."""

import asyncio
import json
import math
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import ecshare.encoder.metrics
import kvshare.metrics
from ecshare.plugin.metrics import PrometheusCounters
from ecshare.transfer.stats import Stats, is_gauge
from lab.completions import AGAIN, NEW, TEXT, Requests
from lab.http_load import Client, by_clients, post
from lab.servers.processes import LOOPBACK, Server
from lab.servers.router import RouterProcess
from lab.servers.stand_in import StandIn
from tests.conftest import LOGS
from tests.docs.pages import fences
from tests.examples.test_monitoring import FOLDER, expressions
from tests.waiting import wait_until

KEY = "a-status-key-for-prometheus-0123"
EACH_SECOND = "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
TABLES = {"ecshare": ecshare.encoder.metrics.METRICS, "kvshare": kvshare.metrics.METRICS}
STAGES = (("encoder", "encode"), ("prefiller", "prefill"), ("decoder", "decode"))


class Prometheus(Server):
    """A server of Prometheus's own program."""

    def __init__(self, program: str, config: Path) -> None:
        super().__init__("prometheus", LOGS)
        self._program, self._config = program, config

    def command(self) -> list[str]:
        """Return the command line; its data lie beside the configuration."""
        return [
            self._program,
            f"--config.file={self._config}",
            f"--storage.tsdb.path={self._config.parent / 'data'}",
            f"--web.listen-address={LOOPBACK}:{self.port.number}",
        ]

    @property
    def health_url(self) -> str:
        """Return the url that answers 200 once queries are served."""
        return f"{self.base_url}/-/ready"

    def get(self, what: str, **parameters: str) -> Any:
        """Return the data of an answer."""
        url = f"{self.base_url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """Return the value that each series of an expression has now."""
        return [float(each["value"][1]) for each in self.get("query", query=expression)["result"]]


class Engine:
    """The /metrics of an engine with both connectors, whose counts rise on demand."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        types: dict[type[Any], Any] = {
            kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
        }
        self._counters = {
            prefix: PrometheusCounters(
                prefix, table, types, ["model_name", "engine"], {0: ["m", "0"]}
            )
            for prefix, table in TABLES.items()
        }
        self._server, self._thread = prometheus_client.start_http_server(0, LOOPBACK, registry)
        self.target = f"{LOOPBACK}:{self._server.server_port}"

    def count(self) -> None:
        """Count one of everything."""
        for prefix, table in TABLES.items():
            stats = Stats()
            for family, metric in table.items():
                for labels in product(*metric.labels.values()):
                    name = "/".join((family, *labels))
                    if metric.is_histogram:
                        stats.observe(name, 0.1)
                    else:
                        (stats.set if is_gauge(name) else stats.add)(name, 1.0)
            self._counters[prefix].observe(stats.take())

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def program() -> str:
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("prometheus is not here; Debian has it in the package of this name")
    return found


@pytest.fixture
def fleet() -> Iterator[tuple[RouterProcess, StandIn, Engine, str]]:
    """A router with engines, one of which can be killed, an engine's page, and a key's file."""
    with ExitStack() as stack:
        engines = {
            option: [
                stack.enter_context(StandIn(f"prometheus-{stage}-{n}", LOGS, stage))
                for n in range(2 if stage == "decode" else 1)
            ]
            for option, stage in STAGES
        }
        key = LOGS / "prometheus.key"
        key.write_text(KEY)
        key.chmod(0o600)
        options = [f"--status-key=file:{key}"]
        router = RouterProcess("prometheus-router", LOGS, engines, options)
        engine = Engine()
        stack.callback(engine.close)
        yield stack.enter_context(router), engines["decoder"][1], engine, str(key)


async def send(router: RouterProcess, requests: Requests) -> None:
    """Send some of each kind, and one that is refused."""
    client = Client(router.port.number)
    try:
        kinds = [TEXT, NEW, AGAIN, AGAIN]
        good = [requests.next(kind, streams=streams) for kind in kinds for streams in (False, True)]
        await by_clients(client.ask, good, 2)
        await client.ask(post("/v1/chat/completions", b'{"messages":1}'))
    finally:
        client.close()


def test_every_expression_finds_series(
    program: str, fleet: tuple[RouterProcess, StandIn, Engine, str], tmp_path: Path
) -> None:
    router, mortal, engine, key = fleet
    (config,) = fences(FOLDER / "README.md", "yaml")
    for told, ours in {
        '"10.0.0.1:8001", "10.0.0.2:8001"': f'"{engine.target}"',
        '"10.0.0.3:8000"': f'"{LOOPBACK}:{router.port.number}"',
        "/etc/ecshare/status.key": key,
    }.items():
        assert told in config, "the page has other targets now"
        config = config.replace(told, ours)
    (tmp_path / "prometheus.yml").write_text(EACH_SECOND + config)
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    board = [
        each.replace("$__rate_interval", "1m") for each in expressions(FOLDER / "grafana.json")
    ]
    assert len(board) > 20
    requests = Requests(3_000)
    asyncio.run(send(router, requests))
    mortal.kill()
    with Prometheus(program, tmp_path / "prometheus.yml") as prometheus:
        missing = set(board)

        def all_found() -> bool:
            asyncio.run(send(router, requests))
            engine.count()
            missing.difference_update(
                [each for each in missing if any(map(math.isfinite, prometheus.values(each)))]
            )
            print(f"without a series: {missing}")
            return not missing

        wait_until(all_found, 60, "there are expressions without a series", pause_s=0.5)

        def rules() -> list[dict[str, Any]]:
            groups = prometheus.get("rules")["groups"]
            return [rule for group in groups for rule in group["rules"]]

        wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), 30)
        assert len(rules()) == len(list(expressions(FOLDER / "alerts.yml")))
        assert {rule["name"]: rule.get("lastError") for rule in rules()} == {
            rule["name"]: None for rule in rules()
        }
        # All of them have happened, but not for as long as it takes to fire.
        happened = {"EngineGetsNoRequests", "StoreIsPaused", "ObjectsAreDamaged", "SharingGaveUp"}
        wait_until(
            lambda: happened <= {rule["name"] for rule in rules() if rule["state"] != "inactive"},
            otherwise="an alert does not see what has happened",
        )
