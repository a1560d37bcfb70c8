# SPDX-License-Identifier: Apache-2.0
"""A plug-in of vLLM: engines on a CPU schedule ahead, as they do on a GPU."""

from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform


def keep_async_scheduling() -> None:
    """Make the CPU platform keep vLLM's choice; it would turn asynchronous scheduling off."""
    check = CpuPlatform.check_and_update_config

    def check_all_else(config: VllmConfig) -> None:
        chosen = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = chosen

    CpuPlatform.check_and_update_config = staticmethod(check_all_else)  # type: ignore[assignment]
