# SPDX-License-Identifier: Apache-2.0
"""What vLLM's executor means for sharing: who schedules, and where the workers are."""

from typing import Any


def executor_refusal(vllm_config: Any) -> str | None:
    """Return why an engine with this executor can share nothing; None if it can.

    The sentence has no full stop.
    """
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return (
            f"with external_launcher each of the {parallel.world_size} ranks has a scheduler of "
            "its own, and they would disagree on what is loaded already"
        )
    return None
