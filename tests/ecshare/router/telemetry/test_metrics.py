# SPDX-License-Identifier: Apache-2.0
"""What /metrics tells of requests, engines and what was spared."""

import asyncio
import re
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ecshare.router.api.chat import CHAT
from ecshare.router.http.bodies import MemoryBudget
from ecshare.router.http.context import OUTCOMES, STATUS_CLASSES, EngineCall
from ecshare.router.telemetry.metrics import RouterMetrics, Sources
from ecshare.router.types import Stage
from tests.ecshare.router import answers, bodies, fake_engine, held
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import Fleet, fleet
from tests.ecshare.router.held import soon
from tests.ecshare.router.media.fake_media import at, served
from tests.ecshare.router.telemetry.asking import SOON_S, get, on_its_way
from tests.waiting import until

PAGE = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
PREFIX = "ecshare_router_"
ROWS = dict(re.findall(rf"^\| `{PREFIX}(\w+)` \|(.*)\|$", PAGE, re.M))
"""What the page tells of each metric."""
ANSWERS = f"answers_total{{{{route={CHAT},status={{}}}}}}"


async def families(f: Fleet) -> list[Metric]:
    response, text = await get(f, "/metrics")
    assert (response.status, response.content_type) == (200, "text/plain")
    return list(text_string_to_metric_families(text))


async def samples(f: Fleet) -> dict[str, float]:
    """The value of each series, as `name{label=value,...}` without our prefix."""
    found = {}
    for sample in (sample for family in await families(f) for sample in family.samples):
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        found[f"{sample.name.removeprefix(PREFIX)}{{{labels}}}"] = sample.value
    return found


def calls(engine: str, outcome: str) -> str:
    """The series of an engine's calls that ended so."""
    return f"calls_total{{engine={engine},outcome={outcome},stage={engine.partition('-')[0]}}}"


async def test_each_request_and_each_call_is_counted_and_timed(f: Fleet) -> None:
    await f.post(chat(picture(PNG)))
    await f.post(chat(picture(PNG), stream=True))
    found = await samples(f)
    assert found[ANSWERS.format("2xx")] == 2
    for path in ("encode,prefill,decode", "prefill,decode"):
        assert found[f"request_seconds_count{{path={path}}}"] == 1
        assert 0 < found[f"request_seconds_sum{{path={path}}}"] < SOON_S
    assert found["first_byte_seconds_count{path=prefill,decode}"] == 1, "the stream"
    assert "first_byte_seconds_count{path=encode,prefill,decode}" not in found
    for stage, number in (("encode", 1), ("prefill", 2), ("decode", 2)):
        assert found[calls(f"{stage}-1", "ok")] == number
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
        await soon(begun)
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
        f.e.answer = answers.failing(500)
        await f.post(chat(picture(PNG)))
        await f.post({"messages": 1})
        await f.post(chat(model="another"))
        for answer in (answers.failing(422), answers.hang_up):
            fake_engine.answer_all(f.decoders, answer)
            await f.post(chat())
        await get(f, "/no/such/page")
        found = await samples(f)
    assert found[calls("encode-1", "failed")] == 1
    assert sum(found[calls(f"decode-{number}", "refused")] for number in (1, 2)) == 1
    assert found["fallbacks_total{}"] == 2, "E, and all of D after P"
    assert (found[ANSWERS.format("4xx")], found[ANSWERS.format("5xx")]) == (3, 1)
    assert found["answers_total{route=none,status=4xx}"] == 1
    for kind in ("invalid_request", "model_not_found", "engine", "engine_failed", "unknown_url"):
        assert found[f"errors_total{{kind={kind}}}"] == 1


async def test_stages_that_are_asked_again_are_counted(f: Fleet) -> None:
    async with fleet(0, 0, num_d=2) as two:
        fake_engine.answer_all(two.decoders, answers.hang_up)
        await two.post(chat())
        assert (await samples(two))["retries_total{stage=decode}"] == 1
    await f.post(chat(picture(PNG)))
    f.d.answer = answers.failing(500)
    await f.post(chat(picture(PNG)))
    assert (await samples(f))["retries_total{stage=encode}"] == 1


async def test_a_stream_that_breaks_is_an_error_although_it_began_well() -> None:
    async with fleet(0, 0) as f:
        f.d.answer = answers.break_in_the_stream
        await f.post(chat(stream=True))
        found = await samples(f)
    assert found["errors_total{kind=engine_failed}"] == found[calls("decode-1", "failed")] == 1


