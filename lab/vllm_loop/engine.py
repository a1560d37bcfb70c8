# SPDX-License-Identifier: Apache-2.0
"""The engine's loop: vLLM's scheduler, and the ranks that run what it schedules."""

import time
from collections import deque
from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lab.vllm_loop.hooks import EC_SCHEDULER_HOOKS, KV_SCHEDULER_HOOKS, HookLog, watch
from lab.vllm_loop.model import Model
from lab.vllm_loop.runners import KINDS, RunnerName, chosen

# A loop of an engine that has work but ran nothing sleeps this long, as EngineCore does.
_NAP_S = 0.001


class EngineLoop:
    """A scheduler and its ranks, one for each of `models`. The owner closes it.

    Subclasses take the answers in `received`.
    """

    def __init__(
        self,
        config: VllmConfig,
        models: Sequence[Model],
        kv_cache_config: KVCacheConfig,
        runner: RunnerName = "v1",
        stage_caches: Sequence[KVCacheConfig] = (),
    ) -> None:
        """Start the connectors that `config` names, with asynchronous scheduling if it says so.

        The block size of `config` is the scheduler's. `stage_caches`: the cache of each pipeline
        stage, if there are several; `models` are then those of the first stage, and so on. Raises
        the exceptions of connectors.
        """
        self.config = config
        self.log = HookLog()
        """The hooks of the connectors in the scheduler's process."""
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        # Only during the start: to configure an engine for the V2 runner, vLLM requires Triton.
        with chosen(runner):
            self._max_in_flight = config.max_concurrent_batches
            kind = config.scheduler_config.get_scheduler_cls()
            assert issubclass(kind, Scheduler), f"{kind} is not vLLM's own scheduler"
            self.scheduler = kind(
                vllm_config=config,
                kv_cache_config=generate_scheduler_kv_cache_config([kv_cache_config]),
                structured_output_manager=StructuredOutputManager(config),
                block_size=config.cache_config.block_size,
                hash_block_size=config.cache_config.block_size,
                log_stats=True,
            )
            tp_size = config.parallel_config.tensor_parallel_size
            caches = [each for each in stage_caches for _ in range(tp_size)]
            self.runners = [
                KINDS[runner](config, rank, model, caches[rank] if caches else kv_cache_config)
                for rank, model in enumerate(models)
            ]
            self._output_rank = len(models) - tp_size if caches else 0
        if (ec_connector := self.scheduler.get_ec_connector()) is not None:
            watch(ec_connector, EC_SCHEDULER_HOOKS, self.log)
        self._kv_aggregator = None
        if (kv_connector := self.scheduler.get_kv_connector()) is not None:
            watch(kv_connector, KV_SCHEDULER_HOOKS, self.log)
            self._kv_aggregator = KVOutputAggregator.from_connector(kv_connector, len(models))
        self._ec_aggregator = ECOutputAggregator()

    @property
    def has_work(self) -> bool:
        """Return whether the loop has work, for requests or for connectors."""
        return self.scheduler.has_requests() or bool(self.in_flight)

    def step(self) -> None:
        """Run one turn of the loop; asynchronous scheduling keeps two steps in flight."""
        has_run = is_filling = False
        if self.scheduler.has_requests():
            output = self.schedule()
            self.execute(output)
            has_run = output.total_num_scheduled_tokens > 0
            is_filling = len(self.in_flight) < self._max_in_flight and (
                has_run or self.scheduler.has_requests()
            )
        if not is_filling:
            self.update()
        if not has_run and self.scheduler.has_requests():
            time.sleep(_NAP_S)

    def schedule(self) -> SchedulerOutput:
        """Schedule: the first part of a step."""
        return self.scheduler.schedule()

    def execute(self, output: SchedulerOutput) -> None:
        """Execute the step on every rank and aggregate their answers: its second part."""
        answers: list[ModelRunnerOutput | None] = [each.execute(output) for each in self.runners]
        answer = answers[self._output_rank]
        if len(answers) > 1:
            if self._kv_aggregator is not None:
                answer = self._kv_aggregator.aggregate(answers, self._output_rank)
            answer = self._ec_aggregator.aggregate(answers, self._output_rank)
        assert answer is not None
        self.in_flight.append((output, answer))

    def update(self) -> None:
        """Process the oldest answer in flight, if there is one: the third part of a step."""
        if not self.in_flight:
            return
        output, answer = self.in_flight.popleft()
        for outputs in self.scheduler.update_from_output(output, answer).values():
            self.received(outputs)
        if output.total_num_scheduled_tokens:
            drafts = self.runners[0].model.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)

    def received(self, outputs: EngineCoreOutputs) -> None:
        """Take the outputs that the engine sends to its front end after a step."""

    def update_all(self) -> None:
        """Process the answers of all steps in flight."""
        while self.in_flight:
            self.update()

    def abort(self, request_id: str) -> None:
        """End a request as if its client had left."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def close(self) -> None:
        """Shut down every part of the engine."""
        for runner in self.runners:
            runner.close()
        self.scheduler.shutdown()
