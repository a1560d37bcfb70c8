# SPDX-License-Identifier: Apache-2.0
"""An OpenTelemetry collector that keeps the spans it receives, for tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from lab.servers.processes import LOOPBACK

ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "100",  # ms
}
"""The variables that make a process export its spans to this collector, and soon."""


class CollectedSpan(NamedTuple):
    """A span as a process exported it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    is_error: bool
    attributes: dict[str, Any]


class Collector:
    """Receives spans by OTLP over HTTP. Threads of the server add them; any thread may read."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://{LOOPBACK}:{port}/v1/traces"
        self._changed = Condition()
        self._spans: list[CollectedSpan] = []

    @classmethod
    @contextmanager
    def listening(cls) -> "Iterator[Collector]":
        """Listen on a free port of this host while the block runs."""

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.add(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        with ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
            collector = cls(server.server_port)
            Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield collector
            finally:
                server.shutdown()

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of a request."""
        with self._changed:
            for of_resource in request.resource_spans:
                service = _attributes(of_resource.resource.attributes).get("service.name", "")
                for scope in of_resource.scope_spans:
                    self._spans += [_collected(service, span) for span in scope.spans]
            self._changed.notify_all()

    def trace(
        self, trace_id: str, is_whole: Callable[[list[CollectedSpan]], bool]
    ) -> list[CollectedSpan]:
        """Return the spans of a trace, once `is_whole` returns True for them.

        Raises:
            AssertionError: it does not within a minute; the message lists the spans so far.
        """

        def spans() -> list[CollectedSpan]:
            return [span for span in self._spans if span.trace_id == trace_id]

        with self._changed:
            ended = self._changed.wait_for(lambda: is_whole(spans()), timeout=60)
            assert ended, [(span.service, span.name) for span in self._spans]
            return spans()


def _collected(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)
