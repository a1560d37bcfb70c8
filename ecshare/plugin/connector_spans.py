# SPDX-License-Identifier: Apache-2.0
"""Spans of connectors in the traces of requests, if vLLM exports traces.

vLLM's --otlp-traces-endpoint sets up the process's exporter, and attaches the trace headers to each
request that has a `traceparent`. Without either, this module does nothing and imports nothing.
"""

import logging
import time
from typing import TYPE_CHECKING, Any

from ecshare.plugin.compat import option

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


def add_span(request: "Request", name: str, seconds: float, **attributes: str | int) -> None:
    """Add a span that ends now and has taken `seconds` to the trace of `request`, if it has one.

    Each of `attributes` is named `<name>.<its keyword>`. Does no I/O: vLLM's exporter has a bounded
    queue and a thread.
    """
    headers: dict[str, str] | None = option(request, "trace_headers")
    if not headers:
        return
    try:
        _add(headers, name, seconds, attributes)
    except Exception:  # noqa: BLE001 — a half must not give up because of a span
        logger.debug("no span %s", name, exc_info=True)


def _add(headers: dict[str, str], name: str, seconds: float, attributes: dict[str, Any]) -> None:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    end_ns = time.time_ns()
    named = {f"{name}.{each}": value for each, value in attributes.items()}
    above = TraceContextTextMapPropagator().extract(headers, Context())
    span = trace.get_tracer("ecshare").start_span(
        name, above, start_time=end_ns - int(seconds * 1e9), attributes=named
    )
    span.end(end_ns)
