# SPDX-License-Identifier: Apache-2.0
"""What /metrics tells of requests, engines and what was spared."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ecshare.router.api.chat import CHAT
from ecshare.router.http.bodies import MemoryBudget
from ecshare.router.http.context import OUTCOMES, STATUS_CLASSES, EngineCall
from ecshare.router.telemetry.metrics import RouterMetrics, Sources
from ecshare.router.types import Stage
from tests.ecshare.router.fake_engine import (
    LOOPBACK,
    PNG,
    PNG_2,
    STATUS_KEY,
    Fleet,
    Hanging,
    Held,
    chat,
    data_url,
    decoded,
    failing,
    fleet,
    hang_up,
    listening,
    picture,
    prefilled,
)
from tests.waiting import until

ROOT = Path(__file__).parents[4]
PREFIX = "ecshare_router_"
SOON_S = 10.0
BEARER = {"Authorization": f"Bearer {STATUS_KEY}"}
SECRETS = ("sk-a-clients-key", "what is this", "my-request", "unheard_of")


async def scrape(f: Fleet, headers: dict[str, str] | None = None) -> str:
    async with f.client.get(f.url + "/metrics", headers=headers or BEARER) as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        return await response.text()


async def families(f: Fleet) -> dict[str, Metric]:
    return {each.name: each for each in text_string_to_metric_families(await scrape(f))}


async def samples(f: Fleet) -> dict[str, float]:
    """The value of each series, as `name{label=value,...}` without our prefix."""
    return {
        f"{sample.name.removeprefix(PREFIX)}{{{labels(sample.labels)}}}": sample.value
        for family in (await families(f)).values()
        for sample in family.samples
    }


def labels(values: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(values.items()))


async def until_no_request_is_left(f: Fleet) -> None:
    """The router learns a moment later that a client has gone."""

    async def is_alone() -> bool:
        return (await samples(f))["requests_in_progress{}"] == 1

    await until(is_alone)


async def test_each_request_and_each_call_is_counted_and_timed() -> None:
    async with fleet() as f:
        await f.post(chat(picture(PNG)))
        await f.post(chat(picture(PNG), stream=True))
        found = await samples(f)
    assert found[f"answers_total{{route={CHAT},status=2xx}}"] == 2
    for path in ("encode,prefill,decode", "prefill,decode"):
        assert found[f"request_seconds_count{{path={path}}}"] == 1
        assert 0 < found[f"request_seconds_sum{{path={path}}}"] < SOON_S
    assert found["first_byte_seconds_count{path=prefill,decode}"] == 1, "the stream"
    assert "first_byte_seconds_count{path=encode,prefill,decode}" not in found
    for stage, number in (("encode", 1), ("prefill", 2), ("decode", 2)):
        assert found[f"calls_total{{engine={stage}-1,outcome=ok,stage={stage}}}"] == number
        assert found[f"call_seconds_count{{stage={stage}}}"] == number
        assert found[f"call_first_byte_seconds_count{{stage={stage}}}"] == number
        first_byte_s = found[f"call_first_byte_seconds_sum{{stage={stage}}}"]
        assert first_byte_s <= found[f"call_seconds_sum{{stage={stage}}}"]
    assert found["encodes_total{event=asked}"] == found["encodes_total{event=avoided}"] == 1


async def test_a_stream_begins_with_its_first_event_not_with_its_head() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        begun.set()
        await go_on.wait()
        await response.write(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        return response

    async with fleet(0, 0) as f:
        f.d.answer = answer
        asked = asyncio.create_task(f.post(chat(stream=True)))
        await asyncio.wait_for(begun.wait(), SOON_S)
        before = await samples(f)
        assert before["outstanding{engine=decode-1,stage=decode}"] == 1
        assert before["requests_in_progress{}"] == 2, "this one and that for the metrics"
        assert before["in_flight_bytes{}"] > 0
        while_it_waits_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.05)
        waited_s = asyncio.get_running_loop().time() - while_it_waits_s
        go_on.set()
        await asked
        found = await samples(f)
    assert found["call_first_byte_seconds_sum{stage=decode}"] >= waited_s
    assert found["first_byte_seconds_sum{path=decode}"] >= waited_s
    assert found["outstanding{engine=decode-1,stage=decode}"] == 0
    assert found["in_flight_bytes{}"] == 0


async def test_what_goes_wrong_is_counted_by_kind() -> None:
    async with fleet(num_d=2) as f:
        f.e.answer = failing(500)
        await f.post(chat(picture(PNG)))
        await f.post({"messages": 1})
        await f.post(chat(model="another"))
        for engine in f.decoders:
            engine.answer = failing(422)
        await f.post(chat())
        for engine in f.decoders:
            engine.answer = hang_up
        await f.post(chat())
        async with f.client.get(f.url + "/no/such/page"):
            pass
        found = await samples(f)
    assert found["calls_total{engine=encode-1,outcome=failed,stage=encode}"] == 1
    assert found["fallbacks_total{}"] == 2, "E, and all of D after P"
    assert found[f"answers_total{{route={CHAT},status=4xx}}"] == 3
    assert found[f"answers_total{{route={CHAT},status=5xx}}"] == 1
    assert found["answers_total{route=none,status=4xx}"] == 1
    for kind in ("invalid_request", "model_not_found", "engine", "engine_failed", "unknown_url"):
        assert found[f"errors_total{{kind={kind}}}"] == 1
    name = "calls_total{{engine=decode-{},outcome=refused,stage=decode}}"
    assert sum(found[name.format(number)] for number in (1, 2)) == 1


async def test_stages_that_are_asked_again_are_counted() -> None:
    async with fleet(0, 0, num_d=2) as f:
        for engine in f.decoders:
            engine.answer = hang_up
        await f.post(chat())
        assert (await samples(f))["retries_total{stage=decode}"] == 1
    async with fleet() as f:
        await f.post(chat(picture(PNG)))
        f.d.answer = failing(500)
        await f.post(chat(picture(PNG)))
        assert (await samples(f))["retries_total{stage=encode}"] == 1


async def test_a_stream_that_breaks_is_an_error_although_it_began_well() -> None:
    async def breaks(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        return await hang_up(http, body)

    async with fleet(0, 0) as f:
        f.d.answer = breaks
        await f.post(chat(stream=True))
        found = await samples(f)
    assert found["errors_total{kind=engine_failed}"] == 1
    assert found["calls_total{engine=decode-1,outcome=failed,stage=decode}"] == 1


async def test_a_client_that_leaves_is_no_error() -> None:
    async with fleet(0, 0) as f:
        f.d.answer = hanging = Hanging()
        asked = asyncio.create_task(f.post(chat()))
        await asyncio.wait_for(hanging.asked.wait(), SOON_S)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.wait_for(hanging.left.wait(), SOON_S)
        await until_no_request_is_left(f)
        found = await samples(f)
    assert found[f"answers_total{{route={CHAT},status=client_gone}}"] == 1
    assert found["calls_total{engine=decode-1,outcome=cancelled,stage=decode}"] == 1
    assert not [name for name in found if name.startswith("errors_total")]


async def test_overload_has_a_status_of_its_own() -> None:
    async with fleet(0, 0, max_in_flight_bytes=5000) as f:
        f.d.answer = held = Held(decoded)
        asked = asyncio.create_task(f.post(chat(picture(PNG))))
        await asyncio.wait_for(held.asked.wait(), SOON_S)
        assert (await f.post(chat(picture(b"x" * 4000))))[0].status == 429
        held.let_go.set()
        await asked
        found = await samples(f)
    assert found[f"answers_total{{route={CHAT},status=429}}"] == 1
    assert found["errors_total{kind=too_many_requests}"] == 1
    assert found["in_flight_limit_bytes{}"] == 5000


async def test_what_is_spared_and_remembered_is_counted() -> None:
    async def stored(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = {"kv_transfer_params": {"kvshare": {"num_tokens": 7}}}
        return web.json_response(answer | {"usage": {"prompt_tokens": 8}})

    async with fleet(max_index_bytes=700) as f:
        f.p.answer = stored
        for content in (PNG, PNG, PNG_2):
            await f.post(chat(picture(content)))
        found = await samples(f)
    assert found["prefills_total{event=avoided}"] == 1
    assert found["prefills_total{event=asked}"] == 2
    for index in ("encodes", "prefills"):
        assert found[f"index_entries{{index={index}}}"] == 1
        assert 0 < found[f"index_bytes{{index={index}}}"] <= 700
        assert found[f"index_evictions_total{{index={index}}}"] == 1


async def test_downloads_are_counted() -> None:
    async def serve(http: web.Request) -> web.Response:
        return web.Response(body=PNG, content_type="image/png")

    media = web.Application()
    media.router.add_get("/a.png", serve)
    async with listening(media) as url, fleet(0, 0, allow_media_networks=LOOPBACK) as f:
        part = {"type": "image_url", "image_url": {"url": f"{url}/a.png"}}
        assert (await f.post(chat(part)))[0].status == 200
        assert (await samples(f))["media_fetches_total{event=fetched}"] == 1


async def test_an_engine_that_rests_is_not_available() -> None:
    async with fleet(0, 0, num_d=2) as f:
        name = "engine_available{{engine=decode-{},stage=decode}}"
        assert (await samples(f))[name.format(1)] == 1
        f.d.answer = hang_up
        for _ in range(2):
            await f.post(chat())
        found = await samples(f)
        assert [found[name.format(number)] for number in (1, 2)] == [0, 1]
        f.clock.now_s += 6
        assert (await samples(f))[name.format(1)] == 1


async def test_every_series_of_calls_and_answers_is_there_from_the_start() -> None:
    async with fleet() as f:
        found = await samples(f)
    for status in STATUS_CLASSES:
        assert found[f"answers_total{{route={CHAT},status={status}}}"] == 0
    for outcome in OUTCOMES:
        assert found[f"calls_total{{engine=prefill-1,outcome={outcome},stage=prefill}}"] == 0


async def test_paths_that_lead_elsewhere_have_no_series_until_somebody_asks() -> None:
    async with fleet() as f:
        assert "/,status=" not in "".join(await samples(f))
        async with f.client.get(f.url + "/live/", allow_redirects=False):
            assert (await samples(f))["answers_total{route=/live/,status=3xx}"] == 1


async def test_nothing_that_a_client_writes_is_a_metric() -> None:
    async with fleet() as f:
        headers = {"Authorization": "Bearer sk-a-clients-key", "x-request-id": "my-request"}
        await f.post(chat(picture(PNG), unheard_of=1), headers=headers)
        async with f.client.get(f.url + "/sk-a-clients-key/my-request", headers=headers):
            pass
        text = await scrape(f)
    assert not [each for each in (*SECRETS, data_url(PNG)) if each in text]


@pytest.mark.parametrize("sent", [{}, {"Authorization": "Bearer not the key at all"}])
async def test_without_the_status_key_there_are_no_metrics(sent: dict[str, str]) -> None:
    async with fleet() as f, f.client.get(f.url + "/metrics", headers=sent) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert (await response.json())["error"]["code"] == "status_key_needed"


async def test_a_router_without_a_status_key_names_its_engines_and_no_urls() -> None:
    async with fleet(status_key=None) as f:
        text = await scrape(f, {"Accept": "text/plain"})
        assert 'engine="decode-1"' in text
        for engine in (f.e, f.p, f.d):
            assert engine.url not in text
    async with fleet() as f:
        text = await scrape(f)
        for engine in (f.e, f.p, f.d):
            assert engine.url in text


async def test_routers_in_one_process_count_apart() -> None:
    async with fleet() as one, fleet() as other:
        await one.post(chat())
        name = f"answers_total{{route={CHAT},status=2xx}}"
        assert (await samples(one))[name] == 1
        assert (await samples(other))[name] == 0


def test_times_are_shown_as_prometheus_client_would_show_them() -> None:
    fields = ("asked", "avoided", "waiting", "remembered", "memory", "evicted")
    downloads = ("fetched", "unchanged", "shared", "refused", "waiting")
    counts = {name: dict.fromkeys(fields, 0) for name in ("encodes", "prefills")}
    known = {**counts, "downloads": dict.fromkeys(downloads, 0), "fallbacks": 0}
    metrics = RouterMetrics(Sources({}, MemoryBudget(1), lambda: known, shows_urls=False))
    context: Any = None  # not read
    times_s = (0.001, 0.005, 0.0051, 0.3, 0.5, 1, 299.9, 1e4)
    for took_s in times_s:
        call = EngineCall(Stage.DECODE, "decode-1", began_s=1.0, ended_s=1.0 + took_s, outcome="ok")
        metrics.call_ended(context, call)
    (family,) = (
        each
        for each in text_string_to_metric_families(metrics.exposed("")[0].decode())
        if each.name == PREFIX + "call_seconds"
    )
    limits = [float(each.labels["le"]) for each in family.samples if "le" in each.labels]
    registry = CollectorRegistry()
    theirs = Histogram(
        family.name, family.documentation, ["stage"], buckets=limits, registry=registry
    )
    for took_s in times_s:
        theirs.labels("decode").observe(1.0 + took_s - 1.0)
    (expected, *_) = text_string_to_metric_families(generate_latest(registry).decode())
    assert family == expected


async def test_the_page_lists_exactly_the_metrics_that_there_are() -> None:
    async with fleet(num_d=2, encoders_more=("http://127.0.0.1:9",)) as f:
        f.p.answer = prefilled
        await f.post(chat(picture(PNG), stream=True))
        await f.post(chat(model="another"))
        found = await families(f)
    rows = dict(
        re.findall(
            rf"^\| `{PREFIX}(\w+)` \|(.*)\|$", (ROOT / "docs" / "metrics.md").read_text(), re.M
        )
    )
    there = {}
    for family in found.values():
        if family.name.startswith(PREFIX) and not family.name.endswith("_created"):
            suffix = "_total" if family.type == "counter" else ""
            there[family.name.removeprefix(PREFIX) + suffix] = family
    assert set(there) == set(rows)
    for name, family in there.items():
        for sample in family.samples:
            assert all(f"`{label}`" in rows[name] for label in sample.labels if label != "le"), name


def test_the_page_lists_every_kind_of_error_and_every_outcome() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    (errors,) = re.findall(rf"^\| `{PREFIX}errors_total` \|(.*)\|$", page, re.M)
    (calls,) = re.findall(rf"^\| `{PREFIX}calls_total` \|(.*)\|$", page, re.M)
    (answers,) = re.findall(rf"^\| `{PREFIX}answers_total` \|(.*)\|$", page, re.M)
    sources = "\n".join(path.read_text() for path in (ROOT / "ecshare" / "router").rglob("*.py"))
    elsewhere = {"malformed_http", "too_many_connections"}  # below HTTP
    elsewhere |= {"uri_too_long", "headers_too_large"}
    kinds = set(re.findall(r'code="(\w+)"', sources)) - elsewhere
    kinds |= {"engine", "invalid_request"}
    assert kinds == set(re.findall(r"`(\w+)`", errors)) - {"kind"}
    assert all(f"`{outcome}`" in calls for outcome in OUTCOMES)
    assert all(f"`{status}`" in answers for status in STATUS_CLASSES)
