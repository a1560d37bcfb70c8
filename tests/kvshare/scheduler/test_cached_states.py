# SPDX-License-Identifier: Apache-2.0
"""States that vLLM's prefix cache holds are found by the hash of their tokens, and no others."""

from collections.abc import Mapping

import pytest

from kvshare.scheduler.cached_states import CachedStates
from tests.kvshare.conftest import StartEngine
from tests.kvshare.test_chunks import LONG
from tests.kvshare.toy import (
    BLOCK,
    LAYERS,
    ToyEngine,
    hybrid,
    make_request,
    read_state,
    serve,
    state_of,
)
from tests.releases import needs_offered_states

pytestmark = needs_offered_states

END = 13 * BLOCK  # the last boundary in LONG; vLLM keeps no state before it


@pytest.fixture
def engine(start: StartEngine) -> ToyEngine:
    """An engine that has computed LONG."""
    engine = start(specs=hybrid(2))
    serve(engine, LONG, max_tokens=1)
    return engine


def hash_at(num_tokens: int, prompt: list[int] = LONG) -> bytes:
    """Return vLLM's hash of the block of `prompt` that ends after `num_tokens`."""
    return bytes(make_request("hashes", prompt).block_hashes[num_tokens // BLOCK - 1])


def cached(engine: ToyEngine, *foreign: tuple[int, int]) -> CachedStates:
    """Return the states in the cache of `engine`, with some foreign blocks of cache groups."""

    def is_foreign(block_of_group: Mapping[int, int]) -> bool:
        return not block_of_group.items().isdisjoint(foreign)

    states = CachedStates(engine.connector.scheduler._facts.layer_sets, is_foreign)
    states.bind(engine.scheduler.kv_cache_manager)
    return states


def test_blocks_that_are_found_hold_the_state(engine: ToyEngine) -> None:
    found = cached(engine).find(hash_at(END), END)
    assert sorted(found) == [0, 1]
    for group, block in found.items():
        caches = engine.scheduler.kv_cache_config.kv_cache_groups[group].layer_names
        states = [read_state(engine.model.kv_caches[name], block) for name in caches]
        assert states == [state_of(LONG[:END], group, layer) for layer in range(LAYERS)]


def test_state_that_vllm_did_not_keep_is_not_found(engine: ToyEngine) -> None:
    assert not cached(engine).find(hash_at(2 * BLOCK), 2 * BLOCK)


def test_state_of_other_tokens_is_not_found(engine: ToyEngine) -> None:
    assert not cached(engine).find(hash_at(END, [7, *LONG[1:]]), END)
    assert not cached(engine).find(hash_at(END), END - BLOCK)


def test_state_in_a_block_that_was_given_away_is_not_found(engine: ToyEngine) -> None:
    for number in range(5):
        serve(engine, [number, *LONG], name=str(number))
    assert not cached(engine).find(hash_at(END), END)


def test_state_that_another_connector_has_loaded_is_not_found(engine: ToyEngine) -> None:
    found = cached(engine).find(hash_at(END), END)
    for place in found.items():
        assert not cached(engine, place).find(hash_at(END), END)


def test_none_is_found_before_vllm_has_a_cache(engine: ToyEngine) -> None:
    states = CachedStates(engine.connector.scheduler._facts.layer_sets, lambda _: False)
    assert not states.find(hash_at(END), END)
