# SPDX-License-Identifier: Apache-2.0
"""What several workers tell, as one router's."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from ecshare.router.telemetry.pages import by_worker, merged

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def exposed(number: int, accept: str) -> bytes:
    registry = CollectorRegistry()
    Counter("asked", "By path.", ["path"], registry=registry).labels('a"} 1\\').inc(number)
    Gauge("used", "Bytes.", registry=registry).set(number)
    Histogram("took", "Seconds.", buckets=(1, 5), registry=registry).observe(number)
    return choose_encoder(accept)[0](registry)


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_each_sample_tells_its_worker(accept: str) -> None:
    alone = {number: exposed(number, accept) for number in (2, 3)}
    parse = openmetrics.text_string_to_metric_families if accept else text_string_to_metric_families

    def samples(text: bytes) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
        return sorted(
            (each.name, tuple(sorted(each.labels.items())), each.value)
            for family in parse(text.decode())
            for each in family.samples
            if not each.name.endswith("_created")
        )

    wanted = sorted(
        (name, tuple(sorted((*labels, ("worker", str(number))))), value)
        for number, text in alone.items()
        for name, labels, value in samples(text)
    )
    both = by_worker(alone)
    assert samples(both) == wanted
    lines = both.decode().splitlines()
    assert len([each for each in lines if each.startswith("# TYPE used")]) == 1
    assert lines.count("# EOF") == (1 if accept else 0)


def test_metrics_that_only_one_has_are_kept() -> None:
    both = by_worker({0: b"# HELP a A.\n# TYPE a gauge\na 1\n", 1: b"# TYPE b gauge\nb 2.0\n"})
    assert both == (
        b'# HELP a A.\n# TYPE a gauge\na{worker="0"} 1\n# TYPE b gauge\nb{worker="1"} 2.0\n'
    )


def test_numbers_are_added_up_and_engines_are_told_by_their_urls() -> None:
    one = {
        "draining": False,
        "counts": {"asked": 1, "paths": {"decode": 2}},
        "engines": [{"url": "a", "state": "up", "in_flight": 1, "models": ["m"], "healthy": True}],
        "requests": [{"at_s": 1.5}],
    }
    other = {
        "draining": True,
        "counts": {"asked": 10, "paths": {"prefill,decode": 5}},
        "engines": [
            {"url": "b", "state": "up", "in_flight": 7, "models": None},
            {"url": "a", "state": "down", "in_flight": 2, "models": ["m"]},
        ],
        "requests": [{"at_s": 0.5}],
    }
    assert merged([one, other]) == {
        "draining": True,
        "counts": {"asked": 11, "paths": {"decode": 2, "prefill,decode": 5}},
        "engines": [
            {"url": "a", "state": "up", "in_flight": 3, "models": ["m"], "healthy": True},
            {"url": "b", "state": "up", "in_flight": 7, "models": None},
        ],
        "requests": [{"at_s": 1.5}, {"at_s": 0.5}],
    }
    assert merged([one]) == one
