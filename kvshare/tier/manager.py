# SPDX-License-Identifier: Apache-2.0
"""KVShareTier: a secondary tier for vLLM's own offloading. Experimental, as vLLM's interface is.

vLLM's OffloadingConnector copies chunks of KV between the GPU and the CPU tier, a memory region of
its own. Below the CPU tier it uses secondary tiers: it asks whether they have a chunk (`lookup`),
has them load chunks into slots of the region (`submit_load`), and has them store chunks from there
(`submit_store`). This tier stores each chunk as one object, in the same kinds of stores as the
connectors of this project.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8000000000,
        "secondary_tiers": [{"type": "KVShareTier", "module_path": "kvshare.tier",
                             "url": "s3://bucket/prefix", "epoch": "qwen3-8b bf16"}]}}'

`url` is the store: a folder, or a bucket. `epoch` is a name of the user's for the weights and the
way in which they are run: engines with the same one use each other's chunks. docs/tier.md has the
details.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ecshare.plugin.logs import log_as_vllm
from ecshare.plugin.start import start_with_namespace
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec
from ecshare.store.keys import Key
from ecshare.transfer.device.staging import Slab, Staging, as_tensor
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Done, Fetch, Handle, Lookup, Outcome, Put, Run, StoredObject
from kvshare.config import parse_tier
from kvshare.tier.facts import tier_namespace

try:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingMetricMetadata,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

    from kvshare.tier.lookup_results import LookupResults
    from kvshare.tier.metrics import definitions, offloading_stats
except ImportError as exc:
    raise ImportError(
        "kvshare.tier is for the tiers of vLLM's OffloadingConnector as vLLM 0.30 to 0.33 have "
        f"them (vllm.v1.kv_offload.tiering). The installed vLLM has another interface: {exc}. "
        "KVShareConnector shares KV without it"
    ) from exc

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec

# `drain_jobs` waits for copies in memory, and checks for their end this often.
_POLL_S = 1.0


@dataclass(slots=True, eq=False)
class _LoadJob:
    """A load job of vLLM's: chunks to be copied into the CPU tier."""

    job_id: int
    keys: tuple[OffloadKey, ...]
    started_s: float
    missing: int
    loaded: list[OffloadKey] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _StoreJob:
    """A store job of vLLM's: chunks to be copied out of the CPU tier.

    Ownership: `copied` belongs to the copy thread until the copy ends, then to the scheduler
    thread.
    """

    job_id: int
    chunks: tuple[tuple[Key, int], ...]
    """Object keys, each with the chunk's slot in the CPU tier."""
    started_s: float
    copied: list[tuple[Key, Slab]] = field(default_factory=list)


