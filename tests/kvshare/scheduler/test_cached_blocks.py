# SPDX-License-Identifier: Apache-2.0
"""Blocks of vLLM's prefix cache are found by the hash of their tokens, and no others."""

from collections.abc import Mapping

import pytest

from kvshare.scheduler.cached_blocks import CachedBlocks
from tests.kvshare.conftest import StartEngine
from tests.kvshare.test_chunks import LONG
from tests.kvshare.toy import (
    BLOCK,
    LAYERS,
    ToyEngine,
    hybrid,
    kv_of,
    make_request,
    read_state,
    serve,
    spec,
    state_of,
    window,
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


def hashes(prompt: list[int] = LONG) -> list[bytes]:
    """Return vLLM's hashes of the blocks of `prompt`."""
    return [bytes(each) for each in make_request("hashes", prompt).block_hashes]


def cached(engine: ToyEngine, *foreign: tuple[int, int]) -> CachedBlocks:
    """Return the states in the cache of `engine`, with some foreign blocks of cache groups."""

    def is_foreign(block_of_group: Mapping[int, int]) -> bool:
        return not block_of_group.items().isdisjoint(foreign)

    states = CachedBlocks(engine.connector.scheduler._facts.layer_sets, BLOCK, is_foreign)
    states.bind(engine.scheduler.kv_cache_manager)
    return states


def test_found_blocks_hold_the_state(engine: ToyEngine) -> None:
    found = cached(engine).state(hashes(), END // BLOCK)
    assert sorted(found) == [0, 1]
    for group, block in found.items():
        caches = engine.scheduler.kv_cache_config.kv_cache_groups[group].layer_names
        states = [read_state(engine.model.kv_caches[name], block) for name in caches]
        assert states == [state_of(LONG[:END], group, layer) for layer in range(LAYERS)]


def test_state_that_vllm_did_not_keep_is_not_found(engine: ToyEngine) -> None:
    assert not cached(engine).state(hashes(), 2)


def test_state_of_other_tokens_is_not_found(engine: ToyEngine) -> None:
    assert not cached(engine).state(hashes([7, *LONG[1:]]), END // BLOCK)
    assert not cached(engine).state(hashes()[1:], END // BLOCK - 1)


def test_state_in_a_block_that_vllm_has_reused_is_not_found(engine: ToyEngine) -> None:
    for number in range(5):
        serve(engine, [number, *LONG], name=str(number))
    assert not cached(engine).state(hashes(), END // BLOCK)


def test_state_that_another_connector_has_loaded_is_not_found(engine: ToyEngine) -> None:
    found = cached(engine).state(hashes(), END // BLOCK)
    for place in found.items():
        assert not cached(engine, place).state(hashes(), END // BLOCK)


def test_blocks_behind_a_window_are_found(start: StartEngine) -> None:
    engine = start(specs=(spec(), window(2 * BLOCK)))
    serve(engine, LONG, max_tokens=1)
    (groups,) = (
        each.groups
        for each in engine.connector.scheduler._facts.layer_sets
        if not each.window.is_full
    )
    found = cached(engine).run(hashes(), groups, 3, 6)
    for group, blocks in zip(groups, found, strict=True):
        names = engine.scheduler.kv_cache_config.kv_cache_groups[group].layer_names
        for name in names:
            cache = engine.model.kv_caches[name]
            assert [float(cache[block, 0, -1, 0]) for block in blocks] == [
                kv_of(LONG[: number * BLOCK], group) for number in (4, 5, 6)
            ]
    assert not cached(engine, (groups[0], found[0][2])).run(hashes(), groups, 3, 6)
    assert not cached(engine).run(hashes([7, *LONG[1:]]), groups, 3, 6)
    assert not cached(engine).run(hashes(), groups, 12, 14), "the last block is not full"


def test_no_block_is_found_before_vllm_has_a_cache(engine: ToyEngine) -> None:
    states = CachedBlocks(engine.connector.scheduler._facts.layer_sets, BLOCK, lambda _: False)
    assert not states.state(hashes(), END // BLOCK)
