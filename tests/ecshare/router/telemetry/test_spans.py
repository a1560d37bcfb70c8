# SPDX-License-Identifier: Apache-2.0
"""Each completion is a span, each call of an engine for it one below."""

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from ecshare.router.telemetry import spans
from lab.servers.collector import ENVIRONMENT, CollectedSpan, Collector
from tests.ecshare.router.answers import failing
from tests.ecshare.router.bodies import PNG, chat, picture
from tests.ecshare.router.fake_engine import Fleet, fleet

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT = {"traceparent": f"00-{TRACE}-{ABOVE}-01", "tracestate": "vendor=1"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with Collector.listening() as collector:
        yield collector


async def post(f: Fleet, *content: Any, **fields: Any) -> aiohttp.ClientResponse:
    response, _ = await f.post(chat(*content, **fields), headers=SENT)
    return response


async def trace_of(collector: Collector, number: int) -> dict[str, CollectedSpan]:
    """The spans of TRACE by name, once there are so many."""
    got = await asyncio.to_thread(collector.trace, TRACE, lambda got: len(got) >= number)
    assert len(got) == number
    return {span.name: span for span in got}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_is_a_span_above_its_calls(collector: Collector, stream: bool) -> None:
    async with fleet(otlp_traces_endpoint=collector.endpoint) as f:
        await post(f, picture(PNG), stream=stream)
        got = await trace_of(collector, 4)
        whole = got["POST /v1/chat/completions"]
        assert whole.service == "ecshare-router"
        assert whole.parent_id == ABOVE
        assert whole.attributes["http.response.status_code"] == 200
        assert whole.attributes["ecshare.path"] == ["encode", "prefill", "decode"]
        for stage, engine in (("encode", f.e), ("prefill", f.p), ("decode", f.d)):
            call = got[f"ecshare.{stage}"]
            assert call.parent_id == whole.span_id
            assert call.attributes["ecshare.engine"] == f"{stage}-1"
            assert 0 < call.seconds <= whole.seconds
            assert 0 < call.attributes["ecshare.first_byte_s"] < whole.seconds
            assert not call.is_error
            headers = engine.headers[0]
            assert headers["traceparent"] == f"00-{TRACE}-{call.span_id}-01"
            assert headers["tracestate"] == "vendor=1"


@pytest.mark.parametrize(
    ("num_p", "engine", "status", "errors"),
    [
        (1, "p", 500, {"ecshare.prefill"}),  # D has answered
        (0, "d", 400, {"ecshare.decode"}),  # the client was wrong, not the router
        (0, "d", 500, {"ecshare.decode", "POST /v1/chat/completions"}),
    ],
)
async def test_who_was_wrong_decides_what_is_an_error(
    collector: Collector, num_p: int, engine: str, status: int, errors: set[str]
) -> None:
    async with fleet(0, num_p, otlp_traces_endpoint=collector.endpoint) as f:
        getattr(f, engine).answer = failing(status)
        response = await post(f)
        got = await trace_of(collector, 2 + num_p)
    assert {name for name, span in got.items() if span.is_error} == errors
    whole = got["POST /v1/chat/completions"]
    assert whole.attributes["http.response.status_code"] == response.status
    assert bool(whole.attributes.get("error.type")) is (num_p == 0)
    if num_p:
        assert response.status == 200
        assert got["ecshare.prefill"].attributes["error.type"] == "failed"


async def test_without_a_traceparent_a_trace_begins(collector: Collector) -> None:
    async with fleet(0, 0, otlp_traces_endpoint=collector.endpoint) as f:
        await f.post(chat(), headers={"traceparent": "00-no-trace"})
        named = re.fullmatch(r"00-([0-9a-f]{32})-[0-9a-f]{16}-0[13]", f.d.headers[0]["traceparent"])
        assert named
        spans = await asyncio.to_thread(collector.trace, named[1], lambda got: len(got) == 2)
        assert [span.parent_id for span in spans if span.name.startswith("POST")] == [""]


async def test_what_clients_write_is_in_no_span(collector: Collector) -> None:
    async with fleet(otlp_traces_endpoint=collector.endpoint) as f:
        shown = picture(PNG) | {"uuid": "a-secret-uuid"}
        await post(f, shown, "a secret text", user="a-secret-user")
        assert "secret" not in repr(await trace_of(collector, 4))


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("answers", [False, True])
async def test_a_collector_that_fails_costs_no_answer_and_little_time_at_the_end(
    monkeypatch: pytest.MonkeyPatch, protocol: str, answers: bool
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setattr(spans, "_CLOSE_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if answers:  # connections, and never a request
            taken.listen()
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}/v1/traces"
        async with fleet(otlp_traces_endpoint=endpoint) as f:
            for _ in range(20):
                assert (await post(f, picture(PNG))).status == 200
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 8  # its own limits are 10 s and more
