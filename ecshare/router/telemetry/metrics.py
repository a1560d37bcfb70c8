# SPDX-License-Identifier: Apache-2.0
"""The router's Prometheus metrics, in a registry of their own. docs/metrics.md lists them.

What happens is counted as it happens. What the router knows anyway, such as the requests in flight,
is read when somebody asks for the metrics. Labels have values of ours only, never a client's text.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, product
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

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

_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_BUCKET_LABELS = [*map(floatToGoString, _BUCKETS_S), "+Inf"]

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


class _Counter(Collector):
    """A counter. That of prometheus_client locks for other threads: see docs/decisions.md."""

    def __init__(self, registry: CollectorRegistry, name: str, what: str, *labels: str) -> None:
        self._about = name, what, labels
        self._counts: dict[tuple[str, ...], int] = {}
        registry.register(self)

    def expect(self, *labels: str) -> None:
        """Show the series with these labels from now on."""
        self._counts.setdefault(labels, 0)

    def add(self, *labels: str) -> None:
        """Count one more."""
        self._counts[labels] = self._counts.get(labels, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Yield it as it is now."""
        name, what, labels = self._about
        yield _family(CounterMetricFamily, name, what, self._counts, *labels)


class _Histogram(Collector):
    """A histogram of seconds, for one thread as `_Counter`."""

    def __init__(self, registry: CollectorRegistry, name: str, what: str, *labels: str) -> None:
        self._about = name, what, labels
        self._series: dict[tuple[str, ...], list[float]] = {}
        """Of each: how many were in each bucket, and in none, and the sum."""
        registry.register(self)

    def expect(self, *labels: str) -> list[float]:
        """Show the series with these labels from now on. Returns it."""
        return self._series.setdefault(labels, [0.0] * (len(_BUCKETS_S) + 2))

    def observe(self, seconds: float, *labels: str) -> None:
        """Count one more."""
        series = self._series.get(labels) or self.expect(*labels)
        series[bisect_left(_BUCKETS_S, seconds)] += 1
        series[-1] += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield it as it is now."""
        name, what, labels = self._about
        family = HistogramMetricFamily(f"{PREFIX}_{name}", what, labels=labels)
        for of, (*numbers, sum_s) in self._series.items():
            family.add_metric(of, [*zip(_BUCKET_LABELS, accumulate(numbers), strict=True)], sum_s)
        yield family


class RouterMetrics(Subscriber):
    """All metrics of one router. Belongs to the event loop's thread."""

    def __init__(self, sources: Sources) -> None:
        self.num_in_progress = 0
        """Requests of clients that are not answered yet."""
        self._registry = registry = CollectorRegistry()
        registry.register(_State(self, sources))
        ProcessCollector(registry=registry)
        self._answers = _Counter(registry, "answers", "Requests of clients.", "route", "status")
        self._errors = _Counter(registry, "errors", "Errors that clients got, by kind.", "kind")
        self._retries = _Counter(registry, "retries", "Stages that were asked again.", "stage")
        self._calls = _Counter(
            registry, "calls", "Requests to engines.", "stage", "engine", "outcome"
        )
        self._request_s = _Histogram(
            registry, "request_seconds", "Whole completions, by path.", "path"
        )
        self._begin_s = _Histogram(
            registry, "first_byte_seconds", "Until a stream began, by path.", "path"
        )
        self._call_s = _Histogram(registry, "call_seconds", "Whole requests to engines.", "stage")
        self._call_begin_s = _Histogram(
            registry, "call_first_byte_seconds", "Until an engine began to answer.", "stage"
        )
        for stage, pool in sources.pools.items():
            for engine in pool:
                self._expect_calls(stage, engine.name)

    def _expect_calls(self, stage: Stage, engine: str) -> None:
        for outcome in OUTCOMES:
            self._calls.expect(stage, engine, outcome)
        self._call_s.expect(stage)
        self._call_begin_s.expect(stage)
        self._retries.expect(stage)

    def expect(self, routes: Iterable[str]) -> None:
        """Show the series of these from the start: a rate misses the rise of one that is late."""
        for labels in product(routes, STATUS_CLASSES):
            self._answers.expect(*labels)

    def request_began(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        self.num_in_progress += 1

    def request_ended(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        self.num_in_progress -= 1
        status = context.status_class
        self._answers.add(context.route, status)
        if context.error:
            self._errors.add(context.error)
        if context.route in SPLIT and status == "2xx" and context.ended_s is not None:
            path = ",".join(context.path)
            self._request_s.observe(context.ended_s - context.began_s, path)
            if context.first_event_s is not None:
                self._begin_s.observe(context.first_event_s - context.began_s, path)

    def call_ended(self, context: RequestContext, call: EngineCall) -> None:
        """See `Subscriber`."""
        self._calls.add(call.stage, call.engine, call.outcome)
        if call.outcome != "ok" or call.ended_s is None:
            return
        self._call_s.observe(call.ended_s - call.began_s, call.stage)
        if call.first_byte_s is not None:
            self._call_begin_s.observe(call.first_byte_s - call.began_s, call.stage)

    def stage_retried(self, stage: Stage) -> None:
        """See `Subscriber`."""
        self._retries.add(stage)

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
