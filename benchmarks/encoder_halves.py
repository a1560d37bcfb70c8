# SPDX-License-Identifier: Apache-2.0
"""Both halves of an encoder-cache connector, driven as vLLM's scheduler and V1 runner drive them.

The configuration, requests and tensors are vLLM's own; there is no engine and no model. Everything
goes through `ECConnectorBase`, so any connector can stand here.
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
    ECConnectorMetadata,
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
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from benchmarks.measure import touch, wait_until
from lab.models import make_qwen25_vl

Role = Literal["ec_producer", "ec_consumer", "ec_both"]

WIDTH = 4096  # elements of an embedding of an 8B-class model
DTYPE = torch.bfloat16
_GIVE_UP_S = 60.0
# What a picture's pixels look like matters to nobody here but that they are there.
_FIELD = MultiModalSharedField(batch_size=1)
_PIXELS = torch.zeros(4, 8)


class NotStored(Exception):
    """A connector says that it does not have what was saved before."""


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
            ec_role=role,
            ec_connector_extra_config=dict(extra_config),
        )
        self.scheduler = connector(config, ECConnectorRole.SCHEDULER)
        self.worker = connector(config, ECConnectorRole.WORKER)
        self._num_saved = 0

    def save(self, identifier: str, tensor: Tensor) -> tuple[float, float]:
        """Encode and save an item nobody has. Returns the seconds the step is held up: by the hooks
        that follow the encoder, and by the one that ends the step."""
        request = request_for(identifier, len(tensor))
        orders = self._schedule(request)
        encoder_cache: dict[str, Tensor] = {}
        self.worker.bind_connector_metadata(orders)
        start_s = perf_counter()
        self.worker.start_save_caches(encoder_cache=encoder_cache)
        begun_s = perf_counter() - start_s
        encoder_cache[identifier] = tensor  # the encoder runs here
        start_s = perf_counter()
        self.worker.save_caches(encoder_cache, identifier)
        saved_s = perf_counter() - start_s
        start_s = perf_counter()
        self.worker.get_finished(set())
        settled_s = perf_counter() - start_s
        self.worker.clear_connector_metadata()
        self.scheduler.request_finished(request)
        return begun_s + saved_s, settled_s

    def settle(self, num_saved: int) -> None:
        """Step on until the worker has reported `num_saved` more items as saved."""
        goal = self._num_saved + num_saved

        def are_saved() -> bool:
            self.worker.get_finished(set())
            report = self.worker.build_connector_worker_meta()
            for sums in getattr(report, "totals", {}).values():
                self._num_saved = max(self._num_saved, int(sums.get("items/saved", 0)))
            return self._num_saved >= goal

        wait_until(are_saved, _GIVE_UP_S)

    def load(self, identifier: str, num_embeds: int) -> tuple[float, float, Tensor]:
        """Load a stored item. Returns the seconds until the scheduler half is ready, those of the
        worker's load to the last byte touched, and the tensor.

        Raises:
            NotStored: the connector would have it encoded.
        """
        request = request_for(identifier, num_embeds)
        start_s = perf_counter()
        # vLLM was seen to ask again about once a millisecond.
        wait_until(lambda: self._is_ready(request), _GIVE_UP_S)
        ready_s = perf_counter() - start_s
        if not self.scheduler.has_cache_item(identifier):
            raise NotStored(identifier)
        orders = self._schedule(request)
        encoder_cache: dict[str, Tensor] = {}
        self.worker.bind_connector_metadata(orders)
        start_s = perf_counter()
        self.worker.start_load_caches(encoder_cache)
        touch(encoder_cache[identifier])
        loaded_s = perf_counter() - start_s
        self.worker.clear_connector_metadata()
        self.scheduler.request_finished(request)
        return ready_s, loaded_s, encoder_cache[identifier]

    def close(self) -> None:
        """Stop both halves."""
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _is_ready(self, request: Request) -> bool:
        """Ask, and end the step without scheduling anything if the answer is no."""
        if self.scheduler.ensure_cache_available(request, 0):
            return True
        self.scheduler.build_connector_meta(step_of())
        return False

    def _schedule(self, request: Request) -> ECConnectorMetadata:
        wait_until(lambda: self._is_ready(request), _GIVE_UP_S)
        self.scheduler.update_state_after_alloc(request, 0)
        return self.scheduler.build_connector_meta(step_of(request))
