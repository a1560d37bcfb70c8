# SPDX-License-Identifier: Apache-2.0
"""Both halves of a KV connector, driven as vLLM's scheduler and model runner drive them.

The configuration, requests and cache tensors are vLLM's own in kind and shape, those of an 8B-class
model; there is no engine and no model. The worker half is driven by the simulator of vLLM's loop,
in the order of the V2 runner. The scheduler half is called here, without vLLM's scheduler: that
would choose the blocks and the moment of each call, and add its own time.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from benchmarks.kv_shapes import DENSE, KVShape
from benchmarks.measure import wait_until
from lab.vllm_loop import Model
from lab.vllm_loop.runners import V2Runner

BLOCK_TOKENS = DENSE.block_tokens
_GIVE_UP_S = 60.0


class NotStored(Exception):
    """A connector does not find what was saved before."""


def text_config(folder: Path) -> VllmConfig:
    """Return the configuration of an engine with an 8B-class model, without weights."""
    (folder / "text-model").mkdir()
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": DENSE.layers,
        "num_attention_heads": 32,
        "num_key_value_heads": DENSE.heads,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    }
    (folder / "text-model" / "config.json").write_text(json.dumps(model))
    config = EngineArgs(
        model=str(folder / "text-model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_hybrid_kv_cache_manager=True,  # ExampleConnector requires it
    ).create_engine_config()
    config.cache_config.block_size = BLOCK_TOKENS
    init_none_hash(sha256)
    return config


def prompt_of(
    num_tokens: int, seed: int, *, name: str = "", block_tokens: int = BLOCK_TOKENS
) -> Request:
    """Return a request with a prompt of its own for each `seed`."""
    return Request(
        request_id=f"{seed}-{num_tokens}-{name}",
        prompt_token_ids=[seed, *range(1, num_tokens)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_tokens, sha256),
    )


def fill(caches: Tensor, seed: int) -> None:
    """Write random bits, different ones for each `seed`."""
    generator = torch.Generator().manual_seed(seed)
    caches.view(torch.int16).random_(generator=generator)


@dataclass(frozen=True)
class LoadTimes:
    """Seconds of one load."""

    look_up_s: float
    """From the first look-up to its answer."""
    held_up_s: float
    """In hooks of the worker, which delay other requests."""
    total_s: float
    """From the first look-up to the last byte in the cache."""


class KVHalves:
    """The scheduler half and the worker half of one connector, in one process."""

    def __init__(
        self,
        connector: type[KVConnectorBase_V1],
        vllm_config: VllmConfig,
        extra_config: Mapping[str, Any],
        caches: Tensor,
        shape: KVShape = DENSE,
    ) -> None:
        """Cache in `caches`, of a model of `shape`; see `KVShape.empty_caches`."""
        config = copy.copy(vllm_config)
        config.cache_config = copy.copy(vllm_config.cache_config)  # each engine has its own
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=connector.__name__,
            kv_connector_module_path=connector.__module__,
            kv_role="kv_both",
            kv_connector_extra_config=dict(extra_config),
        )
        config.cache_config.block_size = shape.block_tokens
        if shape.state is not None:
            config.cache_config.mamba_cache_mode = "align"
        cache = shape.config(caches.shape[1])
        self.scheduler = connector(config, KVConnectorRole.SCHEDULER, cache)
        self.worker = V2Runner(config, 0, _Computed(shape.by_layer(caches)), cache)
        self._shape = shape
        self._num_saved = 0  # blocks, beyond those that `settle` has waited for

    def save(self, request: Request, block_ids: Sequence[int]) -> float:
        """Compute `request`, whose KV and states are in these blocks, and save it.

        Returns the seconds that hooks delay its step.
        """
        num_tokens, _ = self._matched(request)
        assert num_tokens == 0, "it is stored already"
        blocks = blocks_of(self._shape.tables(block_ids))
        self.scheduler.update_state_after_alloc(request, blocks, 0)
        self.worker.log.clear()
        self._execute(_first_step(request, self._shape, block_ids))
        held_up_s = self.worker.log.seconds(
            "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"
        )
        self.scheduler.request_finished(request, list(block_ids))
        return held_up_s

    def settle(self, num_blocks: int) -> None:
        """Step on until the worker has reported `num_blocks` more blocks as saved."""

        def are_saved() -> bool:
            self._execute(SchedulerOutput.make_empty())
            return self._num_saved >= num_blocks

        wait_until(are_saved, _GIVE_UP_S)
        self._num_saved -= num_blocks

    def load(self, request: Request, block_ids: Sequence[int]) -> LoadTimes:
        """Load the stored KV and states of `request` into these blocks.

        Raises:
            NotStored: not all blocks are stored.
        """
        start_s = perf_counter()
        num_tokens, is_async = self._matched(request)
        look_up_s = perf_counter() - start_s
        wanted = (len(block_ids) - self._shape.num_recurrent_groups) * self._shape.block_tokens
        if num_tokens != wanted:
            raise NotStored(f"{num_tokens} tokens of {wanted}")
        blocks = blocks_of(self._shape.tables(block_ids))
        self.scheduler.update_state_after_alloc(request, blocks, num_tokens)
        self.worker.log.clear()
        if is_async:
            wait_until(lambda: self._has_loaded(request.request_id), _GIVE_UP_S)
        else:
            self._execute(_first_step(request, self._shape, block_ids))
        total_s = perf_counter() - start_s
        held_up_s = self.worker.log.seconds("start_load_kv", "get_transfer_results")
        self.scheduler.request_finished(request, list(block_ids))
        return LoadTimes(look_up_s, held_up_s, total_s)

    def close(self) -> None:
        """Stop both halves."""
        self.worker.close()
        self.scheduler.shutdown()  # type: ignore[no-untyped-call]

    def _matched(self, request: Request) -> tuple[int, bool]:
        answer: tuple[int | None, bool] = (None, False)

        def is_known() -> bool:
            nonlocal answer
            answer = self.scheduler.get_num_new_matched_tokens(request, 0)
            return answer[0] is not None

        wait_until(is_known, _GIVE_UP_S)
        assert answer[0] is not None
        return answer[0], answer[1]

    def _has_loaded(self, request_id: str) -> bool:
        results = self._execute(SchedulerOutput.make_empty())
        if results.failed_recving:
            raise NotStored(f"the load failed: {results.failed_recving}")
        return request_id in (results.finished_recving or ())

    def _execute(self, step: SchedulerOutput) -> KVConnectorOutput:
        """Have the worker run a step with the scheduler half's orders. Returns its report."""
        step.kv_connector_metadata = self.scheduler.build_connector_meta(step)
        report = self.worker.execute(step).kv_connector_output or KVConnectorOutput()
        if report.kv_connector_stats is not None:
            self._num_saved += int(report.kv_connector_stats.data.get("blocks/saved", 0))
        # Otherwise the scheduler half assumes that the memory of the saves is still in use.
        self.scheduler.update_connector_output(report)
        return report


class _Computed(Model):
    """A model whose KV is already in the caches."""

    def __init__(self, kv_caches: dict[str, Tensor]) -> None:
        super().__init__()
        self.kv_caches = kv_caches

    def forward(self, output: SchedulerOutput) -> list[list[int]]:
        return [[] for _ in output.num_scheduled_tokens]


def blocks_of(tables: Sequence[Sequence[int]]) -> KVCacheBlocks:
    """Return the blocks of each cache group as vLLM's cache manager hands them out."""
    return KVCacheBlocks(tuple([KVCacheBlock(number) for number in ids] for ids in tables))


def _first_step(request: Request, shape: KVShape, block_ids: Sequence[int]) -> SchedulerOutput:
    """Return the schedule of a step that computes all of `request`.

    vLLM hands over the states at the end of its last whole block.
    """
    tables = shape.tables(block_ids)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(request, tables)]
    num_tokens = len(request.block_hashes) * shape.block_tokens
    output.kv_connector_block_state = handed_over(request, tables, num_tokens)
    output.num_scheduled_tokens = {request.request_id: request.num_tokens}
    output.total_num_scheduled_tokens = request.num_tokens
    output.has_sync_kv_loads = True  # for connectors whose loads are not asynchronous
    return output


def handed_over(
    request: Request, tables: Sequence[Sequence[int]], num_tokens: int
) -> KVConnectorBlockState:
    """Return what tells connectors that the last blocks in `tables` of recurrent layers, which are
    all cache groups but the first, hold the states of `request` after `num_tokens`."""
    states = [(group, ids[-1], num_tokens) for group, ids in enumerate(tables) if group]
    return KVConnectorBlockState(set(), lambda _: (), {request.request_id: states})
