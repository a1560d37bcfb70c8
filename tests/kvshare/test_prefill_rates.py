# SPDX-License-Identifier: Apache-2.0
"""A prefill engine of an 8B model, and a store that keeps up or does not. Time is simulated."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from lab.prefill_rates import TOKEN_BYTES, Load, prefill
from lab.throttled_store import Link

MB = 1e6
S3 = Link(total=2000 * MB, connection=80 * MB, latency_s=0.03)
SLOW = replace(S3, total=200 * MB)
TWO_STEPS = 5 << 29  # of 8,192 tokens


@pytest.mark.parametrize("prompt_tokens", [1000, 4096, 8192])
def test_fast_store_receives_every_prompt(tmp_path: Path, prompt_tokens: int) -> None:
    load = Load(10_000, [prompt_tokens], 20.0, buffer_bytes=TWO_STEPS)
    assert load.tokens_per_s * TOKEN_BYTES < S3.total
    result = prefill(load, S3, tmp_path)
    assert result.num_whole == len(result.announced)
    assert not result.num_untrue


@pytest.mark.parametrize("prompt_tokens", [1000, 4096])
def test_slow_store_receives_some_prompts_whole_and_others_not(
    tmp_path: Path, prompt_tokens: int
) -> None:
    load = Load(20_000, [prompt_tokens], 20.0)
    result = prefill(load, SLOW, tmp_path)
    num_none = result.announced.count(0)
    assert 0 < result.num_whole == len(result.announced) - num_none
    assert not result.num_untrue
    assert result.stored_bytes / result.seconds > 0.85 * SLOW.total


@pytest.mark.parametrize("tokens_per_s", [12_000, 13_000])
def test_worker_has_memory_for_every_ordered_save(tmp_path: Path, tokens_per_s: int) -> None:
    """The memory must be contiguous although saves of all sizes use it."""
    chance = random.Random(1)
    lengths = [chance.randint(500, 9000) for _ in range(1000)]
    load = Load(tokens_per_s, lengths, 60.0, buffer_bytes=4 << 30)
    result = prefill(load, S3, tmp_path)
    assert not result.num_dropped
    assert not result.num_untrue
    assert result.num_whole == len(result.announced) - result.announced.count(0)
