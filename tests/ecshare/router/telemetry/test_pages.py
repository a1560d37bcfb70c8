# SPDX-License-Identifier: Apache-2.0
"""Who is shown what, what nobody is shown, and what several workers tell as one router's."""

import base64
import hashlib
import json
import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from ecshare.router.telemetry.pages import by_worker, merged
from tests.ecshare.router.bodies import PNG, chat, data_url, picture
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.telemetry.asking import get

SECRETS = ("sk-a-clients-key", "what is this", "my-request", "unheard_of", PNG.decode("latin-1"))


@pytest.mark.parametrize("key", [None, "", "Bearer not the status key"])
@pytest.mark.parametrize("path", ["/metrics", "/status", "/dashboard/data"])
async def test_without_the_status_key_there_is_no_data(
    f: Fleet, path: str, key: str | None
) -> None:
    headers = {} if key is None else {"Authorization": key}
    response, text = await get(f, path, headers)
    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert json.loads(text)["error"]["code"] == "status_key_needed"
    assert "127.0.0.1" not in text
    response, text = await get(f, "/dashboard", headers)
    assert response.status == 200
    assert f.d.url not in text


@pytest.mark.parametrize("path", ["/status", "/dashboard/data"])
async def test_a_router_without_a_key_shows_nothing_and_says_why(path: str) -> None:
    async with fleet(status_key=None) as f:
        response, text = await get(f, path)
        assert response.status == 401
        assert "--status-key" in json.loads(text)["error"]["message"]


async def test_metrics_of_a_router_without_a_key_name_engines_and_no_urls(f: Fleet) -> None:
    _, with_key = await get(f, "/metrics")
    async with fleet(status_key=None) as keyless:
        _, text = await get(keyless, "/metrics", {"Accept": "text/plain"})
        assert 'engine="decode-1"' in text
        assert not [each.url for each in (keyless.e, keyless.p, keyless.d) if each.url in text]
    assert all(each.url in with_key for each in (f.e, f.p, f.d))


@pytest.mark.parametrize("path", ["/metrics", "/status", "/dashboard/data"])
async def test_nothing_that_a_client_writes_is_shown(f: Fleet, path: str) -> None:
    headers = {"Authorization": "Bearer sk-a-clients-key", "x-request-id": "my-request"}
    await f.post(chat(picture(PNG), unheard_of=1), headers=headers)
    await get(f, "/sk-a-clients-key/my-request", headers)
    _, text = await get(f, path)
    assert not [each for each in (*SECRETS, data_url(PNG)) if each in text]


async def test_the_dashboard_needs_nothing_from_elsewhere_and_may_load_nothing(f: Fleet) -> None:
    response, page = await get(f, "/dashboard", {})
    assert not re.findall(r"https?:|//\w|\bsrc=|\bhref=|@import|url\(", page)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", page)
    policy = response.headers["Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert rules.pop("connect-src") == "'self'"
    assert set(rules.values()) == {"'none'"}
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} == set(rules)


# --- several workers ---

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
