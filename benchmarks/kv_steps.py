# SPDX-License-Identifier: Apache-2.0
"""Time a step of the scheduler half with many requests, and count what it orders to be stored.

The scheduler half is called as vLLM calls it. There is no worker: the end of each save is reported
in its place.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from random import Random

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from benchmarks import places
from benchmarks.hooks import HookClock
from benchmarks.kv_halves import blocks_of, prompt_of
from benchmarks.kv_shapes import DENSE, HYBRID, LARGE_HYBRID, KVShape
from benchmarks.measure import percentile, wait_until
from benchmarks.report import Table
from kvshare.chunks.prefix import names_state
from kvshare.connector import KVShareConnector
from kvshare.messages import Orders, Piece, Report

PROMPT_TOKENS = 4096
LONG_PROMPT_TOKENS = 32768
STEP_TOKENS = 8192
_GIVE_UP_S = 60.0
_NO_LIMIT = 1 << 40  # bytes of saves: nothing is saved here
DECODE, PREFILL, CROWDED = "all decode", "one computes its prompt", "all decode, saves wait"
_NOTE = (
    "`build_connector_meta`, one call a step, with prompts of {} tokens and more, which end at all "
    "places of a block. `one computes its prompt`: besides, one request ends, and another computes "
    "all of its prompt. `saves wait`: no save ever ends, so that most prompts wait for memory."
)
_BYTES_NOTE = (
    f"A prompt of {LONG_PROMPT_TOKENS} tokens, computed in steps of {STEP_TOKENS}; no other prompt "
    "begins like it. vLLM hands over the state at the end of each step. Those of hybrids end at "
    "whole blocks."
)


class Steps:
    """The scheduler half of an engine with a model of some shape, and its running requests."""

    def __init__(self, connector: KVShareConnector, shape: KVShape) -> None:
        self._connector = connector
        self._shape = shape
        self._blocks = count(1)
        self.clock = HookClock()
        self.running: dict[str, Request] = {}
        self.saves_end = True
        """Whether saves have ended by the next step."""

    def begin(self, request: Request) -> None:
        """Look `request` up, of which nothing is stored, and admit it."""

        def is_known() -> bool:
            return self._connector.get_num_new_matched_tokens(request, 0)[0] is not None

        wait_until(is_known, _GIVE_UP_S)
        self._connector.update_state_after_alloc(request, blocks_of(self._tables(0)), 0)

    def step(
        self, new: Request | None = None, end_tokens: int = 0, *, timed: bool = False
    ) -> Sequence[Piece]:
        """Compute the tokens of request `new` up to `end_tokens`, and one token of each other
        running request; return what is saved."""
        output = SchedulerOutput.make_empty()
        states: dict[str, list[tuple[int, int, int]]] = {}
        cached = CachedRequestData.make_empty()
        for request in self.running.values():
            is_new = request is new
            start = request.num_computed_tokens
            end = end_tokens if is_new else start + 1
            num_blocks = -(-end // self._shape.block_tokens) - -(-start // self._shape.block_tokens)
            tables = self._tables(num_blocks) if num_blocks else None
            if is_new and not start:
                output.scheduled_new_reqs.append(
                    NewRequestData.from_request(request, tables or self._tables(0))
                )
            else:
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(tables)
                cached.num_computed_tokens.append(start)
                cached.num_output_tokens.append(request.num_output_tokens)
            output.num_scheduled_tokens[request.request_id] = end - start
            request.num_computed_tokens = end
            if not is_new:
                request.append_output_token_ids(7)
            if self._shape.state is not None and end % self._shape.block_tokens == 0:
                groups = range(1, 1 + self._shape.num_recurrent_groups)
                states[request.request_id] = [(group, next(self._blocks), end) for group in groups]
        output.scheduled_cached_reqs = cached
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.kv_connector_block_state = KVConnectorBlockState(set(), lambda _: (), states)
        clock = self.clock if timed else HookClock()
        orders = clock.time("step", self._connector.build_connector_meta, output)
        assert isinstance(orders, Orders)
        if self.saves_end:
            ended = Counter(piece.key for piece in (*orders.saves, *orders.leaving))
            report = Report(frozenset(), ended=ended)
            self._connector.update_connector_output(
                KVConnectorOutput(kv_connector_worker_meta=report)
            )
        return (*orders.saves, *orders.leaving)

    def end(self, request: Request) -> None:
        """End a running request."""
        del self.running[request.request_id]
        self._connector.request_finished_all_groups(request, self._tables(0))

    def _tables(self, num_blocks: int) -> tuple[list[int], ...]:
        """Return so many new blocks of each cache group."""
        groups = range(1 + self._shape.num_recurrent_groups)
        return tuple([next(self._blocks) for _ in range(num_blocks)] for _ in groups)


@contextmanager
def _engine(config: VllmConfig, shape: KVShape, **options: int) -> Iterator[Steps]:
    own = copy.copy(config)
    own.cache_config = copy.copy(config.cache_config)
    own.cache_config.block_size = shape.block_tokens
    if shape.state is not None:
        own.cache_config.mamba_cache_mode = "align"
    with places.host_folder() as host:
        extra = {"url": f"file://{host.parent}/store", "host_cache_dir": str(host), **options}
        own.kv_transfer_config = KVTransferConfig(
            kv_connector=KVShareConnector.__name__,
            kv_connector_module_path=KVShareConnector.__module__,
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
        connector = KVShareConnector(own, KVConnectorRole.SCHEDULER, shape.config(2))
        with closing(connector.scheduler):
            yield Steps(connector, shape)


def kv_steps(config: VllmConfig, num_requests: int, num_steps: int) -> Table:
    """Time steps with `num_requests` running requests, `num_steps` of each kind."""
    table = Table(
        "Steps with many requests, microseconds",
        ("model", "requests", "step", "calls", "p50 us", "p99 us", "max us"),
        _NOTE.format(PROMPT_TOKENS),
    )
    for kind in (DECODE, PREFILL, CROWDED):
        for shape in (DENSE, HYBRID):
            with _engine(config, shape) as steps:
                us = _timed(steps, shape, kind, num_requests, num_steps)
            figures = percentile(us, 50), percentile(us, 99), max(us)
            table.add(shape.name, num_requests, kind, len(us), *figures)
    return table


def _timed(
    steps: Steps, shape: KVShape, kind: str, num_requests: int, num_steps: int
) -> Sequence[float]:
    """Return the microseconds of each step."""
    numbers, dice = count(), Random(0)
    steps.saves_end = kind != CROWDED

    def begin() -> Request:
        # Otherwise all would fill their blocks in one step.
        num_tokens = PROMPT_TOKENS + dice.randrange(1024)
        request = prompt_of(num_tokens, next(numbers), block_tokens=shape.block_tokens)
        steps.begin(request)
        steps.running[request.request_id] = request
        return request

    for _ in range(num_requests):
        request = begin()
        steps.step(request, request.num_prompt_tokens)
    for _ in range(num_steps):
        if kind != PREFILL:
            steps.step(timed=True)
            continue
        steps.end(next(iter(steps.running.values())))
        request = begin()
        steps.step(request, request.num_prompt_tokens, timed=True)
    return [1e6 * each for each in steps.clock.readings.values("step")]


def stored_bytes(config: VllmConfig) -> Table:
    """Count what is stored of one long prompt."""
    table = Table(
        "What a long prompt stores",
        ("model", "tokens", "KV MB", "states", "states MB", "MB in all", "objects"),
        _BYTES_NOTE,
    )
    for shape in (DENSE, HYBRID, LARGE_HYBRID):
        with _engine(config, shape, buffer_bytes=_NO_LIMIT) as steps:
            pieces = list(_of_long_prompt(steps, shape))
        states = {piece.key for piece in pieces if names_state(piece.key)}
        num_blocks = sum(piece.num_blocks for piece in pieces if piece.key not in states)
        kv_mb = round(num_blocks * shape.block_bytes / 1e6)
        states_mb = round(len(states) * shape.state_bytes / 1e6)
        table.add(
            *(shape.name, LONG_PROMPT_TOKENS, kv_mb, len(states), states_mb),
            *(float(kv_mb + states_mb), len(pieces)),
        )
    return table


def _of_long_prompt(steps: Steps, shape: KVShape) -> Iterator[Piece]:
    """Compute a long prompt; yield what is saved."""
    request = prompt_of(LONG_PROMPT_TOKENS, 0, block_tokens=shape.block_tokens)
    steps.begin(request)
    steps.running[request.request_id] = request
    step_tokens = STEP_TOKENS // shape.block_tokens * shape.block_tokens
    last = (LONG_PROMPT_TOKENS - 1) // shape.block_tokens * shape.block_tokens
    for end in (*range(step_tokens, last, step_tokens), last, LONG_PROMPT_TOKENS):
        yield from steps.step(request, end)
