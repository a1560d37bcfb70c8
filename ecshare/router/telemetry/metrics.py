# SPDX-License-Identifier: Apache-2.0
"""The router's Prometheus metrics, in a registry of their own. docs/metrics.md lists them.

What happens is counted as it happens. What the router knows anyway, such as the requests in flight,
is read when somebody asks for the metrics. Labels have values of ours only, never a client's text.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ecshare.router.api.endpoints import SPLIT
from ecshare.router.fleet.engines import EnginePool
from ecshare.router.http.bodies import MemoryBudget
from ecshare.router.http.context import (
    OUTCOMES,
    STATUS_CLASSES,
    EngineCall,
    RequestContext,
    Subscriber,
)
from ecshare.router.types import Stage

PREFIX = "ecshare_router"

M = TypeVar("M", Counter, Histogram)

_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)

_EVENTS = ("asked", "avoided", "lost")
_FETCHES = ("fetched", "unchanged", "shared", "refused")

Counts = Mapping[str, Any]
"""What /health tells beside the engines."""


class Sources(NamedTuple):
    """Where the numbers are that the router has anyway."""

    pools: Mapping[Stage, EnginePool]
    memory: MemoryBudget
    counts: Callable[[], Counts]
    shows_urls: bool
    """Whether engines' urls are among the metrics."""


