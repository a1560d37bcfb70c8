# SPDX-License-Identifier: Apache-2.0
"""Threads that keep off the cores on which vLLM computes.

vLLM's CPU worker binds one OpenMP thread to each core of its share, the main thread first, and
leaves a core free for a connector (`vllm/utils/ompmultiprocessing.py`, 0.32). But a thread inherits
the binding of the thread that starts it: ours would all share the first computing core, and delay
all others, which wait for that core. If nothing is bound, as with a GPU, or no core is free, this
module changes nothing.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ecshare.store.threads import show_name

logger = logging.getLogger(__name__)

# The variables in which vLLM names the computing cores, by number, to each OpenMP implementation.
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
_NODES = Path("/sys/devices/system/node")


def start_unbound(name: str, work: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread that runs `work(*args)`; threads that it starts inherit its cores."""

    def run() -> None:
        show_name()
        _unbind()
        work(*args)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _unbind() -> None:
    """Rebind the calling thread from a computing core to the free cores of the same NUMA node.

    Without free cores there, or if the thread is not bound to one computing core, do nothing.
    """
    computing = {
        int(number) for name in _BINDING for number in re.findall(r"\d+", os.environ.get(name, ""))
    }
    if not computing or not hasattr(os, "sched_setaffinity"):
        return
    try:
        bound = os.sched_getaffinity(0)
        if len(bound) > 1 or not bound <= computing:
            return
        # The parent is vLLM's engine core, bound to all cores that the user gave the engine.
        allowed = os.sched_getaffinity(os.getppid())
        near = {core for node in _nodes() if node & bound for core in node}
        if free := allowed & near - computing:
            os.sched_setaffinity(0, free)
    except (OSError, ValueError) as exc:
        logger.debug("threads keep their binding: %s", exc)


def _nodes() -> Iterator[set[int]]:
    """Yield the cores of each NUMA node, as Linux lists them: "0-3,8"."""
    for path in _NODES.glob("node[0-9]*/cpulist"):
        runs = [run.split("-") for run in path.read_text().strip().split(",") if run]
        yield {core for run in runs for core in range(int(run[0]), int(run[-1]) + 1)}
