# SPDX-License-Identifier: Apache-2.0
"""vLLM's own offloading without a GPU: its tiering spec, its managers and its shared region, with
KVShareTier below them, loaded as users load it. In place of the GPU, chunks of the region are
filled and read through the view that vLLM's worker has of it.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvshare.tier.manager import KVShareTier
from tests.waiting import wait_until

BLOCK_BYTES = 8192
GAUGES = ("kvshare_tier_save_queue_bytes", "kvshare_tier_breaker_open")
UNDECIDED = (LookupResult.RETRY, LookupResult.HIT_PENDING)
_numbers = itertools.count()


def tier_options(store: Mapping[str, Any], host: Path, **more: Any) -> dict[str, Any]:
    tier = {"type": "KVShareTier", "module_path": "kvshare.tier", "epoch": "test"}
    return {**tier, **store, "host_cache_dir": str(host), **more}


def offloading_config(
    tier: Mapping[str, Any], model: str = "a model", num_chunks: int = 16, **changes: Any
) -> OffloadingConfig:
    """Return the config that vLLM gives its offloading; `changes`: other values of fields."""
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": num_chunks * BLOCK_BYTES,
            "secondary_tiers": [dict(tier)],
        },
        engine_id=f"test-{os.getpid()}-{next(_numbers)}",
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        kv_cache_layout="LBHNC",
    )
    for name, value in changes.items():
        inner, _, field = name.partition("__")
        if field:
            value = dataclasses.replace(getattr(config, inner), **{field: value})
        config = dataclasses.replace(config, **{inner: value})
    return config


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), group)


def content(number: int) -> bytes:
    """Return the bytes of the chunk of that number; every number has other bytes."""
    generator = torch.Generator().manual_seed(number)
    chunk = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=generator)
    return chunk.numpy().tobytes()


class OffloadingHost:
    """One engine's offloading, driven as vLLM's scheduler drives it."""

    def __init__(self, config: OffloadingConfig) -> None:
        spec = OffloadingSpecFactory.create_spec(config)
        assert isinstance(spec, TieringOffloadingSpec)
        self.spec = spec
        manager = spec.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        (tier,) = manager.secondary_tiers
        assert isinstance(tier, KVShareTier)
        self.tier = tier
        self._region = SharedOffloadRegion(
            config.engine_id, spec.num_chunks, 0, spec.kv_bytes_per_chunk, BLOCK_BYTES
        )
        self._chunks = self._region.create_next_worker_view(BLOCK_BYTES)
        self._requests: dict[str, ReqContext] = {}
        self.counts: dict[str, float] = {}

    def close(self) -> None:
        if self._region.mmap_obj is None:
            return
        del self._chunks
        self._region.cleanup()
        self.manager.shutdown()

    def request(self, name: str) -> ReqContext:
        if name not in self._requests:
            self._requests[name] = ReqContext(req_id=name)
            self.manager.on_new_request(self._requests[name])
        return self._requests[name]

    def finish(self, name: str) -> None:
        self.manager.on_request_finished(self._requests.pop(name))

    def step(self) -> None:
        """End one step of vLLM's scheduler."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def step_until(self, condition: Callable[[], bool]) -> None:
        def is_so() -> bool:
            if condition():
                return True
            self.step()
            return False

        wait_until(is_so)

    def offload(self, numbers: Iterable[int], request: str = "storing") -> None:
        """Store chunks, as a step does once its GPU-to-CPU copies have ended."""
        context = self.request(request)
        prepared = self.manager.prepare_store([key(number) for number in numbers], context)
        assert prepared is not None, "the CPU tier is full"
        stored = dict(zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True))  # type: ignore[attr-defined]
        for number in numbers:
            if key(number) in stored:
                chunk = torch.frombuffer(bytearray(content(number)), dtype=torch.int8)
                self._chunks[int(stored[key(number)])] = chunk
        self.manager.complete_store(stored, context)

    def reset(self) -> None:
        """Clear the CPU tier, as vLLM does while no GPU copy is in progress.

        From 0.33 on vLLM loads nothing until it is notified that no copy is in progress.
        """
        self.manager.reset_cache()
        flushed = getattr(self.manager, "on_reset_flushed", None)
        if flushed is not None:
            flushed()

    def rest(self) -> None:
        """Step until no transfer is in progress and each chunk is stored, dropped or failed."""
        self.step_until(lambda: not self.manager.has_pending_work())
        # For the manager a store job ends with its copy; its saves may still be in progress.
        self.step_until(lambda: not self.tier.engine.in_flight)

    def ask(self, numbers: Iterable[int], request: str = "loading") -> list[LookupResult]:
        """Look chunks up once, in one step."""
        context = self.request(request)
        return [self.manager.lookup(key(number), context) for number in numbers]

    def find(self, numbers: Iterable[int], request: str = "loading") -> list[LookupResult]:
        """Look chunks up, step by step, until vLLM has a result for all of them."""
        numbers = list(numbers)
        found: list[LookupResult] = []

        def is_known() -> bool:
            found[:] = self.ask(numbers, request)
            return not any(result in UNDECIDED for result in found)

        self.step_until(is_known)
        return found

    def read(self, number: int, request: str = "loading") -> bytes:
        """Return a loaded chunk, as the CPU-to-GPU copy reads it."""
        context = self.request(request)
        (slot,) = self.manager.prepare_load([key(number)], context).chunk_ids  # type: ignore[attr-defined]
        chunk = self._chunks[int(slot)].numpy().tobytes()
        self.manager.complete_load([key(number)], context)
        return chunk

    def count(self, name: str) -> float:
        """Return one of the tier's metrics: the sum since the start, or a gauge's current value."""
        stats = self.manager.get_stats()
        for metric, values in (stats.data["data"] if stats else {}).items():
            for labels, value in values.items():
                if metric.startswith("kvshare_tier_"):
                    metric_and_labels = "/".join((metric.removeprefix("kvshare_tier_"), *labels))
                    before = 0 if metric in GAUGES else self.counts.get(metric_and_labels, 0)
                    seen = sum(value) if isinstance(value, list) else value  # of a histogram
                    self.counts[metric_and_labels] = before + seen
        return self.counts.get(name, 0)

    def is_breaker_open(self) -> bool:
        """Return whether a circuit breaker is open."""
        directions = ("read", "write")
        return any([self.count(f"breaker_open/scheduler/{each}") for each in directions])
