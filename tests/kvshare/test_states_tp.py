# SPDX-License-Identifier: Apache-2.0
"""Hybrid models on several ranks: each has its own part of a state, for engines of that size."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec

from kvshare.connector import KVShareConnector
from lab.vllm_loop import RUNNERS, EngineLoop, Row, RunnerName
from tests.kvshare.conftest import StartEngine
from tests.kvshare.test_chunks import LONG
from tests.kvshare.toy import (
    BLOCK,
    VOCAB,
    ToyModel,
    cache_config,
    hybrid,
    kv_of,
    make_request,
    options,
    ours,
    read_state,
    serve,
    spec,
    state_of,
    vllm_config,
)
from tests.releases import needs_offered_states

pytestmark = needs_offered_states

RANKS = 2
END = (len(LONG) - 1) // BLOCK * BLOCK
MOST_STEPS = 10_000


class RankModel(ToyModel):
    """One rank's part of a model. Raises AssertionError if KV or states are not those of its tokens
    and its rank; the next token is made of the tokens alone, so that all ranks agree on it."""

    def __init__(self, cache: KVCacheConfig, rank: int) -> None:
        self._rank = rank
        self.num_computed = 0
        super().__init__(cache, lambda *_: None)

    def flavour(self, row: Row) -> list[int]:
        return [self._rank + 1]

    def compute(self, request_id: str, start: int, end: int) -> list[int]:
        row = self.rows[request_id]
        self.num_computed += max(0, min(end, row.num_prompt_tokens) - start)
        tokens = [*self.flavour(row), *row.tokens]
        for position in range(start, end):
            self.fill(row, position, tokens[: position + 2])
        self._advance(row, start, end)
        for group, window in enumerate(self.windows):
            if window is None:
                block = self._state_block(row, group, end)
                for number, layer in enumerate(self._groups[group]):
                    right = state_of(tokens[: end + 1], group, number)
                    assert read_state(layer, block) == right, "not the state of these tokens"
                continue
            for position in range(end):
                kv = kv_of(tokens[: position + 2], group)
                assert self.read(row, group, position) == kv, "not the KV of these tokens"
        if end < len(row.tokens):
            return []
        row.tokens.append((7 * sum(row.tokens) + 1) % VOCAB)
        return [row.tokens[-1]]


class Ranks(EngineLoop):
    """An engine of two ranks with our connector in each of them."""

    def __init__(self, model: Path, folder: Path, name: str, runner: RunnerName) -> None:
        init_none_hash(sha256)
        kv_options = options(folder) | {"host_cache_dir": f"{folder}/{name}"}
        config = hybrid_config(vllm_config(model, kv_options, tensor_parallel_size=RANKS))
        cache = cache_config(64, hybrid(2))
        self.models = [RankModel(cache, rank) for rank in range(RANKS)]
        with patch("kvshare.worker.worker.repacks_blocks", lambda: False):
            super().__init__(config, self.models, cache, runner)

    def serve(self, prompt: Sequence[int], name: str = "r") -> list[int]:
        """Return how many tokens of `prompt` each rank computes, once all is stored."""
        before = [each.num_computed for each in self.models]
        self.scheduler.add_request(make_request(name, prompt, 3))
        for _ in range(MOST_STEPS):
            if not self.has_work:
                break
            self.step()
        for worker in (ours(each.kv_connector).worker for each in self.runners):
            while not worker.is_empty:
                worker.engine.wait_idle()
                worker.settle()
        return [each.num_computed - num for each, num in zip(self.models, before, strict=True)]

    def received(self, outputs: EngineCoreOutputs) -> None:
        pass


def hybrid_config(config: VllmConfig) -> VllmConfig:
    """Set what vLLM sets for hybrids with prefix caching."""
    config.cache_config.mamba_cache_mode = "align"
    config.cache_config.mamba_block_size = BLOCK
    config.cache_config.mamba_page_size_padded = spec().page_size_bytes
    return config


@pytest.mark.parametrize("runner", RUNNERS)
def test_each_rank_loads_its_own_part_of_a_state(
    text_model: Path, tmp_path: Path, runner: RunnerName
) -> None:
    with engines(text_model, tmp_path, runner) as (first, second):
        assert first.serve(LONG) == [len(LONG)] * RANKS
        assert second.serve(LONG) == [len(LONG) - END] * RANKS


@contextmanager
def engines(model: Path, folder: Path, runner: RunnerName) -> Iterator[list[Ranks]]:
    started = [Ranks(model, folder, name, runner) for name in ("first", "second")]
    yield started
    for each in started:
        each.close()


def half_of(each: KVCacheSpec) -> KVCacheSpec:
    """Return the spec of one rank of two, of a layer that is `each` on one rank."""
    if isinstance(each, MambaSpec):
        shapes = tuple((shape[0] // RANKS, *shape[1:]) for shape in each.shapes)
        return replace(each, shapes=shapes)
    assert isinstance(each, FullAttentionSpec)
    return replace(each, num_kv_heads=each.num_kv_heads // RANKS)


def test_engine_of_another_tp_size_finds_nothing_and_logs_the_size_once(
    text_model: Path, tmp_path: Path, start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    serve(start(specs=hybrid(2)), LONG)
    caplog.clear()
    caplog.set_level(logging.INFO)
    kv_options = options(tmp_path, host_cache_dir=f"{tmp_path}/reader")
    config = hybrid_config(vllm_config(text_model, kv_options, tensor_parallel_size=RANKS))
    cache = cache_config(64, [half_of(each) for each in hybrid(2)])
    reader = KVShareConnector(config, KVConnectorRole.SCHEDULER, cache).scheduler
    try:
        for number in range(3):
            request = make_request(str(number), LONG)
            while reader.num_loadable_tokens(request, 0) is None:
                reader.engine.wait_idle()
            assert reader.num_loadable_tokens(request, 0) == 0
        assert caplog.text.count(f"tensor_parallel_size: {RANKS} != 1") == 1
    finally:
        reader.close()


def test_engine_with_speculative_blocks_shares_nothing_and_logs_it(
    text_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    specs = [
        replace(each, num_speculative_blocks=2) if isinstance(each, MambaSpec) else each
        for each in hybrid(2)
    ]
    init_none_hash(sha256)
    config = hybrid_config(vllm_config(text_model, options(tmp_path)))
    half = KVShareConnector(config, KVConnectorRole.SCHEDULER, cache_config(64, specs)).scheduler
    try:
        why_not = "speculative decoding with recurrent layers is not supported"
        assert caplog.text.count(f"{why_not}: leave --speculative-config out") == 1
        assert half.num_loadable_tokens(make_request("r", LONG), 0) == 0
        assert half.finished(make_request("r", LONG)) is None
    finally:
        half.close()
