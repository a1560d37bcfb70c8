# SPDX-License-Identifier: Apache-2.0
"""Which device the calls of a thread go to.

A thread begins with device 0 as its current one. Any CUDA call there, be it to wait for an event of
another device, makes a context on device 0: about half a GiB that vLLM has not counted, for each
rank. So each thread that may meet CUDA first selects the device of its worker.
"""

from collections.abc import Callable
from functools import partial

import torch


def device_selector(device: torch.device) -> Callable[[], object] | None:
    """Return what makes `device` current for the thread that calls it. None: nothing has to.

    A device without a number, as vLLM's configuration names it, is the current one of the thread
    that asks.
    """
    if device.type != "cuda":
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    return partial(torch.cuda.set_device, number)
