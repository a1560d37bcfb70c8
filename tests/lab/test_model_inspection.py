# SPDX-License-Identifier: Apache-2.0
"""In processes of tests vLLM inspects a model class without another process."""

from pathlib import Path

import pytest
from vllm.model_executor.models import registry
from vllm.platforms import current_platform


@pytest.mark.skipif(not current_platform.is_cpu(), reason="CUDA must not be initialized")
def test_class_that_the_cache_lacks_is_inspected_without_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
    name = "LlamaForCausalLM"
    model = registry._LazyRegisteredModel("vllm.model_executor.models.llama", name)
    assert model.inspect_model_cls().architecture == name
    assert len(list(tmp_path.rglob(f"*{name}.json"))) == 1, "it is not kept for other processes"
