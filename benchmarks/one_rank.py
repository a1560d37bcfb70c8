# SPDX-License-Identifier: Apache-2.0
"""The process groups of a worker that is alone: connectors ask vLLM for their rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)


@contextmanager
def one_rank(config: VllmConfig, folder: Path) -> Iterator[None]:
    """Set the groups up, as vLLM's workers do, and take them down again; needs a `folder`."""
    with set_current_vllm_config(config):
        meeting = f"file://{folder}/ranks"
        init_distributed_environment(1, 0, meeting, local_rank=0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    try:
        yield
    finally:
        destroy_model_parallel()  # type: ignore[no-untyped-call]
        destroy_distributed_environment()  # type: ignore[no-untyped-call]
