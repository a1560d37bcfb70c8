# SPDX-License-Identifier: Apache-2.0
"""A simulator of vLLM's engine loop: vLLM's own scheduler, and its runners' calls of connectors.

It needs no GPU and no model. What is vLLM's own is called, not copied:

- `engine.EngineLoop` schedules, executes and updates as `v1/engine/core.py` does (`step`,
  `step_with_batch_queue`, `post_step`), around a real `v1/core/sched/scheduler.py`.
- `runners.V1Runner` follows `execute_model` and `sample_tokens` of `v1/worker/gpu_model_runner.py`.
  vLLM's mixins `v1/worker/{ec,kv}_connector_model_runner_mixin.py` call the connectors.
- `runners.V2Runner` follows the same functions of `v1/worker/gpu/model_runner.py`, and
  `v1/worker/mm_encoder_model_runner.py`. vLLM's classes in `v1/worker/gpu/{ec,kv}_connector.py`
  call the connectors.
- `states.RunningStates` copies recurrent states between blocks as both runners do.
- `model.Model` stands for the model and for a runner's memory of its requests.

Where the two runners differ:

- V1 saves what leaves its blocks (`handle_preemptions`) before new blocks are zeroed, V2 after.
- V1 ends a step's saves and loads after the forward pass, V2 after sampling. Only with speculative
  decoding does V1 also wait until then, and ask what has ended before it ends the saves.
- V1 offers each encoded item to `save_caches`, in any role, as soon as it is encoded. V2 offers
  the new ones of a step together, and only to producers.
- V1 drops what an encoder-only engine's connector reports. V2 passes it on.
- Both copy recurrent states before a step's synchronous loads start, V1 after
  `handle_preemptions` and V2 before it.
- In a step without tokens V2 calls both connectors, V1 only that for KV.

All ranks are in this process. Messages that would go to another process are pickled.
"""

from lab.vllm_loop.engine import EngineLoop
from lab.vllm_loop.hooks import HookFailed, HookLog
from lab.vllm_loop.model import Model, Row
from lab.vllm_loop.runners import RUNNERS, Runner, RunnerName

__all__ = [
    "RUNNERS",
    "EngineLoop",
    "HookFailed",
    "HookLog",
    "Model",
    "Row",
    "Runner",
    "RunnerName",
]
