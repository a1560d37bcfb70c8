# SPDX-License-Identifier: Apache-2.0
"""One engine with a connector under test. Each failure in it becomes a `Violation`."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from lab.conformance.pictures import Picture, PictureModel, embedding, request_for
from lab.conformance.violations import Effect, Violation
from lab.vllm_loop import EngineLoop, HookFailed, RunnerName

BLOCK_TOKENS = 16
_NUM_BLOCKS = 512


@dataclass
class Ticket:
    """A request in flight, and its answer."""

    request_id: str
    pictures: tuple[Picture, ...]
    reason: FinishReason | None = None
    params: Any = None
    tokens: list[int] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Return whether the request was answered."""
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def is_failed(self) -> bool:
        """Return whether the engine failed the request alone, with a retryable error."""
        return self.reason is FinishReason.ERROR


class Engine(EngineLoop):
    """An engine with a KV cache that is never computed. The owner closes it; `Place` does."""

    def __init__(
        self,
        name: str,
        config: VllmConfig,
        runner: RunnerName,
        patience_s: float,
        encoder_cache_embeds: int | None = None,
    ) -> None:
        self.name = name
        self._patience_s = patience_s
        self._tickets: dict[str, Ticket] = {}
        self._hasher = None
        config.cache_config.block_size = BLOCK_TOKENS
        if config.cache_config.enable_prefix_caching:
            init_none_hash(sha256)
            self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        ranks = range(config.parallel_config.tensor_parallel_size)
        models = [PictureModel(config.model_config, rank, self.expected) for rank in ranks]
        with _dies(f"{name} does not start"):
            super().__init__(config, models, _cache_config(config), runner)
        if encoder_cache_embeds is not None:
            self.scheduler.encoder_cache_manager = EncoderCacheManager(encoder_cache_embeds)

    @property
    def encoded(self) -> list[str]:
        """Return the identifiers that this engine encoded, in order."""
        return self.runners[0].encoded

    @property
    def loaded(self) -> list[str]:
        """Return the identifiers that the connector loaded into the encoder cache, in order."""
        return self.runners[0].loaded

    def expected(self, request_id: str, feature: MultiModalFeatureSpec) -> Tensor:
        """Return the embedding that an item must have."""
        by_identifier = {
            (each.identifier, each.num_embeds): each.seed
            for each in self._tickets[request_id].pictures
        }
        num_embeds = feature.mm_position.get_num_embeds()
        seed = by_identifier[feature.identifier, num_embeds]
        model = self.config.model_config
        assert isinstance(model.dtype, torch.dtype)
        return embedding(seed, num_embeds, model.get_hidden_size(), model.dtype)

    # --- requests ---

    def submit(self, *pictures: Picture, params: Any = None, max_tokens: int = 2) -> Ticket:
        """Hand a request to the scheduler; nothing runs yet."""
        ticket = Ticket(f"{self.name}-{len(self._tickets) + 1}", pictures)
        self._tickets[ticket.request_id] = ticket
        request = request_for(
            ticket.request_id,
            pictures,
            max_tokens=max_tokens,
            params=params,
            hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return ticket

    def ask(self, *pictures: Picture, params: Any = None, max_tokens: int = 2) -> Ticket:
        """Submit a request and step until it is answered and the engine is idle."""
        ticket = self.submit(*pictures, params=params, max_tokens=max_tokens)
        self.wait(ticket)
        self.idle()
        return ticket

    def wait(self, *tickets: Ticket) -> None:
        """Step until all are answered; a request without an answer in time is a `Violation`."""
        deadline_s = time.monotonic() + self._patience_s
        while waiting := [each.request_id for each in tickets if each.reason is None]:
            if time.monotonic() > deadline_s:
                message = f"no answer to {', '.join(waiting)} in {self._patience_s:.0f} s"
                raise Violation(Effect.HANGS, message)
            self.step()

    def idle(self) -> None:
        """Step as long as vLLM would: for finished requests and for pending work of connectors."""
        deadline_s = time.monotonic() + self._patience_s
        while self.has_work:
            if time.monotonic() > deadline_s:
                message = f"{self.name} has no request and still wants to step"
                raise Violation(Effect.HANGS, message)
            self.step()

    def leave(self, ticket: Ticket) -> None:
        """End a request as if its client had left."""
        self.abort(ticket.request_id)
        ticket.reason = FinishReason.ABORT

    def preempt_all(self) -> None:
        """Put every running request back into the queue; they compute their prompts again."""
        self.update_all()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    # --- steps ---

    def schedule(self) -> SchedulerOutput:
        """Schedule a step, with a `Violation` if the scheduler dies."""
        with _dies("the scheduler died"):
            return super().schedule()

    def execute(self, output: SchedulerOutput) -> None:
        """Execute a step, with a `Violation` if a rank dies."""
        with _dies("a worker died"):
            super().execute(output)

    def update(self) -> None:
        """Process the oldest answer of a step, with a `Violation` if the scheduler dies."""
        with _dies("the scheduler died over a step's answer"):
            super().update()

    def received(self, outputs: EngineCoreOutputs) -> None:
        """Record the answers that clients receive."""
        for each in outputs.outputs:
            ticket = self._tickets[each.request_id]
            ticket.tokens += each.new_token_ids
            if each.finish_reason is not None:
                ticket.reason = each.finish_reason
                ticket.params = _as_client_sees(each.ec_transfer_params)

    def close(self) -> None:
        """Shut down every part of the engine."""
        with _dies("shutdown failed"):
            super().close()


@contextmanager
def _dies(where: str) -> Iterator[None]:
    """Convert exceptions to `ENGINE_DIES`, except those that already name their cause."""
    try:
        yield
    except (Violation, HookFailed):
        raise
    except Exception as raised:
        raise Violation(Effect.ENGINE_DIES, f"{where}: {raised!r}") from raised


def _as_client_sees(params: Any) -> Any:
    """Return `ec_transfer_params` as they reach a client, and the next engine: as JSON."""
    try:
        return json.loads(json.dumps(params))
    except (TypeError, ValueError) as raised:
        message = f"ec_transfer_params cannot be sent to a client: {raised}"
        raise Violation(Effect.REQUEST_FAILS, message) from raised


def _cache_config(config: VllmConfig) -> KVCacheConfig:
    if config.is_mm_encoder_only:
        return KVCacheConfig(1, [], [])
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return KVCacheConfig(_NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
