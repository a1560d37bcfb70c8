# SPDX-License-Identifier: Apache-2.0
"""The rank of a worker, and which rank stores objects."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rank:
    """This worker's rank in its engine."""

    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    pcp_rank: int = 0
    """The rank in prefill context parallelism."""
    pp_size: int = 1
    """The number of pipeline stages; `pp_rank` is this worker's."""

    @property
    def is_writer(self) -> bool:
        """Return whether this rank stores objects that all ranks have, such as embeddings."""
        return self.tp_rank == 0 and self.pp_rank == 0 and self.pcp_rank == 0


def worker_rank(vllm_config: Any) -> Rank:
    """Return the rank of this worker process. vLLM must have initialised its process groups."""
    from vllm.distributed.parallel_state import (
        get_pcp_group,
        get_pp_group,
        get_tensor_model_parallel_rank,
    )

    parallel = vllm_config.parallel_config
    return Rank(
        tp_rank=get_tensor_model_parallel_rank(),
        tp_size=parallel.tensor_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
        pcp_rank=get_pcp_group().rank_in_group,
        pp_size=parallel.pipeline_parallel_size,
    )
