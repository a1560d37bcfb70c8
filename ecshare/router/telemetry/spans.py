# SPDX-License-Identifier: Apache-2.0
"""Completions and their calls of engines as OpenTelemetry spans, exported by OTLP.

An engine that is given vLLM's --otlp-traces-endpoint adds its spans below the call that it answers,
and our connectors theirs. Attributes are OpenTelemetry's for HTTP where it has a name for them.
None holds what a client has written.
"""

import asyncio
import os
from threading import Thread

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ecshare.router.api.endpoints import SPLIT
from ecshare.router.http.context import EngineCall, RequestContext, Subscriber

_SERVICE = "ecshare-router"
_CLOSE_S = 5.0
_W3C = TraceContextTextMapPropagator()


class Spans(Subscriber):
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
        self._of_requests: dict[RequestContext, Span] = {}
        self._of_calls: dict[EngineCall, Span] = {}

    @classmethod
    def exported_to(cls, endpoint: str) -> "Spans":
        """Return spans that go to an OTLP collector, by the protocol that vLLM's would."""
        return cls(BatchSpanProcessor(_exporter(endpoint)))

    def request_began(self, context: RequestContext) -> None:
        """Begin the span of a completion, below the one that its `traceparent` names."""
        if context.route not in SPLIT:
            return
        attributes = {"http.request.method": "POST", "http.route": context.route}
        headers = {name.lower(): value for name, value in context.http.headers.items()}
        self._of_requests[context] = self._tracer.start_span(
            f"POST {context.route}",
            _W3C.extract(headers, Context()),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )

    def request_ended(self, context: RequestContext) -> None:
        """End the span of a completion."""
        span = self._of_requests.pop(context, None)
        if span is None:
            return
        span.set_attribute("ecshare.path", context.path)
        span.set_attribute("ecshare.avoided", context.avoided)
        status = context.status
        error = context.error or ("client_gone" if status is None else "")
        if context.first_event_s is not None:
            span.set_attribute("ecshare.first_byte_s", context.first_event_s - context.began_s)
        # What a client does wrong is no error of the server's span, by OpenTelemetry's rules.
        _end(span, status or 0, error, is_failed=bool(error) and (status or 500) >= 500)

    def call_began(self, context: RequestContext, call: EngineCall) -> None:
        """Begin the span of a call, and name it to the engine."""
        request = self._of_requests.get(context)
        if request is None:
            return
        attributes = {"ecshare.stage": str(call.stage), "ecshare.engine": call.engine}
        above = otel.set_span_in_context(request, Context())
        span = self._of_calls[call] = self._tracer.start_span(
            f"ecshare.{call.stage}", above, kind=SpanKind.CLIENT, attributes=attributes
        )
        _W3C.inject(call.headers, otel.set_span_in_context(span, Context()))

    def call_ended(self, context: RequestContext, call: EngineCall) -> None:
        """End the span of a call."""
        span = self._of_calls.pop(call, None)
        if span is None:
            return
        if call.first_byte_s is not None:
            span.set_attribute("ecshare.first_byte_s", call.first_byte_s - call.began_s)
        is_failed = call.outcome != "ok"
        _end(span, call.status, call.outcome if is_failed else "", is_failed=is_failed)

    async def close(self) -> None:
        """Export what is left, for a few seconds at most."""
        # A collector that does not answer would keep the process: the thread is left behind then.
        closing = Thread(target=self._provider.shutdown, daemon=True, name="spans-close")
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_S)


def _end(span: Span, status: int, error: str, *, is_failed: bool) -> None:
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
