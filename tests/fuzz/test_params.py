# SPDX-License-Identifier: Apache-2.0
"""Malformed transfer params of clients are parsed or ignored."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare.messages import announced_tokens, announced_tp_size
from tests.fuzz.running import fuzzed
from tests.fuzz.values import mutated

pytestmark = pytest.mark.fuzz

NUM_TOKENS = 10
FORMS: list[dict[str, Any]] = [
    {"kvshare": {"num_tokens": 7, "size": 1}},
    {"kvshare": {"num_tokens": 7, "size": 1, "stages": 2}},
    {"kvshare": {"streamed": True}},
    {"kvshare": {"streamed": True, "size": 2}},
    {"do_remote_prefill": True, "kvshare": {"num_tokens": 9}},
    {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": None},
]


@fuzzed(300)
@given(st.sampled_from(FORMS).flatmap(mutated), st.sampled_from([1, 2]))
def test_announced_token_count_is_in_range(params: Any, num_stages: int) -> None:
    request: Any = SimpleNamespace(kv_transfer_params=params, num_prompt_tokens=NUM_TOKENS)
    num_tokens = announced_tokens(request, num_stages)
    assert type(num_tokens) is int
    assert 0 <= num_tokens < NUM_TOKENS
    assert type(announced_tp_size(request)) is int
