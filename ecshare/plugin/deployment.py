# SPDX-License-Identifier: Apache-2.0
"""What the way vLLM is deployed means for sharing: who schedules, where, and on which devices."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ecshare.plugin.compat import option

# By these, workers are the engine's process or its children: they see the same memory.
_LOCAL = (None, "uni", "mp", "external_launcher")

_CGROUPS = Path("/sys/fs/cgroup")
# Of version 2 and of version 1; a container sees its own.
_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")

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


def num_local_ranks(vllm_config: Any) -> int:
    """Return how many workers of a deployment share this host, if none `has_remote_workers`."""
    parallel = vllm_config.parallel_config
    return int(parallel.world_size) * int(option(parallel, "data_parallel_size_local") or 1)


def memory_bytes(cgroups: Path = _CGROUPS) -> int:
    """Return how much memory this host has, or as much of it as this container may take."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int((cgroups / name).read_text()))
    return min(limits)
