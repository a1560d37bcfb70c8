# SPDX-License-Identifier: Apache-2.0
"""What the way vLLM is deployed means for sharing: who schedules, where, and on which devices."""

from typing import Any

from ecshare.plugin.compat import option

# By these, workers are the engine's process or its children: they see the same memory.
_LOCAL = (None, "uni", "mp", "external_launcher")

# Copies to and from others would not be waited for.
_DEVICES = ("cpu", "cuda")


def deployment_refusal(vllm_config: Any) -> str | None:
    """Return why an engine that is deployed so can share nothing; None if it can.

    The sentence has no full stop.
    """
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return (
            f"with external_launcher each of the {parallel.world_size} ranks has a scheduler of "
            "its own, and they would disagree on what is loaded already"
        )
    device = vllm_config.device_config.device_type
    if device not in _DEVICES:
        return f"devices of the kind {device} are not supported"
    return None


def has_remote_workers(vllm_config: Any) -> bool:
    """Whether workers may be on other hosts than the scheduler, or in other containers.

    With Ray, and with executors that we do not know, nobody can tell: True.
    """
    parallel = vllm_config.parallel_config
    is_local = parallel.distributed_executor_backend in _LOCAL
    return not is_local or (option(parallel, "nnodes") or 1) > 1
