# SPDX-License-Identifier: Apache-2.0
"""Decides by vLLM's deployment whether an engine can share, and whether its workers are local."""

from typing import Any

from ecshare.plugin.compat import option

# With these executors, workers are the engine's process or its children, on the same host.
_LOCAL = (None, "uni", "mp", "external_launcher")

# No stream is synchronised for devices of other kinds, so their copies might be incomplete.
_DEVICES = ("cpu", "cuda")


def deployment_refusal(vllm_config: Any) -> str | None:
    """Return why an engine with `vllm_config` can share nothing; None if it can.

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
    """Return whether workers may be on other hosts than the scheduler, or in other containers.

    True also if it is unknown, as with Ray and with executors of other projects.
    """
    parallel = vllm_config.parallel_config
    is_local = parallel.distributed_executor_backend in _LOCAL
    return not is_local or (option(parallel, "nnodes") or 1) > 1