class _Series(Generic[M]):
    """The series of one metric, looked up once each."""

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._children: dict[tuple[str, ...], M] = {}

    def of(self, *values: str) -> M:
        """Return the series with these labels."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*values)
        return child


class RouterMetrics(Subscriber):
    """All metrics of one router. Belongs to the event loop's thread."""

    def __init__(self, sources: Sources) -> None:
        self.num_in_progress = 0
        """Requests of clients that are not answered yet."""
        self._registry = CollectorRegistry()
        self._registry.register(_State(self, sources))
        ProcessCollector(registry=self._registry)

        def counter(name: str, what: str, *labels: str) -> _Series[Counter]:
            return _Series(Counter(f"{PREFIX}_{name}", what, labels, registry=self._registry))

        def histogram(name: str, what: str, *labels: str) -> _Series[Histogram]:
            options: dict[str, Any] = {"registry": self._registry, "buckets": _BUCKETS_S}
            return _Series(Histogram(f"{PREFIX}_{name}", what, labels, **options))

        self._answers = counter("answers", "Requests of clients.", "route", "status")
        self._errors = counter("errors", "Errors that clients got, by kind.", "kind")
        self._retries = counter("retries", "Stages that were asked again.", "stage")
        self._calls = counter("calls", "Requests to engines.", "stage", "engine", "outcome")
        self._request_s = histogram("request_seconds", "Whole completions, by path.", "path")
        self._begin_s = histogram("first_byte_seconds", "Until a stream began, by path.", "path")
        self._call_s = histogram("call_seconds", "Whole requests to engines.", "stage")
        self._call_begin_s = histogram(
            "call_first_byte_seconds", "Until an engine began to answer.", "stage"
        )
        for stage, pool in sources.pools.items():
            for engine in pool:
                self._expect_calls(stage, engine.name)

    def _expect_calls(self, stage: Stage, engine: str) -> None:
        for outcome in OUTCOMES:
            self._calls.of(stage, engine, outcome)
        for metric in (self._call_s, self._call_begin_s, self._retries):
            metric.of(stage)

    def expect(self, route: str) -> None:
        """Show the series of a route from the start: a rate misses the rise of one that is late."""
        for status in STATUS_CLASSES:
            self._answers.of(route, status)

    def request_began(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        self.num_in_progress += 1

    def request_ended(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        self.num_in_progress -= 1
        status = context.status_class
        self._answers.of(context.route, status).inc()
        if context.error:
            self._errors.of(context.error).inc()
        if context.route in SPLIT and status == "2xx" and context.ended_s is not None:
            path = ",".join(context.path)
            self._request_s.of(path).observe(context.ended_s - context.began_s)
            if context.first_event_s is not None:
                self._begin_s.of(path).observe(context.first_event_s - context.began_s)

    def call_ended(self, context: RequestContext, call: EngineCall) -> None:
        """See `Subscriber`."""
        self._calls.of(call.stage, call.engine, call.outcome).inc()
        if call.outcome != "ok" or call.ended_s is None:
            return
        self._call_s.of(call.stage).observe(call.ended_s - call.began_s)
        if call.first_byte_s is not None:
            self._call_begin_s.of(call.stage).observe(call.first_byte_s - call.began_s)

    def stage_retried(self, stage: Stage) -> None:
        """See `Subscriber`."""
        self._retries.of(stage).inc()

    def exposed(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as text and its content type, in a format that `accept` names."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _State(Collector):
    """The numbers that the router has anyway."""

    def __init__(self, metrics: RouterMetrics, sources: Sources) -> None:
        self._metrics = metrics
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Yield them as they are now."""
        counts = self._sources.counts()
        yield from self._of_requests(counts)
        yield from _of_engines(self._sources)
        for name in ("encodes", "prefills"):
            yield _family(
                CounterMetricFamily,
                name,
                "Work that an engine was asked for, and that it was spared.",
                {(event,): counts[name][event] for event in _EVENTS if event in counts[name]},
                "event",
            )
        yield from _of_indexes({name: counts[name] for name in ("encodes", "prefills")})
        yield _family(
            CounterMetricFamily,
            "media_fetches",
            "Media from urls.",
            {(event,): counts["downloads"][event] for event in _FETCHES},
            "event",
        )

    def _of_requests(self, counts: Counts) -> Iterator[Metric]:
        memory = self._sources.memory
        waiting = {(name,): counts[name]["waiting"] for name in ("encodes", "downloads")}
        for name, what, value in (
            ("requests_in_progress", "Requests of clients.", self._metrics.num_in_progress),
            ("in_flight_bytes", "Memory that requests in flight hold.", memory.used_bytes),
            ("in_flight_limit_bytes", "What they may hold.", memory.limit_bytes),
        ):
            yield _family(GaugeMetricFamily, name, what, {(): value})
        yield _family(
            GaugeMetricFamily, "waiting", "Items that wait for another request's.", waiting, "work"
        )
        fallbacks = {(): counts["fallbacks"]}
        yield _family(CounterMetricFamily, "fallbacks", "Decode answered alone.", fallbacks)


def _of_engines(sources: Sources) -> Iterator[Metric]:
    engines = [(stage, each) for stage, pool in sources.pools.items() for each in pool]
    for name, what, values in (
        ("outstanding", "Requests that an engine has.", [each.in_flight for _, each in engines]),
        (
            "engine_available",
            "Whether an engine gets requests.",
            [not each.health.is_down for _, each in engines],
        ),
    ):
        labels = [(str(stage), each.name) for stage, each in engines]
        series = dict(zip(labels, values, strict=True))
        yield _family(GaugeMetricFamily, name, what, series, "stage", "engine")
    if sources.shows_urls:
        urls = {(str(stage), each.name, each.url): 1 for stage, each in engines}
        yield _family(
            GaugeMetricFamily, "engine_info", "Engines' urls.", urls, "stage", "engine", "url"
        )


def _of_indexes(indexes: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    for kind, name, what, field in (
        (GaugeMetricFamily, "index_entries", "What is remembered.", "remembered"),
        (GaugeMetricFamily, "index_bytes", "Memory of what is remembered.", "memory"),
        (CounterMetricFamily, "index_evictions", "Entries that made room for others.", "evicted"),
    ):
        values = {(index,): counts[field] for index, counts in indexes.items()}
        yield _family(kind, name, what, values, "index")


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    what: str,
    values: Mapping[Any, float],
    *labels: str,
) -> Metric:
    family = kind(f"{PREFIX}_{name}", what, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family
