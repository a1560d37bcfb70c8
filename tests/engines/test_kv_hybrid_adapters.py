# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of hybrid models: each has KV and recurrent states of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lab import model_cache
from lab.models import make_adapter
from lab.servers.engine_forks import EngineForks
from lab.servers.engines import EngineProcess, ModelRunner, kv_argument
from tests.conftest import CACHE, LOGS, engines
from tests.engines.chat import Answer, complete, stored_kv
from tests.engines.runners import on_each_runner
from tests.engines.test_kv_hybrid import BLOCKS, OPTIONS, STATE_PART, prompt_of
from tests.releases import needs_offered_states

pytestmark = [
    pytest.mark.engine,
    pytest.mark.models,
    on_each_runner,
    needs_offered_states,
]

ADAPTERS = ("one", "other")


class Fleet(NamedTuple):
    plain: EngineProcess
    first: EngineProcess
    second: EngineProcess
    root: Path
    block: int

    def check(self, engine: EngineProcess, name: str, prompt: list[int]) -> Answer:
        """Ask `engine` with this adapter; the tokens are those of the plain one."""
        answer = complete(engine, name or engine.model, prompt)
        assert answer.tokens == complete(self.plain, name or self.plain.model, prompt).tokens
        return answer

    def last_boundary(self, prompt: list[int]) -> int:
        return (len(prompt) - 1) // self.block * self.block


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5-text"])
def fleet(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
    forks: EngineForks,
) -> Iterator[Fleet]:
    family: str = request.param
    root = tmp_path_factory.mktemp(family)
    model = model_cache.model(CACHE / "models", family)
    paths = {name: make_adapter(root / name, model, seed) for seed, name in enumerate(ADAPTERS)}
    adapted = (
        *OPTIONS[family],
        "--enable-lora",
        "--max-lora-rank=8",
        "--max-loras=2",
        "--lora-modules",
        *(f"{name}={path}" for name, path in paths.items()),
    )

    def sharing(name: str) -> str:
        own = {"host_cache_dir": f"{root}/{name}-host"}
        return kv_argument("both", f"file://{root}/store", **own)

    with engines(LOGS / f"{__name__}.{family}.{runner}", model, forks) as start:
        plain = start("plain", *adapted)
        first, second = (
            start(name, *adapted, sharing(name), runner=runner) for name in ("first", "second")
        )
        for engine in (plain, first, second):
            engine.wait_ready()
        yield Fleet(plain, first, second, root, BLOCKS[family])


def test_each_adapter_and_none_load_their_own_kv_and_states_only(fleet: Fleet) -> None:
    prompt = prompt_of(1)
    names = ("", *ADAPTERS)
    tokens = []
    for name in names:
        before = stored_kv(fleet.root, STATE_PART)
        cold = fleet.check(fleet.first, name, prompt)
        assert cold.num_cached_tokens == 0
        assert stored_kv(fleet.root, STATE_PART) > before
        tokens.append(cold.tokens)
    assert len({tuple(each) for each in tokens}) == len(names)
    for name in names:
        warm = fleet.check(fleet.second, name, prompt)
        assert warm.num_cached_tokens == fleet.last_boundary(prompt)


def test_restarted_engine_loads_the_states_of_its_adapter(fleet: Fleet) -> None:
    prompt = prompt_of(2)
    assert fleet.check(fleet.first, "one", prompt).num_cached_tokens == 0
    stored_kv(fleet.root, STATE_PART)
    fleet.first.stop()
    fleet.first.start()
    fleet.first.wait_ready()
    assert fleet.check(fleet.first, "other", prompt).num_cached_tokens == 0
    assert fleet.check(fleet.first, "one", prompt).num_cached_tokens == fleet.last_boundary(prompt)
