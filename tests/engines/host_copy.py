# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiering spec for an engine without an accelerator, loaded by `spec_module_path`.

vLLM's own worker half of offloading refuses CPU engines: it copies by CUDA calls. This one copies
between the same two places, the cache tensors and the shared region, by plain assignments.
"""

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopyWorker(OffloadingWorker):
    """One cache group, one block a chunk."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = [
            (cache.tensor, region.create_next_worker_view(cache.page_size_bytes))
            for cache in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        for block, chunk in zip(src_spec.block_ids, dst_spec.chunk_ids, strict=True):
            for cache, region in self._pairs:
                region[int(chunk)] = cache[int(block)]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        for block, chunk in zip(dst_spec.block_ids, src_spec.chunk_ids, strict=True):
            for cache, region in self._pairs:
                cache[int(block)] = region[int(chunk)]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies that are complete when they are submitted."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class HostCopySpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            self.config.engine_id,
            self.num_chunks,
            0,
            self.kv_bytes_per_chunk,
            self.cpu_page_size_per_worker,
        )
        return HostCopyWorker(kv_caches, region)
