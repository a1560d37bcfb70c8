# SPDX-License-Identifier: Apache-2.0
"""Spans of connectors. tests/engines/test_stages.py checks those of real engines."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ecshare.plugin.connector_spans import add_span

SENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def request(headers: Any) -> Any:
    return SimpleNamespace(trace_headers=headers)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def test_span_ends_now_and_belongs_to_the_requests_trace(
    exported: InMemorySpanExporter,
) -> None:
    add_span(request(SENT), "kvshare.load", 1.5, tokens=7)
    (span,) = exported.get_finished_spans()
    assert (span.name, dict(span.attributes or {})) == ("kvshare.load", {"kvshare.load.tokens": 7})
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (
        "0af7651916cd43dd8448eb211c80319c",
        "b7ad6b7169203331",
    )
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 1_500_000_000


@pytest.mark.parametrize("headers", [None, {}])
def test_a_request_without_a_trace_has_no_span(
    exported: InMemorySpanExporter, headers: Any
) -> None:
    add_span(request(headers), "kvshare.load", 1.0)
    add_span(SimpleNamespace(), "kvshare.load", 1.0)  # type: ignore[arg-type] # of an old vLLM
    assert not exported.get_finished_spans()


@pytest.mark.parametrize(
    "headers", [{"traceparent": "\x00"}, {"tracestate": "=,=" * 1000}, {"traceparent": 1}, ["no"]]
)
def test_malformed_trace_headers_raise_nothing(
    exported: InMemorySpanExporter, headers: Any
) -> None:
    add_span(request(headers), "kvshare.load", 1.0)


def test_opentelemetry_is_not_imported_without_a_trace() -> None:
    program = (
        "import sys, types; from ecshare.plugin.connector_spans import add_span;"
        "add_span(types.SimpleNamespace(trace_headers=None), 'a', 1.0);"
        "assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
