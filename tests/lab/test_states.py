# SPDX-License-Identifier: Apache-2.0
"""The stand-in runners copy recurrent states where vLLM's own code does."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import mamba_utils

from lab.vllm_loop import Row
from lab.vllm_loop.states import RunningStates
from tests.kvshare.toy import BareEngine, engine_config, hybrid, make_request, write_model
from tests.releases import needs_offered_states

pytestmark = needs_offered_states


class Move(NamedTuple):
    """A copy of a request's states from one place in its block table to another."""

    block_ids: list[list[int]]
    before: int
    after: int


class Compared(RunningStates):
    """Asks vLLM's V1 code for the copies of each step, too."""

    def __init__(self, engine: BareEngine) -> None:
        self.moves: list[Move] = []
        self.vllms: list[Move] = []
        self._cache = engine.scheduler.kv_cache_config
        self._vllms_places: dict[str, int] = {}
        super().__init__(self._cache, engine.model.kv_caches)

    def move(self, output: SchedulerOutput, rows: Mapping[str, Row]) -> None:
        names = list(output.num_scheduled_tokens)
        groups = mamba_utils.get_mamba_groups(self._cache)
        mamba_utils.preprocess_mamba(
            output,
            self._cache,
            SimpleNamespace(enable_prefix_caching=True),  # type: ignore[arg-type]
            self._vllms_places,
            SimpleNamespace(  # type: ignore[arg-type]
                req_ids=names, num_accepted_tokens_cpu=np.ones(len(names), dtype=int)
            ),
            rows,  # type: ignore[arg-type]
            {},
            {},
            SimpleNamespace(  # type: ignore[arg-type]
                mamba_group_ids=mamba_utils.get_mamba_group_ids(groups),
                mamba_spec=next(iter(groups)),
            ),
        )
        super().move(output, rows)

    def collect(self, *told: Any) -> None:
        """Stand for vLLM's function of this task."""
        *_, before, after, bias, row, _ = told
        assert bias == 0, "only speculative decoding shifts states"
        self.vllms.append(Move([list(ids) for ids in row.block_ids], before, after))

    def _copy(self, row: Row, before: int, after: int) -> None:
        self.moves.append(Move([list(ids) for ids in row.block_ids], before, after))
        super()._copy(row, before, after)


@pytest.mark.parametrize("is_async", [False, True])
def test_states_move_as_vllms_v1_runner_moves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    config = engine_config(write_model(tmp_path), max_num_batched_tokens=24, max_num_seqs=8)
    engine = BareEngine(config, num_blocks=40, specs=hybrid(2), is_async=is_async)
    states = engine.runners[0]._states = Compared(engine)
    monkeypatch.setattr(mamba_utils, "collect_mamba_copy_meta", states.collect)
    monkeypatch.setattr(mamba_utils, "do_mamba_copy_block", lambda _: None)
    requests = [
        make_request(f"r{number}", [number % 3, *range(4 * number)], 20) for number in range(8)
    ]
    engine.run(*requests)
    engine.close()
    assert any(each.num_preemptions for each in requests)
    assert states.moves == states.vllms
    assert len(states.moves) > 20
