# SPDX-License-Identifier: Apache-2.0
"""One rank of an engine: its connectors, called in the order of vLLM's V1 or V2 model runner."""

import contextlib
import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ModelRunnerOutput,
    make_empty_encoder_model_runner_output,
)
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from lab.vllm_loop.hooks import EC_WORKER_HOOKS, KV_WORKER_HOOKS, HookLog, watch
from lab.vllm_loop.model import Model
from lab.vllm_loop.states import RunningStates

RunnerName = Literal["v1", "v2"]
RUNNERS: tuple[RunnerName, ...] = ("v1", "v2")


class Runner:
    """One rank; `execute` plays one step. See the subclasses for what a runner does.

    Layer by layer a real model waits for a layer's KV, computes it and saves it; layers with a
    recurrent state do neither. `model` computes all layers at once, so here all are waited for
    before it, and all are saved behind it.
    """

    def __init__(
        self, config: VllmConfig, rank: int, model: Model, kv_cache_config: KVCacheConfig
    ) -> None:
        """Start the connectors that `config` names. `model`: its `kv_caches` are registered."""
        self.config = config
        self.model = model
        self.encoded: list[str] = []
        """Identifiers of the items that this rank encoded, in order."""
        self.loaded: list[str] = []
        """Identifiers that the connector put into the encoder cache, in order."""
        self.log = HookLog()
        self.ec_connector: ECConnectorBase | None = None
        self.kv_connector: KVConnectorBase_V1 | None = None
        self._rank = rank
        self._states = RunningStates(kv_cache_config, model.kv_caches)
        self._layers = {
            name: SimpleNamespace(kv_cache=cache) for name, cache in model.kv_caches.items()
        }
        self._attention: dict[str, Any] = dict.fromkeys(model.kv_caches)
        with self._in_its_process():
            if config.ec_transfer_config is not None:
                self.ec_connector = ECConnectorFactory.create_connector(
                    config, ECConnectorRole.WORKER
                )
                watch(self.ec_connector, EC_WORKER_HOOKS, self.log)
            if config.kv_transfer_config is not None:
                connector = KVConnectorFactory.create_connector(
                    config, KVConnectorRole.WORKER, kv_cache_config
                )
                assert isinstance(connector, KVConnectorBase_V1)
                self.kv_connector = connector
                watch(connector, KV_WORKER_HOOKS, self.log)
        with self._in_its_process():
            self._start()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Play one step. What crosses the process boundary is pickled on the way."""
        output = replace(
            output,
            ec_connector_metadata=_carried(output.ec_connector_metadata),
            kv_connector_metadata=_carried(output.kv_connector_metadata),
        )
        with self._in_its_process(), torch.inference_mode():
            answer = self._run(output)
        return replace(
            answer,
            ec_connector_output=_carried(answer.ec_connector_output),
            kv_connector_output=_carried(answer.kv_connector_output),
        )

    def close(self) -> None:
        """Shut the connectors down, as the worker does when its process ends."""
        with self._in_its_process():
            if self.ec_connector is not None:
                self.ec_connector.shutdown()
            if self.kv_connector is not None:
                self.kv_connector.shutdown()  # type: ignore[no-untyped-call]

    def _start(self) -> None:
        """Create the objects through which this runner calls the connectors."""

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        raise NotImplementedError

    @contextlib.contextmanager
    def _in_its_process(self) -> Iterator[None]:
        """Set the globals that vLLM has once a process: the connectors and the rank."""
        parallel = self.config.parallel_config
        stage, rank = divmod(self._rank, parallel.tensor_parallel_size)
        ranks = SimpleNamespace(
            rank_in_group=rank, world_size=parallel.tensor_parallel_size, rank=self._rank
        )
        stages = SimpleNamespace(
            rank_in_group=stage,
            world_size=parallel.pipeline_parallel_size,
            is_first_rank=not stage,
            is_last_rank=stage == parallel.pipeline_parallel_size - 1,
        )
        first = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True)
        with (
            _replaced(ec_transfer_state, "_EC_CONNECTOR_AGENT", self.ec_connector),
            _replaced(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.kv_connector),
            _replaced(parallel_state, "_TP", ranks),
            _replaced(parallel_state, "_PP", stages),
            _replaced(parallel_state, "_PCP", first),
        ):
            yield

    @contextlib.contextmanager
    def _forward_context(self) -> Iterator[None]:
        # Restores vLLM's own layers at the end: connectors that start later read them.
        layers = _replaced(self.config.compilation_config, "static_forward_context", self._layers)
        with layers, set_forward_context(self._attention, self.config):
            yield

    def _encode(self, features: Iterable[MultiModalFeatureSpec]) -> dict[str, Tensor]:
        made = {each.identifier: self.model.encode(each) for each in features}
        self.encoded += made
        return made

    def _forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        connector = self.kv_connector
        with_kv = [name for name in self._layers if name not in self._states.layers]
        if connector is not None:
            for name in with_kv:
                connector.wait_for_layer_load(name)
        sampled = self.model.forward(output)
        if connector is not None:
            for name in with_kv:
                layer = self._layers[name]
                connector.save_kv_layer(name, layer.kv_cache, self._attention[name])
        ids = list(output.num_scheduled_tokens)
        index = {request_id: number for number, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled)


class V1Runner(Runner):
    """The order of `v1/worker/gpu_model_runner.py`."""

    def _start(self) -> None:
        if self.kv_connector is not None:
            self.kv_connector.register_kv_caches(self.model.kv_caches)
            self.kv_connector.set_host_xfer_buffer_ops(copy_kv_blocks)

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self.kv_connector is not None:
            assert output.kv_connector_metadata is not None
            self.kv_connector.handle_preemptions(output.kv_connector_metadata)
        self.model.update(output)
        if self.ec_connector is not None and not self.ec_connector.is_consumer:
            with ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(
                output, encoder_cache=self.model.encoder_cache
            ):
                self._encode_and_save(output)
            return make_empty_encoder_model_runner_output(output)
        if not output.total_num_scheduled_tokens:
            if self.kv_connector is None:
                return EMPTY_MODEL_RUNNER_OUTPUT
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
        return self._with_tokens(output)

    def _with_tokens(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._states.move(output, self.model.rows)
        before = set(self.model.encoder_cache)
        with ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(
            output, encoder_cache=self.model.encoder_cache
        ) as ec_output:
            self.loaded += set(self.model.encoder_cache) - before
            self._encode_and_save(output)
            self.model.gather(output)
        is_speculating = self.config.speculative_config is not None
        with (
            self._forward_context(),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                output, defer_finalize=is_speculating
            ) as kv_output,
        ):
            answer = self._forward(output)
        if is_speculating:
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        answer.ec_connector_output, answer.kv_connector_output = ec_output, kv_output
        return answer

    def _encode_and_save(self, output: SchedulerOutput) -> None:
        cache = self.model.encoder_cache
        for identifier, tensor in self._encode(self.model.to_encode(output)).items():
            cache[identifier] = tensor
            ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(cache, identifier)


class V2Runner(Runner):
    """The order of `v1/worker/gpu/model_runner.py` and `v1/worker/mm_encoder_model_runner.py`."""

    def _start(self) -> None:
        # Imported late: a CPU build of vLLM may lack a dependency.
        from vllm.v1.worker.gpu.ec_connector import ActiveECConnector, ECConnector
        from vllm.v1.worker.gpu.kv_connector import get_kv_connector

        self._ec = (
            ECConnector()
            if self.ec_connector is None
            else ActiveECConnector(self.config, self.model.encoder_cache)
        )
        self._kv = get_kv_connector(self.config, self.model.kv_caches)

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.model.update(output)
        if not output.total_num_scheduled_tokens:
            answer = self._kv.no_forward(output)
            ec_output = self._ec.no_forward(output).ec_connector_output
            return ModelRunnerOutput.with_ec_conn_output(answer, ec_output)
        self._states.move(output, self.model.rows)
        is_encoder = self.config.is_mm_encoder_only
        cache = self.model.encoder_cache
        before = set(cache)
        with self._ec.maybe_get_output(output) as ec_output:
            self.loaded += set(cache) - before
            items = self.model.to_encode(output)
            cache.update(self._encode(each for each in items if each.identifier not in cache))
            if not is_encoder:
                self.model.gather(output)
        if is_encoder:
            answer = make_empty_encoder_model_runner_output(output)
            return ModelRunnerOutput.with_ec_conn_output(answer, ec_output)
        with self._forward_context():
            self._kv.pre_forward(output)
            answer = self._forward(output)
        self._kv.finish_forward()
        answer.kv_connector_output = self._kv.post_forward(output.finished_req_ids)
        answer.ec_connector_output = ec_output
        return answer


@contextlib.contextmanager
def chosen(runner: RunnerName) -> Iterator[None]:
    """Tell vLLM which runner it configures its scheduler for."""
    name = "VLLM_USE_V2_MODEL_RUNNER"
    before = os.environ.get(name)
    os.environ[name] = "1" if runner == "v2" else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _carried(message: Any) -> Any:
    """Return `message` as it arrives in another process."""
    return pickle.loads(pickle.dumps(message))  # noqa: S301 - our own, a moment ago


KINDS: dict[RunnerName, type[Runner]] = {"v1": V1Runner, "v2": V2Runner}
