# SPDX-License-Identifier: Apache-2.0
"""Completions and their calls of engines as OpenTelemetry spans, exported by OTLP.

An engine that is given vLLM's --otlp-traces-endpoint adds its spans below the call that it answers,
and our connectors theirs. Attributes are OpenTelemetry's for HTTP where it has a name for them.
None holds what a client has written.
"""

import asyncio
import os
from collections.abc import Mapping
from threading import Thread

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ecshare.router.trace import Call, Trace

_SERVICE = "ecshare-router"
_CLOSE_S = 5.0
_W3C = TraceContextTextMapPropagator()


class Spans:
    """Begins and ends spans. Belongs to the event loop's thread; another one exports them.

    What a slow collector does not take is dropped, the oldest first.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor` gets each span that has ended."""
        # The environment's OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first.
        named = Resource({SERVICE_NAME: _SERVICE}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("ecshare.router")

    @classmethod
    def exported_to(cls, endpoint: str) -> "Spans":
        """Return spans that go to an OTLP collector, by the protocol that vLLM's would."""
        return cls(BatchSpanProcessor(_exporter(endpoint)))

    def begin_request(self, route: str, headers: Mapping[str, str]) -> Span:
        """Return the span of a client's request, below the one that its `traceparent` names."""
        attributes = {"http.request.method": "POST", "http.route": route}
        above = _W3C.extract({name.lower(): value for name, value in headers.items()}, Context())
        return self._tracer.start_span(
            f"POST {route}", above, kind=SpanKind.SERVER, attributes=attributes
        )

    def begin_call(self, call: Call, request: Span) -> tuple[Span, dict[str, str]]:
        """Return the span of a call for `request`, and the headers that name it to the engine."""
        attributes = {"ecshare.stage": str(call.stage), "ecshare.engine": call.engine}
        above = otel.set_span_in_context(request, Context())
        span = self._tracer.start_span(
            f"ecshare.{call.stage}", above, kind=SpanKind.CLIENT, attributes=attributes
        )
        headers: dict[str, str] = {}
        _W3C.inject(headers, otel.set_span_in_context(span, Context()))
        return span, headers

    @staticmethod
    def end_request(span: Span, trace: Trace, status: int | None) -> None:
        """End the span of a request; `status` is None if the client has gone."""
        span.set_attribute("ecshare.path", trace.path)
        span.set_attribute("ecshare.avoided", trace.avoided)
        error = trace.error or ("client_gone" if status is None else "")
        # What a client does wrong is no error of the server's span, by OpenTelemetry's rules.
        _end(span, trace, status or 0, error, is_failed=bool(error) and (status or 500) >= 500)

    @staticmethod
    def end_call(span: Span, call: Call) -> None:
        """End the span of a call."""
        is_failed = call.outcome != "ok"
        error = call.outcome if is_failed else ""
        _end(span, call, call.status, error, is_failed=is_failed)

    async def close(self) -> None:
        """Export what is left, for a few seconds at most."""
        # A collector that does not answer would keep the process: the thread is left behind then.
        closing = Thread(target=self._provider.shutdown, daemon=True, name="spans-close")
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_S)


def _end(span: Span, timed: Trace | Call, status: int, error: str, *, is_failed: bool) -> None:
    if timed.first_byte_s is not None and timed.ended_s is not None:
        span.set_attribute("ecshare.first_byte_s", timed.first_byte_s - timed.began_s)
    if status:
        span.set_attribute("http.response.status_code", status)
    if error:
        span.set_attribute("error.type", error)
    if is_failed:
        span.set_status(StatusCode.ERROR)
    span.end()


def _exporter(endpoint: str) -> SpanExporter:
    # Imported here: grpcio is large.
    if os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

        return by_grpc.OTLPSpanExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http

    return by_http.OTLPSpanExporter(endpoint)
