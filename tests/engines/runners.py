# SPDX-License-Identifier: Apache-2.0
"""Tests that run on both of vLLM's model runners: V1, CPU engines' own, and V2, that of GPUs.

Their engines get the runner by `engine(..., runner=runner)`. Plain engines that give the expected
tokens stay on V1, and so do those that only encode: vLLM has no V2 runner for them on a CPU.
"""

import pytest

from tests.releases import needs_v2_runner

V2_IN_THE_GATE = pytest.param("v2", marks=needs_v2_runner)
V2 = pytest.param("v2", marks=[needs_v2_runner, pytest.mark.models])


def on(*runners: object) -> pytest.MarkDecorator:
    """Run a test, or all of a module, once with each runner."""
    return pytest.mark.parametrize("runner", runners, indirect=True, scope="module")


on_each_runner = on("v1", V2)
