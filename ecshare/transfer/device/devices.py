# SPDX-License-Identifier: Apache-2.0
"""Selects the current device of a thread.

A thread starts with device 0 as its current one. Any CUDA call in it, even a wait for an event of
another device, creates a context on device 0: about half a GiB per rank that vLLM has not counted.
So each thread that may call CUDA first selects the device of its worker.
"""

from collections.abc import Callable
from functools import partial

import torch


def device_selector(device: torch.device) -> Callable[[], object] | None:
    """Return a function that makes `device` current for its calling thread. None: not needed.

    A device without a number, as vLLM's configuration names it, is the current one of the thread
    that calls `device_selector`.
    """
    if device.type != "cuda":
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    return partial(torch.cuda.set_device, number)
