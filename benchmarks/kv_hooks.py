# SPDX-License-Identifier: Apache-2.0
"""Time the KV connector's hooks on the scheduler thread, whatever the store does."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from benchmarks import places
from benchmarks.hooks import BLACK_HOLE, COLUMNS, RUNNING, SHORT_S, STEP_S, HookClock
from benchmarks.kv_halves import BLOCK_TOKENS, KVHalves, blocks_of, prompt_of
from benchmarks.kv_shapes import DENSE
from benchmarks.places import Place
from benchmarks.report import Cell, Table
from kvshare.connector import KVShareConnector

NUM_TOKENS = 4096
STORED_BLOCKS = 1  # enough for a hit; the rest of the prompt is still looked up
_SEED = 1000  # prompts that no other measurement has stored
HOOKS = (
    "get_num_new_matched_tokens, first",
    "get_num_new_matched_tokens, again",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
)
_NOTE = (
    f"One call each, for one request of {NUM_TOKENS} tokens, {NUM_TOKENS // BLOCK_TOKENS} blocks; "
    f"every other prompt's first block is stored. {RUNNING} requests at once, a step a "
    "millisecond. `first`: the call that sees a request it does not know yet; `again`: those that "
    "follow until the answer is known. In a black hole the store was there at the start and falls "
    "silent. ExampleConnector cannot use S3, and nothing is stored for it."
)


def kv_hooks(
    config: VllmConfig, found: Sequence[Place], sizes: Sequence[int], num_requests: int
) -> Table:
    """Time the hooks of the KV connectors at all places, and in a black hole.

    `sizes`: tokens a chunk, one after the other.
    """
    table = Table("Hooks of the scheduler thread, microseconds", COLUMNS, _NOTE)
    for place in found:
        rows: list[tuple[Cell, ...]] = []
        for size in sizes:
            rows += _ours(config, place, size, num_requests, is_stalled=False)
            if place.proxy is not None:
                rows += _ours(config, place, size, num_requests, is_stalled=True)
        if place.folder is not None:
            extra = {"shared_storage_path": str(place.folder / "example-hooks")}
            halves = KVHalves(ExampleConnector, config, extra, DENSE.empty_caches(2))
            rows += _timed(halves, ExampleConnector.__name__, place.name, num_requests)
        table.rows += rows
    table.rows.sort(key=lambda row: HOOKS.index(str(row[0])))
    return table


def _ours(
    config: VllmConfig, place: Place, size: int, num_requests: int, *, is_stalled: bool
) -> list[tuple[Cell, ...]]:
    name = f"{KVShareConnector.__name__}, chunks of {size}"
    with ExitStack() as stack:

        def start(**limits: float) -> KVHalves:
            host = str(stack.enter_context(places.host_folder()))
            extra = {**place.options, "host_cache_dir": host, "chunk_tokens": size, **limits}
            caches = DENSE.empty_caches(STORED_BLOCKS + 1)
            halves = KVHalves(KVShareConnector, config, extra, caches)
            return stack.enter_context(closing(halves))

        if is_stalled:
            assert place.proxy is not None
            halves = start(wait_s=SHORT_S, io_timeout_s=SHORT_S)
            place.proxy.stall()
            stack.callback(place.proxy.resume)
            return _timed(halves, name, BLACK_HOLE, num_requests)
        writer = start()
        num_tokens = STORED_BLOCKS * BLOCK_TOKENS + 1
        for number in range(0, num_requests, 2):
            writer.save(prompt_of(num_tokens, _SEED + number, name="w"), range(STORED_BLOCKS))
        writer.settle(STORED_BLOCKS * len(range(0, num_requests, 2)))
        return _timed(start(), name, place.name, num_requests)


def _timed(
    halves: KVHalves, connector: str, store: str, num_requests: int
) -> list[tuple[Cell, ...]]:
    clock = HookClock()
    _drive(halves, [prompt_of(NUM_TOKENS, _SEED + n) for n in range(num_requests)], clock)
    return clock.rows(HOOKS, connector, store)


def _drive(halves: KVHalves, requests: Sequence[Request], clock: HookClock) -> None:
    """Call the scheduler half as vLLM's scheduler does, until all requests were admitted.

    Nothing is loaded: that is the worker's part. Each request is reported as loaded and ends.
    """
    first, again, allocated, orders, finished = HOOKS
    hooks: Any = halves.scheduler
    waiting, running = deque(requests), dict[str, Request]()
    block_ids = range(NUM_TOKENS // BLOCK_TOKENS)
    seen = set[str]()
    while waiting or running:
        while waiting and len(running) < RUNNING:
            request = waiting.popleft()
            running[request.request_id] = request
        admitted = []
        for name, request in running.items():
            ask = again if name in seen else first
            seen.add(name)
            num_tokens, _ = clock.time(ask, hooks.get_num_new_matched_tokens, request, 0)
            if num_tokens is not None:
                blocks = blocks_of([block_ids])
                clock.time(allocated, hooks.update_state_after_alloc, request, blocks, num_tokens)
                admitted.append(request)
        clock.time(orders, hooks.build_connector_meta, SchedulerOutput.make_empty())
        ended = {request.request_id for request in admitted}
        hooks.update_connector_output(KVConnectorOutput(finished_recving=ended))
        for request in admitted:
            clock.time(finished, hooks.request_finished, request, list(block_ids))
            del running[request.request_id]
        time.sleep(STEP_S)
