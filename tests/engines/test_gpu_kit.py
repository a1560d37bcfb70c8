# SPDX-License-Identifier: Apache-2.0
"""The engine checks of the GPU kit, run with engines on this CPU."""

from pathlib import Path

import pytest
import torch

from lab.gpu_kit import engines
from lab.gpu_kit.kit import Bench, Check, play

pytestmark = [pytest.mark.engine, pytest.mark.models]


@pytest.mark.parametrize("check", engines.CHECKS)
def test_checks_of_engines_pass_on_a_cpu(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LONG_TOKENS", 4000)  # a CPU takes its time
    result = play(check, Bench(torch.device("cpu"), tmp_path))
    assert result.verdict == "ok", result.said
