# SPDX-License-Identifier: Apache-2.0
"""A connector beside ours below vLLM's MultiConnector, which loads wrong KV.

Requests address it as they address NIXL: by params with `do_remote_prefill` that name P's host. It
loads such a request once, and records that in the params. With the option `brings` = `always` it
loads KV for all requests whenever vLLM asks, as an offloading connector does.

In real engines it fills the blocks with noise. It reports no error, as NIXL reports none if P's
blocks hold other KV by then, unless `remote_fails` of the params says so: `request` (all of it) or
`blocks` (from the first one on).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus


def from_prefiller(**more: Any) -> dict[str, Any]:
    """Return the params of a request that the sibling loads. `more`: such as `fails`, `tokens`."""
    fields = {f"remote_{name}": value for name, value in more.items()}
    return {"do_remote_prefill": True, "remote_host": "10.0.0.1", **fields}


@dataclass
class Load:
    request_id: str
    tokens: list[int]
    start: int
    end: int
    block_ids: tuple[list[int], ...]
    fails: str


@dataclass
class Loads(KVConnectorMetadata):
    loads: list[Load]


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """Options: `brings` (`named` or `always`), and `is_async`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self.options = options
        self.is_async = bool(options.get("is_async", True))
        self.block_tokens = vllm_config.cache_config.block_size
        self.groups = kv_cache_config.kv_cache_groups
        self.starts: dict[str, int] = {}
        self.admitted: dict[str, tuple[Request, int]] = {}
        """Requests, and how often each had been preempted when it last got blocks."""
        self.loads: list[Load] = []
        self.results = KVConnectorTransferResults()
        self.invalid_blocks: set[int] = set()
        self.caches: dict[str, Tensor] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if self._is_a_load_lost():
            return 0, False
        if self.options.get("brings") == "always":
            end = (request.num_tokens - 1) // self.block_tokens * self.block_tokens
        elif params.get("do_remote_prefill") and params.get("remote_host"):
            end = params.get("remote_tokens", request.num_prompt_tokens - (not self.is_async))
        else:
            return 0, False
        self.starts[request.request_id] = num_computed_tokens
        num_tokens = max(0, end - num_computed_tokens)
        return num_tokens, self.is_async and num_tokens > 0

    def _is_a_load_lost(self) -> bool:
        """Return whether a load failed as a whole, by any connector, and its request waits to run.

        vLLM then still counts the blocks that the request needs as reserved. Whoever offers this
        request, or one that was preempted meanwhile and is asked about before it, a further
        asynchronous load has both wait for ever, unless all of that is free.
        """
        return any(
            request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and request.num_computed_tokens == 0
            and request.num_preemptions == num_preemptions
            for request, num_preemptions in self.admitted.values()
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
        self.admitted[request.request_id] = request, request.num_preemptions
        start = self.starts.pop(request.request_id, 0)
        if num_external_tokens:
            load = Load(
                request.request_id,
                list(request.all_token_ids),
                start,
                start + num_external_tokens,
                blocks.get_block_ids(),
                params.pop("remote_fails", ""),
            )
            self.loads.append(load)

    def build_connector_meta(self, scheduler_output: object) -> Loads:
        loads, self.loads = self.loads, []
        return Loads(loads)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.admitted.pop(request.request_id, None)
        return False, None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.admitted.pop(request.request_id, None)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for load in metadata.loads:
            first = load.start // self.block_tokens
            end = -(-load.end // self.block_tokens)
            for group, ids in enumerate(load.block_ids):
                for place in range(first, end):
                    if ids[place]:  # not the placeholder before a window
                        self.fill(load, group, place)
            if load.fails == "blocks":
                self.invalid_blocks |= set(load.block_ids[0][first:end])
            if self.is_async:
                self.results.finished_recving.add(load.request_id)
                if load.fails == "request":
                    self.results.failed_recving.add(load.request_id)

    def fill(self, load: Load, group: int, place: int) -> None:
        """Write the block of a request at `place` in one cache group."""
        for name in self.groups[group].layer_names:
            self.caches[name][load.block_ids[group][place]].normal_()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self.results = self.results, KVConnectorTransferResults()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self.invalid_blocks = self.invalid_blocks, set()
        return blocks

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
