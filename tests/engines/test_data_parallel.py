# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks of one engine share KV and embeddings, as engines do."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from lab import model_cache
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, ec_argument, kv_argument
from tests.conftest import CACHE, LOGS, engines
from tests.engines.chat import QUESTION, ask, ask_rank, complete, counting, picture, stored_kv, text
from tests.releases import needs_encoder_metrics, needs_offered_states

pytestmark = [pytest.mark.engine, pytest.mark.models]

STORY = [text("Tell me a story about the sea, the wind and the stars. " * 24)]
OPTIONS = {"qwen2.5-vl": ("--block-size=32",), "lfm2": ("--dtype=float32",)}
HYBRID_BLOCK = 128  # tokens, as vLLM chooses to fit a state
ENCODED, LOADED = "ecshare_items/encoded", "ecshare_items/loaded"
# Both on the first one: 0.33 gives each rank the next one, and dies where a machine has no second.
MEMORY_NODES = {"CPU_VISIBLE_MEMORY_NODES": "0,0"}


class Fleet(NamedTuple):
    plain: EngineProcess
    ranks: EngineProcess
    root: Path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, forks: EngineForks) -> Iterator[Fleet]:
    """Engines that encode pictures."""
    root = tmp_path_factory.mktemp("fleet")
    with started("qwen2.5-vl", root, forks, (kv_argument, ec_argument)) as fleet:
        yield fleet


@contextmanager
def started(
    family: str, root: Path, forks: EngineForks, kinds: Sequence[Callable[..., str]]
) -> Iterator[Fleet]:
    """Yield a plain engine and one with two ranks, with connectors of these `kinds`."""
    url, host = f"file://{root}/store", f"{root}/host"
    transfers = [kind("both", url, host_cache_dir=host) for kind in kinds]
    model = model_cache.model(CACHE / "models", family)
    with engines(LOGS / f"{__name__}.{family}", model, forks) as start:
        plain = start("plain", *OPTIONS[family])
        two = ("--data-parallel-size=2", *OPTIONS[family], *transfers)
        ranks = start("ranks", *two, environment=MEMORY_NODES)
        for each in (plain, ranks):
            each.wait_ready()
        yield Fleet(plain, ranks, root)


@needs_offered_states
def test_rank_of_a_hybrid_loads_states_that_another_has_computed(
    tmp_path: Path, forks: EngineForks
) -> None:
    prompt = [(7 * place + place // 9) % 200 + 20 for place in range(1500)]
    with started("lfm2", tmp_path, forks, [kv_argument]) as (plain, ranks, root):
        expected = complete(plain, plain.model, prompt).tokens
        cold = complete(ranks, ranks.model, prompt, rank=0)
        assert (cold.tokens, cold.num_cached_tokens) == (expected, 0)
        assert stored_kv(root, "t0of1-s1")
        warm = complete(ranks, ranks.model, prompt, rank=1)
        assert warm.tokens == expected
        assert warm.num_cached_tokens == (len(prompt) - 1) // HYBRID_BLOCK * HYBRID_BLOCK


@needs_encoder_metrics
def test_rank_loads_kv_that_another_has_computed(fleet: Fleet) -> None:
    expected = ask(fleet.plain, fleet.plain.model, STORY).tokens
    cold = ask_rank(fleet.ranks, 0, fleet.ranks.model, STORY)
    assert (cold.tokens, cold.num_cached_tokens) == (expected, 0)
    assert stored_kv(fleet.root, "t0of1")
    warm = ask_rank(fleet.ranks, 1, fleet.ranks.model, STORY)
    assert warm.tokens == expected
    assert warm.num_cached_tokens == warm.num_prompt_tokens - 1


@needs_encoder_metrics
def test_rank_loads_embeddings_that_another_has_encoded(fleet: Fleet) -> None:
    shown = [picture(7), QUESTION]
    expected = ask(fleet.plain, fleet.plain.model, shown).tokens
    with counting(fleet.ranks) as gained:
        assert ask_rank(fleet.ranks, 0, fleet.ranks.model, shown).tokens == expected
    assert (gained[ENCODED], gained[LOADED]) == (1, 0)
    # Other words before it, so that no KV of the picture is loaded.
    asked = [text("Look: "), *shown]
    expected = ask(fleet.plain, fleet.plain.model, asked).tokens
    with counting(fleet.ranks) as gained:
        assert ask_rank(fleet.ranks, 1, fleet.ranks.model, asked).tokens == expected
    assert (gained[ENCODED], gained[LOADED]) == (0, 1)
