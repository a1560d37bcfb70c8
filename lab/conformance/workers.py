# SPDX-License-Identifier: Apache-2.0
"""One rank of an engine: vLLM's encoder-cache calls in a runner's order, with a toy for a model.

The calls into the connector are made by vLLM itself: `ECConnectorModelRunnerMixin` for the V1
runner, `ActiveECConnector` for the V2 runner. What stands around them here follows
`v1/worker/gpu_model_runner.py`, `v1/worker/gpu/model_runner.py` and
`v1/worker/mm_encoder_model_runner.py`: when they are called, with what, and what is done with
their answer.
"""

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorOutput,
    ModelRunnerOutput,
    make_empty_encoder_model_runner_output,
)
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin

from lab.conformance.pictures import encode
from lab.conformance.rules import Effect, Violation, require
from lab.conformance.watch import WORKER_HOOKS, HookLog, watch

_SAMPLED = 7


@dataclass
class _Running:
    """What a runner knows of a request."""

    num_prompt_tokens: int
    features: list[MultiModalFeatureSpec]
    num_computed_tokens: int
    num_sampled_tokens: int = 0


class Truth(Protocol):
    """Who knows what each item's embedding must be."""

    def expected(self, request_id: str, feature: MultiModalFeatureSpec) -> Tensor:
        """Return the embedding of an item of a request."""
        ...


@dataclass
class Deeds:
    """What an engine's first rank did with items, by identifier."""

    encoded: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


class Worker:
    """One rank; `execute` plays one step. See the subclasses for what a runner does."""

    def __init__(self, config: VllmConfig, rank: int, truth: Truth) -> None:
        self._config = config
        self._rank = rank
        self._truth = truth
        self._requests: dict[str, _Running] = {}
        self.encoder_cache: dict[str, Tensor] = {}
        self.deeds = Deeds()
        self.log = HookLog()
        self._is_encoder_only = config.is_mm_encoder_only
        self.connector: ECConnectorBase | None = None
        self._connect()
        watch(self.connector, WORKER_HOOKS, self.log)
        with self._in_its_process():
            self._start()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Play one step. What crosses the process boundary is pickled on the way."""
        output = replace(output, ec_connector_metadata=_carried(output.ec_connector_metadata))
        with self._in_its_process(), torch.inference_mode():
            self._update(output)
            answer = self._run(output)
        if answer.ec_connector_output is not None:
            back = _carried(answer.ec_connector_output)
            answer = ModelRunnerOutput.with_ec_conn_output(answer, back)
        return answer

    def close(self) -> None:
        """Shut the connector down, as the worker does when its process ends."""
        assert self.connector is not None
        with self._in_its_process():
            self.connector.shutdown()

    def _start(self) -> None:
        """Make what the runner makes of the connector."""

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        raise NotImplementedError

    # --- the process ---

    def _connect(self) -> None:
        with self._in_its_process():
            ec_transfer_state.ensure_ec_transfer_initialized(self._config)
            self.connector = ec_transfer_state.get_ec_transfer()

    @contextlib.contextmanager
    def _in_its_process(self) -> Iterator[None]:
        """Set the globals that vLLM keeps one of a process: the connector and the rank."""
        size = self._config.parallel_config.tensor_parallel_size
        ranks = SimpleNamespace(rank_in_group=self._rank, world_size=size, rank=self._rank)
        first = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True)
        before = ec_transfer_state._EC_CONNECTOR_AGENT, parallel_state._TP, parallel_state._PP
        ec_transfer_state._EC_CONNECTOR_AGENT = self.connector
        parallel_state._TP, parallel_state._PP = ranks, first  # type: ignore[assignment]
        try:
            yield
        finally:
            ec_transfer_state._EC_CONNECTOR_AGENT, parallel_state._TP, parallel_state._PP = before

    # --- the model ---

    def _update(self, output: SchedulerOutput) -> None:
        """Take over the scheduler's view of requests and of the encoder cache."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        for identifier in output.free_encoder_mm_hashes:
            self.encoder_cache.pop(identifier, None)
        for new in output.scheduled_new_reqs:
            before = self._requests.get(new.req_id)
            self._requests[new.req_id] = _Running(
                len(new.prompt_token_ids or ()),
                list(new.mm_features),
                new.num_computed_tokens,
                before.num_sampled_tokens if before else 0,
            )
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._requests[request_id].num_computed_tokens = computed

    def _to_encode(self, output: SchedulerOutput) -> list[MultiModalFeatureSpec]:
        return [
            feature
            for request_id, indices in output.scheduled_encoder_inputs.items()
            for index in indices
            if (feature := self._requests[request_id].features[index]).data is not None
        ]

    def _encode(self, feature: MultiModalFeatureSpec) -> Tensor:
        model = self._config.model_config
        made = encode(feature, model.get_hidden_size(), model.dtype)  # type: ignore[arg-type]
        if made is None:
            said = f"item {feature.identifier[:40]!r} is to be encoded and has no pixels"
            raise Violation(Effect.ENGINE_DIES, said)
        self.deeds.encoded.append(feature.identifier)
        return made

    def _gather(self, output: SchedulerOutput) -> None:
        """Take the embeddings that this step's tokens need, as `_gather_mm_embeddings` does."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            running = self._requests[request_id]
            start = running.num_computed_tokens
            for feature in running.features:
                position = feature.mm_position
                end = position.offset + position.length
                if position.offset < start + num_tokens and end > start:
                    self._compare(request_id, feature)

    def _compare(self, request_id: str, feature: MultiModalFeatureSpec) -> None:
        found = self.encoder_cache.get(feature.identifier)
        name = f"item {feature.identifier[:40]!r} on rank {self._rank}"
        if found is None:
            said = f"encoder cache miss: {name} was neither loaded nor encoded"
            raise Violation(Effect.ENGINE_DIES, said)
        wanted = self._truth.expected(request_id, feature)
        facts = [(tuple(each.shape), each.dtype) for each in (found, wanted)]
        require(facts[0] == facts[1], Effect.WRONG_ROWS, f"{name} is {facts[0]} and not {facts[1]}")
        require(torch.equal(found, wanted), Effect.WRONG_ROWS, f"{name} has other numbers")

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Give each request whose prompt is computed its next token."""
        sampled = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            running = self._requests[request_id]
            known = running.num_prompt_tokens + running.num_sampled_tokens
            is_last_chunk = running.num_computed_tokens + num_tokens >= known
            running.num_sampled_tokens += is_last_chunk
            sampled.append([_SAMPLED] if is_last_chunk else [])
        ids = list(output.num_scheduled_tokens)
        index = {request_id: number for number, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled)


