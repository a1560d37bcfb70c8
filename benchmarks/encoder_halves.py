# SPDX-License-Identifier: Apache-2.0
"""Both halves of an encoder-cache connector, driven as vLLM's scheduler and V2 runner drive them.

The configuration, requests and tensors are vLLM's own; there is no engine and no model. The worker
half is driven by the simulator of vLLM's loop. The scheduler half is called here, without vLLM's
scheduler: that would choose the moment of each call, and add its own time.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorRole,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from benchmarks.measure import touch, wait_until
from lab.models import make_qwen25_vl
from lab.vllm_loop import Model
from lab.vllm_loop.runners import V2Runner

Role = Literal["ec_producer", "ec_consumer", "ec_both"]

WIDTH = 4096  # elements of an embedding of an 8B-class model
DTYPE = torch.bfloat16
_GIVE_UP_S = 60.0
# The content of the pixels does not matter, only their presence.
_FIELD = MultiModalSharedField(batch_size=1)
_PIXELS = torch.zeros(4, 8)


class NotStored(Exception):
    """A connector reports that it does not have what was saved before."""


def vlm_config(folder: Path) -> VllmConfig:
    """Return the configuration of a small VLM, whose embeddings are as wide as a large one's."""
    model = make_qwen25_vl(folder / "model")
    config = EngineArgs(
        model=str(model), dtype="bfloat16", enforce_eager=True
    ).create_engine_config()
    config.model_config.model_arch_config.hidden_size = WIDTH
    return config


def embedding(num_bytes: int, seed: int) -> Tensor:
    """Return a random embedding of about `num_bytes`."""
    generator = torch.Generator().manual_seed(seed)
    num_embeds = num_bytes // (WIDTH * DTYPE.itemsize)
    bits = torch.randint(-(1 << 15), 1 << 15, (num_embeds, WIDTH), generator=generator)
    return bits.to(torch.int16).view(DTYPE)


def request_for(identifier: str, num_embeds: int) -> Request:
    """Return a request of its own for one picture."""
    fields = {
        "image_grid_thw": MultiModalFieldElem(
            data=torch.tensor([1, 2, 2 * num_embeds]), field=_FIELD
        ),
        "pixel_values": MultiModalFieldElem(data=_PIXELS, field=_FIELD),
    }
    feature = MultiModalFeatureSpec(
        data=MultiModalKwargsItem(fields),
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=1, length=num_embeds),
    )
    return Request(
        request_id=f"request-{identifier}",
        prompt_token_ids=[0] * (num_embeds + 2),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[feature],
    )


def step_of(*requests: Request) -> SchedulerOutput:
    """Return the schedule of a step that computes all tokens of `requests`."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {each.request_id: each.num_tokens for each in requests}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    return output


class Halves:
    """The scheduler half and the worker half of one connector, in one process."""

    def __init__(
        self,
        connector: type[ECConnectorBase],
        vllm_config: VllmConfig,
        role: Role,
        extra_config: Mapping[str, Any],
    ) -> None:
        config = copy.copy(vllm_config)
        config.ec_transfer_config = ECTransferConfig(
            ec_connector=connector.__name__,
            ec_connector_module_path=connector.__module__,
            ec_role=role,
            ec_connector_extra_config=dict(extra_config),
        )
        self.scheduler = connector(config, ECConnectorRole.SCHEDULER)
        self._model = _Encoder()
        self.worker = V2Runner(config, 0, self._model, KVCacheConfig(1, [], []))
        self._num_saved = 0

    def save(self, identifier: str, tensor: Tensor) -> tuple[float, float]:
        """Encode and save a new item. Returns the seconds that hooks delay the step: those after
        the encoder, and the one that ends the step."""
        request = request_for(identifier, len(tensor))
        self._model.made = tensor
        self._run(request, encodes=True)
        log = self.worker.log
        copied_s = log.seconds("start_save_caches", "save_caches")
        return copied_s, log.seconds("get_finished")

    def settle(self, num_saved: int) -> None:
        """Step on until the worker has reported `num_saved` more items as saved."""
        goal = self._num_saved + num_saved

        def are_saved() -> bool:
            self._execute(step_of())
            return self._num_saved >= goal

        wait_until(are_saved, _GIVE_UP_S)

    def load(self, identifier: str, num_embeds: int) -> tuple[float, float, Tensor]:
        """Load a stored item. Returns the seconds until the scheduler half is ready, those of the
        worker's load to the last byte touched, and the tensor.

        Raises:
            NotStored: the connector would have it encoded.
        """
        request = request_for(identifier, num_embeds)
        self._free()
        start_s = perf_counter()
        # vLLM was seen to ask again about once a millisecond.
        wait_until(lambda: self._is_ready(request), _GIVE_UP_S)
        ready_s = perf_counter() - start_s
        if not self.scheduler.has_cache_item(identifier):
            raise NotStored(identifier)
        self._run(request, encodes=False)
        start_s = perf_counter()
        touch(self._model.encoder_cache[identifier])
        loaded_s = self.worker.log.seconds("start_load_caches") + perf_counter() - start_s
        return ready_s, loaded_s, self._model.encoder_cache[identifier]

    def close(self) -> None:
        """Stop both halves."""
        self.worker.close()
        self.scheduler.shutdown()

    def _free(self) -> None:
        """Tell both halves that vLLM's own encoder cache is empty."""
        step = step_of()
        step.free_encoder_mm_hashes = list(self._model.encoder_cache)
        self._execute(step)

    def _is_ready(self, request: Request) -> bool:
        """Ask, and end the step without scheduling anything if the answer is no."""
        if self.scheduler.ensure_cache_available(request, 0):
            return True
        self.scheduler.build_connector_meta(step_of())
        return False

    def _run(self, request: Request, *, encodes: bool) -> None:
        """Run one step that computes `request`; the worker's log then has this step alone."""
        wait_until(lambda: self._is_ready(request), _GIVE_UP_S)
        self.scheduler.update_state_after_alloc(request, 0)
        step = step_of(request)
        step.scheduled_new_reqs = [NewRequestData.from_request(request, ())]
        if encodes:
            step.scheduled_encoder_inputs = {request.request_id: [0]}
        self._model.clear()
        self.worker.log.clear()
        self._execute(step)
        self.scheduler.request_finished(request)

    def _execute(self, step: SchedulerOutput) -> None:
        """Have the worker run a step with the scheduler half's orders."""
        step.ec_connector_metadata = self.scheduler.build_connector_meta(step)
        output = self.worker.execute(step).ec_connector_output
        report = output and output.ec_connector_worker_meta
        for sums in getattr(report, "totals", {}).values():
            self._num_saved = max(self._num_saved, int(sums.get("items/saved", 0)))


class _Encoder(Model):
    """Returns a given embedding for every picture."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.empty(0)

    def encode(self, feature: MultiModalFeatureSpec) -> Tensor:
        return self.made

    def clear(self) -> None:
        """Drop all requests and embeddings."""
        self.rows.clear()
        self.encoder_cache.clear()
