# SPDX-License-Identifier: Apache-2.0
"""The stages of a pipeline: each has some layers of the model, and stores the KV of these."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvshare.chunks.layers import LayerSet

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def layers_of_stages(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """Return how many layers vLLM gives to each stage, without those of a draft model.

    Empty: there is one stage.
    """
    from vllm.distributed.utils import get_pp_indices

    count = vllm_config.parallel_config.pipeline_parallel_size
    if count < 2:
        return ()
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    try:
        bounds = [get_pp_indices(num_layers, stage, count) for stage in range(count)]
    except ValueError:
        # VLLM_PP_LAYER_PARTITION fits the layers that the model divides, which are not these.
        # Objects of a stage with more or fewer layers have another size, and are not loaded.
        return (num_layers,) * count
    return tuple(end - start for start, end in bounds)


def stage_part(part: str, stage: int, num_stages: int) -> str:
    """Return the name of the object of a `stage`. `part`: the name that it has without stages."""
    return f"{part}-p{stage}of{num_stages}" if num_stages > 1 else part


def parts_of_stages(parts: Iterable[str], num_stages: int) -> tuple[str, ...]:
    """Return the names of the objects of all stages; see `stage_part`."""
    stages = range(max(1, num_stages))
    return tuple(stage_part(part, stage, num_stages) for part in parts for stage in stages)


def kinds_of(sets: Sequence[LayerSet]) -> str:
    """Return a text that is equal for two stages exactly if their layer sets are of equal kinds.

    Then a number means the same layer set, and the same cache groups, in both.
    """
    return "; ".join(f"{each.groups} {each.kind} {each.total_heads}" for each in sets)