class V1Worker(Worker):
    """The V1 runner: saves item by item, in any role; a producer's answer to a step is lost."""

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self._is_encoder_only:
            with self._calls(output):
                self._encode_and_save(output)
            return make_empty_encoder_model_runner_output(output)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        before = set(self.encoder_cache)
        with self._calls(output) as connector_output:
            self.deeds.loaded += set(self.encoder_cache) - before
            self._encode_and_save(output)
            self._gather(output)
        answer = self._sample(output)
        answer.ec_connector_output = connector_output
        return answer

    def _calls(
        self, output: SchedulerOutput
    ) -> contextlib.AbstractContextManager[ECConnectorOutput | None]:
        return ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(
            output, encoder_cache=self.encoder_cache
        )

    def _encode_and_save(self, output: SchedulerOutput) -> None:
        made = [(each.identifier, self._encode(each)) for each in self._to_encode(output)]
        for identifier, tensor in made:
            self.encoder_cache[identifier] = tensor
            ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(self.encoder_cache, identifier)


class V2Worker(Worker):
    """The V2 runner: saves new items after the step, on producers; steps without tokens count."""

    def _start(self) -> None:
        # Here, because it needs what a CPU build of vLLM need not have.
        from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

        self._calls = ActiveECConnector(self._config, self.encoder_cache)

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if not output.total_num_scheduled_tokens:
            return self._calls.no_forward(output)
        before = set(self.encoder_cache)
        with self._calls.maybe_get_output(output) as connector_output:
            self.deeds.loaded += set(self.encoder_cache) - before
            missing = [
                each
                for each in self._to_encode(output)
                if each.identifier not in self.encoder_cache
            ]
            self.encoder_cache.update({each.identifier: self._encode(each) for each in missing})
            if not self._is_encoder_only:
                self._gather(output)
        answer = (
            make_empty_encoder_model_runner_output(output)
            if self._is_encoder_only
            else self._sample(output)
        )
        return ModelRunnerOutput.with_ec_conn_output(answer, connector_output)


def _carried(message: Any) -> Any:
    """Return `message` as it arrives in another process."""
    try:
        return pickle.loads(pickle.dumps(message))
    except Exception as raised:
        said = f"{type(message).__name__} cannot be pickled: {raised}"
        raise Violation(Effect.ENGINE_DIES, said) from raised


WORKERS = {"v1": V1Worker, "v2": V2Worker}