class KVShareTier(SecondaryTierManager):
    """A secondary tier that stores chunks of the CPU tier as objects; see the module docstring.

    Load: a load thread of the transfer engine verifies the object and copies it to its slot. Store:
    the job ends for vLLM as soon as the chunk is copied out, so a slow store holds no slot of the
    CPU tier. Copies that wait for the store take at most `buffer_bytes`; further chunks are dropped
    and counted.

    Ownership: vLLM's scheduler thread calls every public method and owns all fields. Load and copy
    threads read `_rows`, `_spec` and `_staging`. They write only to slots that vLLM reserves for
    their job.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Parse the options, start the I/O thread and check that the store answers.

        `primary_kv_view`: the CPU tier, [number of chunks, bytes of a chunk].

        Raises:
            ConfigError: an option is wrong or the store cannot be used; names the option.
        """
        log_as_vllm()
        # vLLM 0.30 has no backpressure detectors.
        detector = () if backpressure_detector is None else (backpressure_detector,)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        path = f"secondary_tiers.{tier_type}"
        config = parse_tier(options, path)
        self.locality = Locality(config.locality) if config.locality else None
        self._config = config
        num_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        self._spec = TensorSpec("U8", (num_bytes,))
        self._staging = Staging(torch.device("cpu"), config.buffer_bytes)
        self._lookup_results = LookupResults()
        self._loading: set[Handle[StoredObject]] = set()
        self._copying: set[Handle[None]] = set()
        self._finished: list[JobResult] = []
        self._engine, self._namespace = start_with_namespace(
            config,
            path,
            partial(tier_namespace, offloading_spec, num_bytes, config.epoch),
            write=True,
            live=False,  # it hears of no reset of vLLM's caches
        )
        self._stats = self._engine.stats
        self._rows = torch.frombuffer(primary_kv_view.cast("B"), dtype=torch.uint8).view(
            -1, num_bytes
        )

    # --- vLLM's hooks ---

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether the chunk is stored; RETRY until the store answers, at most `wait_s`."""
        return self._lookup_results.result(key, req_context.req_id)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to load chunks into slots of the CPU tier; see `get_finished_jobs`."""
        job, keys = job_metadata, tuple(job_metadata.keys)
        load = _LoadJob(job.job_id, keys, time.monotonic(), missing=len(keys))
        handles = []
        names = [*map(self._namespace.key, keys)]
        # vLLM asks for the chunks of a prompt from its beginning on.
        self._engine.uses.add_chain(names, 1)
        for key, name, place in zip(keys, names, job.chunk_ids.tolist(), strict=True):
            fetch = Fetch(
                name,
                self._config.io_timeout_s,
                PROLOGUE_BYTES + self._spec.num_bytes,
                accepts=self._fits,
                use=partial(self._copy_in, place),
            )
            handle = Handle[StoredObject](fetch)
            handle.then = partial(self._loaded, handle, key, load)
            handles.append(handle)
        self._loading.update(handles)
        self._engine.submit(*handles)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to copy chunks out of the CPU tier and to store them."""
        job = job_metadata
        names = [self._namespace.key(key) for key in job.keys]
        chunks = tuple(zip(names, job.chunk_ids.tolist(), strict=True))
        store = _StoreJob(job.job_id, chunks, time.monotonic())
        handle = Handle[None](Run("copy out", partial(self._copy_out, store)))
        handle.then = partial(self._copied, handle, store)
        self._copying.add(handle)
        self._engine.submit(handle)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of the jobs that ended since the last call, each once."""
        self._engine.poll()
        finished, self._finished = self._finished, []
        return finished

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return the default: vLLM looks up only the new chunks of a request."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Remove the look-up results of the request."""
        self._lookup_results.remove_request(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Query the store for the chunks of this step's look-ups, in one batch per request."""
        handles = []
        for keys in self._lookup_results.take_queries():
            job = Lookup(tuple(map(self._namespace.key, keys)), self._config.wait_s)
            handles.append(Handle(job, partial(self._answered, keys)))
        if handles:
            self._engine.submit(*handles)

    def drain_jobs(self) -> None:
        """Block until no thread of this tier reads or writes the CPU tier; never for the store.

        Loads that wait for the store are cancelled: vLLM is about to clear the CPU tier.
        """
        self._engine.cancel(*self._loading)
        while self._loading or self._copying:
            some: Handle[Any] = next(iter((*self._loading, *self._copying)))
            self._engine.drain(_POLL_S, until=some)

    @property
    def engine(self) -> TransferEngine:
        """The transfer engine, which this tier owns."""
        return self._engine

    def shutdown(self) -> None:
        """Release the CPU tier, give saves a few seconds to end, and stop the I/O thread."""
        self.drain_jobs()
        self._engine.close()
        self._rows = torch.empty(0)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return this tier's metrics; see docs/metrics.md."""
        return definitions()

    def get_stats(self) -> "OffloadingConnectorStats | None":
        """Return the counts since the last call; None if there are none."""
        self._stats.set("now/save_queue_bytes", self._staging.used_bytes)
        return offloading_stats(self._engine.take_counts("scheduler"))

    # --- ends of jobs; scheduler thread ---

    def _saved(self, done: Done[None]) -> None:
        is_saved = done.outcome is Outcome.OK
        self._stats.add(f"chunks/{'saved' if is_saved else 'failed'}")

    def _answered(self, keys: tuple[OffloadKey, ...], done: Done[tuple[bool, ...]]) -> None:
        has_answer = done.value is not None
        found = done.value or (False,) * len(keys)
        for key, is_stored in zip(keys, found, strict=True):
            self._lookup_results.answer(key, is_stored=is_stored)
        num_missed = len(keys) - sum(found)
        if num_missed:
            self._stats.add(f"chunks/{'missed' if has_answer else 'failed'}", num_missed)

    def _loaded(
        self,
        handle: Handle[StoredObject],
        key: OffloadKey,
        load: _LoadJob,
        done: Done[StoredObject],
    ) -> None:
        self._loading.discard(handle)
        load.missing -= 1
        if done.outcome is Outcome.OK:
            load.loaded.append(key)
            self._stats.add("chunks/loaded")
        else:
            self._lookup_results.lost([key])
            self._stats.add("chunks/failed")
        if load.missing:
            return
        is_whole = len(load.loaded) == len(load.keys)
        self._finished.append(
            JobResult(
                load.job_id,
                success=is_whole,
                successful_keys=None if is_whole else tuple(load.loaded),
                transfer_time=time.monotonic() - load.started_s,
            )
        )

    def _copied(self, handle: Handle[None], store: _StoreJob, _: Done[None]) -> None:
        self._copying.discard(handle)
        puts = (Handle(Put(key, slab), self._saved) for key, slab in store.copied)
        self._engine.submit(*puts)
        num_dropped = len(store.chunks) - len(store.copied)
        if num_dropped:
            self._stats.add("chunks/dropped", num_dropped)
        seconds = time.monotonic() - store.started_s
        self._finished.append(
            JobResult(store.job_id, success=not num_dropped, transfer_time=seconds)
        )

    # --- load and copy threads ---

    def _fits(self, spec: TensorSpec) -> bool:
        return spec == self._spec

    def _copy_in(self, place: int, stored: StoredObject) -> None:
        self._rows[place].copy_(as_tensor(stored.payload, stored.spec))

    def _copy_out(self, store: _StoreJob) -> None:
        for key, place in store.chunks:
            slab = self._staging.reserve(self._spec)
            if slab is not None:
                self._staging.copy_out(slab, self._rows[place])
                store.copied.append((key, slab))
