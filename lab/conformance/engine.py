# SPDX-License-Identifier: Apache-2.0
"""One engine: vLLM's own scheduler, the ranks of `workers`, and the loop of `v1/engine/core.py`."""

import json
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lab.conformance.pictures import Picture, embedding, request_for
from lab.conformance.rules import Effect, Violation
from lab.conformance.watch import SCHEDULER_HOOKS, HookLog, watch
from lab.conformance.workers import WORKERS, Worker

BLOCK_TOKENS = 16
_NUM_BLOCKS = 512
# A loop of an engine that has work but ran nothing sleeps this long, as EngineCore does.
_NAP_S = 0.001


@dataclass
class Ticket:
    """A request on its way, and its answer."""

    request_id: str
    pictures: tuple[Picture, ...]
    reason: FinishReason | None = None
    params: Any = None
    tokens: list[int] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether it was answered."""
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def is_failed(self) -> bool:
        """Whether it alone was failed, with an error that a client may retry."""
        return self.reason is FinishReason.ERROR


class Engine:
    """A scheduler and its ranks. Close it; `place.Place` does."""

    def __init__(
        self,
        name: str,
        config: VllmConfig,
        runner: str,
        patience_s: float,
        encoder_cache_embeds: int | None = None,
    ) -> None:
        self.name = name
        self.log = HookLog()
        self._patience_s = patience_s
        self._config = config
        self._tickets: dict[str, Ticket] = {}
        self._num_asked = 0
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._hasher = None
        if config.cache_config.enable_prefix_caching:
            init_none_hash(hash_of)
            self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_of)
        self._num_in_flight = config.max_concurrent_batches
        ranks = config.parallel_config.tensor_parallel_size
        try:
            self.scheduler = _scheduler(config)
            self.workers: list[Worker] = [
                WORKERS[runner](config, rank, self) for rank in range(ranks)
            ]
        except Exception as raised:
            raise Violation(Effect.ENGINE_DIES, f"{name} does not start: {raised!r}") from raised
        if encoder_cache_embeds is not None:
            self.scheduler.encoder_cache_manager = EncoderCacheManager(encoder_cache_embeds)
        watch(self.connector, SCHEDULER_HOOKS, self.log)

    @property
    def connector(self) -> ECConnectorBase:
        """The connector object of the scheduler process."""
        connector = self.scheduler.get_ec_connector()
        assert connector is not None
        return connector

    @property
    def encoded(self) -> list[str]:
        """Identifiers that were encoded here, in order."""
        return self.workers[0].deeds.encoded

    @property
    def loaded(self) -> list[str]:
        """Identifiers that the connector put into the encoder cache here, in order."""
        return self.workers[0].deeds.loaded

    def expected(self, request_id: str, feature: MultiModalFeatureSpec) -> Tensor:
        """Return what an item's embedding must be."""
        by_identifier = {
            (each.identifier, each.num_embeds): each.seed
            for each in self._tickets[request_id].pictures
        }
        num_embeds = feature.mm_position.get_num_embeds()
        seed = by_identifier[feature.identifier, num_embeds]
        model = self._config.model_config
        assert isinstance(model.dtype, torch.dtype)
        return embedding(seed, num_embeds, model.get_hidden_size(), model.dtype)

    # --- requests ---

    def submit(self, *pictures: Picture, params: Any = None, max_tokens: int = 2) -> Ticket:
        """Hand a request to the scheduler; nothing runs yet."""
        self._num_asked += 1
        ticket = Ticket(f"{self.name}-{self._num_asked}", pictures)
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
        """Step until all are answered; a request that nobody answers is a `Violation`."""
        deadline_s = time.monotonic() + self._patience_s
        while waiting := [each.request_id for each in tickets if each.reason is None]:
            if time.monotonic() > deadline_s:
                said = f"no answer to {', '.join(waiting)} in {self._patience_s:.0f} s"
                raise Violation(Effect.HANGS, said)
            self.step()

    def idle(self) -> None:
        """Step as long as vLLM would: finished requests, and what the connector still pushes."""
        deadline_s = time.monotonic() + self._patience_s
        while self.scheduler.has_requests() or self._in_flight:
            if time.monotonic() > deadline_s:
                said = f"{self.name} has no request and still wants to step"
                raise Violation(Effect.HANGS, said)
            self.step()

    def abort(self, ticket: Ticket) -> None:
        """End a request as if its client had left."""
        self.scheduler.finish_requests(ticket.request_id, RequestStatus.FINISHED_ABORTED)
        ticket.reason = FinishReason.ABORT

    # --- steps ---

    def step(self) -> None:
        """Run one turn of the engine's loop; asynchronous scheduling keeps two steps in flight."""
        if self.scheduler.has_requests():
            output = self.schedule()
            self.execute(output)
            has_run = output.total_num_scheduled_tokens > 0
            if len(self._in_flight) < self._num_in_flight and has_run:
                return
        else:
            has_run = False
        self.update()
        if not has_run and self.scheduler.has_requests():
            time.sleep(_NAP_S)

    def schedule(self) -> SchedulerOutput:
        """First part of a step: what runs."""
        try:
            return self.scheduler.schedule()
        except Violation:
            raise
        except Exception as raised:
            raise Violation(Effect.ENGINE_DIES, f"the scheduler died: {raised!r}") from raised

    def execute(self, output: SchedulerOutput) -> None:
        """Second part: every rank runs it, and their answers are brought together."""
        answers: list[ModelRunnerOutput | None] = [each.execute(output) for each in self.workers]
        answer = answers[0]
        if len(answers) > 1:
            answer = ECOutputAggregator().aggregate(answers, output_rank=0)
        assert answer is not None
        self._in_flight.append((output, answer))

    def update(self) -> None:
        """Third part: the scheduler takes the oldest answer in flight."""
        if not self._in_flight:
            return
        output, answer = self._in_flight.popleft()
        try:
            outputs = self.scheduler.update_from_output(output, answer)
        except Violation:
            raise
        except Exception as raised:
            said = f"the scheduler died over a step's answer: {raised!r}"
            raise Violation(Effect.ENGINE_DIES, said) from raised
        for client in outputs.values():
            for each in client.outputs:
                self._take(each)

    def _take(self, output: EngineCoreOutput) -> None:
        ticket = self._tickets[output.request_id]
        ticket.tokens += output.new_token_ids
        if output.finish_reason is not None:
            ticket.reason = output.finish_reason
            ticket.params = _as_client_sees(output.ec_transfer_params)

    def preempt_all(self) -> None:
        """Put every running request back into the queue; they compute their prompts again."""
        self.idle_in_flight()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def idle_in_flight(self) -> None:
        """Take the answers of all steps in flight."""
        while self._in_flight:
            self.update()

    def close(self) -> None:
        """Shut down every part of the engine."""
        try:
            for worker in self.workers:
                worker.close()
            self.scheduler.shutdown()
        except Exception as raised:
            said = f"shutdown raised {raised!r}"
            raise Violation(Effect.ENGINE_DIES, said) from raised


def _as_client_sees(params: Any) -> Any:
    """Return `ec_transfer_params` as they reach a client, and the next engine: as JSON."""
    try:
        return json.loads(json.dumps(params))
    except (TypeError, ValueError) as raised:
        said = f"ec_transfer_params cannot be sent to a client: {raised}"
        raise Violation(Effect.REQUEST_FAILS, said) from raised


def hash_of(value: Any) -> bytes:
    """Hash a block as vLLM does by default, in a way that takes any text."""
    from vllm.utils.hashing import sha256

    return sha256(value)


def _scheduler(config: VllmConfig) -> Scheduler:
    """Return vLLM's scheduler for `config`, with a KV cache that nobody computes."""
    groups = []
    if not config.is_mm_encoder_only:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
    num_blocks = _NUM_BLOCKS if groups else 1
    config.cache_config.num_gpu_blocks = num_blocks
    made = config.scheduler_config.get_scheduler_cls()
    assert issubclass(made, Scheduler), f"{made} is not vLLM's own scheduler"
    return made(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )
