# SPDX-License-Identifier: Apache-2.0
"""Has vLLM inspect model classes in the process that imports this, which has imported vLLM.

vLLM starts a process for each class that the cache of the machine lacks, so that its own does not
initialize CUDA. That process imports vLLM again: ten seconds of CPU time, in each of several
engines that start together. On a CPU there is nothing to initialize, and an engine imports the
class anyway.
"""

from vllm.model_executor.models import registry
from vllm.platforms import current_platform

if current_platform.is_cpu():
    registry._run_in_subprocess = lambda fn: fn()
