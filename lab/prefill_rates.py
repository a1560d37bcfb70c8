# SPDX-License-Identifier: Apache-2.0
"""A prefill engine that computes more KV than its store takes, in simulated time.

The scheduler half is real, and so are the limits of what is in flight and the memory that saves
take on a worker. The engine's steps and the store are imaginary.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ecshare.store.format import PROLOGUE_BYTES
from ecshare.transfer.client.priority import Admission, Priority
from ecshare.transfer.device.staging import Arena
from ecshare.transfer.engine import TransferEngine
from kvshare.chunks.facts import KVFacts
from kvshare.chunks.layers import AttentionWindow, LayerSet
from kvshare.chunks.prefix import ChunkKey, Grid
from kvshare.chunks.slabs import slab_sizes
from kvshare.config import KVConfig
from kvshare.messages import Piece, Report
from kvshare.scheduler.scheduler import KVScheduler
from lab.counted_time import CountedTime
from lab.throttled_store import Link, ThrottledStore

BLOCK_TOKENS = 16
CHUNK_BLOCKS = 16
# Qwen3-8B: K and V of 36 layers with 8 heads of 128 numbers, 2 bytes each.
TOKEN_BYTES = 2 * 36 * 8 * 128 * 2
_TIMEOUT_S = 10.0
# After this the limits in flight have adapted to the store.
_BEGIN_S = 10.0


@dataclass(frozen=True)
class Load:
    """The load of the engine: prompts of these lengths in turn, computed as fast as possible, for
    10 s and then for the `seconds` that are measured."""

    tokens_per_s: float
    prompt_tokens: Sequence[int]
    seconds: float
    step_tokens: int = 8192
    buffer_bytes: int = 1 << 30


@dataclass
class Result:
    """The outcome for the prompts."""

    announced: list[int] = field(default_factory=list)
    """The number of tokens of each prompt that were announced, in the order of their ends."""
    num_whole: int = 0
    """The number of prompts that were announced completely."""
    num_untrue: int = 0
    """The number of prompts of which a chunk was announced and never stored."""
    num_dropped: int = 0
    """The number of ordered chunks for which the worker had no memory."""
    stored_bytes: int = 0
    seconds: float = 0.0


class _Run:
    def __init__(self, load: Load, link: Link, half: KVScheduler) -> None:
        self.load = load
        self.result = Result()
        self._half = half
        self._store = ThrottledStore(link)
        self._admission = Admission(_TIMEOUT_S, grows=True)
        self._arena = Arena(load.buffer_bytes, torch.device("cpu"))
        self._ended: Counter[ChunkKey] = Counter()
        self._lost: set[ChunkKey] = set()
        self._stored: set[ChunkKey] = set()
        self._saves: set[asyncio.Task[None]] = set()
        self._promises: list[tuple[Request, int]] = []

    async def compute(self) -> None:
        """Compute prompts, then let all saves end."""
        loop, prompts = asyncio.get_running_loop(), _prompts(self.load.prompt_tokens)
        running: list[Request] = []
        before_bytes = 0
        while loop.time() < _BEGIN_S + self.load.seconds:
            if loop.time() < _BEGIN_S:
                before_bytes = self._store.moved_bytes
            output = self._schedule(running, prompts)
            orders = self._half.orders(output)
            self._save((*orders.leaving, *orders.saves))
            await asyncio.sleep(output.total_num_scheduled_tokens / self.load.tokens_per_s)
            self._half.reported(self._report())
            for request in [
                each for each in running if each.num_computed_tokens == each.num_tokens
            ]:
                running.remove(request)
                request.append_output_token_ids(0)
                self._finish(request)
        self.result.seconds = loop.time() - _BEGIN_S
        self.result.stored_bytes = self._store.moved_bytes - before_bytes
        orders = self._half.orders(SchedulerOutput.make_empty())
        self._save((*orders.leaving, *orders.saves))
        await asyncio.gather(*self._saves)
        self._check()

    def _schedule(self, running: list[Request], prompts: Iterator[Request]) -> SchedulerOutput:
        output, left = SchedulerOutput.make_empty(), self.load.step_tokens
        cached = CachedRequestData.make_empty()
        for request in running:
            left -= self._run(output, request, left)
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
        while left:
            request = next(prompts)
            running.append(request)
            num_tokens = self._run(output, request, left)
            left -= num_tokens
            self._half.allocated(request, [], 0)
            output.scheduled_new_reqs.append(_new(request))
        output.scheduled_cached_reqs = cached
        output.total_num_scheduled_tokens = self.load.step_tokens - left
        for request in running:
            request.num_computed_tokens += output.num_scheduled_tokens[request.request_id]
        return output

    def _run(self, output: SchedulerOutput, request: Request, most: int) -> int:
        num_tokens = min(most, request.num_tokens - request.num_computed_tokens)
        output.num_scheduled_tokens[request.request_id] = num_tokens
        return num_tokens

    def _save(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            num_bytes = PROLOGUE_BYTES + piece.num_blocks * BLOCK_TOKENS * TOKEN_BYTES
            memory = self._arena.take(num_bytes)
            if memory is None:
                self.result.num_dropped += self._counts
                self._lost.add(piece.key)
                self._ended[piece.key] += 1
                continue
            task = asyncio.get_running_loop().create_task(self._store_piece(piece, memory))
            self._saves.add(task)
            task.add_done_callback(self._saves.discard)

    async def _store_piece(self, piece: Piece, memory: Tensor) -> None:
        async with self._admission.admitted(Priority.SAVE, memory.nbytes):
            await self._store.move(memory.nbytes)
        self._arena.give_back(memory)
        self._stored.add(piece.key)
        self._ended[piece.key] += 1

    @property
    def _counts(self) -> bool:
        return asyncio.get_running_loop().time() > _BEGIN_S

    def _report(self) -> KVConnectorOutput:
        ended, self._ended = self._ended, Counter()
        lost, self._lost = frozenset(self._lost), set()
        return KVConnectorOutput(kv_connector_worker_meta=Report(lost, False, ended))

    def _finish(self, request: Request) -> None:
        params = self._half.finished(request)
        num_tokens = params["kvshare"]["num_tokens"] if params else 0
        if self._counts:
            self.result.announced.append(num_tokens)
            self.result.num_whole += num_tokens == request.num_prompt_tokens - 1
        self._promises.append((request, num_tokens))

    def _check(self) -> None:
        for request, num_tokens in self._promises:
            grid, num_blocks = Grid(BLOCK_TOKENS, CHUNK_BLOCKS), num_tokens // BLOCK_TOKENS
            chunks = (
                grid.run(request.block_hashes, first, first + CHUNK_BLOCKS)
                for first in range(0, num_blocks - CHUNK_BLOCKS + 1, CHUNK_BLOCKS)
            )
            self.result.num_untrue += not all(chunk.key in self._stored for chunk in chunks)


def prefill(load: Load, link: Link, folder: Path) -> Result:
    """Return the outcome for the KV that `load` computes, with a store behind `link`.

    `folder`: for the host cache and its notes; nothing else is written.
    """
    init_none_hash(sha256)
    config = KVConfig(
        url=f"file://{folder}/store",
        host_cache_dir=f"{folder}/host",
        buffer_bytes=load.buffer_bytes,
    )
    layers = LayerSet(0, (0,), (("layers.0", 0),), AttentionWindow(), 1, 1)
    facts = KVFacts(
        "0" * 32,
        Grid(BLOCK_TOKENS, CHUNK_BLOCKS),
        (layers,),
        1,
        {1: ("t0of1",)},
        slab_sizes([BLOCK_TOKENS * TOKEN_BYTES]),
        sha256,
        saves=True,
        loads=False,
    )
    half = KVScheduler(config, facts, TransferEngine(config, "options"))
    run = _Run(load, link, half)
    try:
        with asyncio.Runner(loop_factory=CountedTime) as runner:
            runner.run(run.compute())
    finally:
        half.close()
    return run.result


def _prompts(lengths: Sequence[int]) -> Iterator[Request]:
    """Yield requests as a router sends them to P: each prompt is new, and one token is sampled."""
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    for number, num_tokens in zip(count(1), cycle(lengths)):
        yield Request(
            request_id=str(number),
            prompt_token_ids=[number, *range(1, num_tokens)],
            sampling_params=SamplingParams(
                max_tokens=1,
                extra_args={"kv_transfer_params": {"kvshare": {"for_decode": True}}},
            ),
            pooling_params=None,
            block_hasher=hasher,
        )


def _new(request: Request) -> NewRequestData:
    num_blocks = -(-request.num_tokens // BLOCK_TOKENS)
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(list(range(num_blocks)),),
        num_computed_tokens=request.num_computed_tokens,
        lora_request=None,
    )
