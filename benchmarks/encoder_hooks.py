# SPDX-License-Identifier: Apache-2.0
"""Time the encoder cache's hooks on the scheduler thread, whatever the store does."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector
from vllm.v1.request import Request

from benchmarks import places
from benchmarks.encoder_halves import Halves, embedding, request_for, step_of
from benchmarks.hooks import BLACK_HOLE, COLUMNS, RUNNING, SHORT_S, STEP_S, HookClock
from benchmarks.places import Place
from benchmarks.report import Cell, Table
from ecshare.connector import ECShareConnector

ITEM_BYTES = 512 * 1024
_NOTE = (
    "One call each, for one request with one picture of 0.5 MB; every other picture is stored. "
    f"{RUNNING} requests at once, a step a millisecond. `first`: the call that finds a picture it "
    "does not know yet; `again`: those that follow until the answer is True. Either one takes in "
    "what became of all pictures since the last call. `all of a step, an item`: all calls of a "
    "step, divided by its requests. In a black hole the store was there at the start and falls "
    "silent. ECExampleConnector cannot use S3, and its `ensure_cache_available` is vLLM's own, "
    "which does nothing. `a sort`: Python's own, of 40 numbers by their text, before each step: "
    "what a little work that touches no lock and no file takes on this machine at that moment."
)


HOOKS = (
    "ensure_cache_available, first",
    "ensure_cache_available, again",
    "has_cache_item",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "all of a step, an item",
    "for comparison: a sort",
)
_SORTED = list(range(40, 0, -1))


def encoder_hooks(config: VllmConfig, found: Sequence[Place], num_items: int) -> Table:
    """Time the hooks of the encoder-cache connectors at all places, and in a black hole."""
    table = Table("Hooks of the scheduler thread, microseconds", COLUMNS, _NOTE)
    item = embedding(ITEM_BYTES, seed=0)
    for place in found:
        _store(ECShareConnector, config, place.options, item, num_items)
        for row in _ours(config, place, item, num_items, is_stalled=False):
            table.add(*row)
        if place.proxy is not None:
            for row in _ours(config, place, item, num_items, is_stalled=True):
                table.add(*row)
        if place.folder is not None:
            for row in _example(config, place, item, num_items):
                table.add(*row)
    table.rows.sort(key=lambda row: HOOKS.index(str(row[0])))
    return table


def _store(
    connector: type[ECShareConnector] | type[ECExampleConnector],
    config: VllmConfig,
    extra: Mapping[str, Any],
    item: Any,
    num_items: int,
) -> None:
    """Store every other item."""
    with places.host_folder() as host:
        ours = {"host_cache_dir": str(host), "save": "durable"}
        own = ours if connector is ECShareConnector else {}
        with closing(Halves(connector, config, "ec_producer", {**extra, **own})) as producer:
            for number in range(0, num_items, 2):
                producer.save(f"hook-{number}", item)


def _ours(
    config: VllmConfig, place: Place, item: Any, num_items: int, *, is_stalled: bool
) -> list[tuple[Cell, ...]]:
    clock = HookClock()
    with ExitStack() as stack:
        extra = {**place.options, "host_cache_dir": str(stack.enter_context(places.host_folder()))}
        if is_stalled:
            extra |= {"wait_s": SHORT_S, "io_timeout_s": SHORT_S}
        halves = stack.enter_context(
            closing(Halves(ECShareConnector, config, "ec_consumer", extra))
        )
        if is_stalled and place.proxy is not None:
            place.proxy.stall()
            stack.callback(place.proxy.resume)
        _drive(halves, _requests(item, num_items), clock)
    store = BLACK_HOLE if is_stalled else place.name
    return clock.rows(HOOKS, ECShareConnector.__name__, store)


def _example(config: VllmConfig, place: Place, item: Any, num_items: int) -> list[tuple[Cell, ...]]:
    assert place.folder is not None
    extra = {"shared_storage_path": str(Path(place.folder) / "example-hooks")}
    _store(ECExampleConnector, config, extra, item, num_items)
    clock = HookClock()
    with closing(Halves(ECExampleConnector, config, "ec_consumer", extra)) as halves:
        _drive(halves, _requests(item, num_items), clock)
    return clock.rows(HOOKS[1:], ECExampleConnector.__name__, place.name)


def _requests(item: Any, num_items: int) -> list[Request]:
    return [request_for(f"hook-{number}", len(item)) for number in range(num_items)]


def _drive(halves: Halves, requests: Sequence[Request], clock: HookClock) -> None:
    """Call the scheduler half as vLLM's scheduler does, step by step, until all are scheduled."""
    first, again, has, allocated, orders, finished, step, comparison = HOOKS
    hooks = halves.scheduler
    waiting, running = deque(requests), dict[str, Request]()
    seen = set[str]()
    while waiting or running:
        while waiting and len(running) < RUNNING:
            request = waiting.popleft()
            running[request.request_id] = request
        scheduled = []
        clock.time(comparison, sorted, _SORTED, key=str)
        num_items, before_s = len(running), clock.total_s
        for name, request in running.items():
            ask = again if name in seen else first
            seen.add(name)
            if clock.time(ask, hooks.ensure_cache_available, request, 0):
                clock.time(has, hooks.has_cache_item, request.mm_features[0].identifier)
                clock.time(allocated, hooks.update_state_after_alloc, request, 0)
                scheduled.append(request)
        clock.time(orders, hooks.build_connector_meta, step_of(*scheduled))
        for request in scheduled:
            clock.time(finished, hooks.request_finished, request)
            del running[request.request_id]
        clock.readings.add(step, (clock.total_s - before_s) / num_items)
        time.sleep(STEP_S)
