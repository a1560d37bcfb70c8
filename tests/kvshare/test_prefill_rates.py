# SPDX-License-Identifier: Apache-2.0
"""A prefill engine of 8B class whose store takes what it computes, or less. Time is simulated."""

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
def test_a_store_that_is_fast_enough_gets_every_prompt(tmp_path: Path, prompt_tokens: int) -> None:
    load = Load(10_000, [prompt_tokens], 20.0, buffer_bytes=TWO_STEPS)
    assert load.tokens_per_s * TOKEN_BYTES < S3.total
    result = prefill(load, S3, tmp_path)
    assert result.num_whole == len(result.announced)
    assert not result.num_untrue


@pytest.mark.parametrize("prompt_tokens", [1000, 4096])
def test_a_slow_store_gets_some_prompts_as_a_whole(tmp_path: Path, prompt_tokens: int) -> None:
    load = Load(20_000, [prompt_tokens], 20.0)
    result = prefill(load, SLOW, tmp_path)
    num_none = result.announced.count(0)
    assert 0 < result.num_whole == len(result.announced) - num_none
    assert not result.num_untrue
    assert result.stored_bytes / result.seconds > 0.85 * SLOW.total


@pytest.mark.parametrize("tokens_per_s", [12_000, 13_000])
def test_a_worker_has_memory_for_all_that_is_ordered(tmp_path: Path, tokens_per_s: int) -> None:
    """In one piece, though saves of all sizes come and go."""
    chance = random.Random(1)
    lengths = [chance.randint(500, 9000) for _ in range(1000)]
    load = Load(tokens_per_s, lengths, 60.0, buffer_bytes=4 << 30)
    result = prefill(load, S3, tmp_path)
    assert not result.num_dropped
    assert not result.num_untrue
    assert result.num_whole == len(result.announced) - result.announced.count(0)