async def test_a_client_that_leaves_is_no_error() -> None:
    async with fleet(0, 0) as f:
        f.d.answer = hanging = held.Hanging()
        async with on_its_way(f, hanging, chat()):
            pass
        await soon(hanging.left)

        async def is_alone() -> bool:
            return (await samples(f))["requests_in_progress{}"] == 1

        await until(is_alone)  # the router learns a moment later that a client has gone
        found = await samples(f)
    assert found[ANSWERS.format("client_gone")] == found[calls("decode-1", "cancelled")] == 1
    assert not [name for name in found if name.startswith("errors_total")]


async def test_overload_has_a_status_of_its_own() -> None:
    async with fleet(0, 0, max_in_flight_bytes=5000) as f:
        held = f.d.hold()
        async with on_its_way(f, held, chat(picture(PNG))) as asked:
            assert (await f.post(chat(picture(b"x" * 4000))))[0].status == 429
            held.let_go.set()
            await asked
        found = await samples(f)
    assert found[ANSWERS.format("429")] == found["errors_total{kind=too_many_requests}"] == 1
    assert found["in_flight_limit_bytes{}"] == 5000


async def test_what_is_spared_and_remembered_is_counted() -> None:
    async def stored(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = {"kv_transfer_params": {"kvshare": {"num_tokens": 7}}}
        return web.json_response(answer | {"usage": {"prompt_tokens": 8}})

    async with fleet(max_index_bytes=700) as f:
        f.p.answer = stored
        for content in (PNG, PNG, bodies.PNG_2):
            await f.post(chat(picture(content)))
        found = await samples(f)
    assert found["prefills_total{event=avoided}"] == 1
    assert found["prefills_total{event=asked}"] == 2
    for index in ("encodes", "prefills"):
        assert found[f"index_entries{{index={index}}}"] == 1
        assert 0 < found[f"index_bytes{{index={index}}}"] <= 700
        assert found[f"index_evictions_total{{index={index}}}"] == 1


async def test_downloads_are_counted() -> None:
    async with served() as (f, url):
        assert (await f.post(at(url + "/a")))[0].status == 200
        assert (await samples(f))["media_fetches_total{event=fetched}"] == 1


async def test_an_engine_that_rests_is_not_available() -> None:
    async def available(f: Fleet) -> list[float]:
        found = await samples(f)
        return [found[f"engine_available{{engine=decode-{n},stage=decode}}"] for n in (1, 2)]

    async with fleet(0, 0, num_d=2) as f:
        assert await available(f) == [1, 1]
        f.d.answer = answers.hang_up
        for _ in range(2):
            await f.post(chat())
        assert await available(f) == [0, 1]
        f.clock.now_s += 6
        assert await available(f) == [1, 1]


async def test_series_are_there_from_the_start_but_for_paths_that_lead_elsewhere(f: Fleet) -> None:
    found = await samples(f)
    assert not any(found[ANSWERS.format(status)] for status in STATUS_CLASSES)
    assert not any(found[calls("prefill-1", outcome)] for outcome in OUTCOMES)
    assert "/,status=" not in "".join(found)
    await get(f, "/live/")
    assert (await samples(f))["answers_total{route=/live/,status=3xx}"] == 1


async def test_routers_in_one_process_count_apart(f: Fleet) -> None:
    async with fleet() as other:
        await f.post(chat())
        assert [(await samples(each))[ANSWERS.format("2xx")] for each in (f, other)] == [1, 0]


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
    text = metrics.exposed("")[0].decode()
    (family,) = (
        each
        for each in text_string_to_metric_families(text)
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
        await f.post(chat(picture(PNG), stream=True))
        await f.post(chat(model="another"))
        found = await families(f)
    there = {}
    for family in found:
        if family.name.startswith(PREFIX) and not family.name.endswith("_created"):
            suffix = "_total" if family.type == "counter" else ""
            there[family.name.removeprefix(PREFIX) + suffix] = family
    assert set(there) == set(ROWS)
    for name, family in there.items():
        for sample in family.samples:
            assert all(f"`{label}`" in ROWS[name] for label in sample.labels if label != "le"), name


def test_the_page_lists_every_kind_of_error_and_every_outcome() -> None:
    router = Path(__file__).parents[4] / "ecshare" / "router"
    sources = "\n".join(path.read_text() for path in router.rglob("*.py"))
    elsewhere = {"malformed_http", "too_many_connections"}  # below HTTP
    elsewhere |= {"uri_too_long", "headers_too_large"}
    kinds = set(re.findall(r'code="(\w+)"', sources)) - elsewhere
    kinds |= {"engine", "invalid_request"}
    assert kinds == set(re.findall(r"`(\w+)`", ROWS["errors_total"])) - {"kind"}
    assert all(f"`{outcome}`" in ROWS["calls_total"] for outcome in OUTCOMES)
    assert all(f"`{status}`" in ROWS["answers_total"] for status in STATUS_CLASSES)
