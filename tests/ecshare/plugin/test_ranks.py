# SPDX-License-Identifier: Apache-2.0
"""A worker's rank, from vLLM's process groups."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed import parallel_state

from ecshare.plugin.ranks import worker_rank


@pytest.mark.parametrize(
    ("tp", "pp", "pcp", "is_writer"),
    [(0, 0, 0, True), (1, 0, 0, False), (0, 1, 0, False), (0, 0, 1, False)],
)
def test_only_the_first_rank_of_all_groups_is_the_writer(
    monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, pcp: int, *, is_writer: bool
) -> None:
    for name, value in (
        ("get_tensor_model_parallel_rank", tp),
        ("get_pp_group", SimpleNamespace(rank_in_group=pp)),
        ("get_pcp_group", SimpleNamespace(rank_in_group=pcp)),
    ):
        monkeypatch.setattr(parallel_state, name, lambda value=value: value)
    sizes: Any = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2)
    rank = worker_rank(SimpleNamespace(parallel_config=sizes))
    assert rank.is_writer is is_writer
