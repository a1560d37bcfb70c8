# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner, the default on GPUs, in an engine on a CPU.

V2 prepares its inputs with small Triton kernels, and Triton compiles for GPUs only. Its interpreter
runs them as Python instead. vLLM's CPU build has a V2 runner of its own, which it leaves alone as
long as Triton has no back end named "cpu"; so this package is one, in which nothing is ever
compiled. Triton finds back ends by their entry points. Ours is in the folder `on_path`, which only
engines that are to run V2 have on their PYTHONPATH. There is also a version of the distribution
"vllm", which the CPU build lacks: without one, most releases take it that there is no Triton.

Such an engine also schedules asynchronously, as on a GPU; see `scheduling`.

An engine that only encodes has no V2 runner on a CPU. Interpreted kernels are slow: a step of one
request takes about 30 ms more than with V1, a step of eight 160 ms.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_ON_PATH = Path(__file__).with_name("on_path")
LOGGED = "Using V2 Model Runner"
"""What the worker of an engine logs before it makes that runner."""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return what makes V2 possible in an engine whose environment is else `base`."""
    before = base.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join((str(_ON_PATH), *([before] if before else ()))),
        "TRITON_INTERPRET": "1",
    }
