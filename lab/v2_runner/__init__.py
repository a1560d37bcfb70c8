# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner, the default on GPUs, in an engine on a CPU.

V2 prepares its inputs with small Triton kernels, and Triton compiles for GPUs only. Its interpreter
runs them as Python instead. vLLM's CPU build has a V2 runner of its own, which it uses only if
Triton has a back end named "cpu". This package is such a back end; it never compiles anything.
Triton finds back ends by their entry points. Ours is in the folder `on_path`, which only engines
that are to run V2 have on their PYTHONPATH. The folder also has metadata with a version of the
distribution "vllm", which the CPU build lacks: without it, most releases assume that Triton is
missing.

Such an engine also schedules asynchronously, as on a GPU; see `scheduling`.

An engine that only encodes has no V2 runner on a CPU. Interpreted kernels are slow: a step of one
request takes about 30 ms more than with V1, a step of eight 160 ms.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_ON_PATH = Path(__file__).with_name("on_path")
LOGGED = "Using V2 Model Runner"
"""The text that an engine's worker logs before it creates the V2 runner."""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make an engine with the environment `base` run V2."""
    before = base.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join((str(_ON_PATH), *([before] if before else ()))),
        "TRITON_INTERPRET": "1",
    }
